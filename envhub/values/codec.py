"""Strict msgpack for headers, infos, options and call arguments.

Types that msgpack does not have travel as extension types, and, if the caller allows it, any other value as its
``repr``. An array has the description that ``msgpack_numpy`` gives it in front of its items. The decoder of
``msgpack_numpy`` unpickles, so it reads a description after a check, and no items. Decoding never runs code that the
sender chose, except for ``PICKLE``: a caller must allow it, and only a program and the workers of its own private hub
do.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import Counter
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Callable, Collection, NamedTuple

import msgpack

from envhub.errors import UnsupportedSpace, printable, shortened

if TYPE_CHECKING:
    import numpy as np  # the functions that use it import it: a health check asks a hub in a third of that time

TUPLE, SET, FROZENSET, INTEGER, COMPLEX, MAPPING, GENERATOR, ARRAY, REPR, PICKLE, GRAPH, SCALAR, SPEC, SPACE = range(
    1, 15
)

DEPTH_MAX = 64
DECODED_DEPTH_MAX = DEPTH_MAX + 2  # the outermost value itself, and an array inside the innermost container
ITEMS_MAX = 1 << 20
CHECKED_BYTES_MIN = 1 << 12  # in fewer bytes a list can make msgpack allocate only little
WALKED_MAX = 64  # items; to walk over more costs more than a copy
HEADER_BYTES_MAX = 1 << 16  # without bin values, which the hub passes on unread
HEADER_ITEMS_MAX = 1 << 13  # sum over all lists and maps
KNOWN_HEADER_ITEMS_MAX = 1 << 18  # the same, for a trusted sender
HEADER_DEPTH_MAX = 8  # lists and maps around an item
HEADER_EXTENSION_BYTES_MAX = 128  # an integer in hexadecimal digits
STRING_BYTES_MAX = 1 << 26
BYTES_MAX = 1 << 30
# Python hashes only text and bytes with a secret. The sender can choose the hashes of other keys, equal ones or ones
# that collide in the table, so that a map or set takes time quadratic in their number.
UNSALTED_KEYS_MAX = 1 << 12  # of one map or set
EQUAL_HASHES_MAX = 8  # of these keys
REPR_CHARS_MAX = 256
SPACES_BYTES_MAX = 1 << 24  # sum of the sizes of one element of each space in a value
PIECE_BYTES = 1 << 16  # a copy of a string of this size costs more than one more piece
NDIM_MAX = 16
NUMBER_BYTES_MAX = 16
DTYPE_CHARS_MAX = 24  # of the name of an array's dtype

_CONTAINER_ITEMS_MAX = ITEMS_MAX // 2  # a mapping's keys and values count as items each
_STRING_CHARS_MAX = STRING_BYTES_MAX // 4  # a character takes up to 4 bytes
_SALTED = frozenset([str, bytes])
_ATOMS = frozenset([type(None), bool, float, str, bytes])
_PACKED = _ATOMS | {int}
_NUMBERS = frozenset([type(None), bool, float, int])
_packb: Callable[..., bytes] = msgpack.packb
_PACKED_NESTED = _PACKED | {dict, list}
_TEXT = frozenset([str])
_DESCRIPTION = {b"nd", b"type", b"kind", b"shape"}  # the entries of an array's head
_NUMBER_KINDS, _TEXT_KINDS = "biufc", "USmM"
_GENERATORS = frozenset(["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
_CODE_POINT_MAX = 0x10FFFF
_BIN_32 = struct.Struct(">BI")
_LARGE_EXTENSION = struct.Struct(">BIB")  # its first byte, length and type
_COMPLEX = struct.Struct("=2d")
_NEW_EXTENSION = partial(tuple.__new__, msgpack.ExtType)  # its own checks take as long as the rest of a small array
_BIN_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # of a byte string's length, by its first byte

Unknown = Callable[[Any], msgpack.ExtType]


class Repr(str):
    """The ``repr`` of a value that the codec could not carry."""

    def __repr__(self) -> str:
        return str(self)


class DecodeError(ValueError):
    """The bytes are not a value that EnvHub's codec accepts."""


