"""Infos in columns: the numeric values of an env's info as bytes in fixed offsets, instead of an encoded map.

Most envs return the same keys in every step: lives, positions, parts of the reward. The keys, types and nesting are a
**template**. The reader learns it once, from an example. From then on a row holds values only. The values of one key in
many rows are a column, which is read as one array.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from functools import lru_cache
from typing import Any, Callable, Dict, Iterable, Iterator, NamedTuple, Union

import numpy as np

from envhub.values.codec import DecodeError, encode

TEMPLATES_MAX = 64  # of a worker; infos of further forms travel encoded
EXAMPLE_BYTES_MAX = 1 << 16
COLUMNS_BYTES_MAX = 1 << 20  # of a row
ALIGNMENT = 8
NESTING_MAX = 8
# The struct code of each dtype, by NumPy's name.
_CODES = {"b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
_CODES.update({"f2": "e", "f4": "f", "f8": "d"})
_PYTHON = {bool: "b1", int: "i8", float: "f8"}
_NUMPY = {np.dtype(name).type: name for name in _CODES}
_KINDS = frozenset([dict, np.ndarray, *_PYTHON, *_NUMPY])
# Observations, which Gymnasium's vector envs put into an array of objects instead of a batch.
UNBATCHED = frozenset(["final_obs"])
# The key of a float64 reward with axes in the info of its step; clients remove it from the info.
VECTOR_REWARD = "envhub_vector_reward"


class NotInColumns(Exception):
    """The info has a value that is neither a number nor an array of numbers."""


class Column(NamedTuple):
    """One value of an info: its place in the row, and its type, ``np.ndarray`` or a number's."""

    name: str
    kind: type
    dtype: Any
    shape: tuple[int, ...]

    def values(self, records: np.ndarray) -> list[Any]:
        column = records[self.name]
        if self.kind is np.ndarray:
            return [np.array(value, self.dtype) for value in column]
        return column.tolist() if self.kind in _PYTHON else list(column)


Tree = Dict[str, Union[Column, "Tree"]]