class EncodeError(TypeError):
    """The value has no form in EnvHub's codec."""


def refuse(value: Any) -> msgpack.ExtType:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value).__module__ == "numpy":
        kind += f" of dtype {getattr(value, 'dtype', None)}"
    raise EncodeError(
        f"a {kind} cannot be sent to or from a hub on the network; "
        f"send numbers, strings, NumPy arrays and containers of up to {_CONTAINER_ITEMS_MAX} of them (of up to "
        f"{UNSALTED_KEYS_MAX} in a set or as keys that are no text), or use a private hub (hub=None)"
    )


def as_repr(value: Any) -> msgpack.ExtType:
    try:
        text = repr(value)
    except Exception as error:  # a repr that raises must not make the step fail
        text = f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"
    return msgpack.ExtType(REPR, text[:REPR_CHARS_MAX].encode("utf-8", "replace"))


def as_pickle(value: Any) -> msgpack.ExtType:
    """Carry a value by cloudpickle; for a program's own private hub only. Raises ``EncodeError``."""
    from envhub.values import pickling

    try:
        return msgpack.ExtType(PICKLE, pickling.dumps(value))
    except Exception as error:  # a foreign __reduce__ may raise anything
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise EncodeError(pickling.why_unpicklable(f"a {kind}", value, error)) from error


def as_pickle_or_repr(value: Any) -> msgpack.ExtType:
    """Encode as ``as_pickle`` does, or as ``as_repr`` where that fails."""
    from envhub.values import pickling

    try:
        return msgpack.ExtType(PICKLE, pickling.dumps(value))
    except Exception:  # as above; the search for the reason takes long, and the caller does not need it
        return as_repr(value)


_FAITHFUL = frozenset([as_pickle, as_pickle_or_repr])  # these can keep the class of a value


def encode(value: Any, unknown: Unknown = refuse) -> bytes:
    """Encode ``value``; ``unknown`` decides about values that the codec cannot carry. Raises ``EncodeError``."""
    kind = type(value)
    try:
        if kind in _NUMBERS:
            return _packb(value)
        packs = kind in (dict, list) and _packs_whole(value)
        return _pack(value if packs else _Encoder(unknown).plain(value, 0))
    except OverflowError:  # an integer of more than 64 bits among other values
        return _pack(_Encoder(unknown, at_once=False).plain(value, 0))


def encode_pieces(value: Any, unknown: Unknown = refuse) -> list[Any]:
    """``encode(value)`` in pieces; a large array of numbers is not copied."""
    import numpy as np

    if type(value) is not np.ndarray or value.nbytes < PIECE_BYTES or value.dtype.kind not in _NUMBER_KINDS:
        return [encode(value, unknown)]
    if not (head := _array_head(value.dtype, value.shape)):
        return [encode(value, unknown)]
    items = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return [_LARGE_EXTENSION.pack(0xC9, len(head) + len(items), ARRAY) + head, items]


def encode_call(name: str, fields: dict[str, Any]) -> list[bytes]:
    """``encode([name, fields])`` in pieces; large byte strings are not copied."""
    large = {key: value for key, value in fields.items() if type(value) is bytes and len(value) >= PIECE_BYTES}
    small = {key: value for key, value in fields.items() if key not in large}
    own_header = len(msgpack.Packer().pack_map_header(len(small)))
    header = msgpack.Packer().pack_map_header(len(fields))
    pieces = [msgpack.Packer().pack_array_header(2) + encode(name) + header + encode(small)[own_header:]]
    for key, value in large.items():
        pieces += [encode(key) + _BIN_32.pack(0xC6, len(value)), value]
    return pieces


def decode(blob: Any, allow_pickle: bool = False) -> Any:
    """Decode into new, writable arrays; raises ``DecodeError``. Never use ``allow_pickle`` for bytes from a network."""
    if type(blob) is memoryview and blob.nbytes <= NUMBER_BYTES_MAX:
        blob = bytes(blob)
    if type(blob) is bytes and blob and len(blob) == _ENCODED_BYTES.get(blob[0]):
        return msgpack.unpackb(blob)
    return _Decoder(allow_pickle).unpack(blob)


def decode_leniently(blob: Any, allow_pickle: bool = False) -> tuple[Any, list[Repr]]:
    """Decode with texts in place of values that cannot be unpickled; also return every ``Repr``."""
    decoder = _Decoder(allow_pickle, lenient=True)
    return decoder.unpack(blob), decoder.reprs


def encode_pair(first: bytes, second: bytes) -> bytes:
    """``encode([first, second])``, which copies them once."""
    return b"".join((b"\x92", _bin_head(len(first)), first, _bin_head(len(second)), second))


def _bin_head(nbytes: int) -> bytes:
    if nbytes >= 1 << 16:
        return _BIN_32.pack(0xC6, nbytes)
    return bytes((0xC4, nbytes)) if nbytes < 1 << 8 else bytes((0xC5, nbytes >> 8, nbytes & 0xFF))


def decode_pair(blob: Any) -> tuple[memoryview, memoryview]:
    """Views of the two byte strings of ``encode_pair``; raises ``DecodeError``."""
    view = memoryview(blob).cast("B")
    try:
        begin = 2 + _BIN_WIDTHS[view[1]]
        end = begin + int.from_bytes(view[2:begin], "big")
        second = end + 1 + _BIN_WIDTHS[view[end]]
        whole = second + int.from_bytes(view[end + 1 : second], "big") == len(view)
    except (IndexError, KeyError):
        whole = False
    if not whole or view[0] != 0x92:
        raise DecodeError("not a list of two byte strings")
    return view[begin:end], view[second:]


class HeaderLimits(NamedTuple):
    """The limits of one header."""

    bytes_max: int  # the length, without the contents of bin values
    items_max: int  # sum over all lists and maps; a key and its value are two items


STRANGERS = HeaderLimits(HEADER_BYTES_MAX, HEADER_ITEMS_MAX)
# For the hub of a client, a hub's own workers, and the one program that a private hub serves.
KNOWN = HeaderLimits(BYTES_MAX, KNOWN_HEADER_ITEMS_MAX)


def decode_header(blob: Any, limits: HeaderLimits = KNOWN) -> Any:
    """Decode a header: few items, little nesting, and integers as its only extension type; raises ``DecodeError``."""
    check_header(blob, limits)
    return _Decoder(False, limits.items_max, header=True).unpack(blob)


def check_header(blob: Any, limits: HeaderLimits) -> None:
    """Refuse a header over the limits before it is decoded, by work that they bound; raises ``DecodeError``."""
    view = memoryview(blob).cast("B")
    pending = [1]  # for each list and map around the next item, how many items remain
    at = items = unread_bytes = 0
    while pending:
        if not pending[-1]:
            pending.pop()
            continue
        if at >= len(view):
            raise DecodeError("a header that ends within a list or map")
        pending[-1] -= 1
        kind, length, width = _HEADS[view[at]]
        at += 1 + width
        length += int.from_bytes(view[at - width : at], "big") if width else 0
        if kind in (_LIST, _MAP):
            length *= kind
            items += length
            if items > limits.items_max:
                raise DecodeError(f"a header of more than {limits.items_max} items")
            if len(pending) > HEADER_DEPTH_MAX:
                raise DecodeError(f"a header with more than {HEADER_DEPTH_MAX} lists and maps around an item")
            pending.append(length)
            continue
        if kind == _INVALID or (kind == _EXTENSION and length > HEADER_EXTENSION_BYTES_MAX):
            raise DecodeError(f"a header with an item that none has, at byte {at}")
        at += length
        unread_bytes += length if kind == _BIN else 0
        if at - unread_bytes > limits.bytes_max:
            raise DecodeError(f"a header of more than {limits.bytes_max} bytes")
    if at != len(view):
        raise DecodeError(f"a header of {len(view)} bytes whose last item ends at byte {at}")