class Template:
    """The form of an info: ``dtype`` and ``nbytes`` of a row, and as ``tree`` the info with a ``Column`` per value."""

    def __init__(self, example: dict[str, Any]) -> None:
        """Make the template of infos of which ``example_of`` returns such an example; raises ``NotInColumns``."""
        self._columns: list[Column] = []
        self.tree = self._grow(example, NESTING_MAX)
        dtypes = [np.dtype((column.dtype, column.shape)) for column in self._columns]
        offsets = [0]
        for dtype in dtypes:
            offsets.append(offsets[-1] + -(-dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        self.nbytes = offsets[-1]
        if self.nbytes > COLUMNS_BYTES_MAX:
            raise NotInColumns(f"{self.nbytes} bytes")
        names = [column.name for column in self._columns]
        self.dtype = np.dtype({"names": names, "formats": dtypes, "offsets": offsets[:-1], "itemsize": self.nbytes})
        pieces = (
            f"{dtype.itemsize}s" if column.kind is np.ndarray else _CODES[dtype.str[1:]]
            for column, dtype in zip(self._columns, dtypes)
        )
        padded = (f"{piece}{-dtype.itemsize % ALIGNMENT}x" for piece, dtype in zip(pieces, dtypes))
        self._pack_into = struct.Struct("=" + "".join(padded)).pack_into
        self._arrays = [number for number, column in enumerate(self._columns) if column.kind is np.ndarray]

    def write(self, values: list[Any], memory: Any) -> None:
        """Write the values of an info, in their order, at the start of ``memory``. Raises ``struct.error``."""
        for number in self._arrays:
            values[number] = values[number].tobytes()
        self._pack_into(memory, 0, *values)

    def _grow(self, example: dict[str, Any], nesting: int) -> Tree:
        tree: Tree = {}
        for key, value in example.items():
            if f"_{key}" in example or (key in UNBATCHED and type(value) is dict):
                raise NotInColumns(f"the key {key!r}")
            tree[key] = self._grow(value, nesting - 1) if type(value) is dict and nesting else self._column(value)
        return tree

    def _column(self, value: Any) -> Column:
        kind = type(value)
        if kind is list:
            name, shape = value
            dtype = np.dtype(name if name[1:] in _CODES else object)
            if not dtype.isnative or dtype.hasobject or not all(type(axis) is int and axis >= 0 for axis in shape):
                raise NotInColumns(f"an array of {name} and {shape}")
            column = Column(str(len(self._columns)), np.ndarray, dtype, tuple(shape))
        elif kind in _PYTHON or kind in _NUMPY:
            column = Column(str(len(self._columns)), kind, np.dtype(_PYTHON.get(kind) or _NUMPY[kind]), ())
        else:
            raise NotInColumns(f"a {kind.__name__}")
        self._columns.append(column)
        return column

    def drop_reward(self) -> Template:
        rest = copy.copy(self)
        rest.tree = {key: column for key, column in self.tree.items() if key != VECTOR_REWARD}
        return rest

    def infos(self, records: np.ndarray) -> list[dict[str, Any]]:
        return _filled(self.tree, records)


def _filled(tree: Tree, records: np.ndarray) -> list[dict[str, Any]]:
    if not tree:
        return [{} for _ in records]
    columns = [_filled(each, records) if isinstance(each, dict) else each.values(records) for each in tree.values()]
    return [dict(zip(tree, values)) for values in zip(*columns)]


def example_of(info: dict[str, Any]) -> dict[str, Any]:
    """The info with the dtype and shape in place of each array, as ``Template`` takes it; raises ``NotInColumns``."""
    example: dict[str, Any] = {}
    for key, value in info.items():
        if type(value) is list:
            raise NotInColumns("a list")
        if type(value) is np.ndarray:
            example[key] = [value.dtype.str, list(value.shape)]
        else:
            example[key] = example_of(value) if type(value) is dict else value
    return example


class Writer:
    """Writes infos as rows of columns, in the process of the envs."""

    def __init__(self, row_bytes: int, announce: Callable[[int, bytes, int], None]) -> None:
        """Use at most ``row_bytes`` per row; ``announce`` takes a new template's number, encoded example and bytes."""
        self._row_bytes = row_bytes
        self._announce = announce
        self._templates: dict[tuple[Any, ...], tuple[int, Template] | None] = {}

    def write(self, info: dict[str, Any], memory: Any, large_memory: Any = b"") -> tuple[int, int]:
        """Write the info into its row's bytes; return the template's number and the length, or zeros if it cannot.

        It goes into the ``memory``, or if it is longer into the ``large_memory``.
        """
        values: list[Any] = []
        if entry := self.template_of(info, values):
            number, template = entry
            memory = memory if template.nbytes <= len(memory) else large_memory
            try:
                if template.nbytes <= len(memory):
                    template.write(values, memory)
                    return number, template.nbytes
            except struct.error:  # such as an int of more than 64 bits
                pass
        return 0, 0

    def template_of(self, info: dict[str, Any], values: list[Any]) -> tuple[int, Template] | None:
        """The number and template of this info's form; a new one is announced. None if the info travels encoded.

        Also appends the info's values to ``values``.
        """
        kinds = tuple(map(type, info.values()))
        if not _KINDS.issuperset(kinds):
            return None
        try:
            if np.ndarray in kinds or dict in kinds:
                signature = tuple(_signature(info, values, NESTING_MAX))
            else:  # these say as much, at once
                signature = tuple(info), kinds
                values.extend(info.values())
            if signature not in self._templates:
                self._learn(signature, info)
            return self._templates.get(signature)
        except NotInColumns:
            return None

    def _learn(self, signature: tuple[Any, ...], info: dict[str, Any]) -> None:
        if len(self._templates) >= TEMPLATES_MAX:
            return
        self._templates[signature] = None
        tuple(_signature(info, [], NESTING_MAX))  # raises if a key is no text
        example = example_of(info)
        template, encoded = Template(example), encode(example)
        if not 0 < template.nbytes <= self._row_bytes or len(encoded) > EXAMPLE_BYTES_MAX:
            return
        digest = hashlib.blake2b(repr(signature).encode("utf-8", "backslashreplace"), digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> 1 or 1
        self._announce(number, encoded, template.nbytes)
        self._templates[signature] = (number, template)


class BatchWriter:
    """Writes the infos of several envs at once; each value is an array with an entry per row."""

    def __init__(self, writer: Writer, infos_of: Callable[[int], np.ndarray | None], rows: slice) -> None:
        """Write these rows of the array that ``infos_of(nbytes)`` returns; it is None if they have no room yet."""
        self._writer, self._infos_of, self._rows = writer, infos_of, rows
        self._forms: dict[tuple[Any, ...], tuple[int, int, list[np.ndarray]]] = {}

    def write(self, columns: dict[str, Any], first: Callable[[], dict[str, Any]]) -> tuple[int, int]:
        """Write the infos; return template and length, or zeros. The info of the ``first`` env decides on the types."""
        arrays: list[np.ndarray] = []
        try:
            form = tuple(_signature(columns, arrays, NESTING_MAX))
        except NotInColumns:
            return 0, 0
        if form not in self._forms:
            entry = self._fields_of(first(), arrays) if len(self._forms) < TEMPLATES_MAX else None
            if entry is None:
                return 0, 0
            self._forms[form] = entry
        number, nbytes, fields = self._forms[form]
        for field, array in zip(fields, arrays):
            field[...] = array
        return number, nbytes

    def _fields_of(self, info: dict[str, Any], arrays: list[np.ndarray]) -> tuple[int, int, list[np.ndarray]] | None:
        entry = self._writer.template_of(info, [])
        if entry is None:
            return 0, 0, []
        number, template = entry
        infos = self._infos_of(template.nbytes)
        if infos is None:
            return None
        rows, row_bytes = range(len(infos))[self._rows], infos.strides[0]
        start, stride = rows.start * row_bytes, rows.step * row_bytes
        records = np.ndarray(len(rows), template.dtype, infos, start, (stride,))
        fields = [records[name] for name in template.dtype.names or ()]
        if any(field.dtype != array.dtype for field, array in zip(fields, arrays)):
            return 0, 0, []
        return number, template.nbytes, fields


def _signature(info: dict[str, Any], values: list[Any], nesting: int) -> Iterator[Any]:
    """A key that is equal for infos of one form; also appends the info's values to ``values``."""
    if not nesting:
        raise NotInColumns("maps too deep")
    for key, value in info.items():
        if type(key) is not str:
            raise NotInColumns(f"the key {key!r}")
        kind = type(value)
        yield key
        if kind is dict:
            yield dict
            yield from _signature(value, values, nesting - 1)
            yield None
            continue
        values.append(value)
        yield (value.dtype.str, value.shape) if kind is np.ndarray else kind


class Rows(NamedTuple):
    """Several rows of one template: the numbers of the rows, ascending, and the bytes of each."""

    template: int
    rows: np.ndarray
    data: np.ndarray


_HEAD = struct.Struct("<QII")


def pack_columns(parts: Iterable[Rows]) -> bytes:
    pieces = []
    for template, rows, data in parts:
        pieces += [_HEAD.pack(template, *data.shape), rows.astype("<u4").tobytes(), data.tobytes()]
    return b"".join(pieces)


def unpack_columns(frame: Any, rows: int) -> list[Rows]:
    """Unpack a frame of ``pack_columns``, with row numbers in ``[0, rows)``; raises ``DecodeError``."""
    view, start = memoryview(frame).cast("B"), 0
    parts: list[Rows] = []
    while start < len(view):
        if start + _HEAD.size > len(view):
            raise DecodeError("a frame of columns ends in the middle of a head")
        template, count, width = _HEAD.unpack_from(view, start)
        start += _HEAD.size
        if not count or len(view) - start < count * (4 + width) or len(parts) >= rows:
            raise DecodeError(f"a frame of columns with {count} rows of {width} bytes")
        numbers = _numbers(bytes(view[start : start + 4 * count]), rows)
        data = np.frombuffer(view, np.uint8, count * width, start + 4 * count).reshape(count, width)
        start += count * (4 + width)
        parts.append(Rows(template, numbers, data))
    return parts


@lru_cache(maxsize=16)  # usually all rows of a session have one template, in every step
def _numbers(encoded: bytes, rows: int) -> np.ndarray:
    numbers: np.ndarray = np.frombuffer(encoded, "<u4").astype(np.int64)
    if numbers[-1] >= rows or (numbers[1:] <= numbers[:-1]).any():
        raise DecodeError(f"a frame of columns whose rows are not ascending and less than {rows}")
    numbers.flags.writeable = False
    return numbers