_LIST, _MAP, _BIN, _EXTENSION, _PLAIN, _INVALID = range(1, 7)  # the first two contain items


def _packs(values: Collection[Any], kinds: frozenset[type] = _PACKED) -> bool:
    own = set(map(type, values))
    if not own <= kinds:
        return False
    if str in own:
        for value in values:  # a generator takes twice as long
            if type(value) is str and len(value) > _STRING_CHARS_MAX:
                return False
    return True


def _packs_whole(value: Any) -> bool:
    """True if it is maps with text keys and lists, in one another, of what ``_packs`` accepts."""
    level = [value]
    for _ in range(DEPTH_MAX):  # all values of a level at once: a call for each takes several times as long
        items: list[Any] = []
        for each in level:
            if type(each) is list:
                items += each
            elif type(each) is dict and _TEXT.issuperset(map(type, each)):
                items += each.values()
            else:
                return False
        if len(items) > _CONTAINER_ITEMS_MAX or not _packs(items, _PACKED_NESTED):
            return False
        level = []
        for each in items:  # a comprehension would be one more call
            if type(each) not in _PACKED:
                level.append(each)
        if not level:
            return True
    return False


def _head(lead: int) -> tuple[int, int, int]:
    """The kind of an item with this first byte, a length, and the number of bytes that follow and add to the length."""
    if lead < 0x80 or lead >= 0xE0 or lead in (0xC0, 0xC2, 0xC3):
        return _PLAIN, 0, 0
    if lead < 0xC0:
        return (_MAP, lead & 15, 0) if lead < 0x90 else (_LIST, lead & 15, 0) if lead < 0xA0 else (_PLAIN, lead & 31, 0)
    if 0xC4 <= lead <= 0xC6:
        return _BIN, 0, 1 << (lead - 0xC4)
    if 0xC7 <= lead <= 0xC9:
        return _EXTENSION, 1, 1 << (lead - 0xC7)  # one more byte for the type
    if 0xD4 <= lead <= 0xD8:
        return _EXTENSION, 1 + (1 << (lead - 0xD4)), 0
    if 0xD9 <= lead <= 0xDB:
        return _PLAIN, 0, 1 << (lead - 0xD9)
    if lead >= 0xDC:
        return (_LIST if lead < 0xDE else _MAP), 0, 2 << (lead & 1)
    return (_INVALID, 0, 0) if lead == 0xC1 else (_PLAIN, _NUMBER_BYTES[lead], 0)


_NUMBER_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_HEADS = [_head(lead) for lead in range(256)]
# How many bytes an encoded number, boolean or None has, by its first byte.
_ENCODED_BYTES = {lead: 1 for lead, head in enumerate(_HEADS) if head == (_PLAIN, 0, 0)}
_ENCODED_BYTES.update({lead: 1 + length for lead, length in _NUMBER_BYTES.items()})


def _pack(plain: Any) -> bytes:
    try:
        return _packb(plain)
    except UnicodeEncodeError:  # a lone surrogate, as in the name of a file that is not valid UTF-8
        return _packb(plain, unicode_errors="surrogatepass")


_SPACES = "box dict discrete graph multi_binary multi_discrete oneof sequence text tuple"
_GYMNASIUM = frozenset(
    ["gymnasium.envs.registration", "gym.spaces.graph", *(f"gymnasium.spaces.{name}" for name in _SPACES.split())]
)

_CONTAINERS = (dict, list, tuple, set, frozenset)

# With NumPy's, the classes that decode to themselves; an enum, a named tuple and the like are subclasses of them.
_OWN_CLASSES = frozenset([int, complex, *_CONTAINERS])

# Subclasses, such as an enum's members, travel as the class that they extend; their ``__str__`` may differ.
_BASES: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}


def _is_of_numpy(value: Any) -> bool:
    import numpy as np

    return type(value) in (np.ndarray, np.random.Generator) or isinstance(value, np.generic)


class _Encoder:
    """Turns values into types that msgpack packs, and extension types."""

    def __init__(self, unknown: Unknown, at_once: bool = True) -> None:
        self._unknown = unknown
        self._at_once = at_once
        self._faithful = unknown in _FAITHFUL
        self._path: set[int] = set()  # ids of the containers around the current value, to detect a cycle

    def plain(self, value: Any, depth: int) -> Any:
        # The most frequent kinds come first.
        kind = type(value)
        if kind in _ATOMS:
            return value if kind is not str or len(value) <= _STRING_CHARS_MAX else self._unknown(value)
        if kind in _CONTAINERS:
            return self._container(value, depth + 1)
        if kind.__module__ == "numpy" and _is_of_numpy(value):
            return self._numpy(value)
        if kind.__module__ in _GYMNASIUM:
            return self._encode_gymnasium(value, depth)
        if self._faithful and kind not in _OWN_CLASSES and not _is_of_numpy(value):
            return self._unknown(value)
        if kind is int:
            return value if -(1 << 63) <= value < (1 << 64) else msgpack.ExtType(INTEGER, hex(value).encode())
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth + 1)
        import numpy as np

        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value)
        return self._other(value, depth)

    def _numpy(self, value: Any) -> Any:
        import numpy as np

        dtype, is_array = value.dtype, not isinstance(value, np.generic)
        if not is_array and dtype.kind in "US":
            text, value = value, np.array(value)
            if value[()] != text:  # an array would drop the zero that ends a text; so does NumPy's own ``item``
                return str.__str__(text) if isinstance(text, np.str_) else bytes(text)
            dtype = value.dtype
        head = _array_head(dtype, value.shape if is_array else ())
        if not head:
            return self._unknown(value)
        is_large = is_array and value.nbytes >= PIECE_BYTES and dtype.kind in _NUMBER_KINDS and value.flags.c_contiguous
        blob = b"".join((head, value.data)) if is_large else head + value.tobytes()
        return _NEW_EXTENSION((ARRAY if is_array else SCALAR, blob))

    def _container(self, value: Any, depth: int) -> Any:
        if depth > DEPTH_MAX or id(value) in self._path or len(value) > _CONTAINER_ITEMS_MAX:
            return self._unknown(value)
        kind, is_map = type(value), isinstance(value, dict)
        has_text_keys = is_map and _TEXT.issuperset(map(type, value))
        if not (has_text_keys or isinstance(value, (list, tuple))) and _problem_of_keys(value):
            return self._unknown(value)
        packs = self._at_once and has_text_keys == is_map and _packs(value.values() if is_map else value)
        if packs and (kind is dict or kind is list):
            return value
        self._path.add(id(value))
        try:
            if is_map:
                if has_text_keys:
                    return {key: self.plain(item, depth) for key, item in value.items()}
                pairs = [self.plain(part, depth) for pair in value.items() for part in pair]
                return msgpack.ExtType(MAPPING, _pack(pairs))
            items = list(value) if packs else [self.plain(item, depth) for item in value]
        finally:
            self._path.discard(id(value))
        if isinstance(value, list):
            return items
        code = TUPLE if isinstance(value, tuple) else SET if isinstance(value, set) else FROZENSET
        return msgpack.ExtType(code, _pack(items))

    def _encode_gymnasium(self, value: Any, depth: int) -> Any:
        if type(value).__name__ == "GraphInstance":
            return msgpack.ExtType(GRAPH, _pack([self.plain(part, depth + 1) for part in value]))
        if self._faithful:
            return self._unknown(value)
        if type(value).__name__ == "EnvSpec":
            if not all(isinstance(entry, (str, type(None))) for entry in (value.entry_point, value.vector_entry_point)):
                return self._unknown(value)  # a class or function by value, not by its import path
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            fields["additional_wrappers"] = list(map(dataclasses.astuple, value.additional_wrappers))
            return msgpack.ExtType(SPEC, _pack(self.plain(fields, depth + 1)))
        from envhub.values import spaces

        try:
            return msgpack.ExtType(SPACE, _pack(self.plain(spaces.describe(value, exact=True), depth + 1)))
        except UnsupportedSpace:  # another object of these modules, which is not a space
            return self._unknown(value)

    def _other(self, value: Any, depth: int) -> Any:
        import numpy as np

        if isinstance(value, complex):
            return msgpack.ExtType(COMPLEX, _COMPLEX.pack(value.real, value.imag))
        if isinstance(value, np.random.Generator):
            name = type(value.bit_generator).__name__
            if name in _GENERATORS:
                return msgpack.ExtType(GENERATOR, _pack([name, self.plain(value.bit_generator.state, depth + 1)]))
        if isinstance(value, Repr):
            return as_repr(value)
        for base, convert in _BASES.items():
            if isinstance(value, base):
                return self.plain(convert(value), depth)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return memoryview(value).tobytes()
        return self._unknown(value)


class _Decoder:
    """The state of one decoding; it counts the nesting of extension types, which msgpack does not see."""

    def __init__(
        self, allow_pickle: bool, items_max: int = ITEMS_MAX, header: bool = False, lenient: bool = False
    ) -> None:
        self._allow_pickle = allow_pickle
        self._is_header, self._lenient = header, lenient  # a header was checked, and its extensions are integers
        self._depth_max = 1 if header else DECODED_DEPTH_MAX
        self._items_max = items_max
        self._depth = 0
        self._spaces_bytes = 0
        self.reprs: list[Repr] = []

    def unpack(self, blob: Any) -> Any:
        self._depth += 1
        if self._depth > self._depth_max:
            raise DecodeError(f"values nested deeper than {self._depth_max}")
        try:
            nbytes = len(blob) if type(blob) is bytes else memoryview(blob).nbytes
            if nbytes >= PIECE_BYTES and not self._is_header and (array := _large_array(blob)) is not None:
                return array
            items_max = min(self._items_max, nbytes)  # msgpack allocates the length that a list announces
            if nbytes >= CHECKED_BYTES_MIN and not self._is_header and not _has_few_items(blob):
                # It refuses lists that announce more items than there are bytes: msgpack would allocate all of them.
                unpacker = msgpack.Unpacker(max_buffer_size=nbytes)
                unpacker.feed(blob)
                unpacker.skip()  # raises if the value is incomplete
            return msgpack.unpackb(
                blob,
                raw=False,
                unicode_errors="surrogatepass",
                strict_map_key=True,
                max_array_len=items_max,
                max_map_len=items_max,
                max_str_len=STRING_BYTES_MAX,
                max_bin_len=BYTES_MAX,
                max_ext_len=BYTES_MAX,
                ext_hook=self._extension,
                object_hook=_map,
            )
        except DecodeError:
            raise
        except Exception as error:
            # msgpack raises a dozen kinds (ValueError, StackError, UnicodeDecodeError …) for malformed input
            text = printable(shortened(f"malformed msgpack: {type(error).__name__}: {error}", REPR_CHARS_MAX))
            raise DecodeError(text) from error
        finally:
            self._depth -= 1

    def _extension(self, code: int, blob: bytes) -> Any:
        if self._is_header and code != INTEGER:
            raise DecodeError(f"extension type {code} is not accepted here")
        if code == ARRAY:
            return _array(blob)
        if code == SCALAR:
            if (array := _array(blob)).ndim:
                raise DecodeError("a scalar with dimensions")
            return array[()]
        if code in _REBUILD:
            items = self.unpack(blob)
            if not isinstance(items, list):
                raise DecodeError(f"extension type {code} holds no list")
            return _REBUILD[code](items)
        if code == INTEGER:
            return int(bytes(blob).decode("ascii"), 16)
        if code == COMPLEX and len(blob) == 16:
            return complex(*_COMPLEX.unpack(blob))
        if code == REPR:
            return self._repr(bytes(blob).decode("utf-8")[:REPR_CHARS_MAX])
        if code == SPEC:
            return _spec(self.unpack(blob))
        if code == SPACE:
            from envhub.values import spaces

            description = self.unpack(blob)
            space = spaces.build(description, SPACES_BYTES_MAX - self._spaces_bytes)
            self._spaces_bytes += sum(spaces.sizes(description))
            return space
        if code == PICKLE and self._allow_pickle:
            import pickle

            try:
                return pickle.loads(blob)  # noqa: S301  the program's own private hub, see the module's docstring
            except Exception as error:  # a foreign constructor may raise anything
                why = f"a value was pickled but cannot be unpickled: {type(error).__name__}: {error}"
                if not self._lenient:
                    raise DecodeError(why) from error
                return self._repr(f"<{why}>"[:REPR_CHARS_MAX])
        raise DecodeError(f"extension type {code} of {len(blob)} bytes is not accepted here")

    def _repr(self, text: str) -> Repr:
        reprs = Repr(text)
        self.reprs.append(reprs)
        return reprs


def _large_array(blob: Any) -> np.ndarray | None:
    """The array that ``encode_pieces`` has encoded, which is copied once; None for another value."""
    view = memoryview(blob).cast("B")
    begin = _LARGE_EXTENSION.size
    is_array = _LARGE_EXTENSION.unpack_from(view) == (0xC9, len(view) - begin, ARRAY)
    return _array(view[begin:]) if is_array else None


def _has_few_items(blob: Any) -> bool:
    """True if the message is one complete value of few items, such as a large array; it does not read every byte."""
    view, at, left = memoryview(blob).cast("B"), 0, 1
    for _ in range(WALKED_MAX):
        if not left or at >= len(view):
            break
        kind, length, width = _HEADS[view[at]]
        at += 1 + width
        length += int.from_bytes(view[at - width : at], "big") if width else 0
        left -= 1
        if kind in (_LIST, _MAP):
            left += length * kind
        else:
            at += length
    return not left and at == len(view)


def _problem_of_keys(keys: Collection[Any]) -> str:
    """The reason why a map or a set of these keys would take more than linear time; empty if it would not."""
    if len(keys) <= EQUAL_HASHES_MAX:
        return ""
    unsalted = [key for key in keys if type(key) not in _SALTED]
    if len(unsalted) > UNSALTED_KEYS_MAX:
        return f"a map or set of {len(unsalted)} keys that are no text; at most {UNSALTED_KEYS_MAX} are accepted"
    equal = max(Counter(map(hash, unsalted)).values(), default=0)
    return f"a map or set of {equal} keys of one hash" if equal > EQUAL_HASHES_MAX else ""


def _checked_keys(keys: list[Any]) -> list[Any]:
    if problem := _problem_of_keys(keys):
        raise DecodeError(problem)
    return keys


def _mapping(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise DecodeError("a mapping's last key has no value")
    return dict(zip(_checked_keys(items[::2]), items[1::2]))


def _generator(items: list[Any]) -> np.random.Generator:
    import numpy as np

    name, state = items
    if name not in _GENERATORS:
        raise DecodeError("unknown bit generator")
    # NumPy uses these positions as indices without a check: a wrong one reads memory outside the state.
    if name == "MT19937" and state["state"]["pos"] not in range(625):
        raise DecodeError("an MT19937 state with a position outside of it")
    if name == "Philox" and state["buffer_pos"] not in range(5):
        raise DecodeError("a Philox state with a position outside of it")
    bits = getattr(np.random, name)()
    bits.state = state
    return np.random.Generator(bits)


def _graph(parts: list[Any]) -> Any:
    from envhub.values.gym_api import api

    return api.spaces.GraphInstance(*parts)


def _array(blob: bytes | memoryview) -> np.ndarray:
    import numpy as np

    end = 1 + blob[0]
    dtype, shape, nbytes = _read_array_head(bytes(blob[1:end]))
    if len(blob) != end + nbytes:
        raise DecodeError("an array's shape and bytes disagree")
    if dtype.kind == "U" and nbytes and np.frombuffer(blob, f"{dtype.byteorder}u4", -1, end).max() > _CODE_POINT_MAX:
        raise DecodeError("an array of text with a character that does not exist")
    array: np.ndarray = np.ndarray(shape, dtype, blob, end).copy()
    return array


def _is_carried(dtype: np.dtype[Any]) -> bool:
    is_number = dtype.kind in _NUMBER_KINDS and dtype.itemsize <= NUMBER_BYTES_MAX
    return dtype.itemsize > 0 and (is_number or dtype.kind in _TEXT_KINDS)


# Most arrays of a session have one of a few forms.
@lru_cache(maxsize=256)
def _array_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The bytes in front of the items of such an array; empty if none of its kind is carried."""
    if not _is_carried(dtype) or len(dtype.str) > DTYPE_CHARS_MAX or len(shape) > NDIM_MAX:
        return b""
    import msgpack_numpy
    import numpy as np

    description = msgpack_numpy.encode(np.empty(0, "u1" if dtype.kind in "mM" else dtype))  # it refuses times
    del description[b"data"]
    head = _pack({**description, b"type": dtype.str, b"shape": shape})
    return bytes([len(head)]) + head


@lru_cache(maxsize=256)
def _read_array_head(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """The dtype, shape and bytes of an array's items; raises ``DecodeError`` or what msgpack and NumPy raise."""
    import msgpack_numpy
    import numpy as np

    fields = msgpack.unpackb(head, strict_map_key=False, max_array_len=NDIM_MAX, max_map_len=4)
    if type(fields) is not dict or fields.keys() != _DESCRIPTION or fields[b"nd"] is not True or fields[b"kind"] != b"":
        raise DecodeError("malformed array")
    name, shape = fields[b"type"], fields[b"shape"]
    if type(name) is not str or len(name) > DTYPE_CHARS_MAX or not _is_carried(np.dtype(name)):
        raise DecodeError(f"an array of dtype {name!r} is not accepted")
    if type(shape) is not list or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise DecodeError("malformed array shape")
    dtype = msgpack_numpy.decode({**fields, b"shape": [0], b"data": b""}).dtype
    return dtype, tuple(shape), math.prod(shape) * dtype.itemsize


def _spec(fields: dict[str, Any]) -> Any:
    from gymnasium.envs.registration import EnvSpec, WrapperSpec

    accepted = {field.name for field in dataclasses.fields(EnvSpec) if field.init}
    fields["additional_wrappers"] = tuple(WrapperSpec(*wrapper) for wrapper in fields.get("additional_wrappers", []))
    return EnvSpec(**{name: value for name, value in fields.items() if name in accepted})


_REBUILD: dict[int, Callable[[list[Any]], Any]] = {
    TUPLE: tuple,
    SET: lambda items: set(_checked_keys(items)),
    FROZENSET: lambda items: frozenset(_checked_keys(items)),
    MAPPING: _mapping,
    GENERATOR: _generator,
    GRAPH: _graph,
}


def _map(fields: dict[Any, Any]) -> dict[Any, Any]:
    if not _TEXT.issuperset(map(type, fields)):
        raise DecodeError("map keys must be strings")
    return fields
