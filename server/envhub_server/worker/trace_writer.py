"""Writes the trace of a worker: a few copies before each batch, and a note for what is no step."""

from __future__ import annotations

import contextlib
import struct
from typing import Any, Mapping, Sequence

import numpy as np

from envhub.arena.memory import Arena
from envhub.protocol.messages import Call
from envhub.values import actions, codec
from envhub.values.leaf import Leaf
from envhub_server.ipc.replay_file import (
    ACTION,
    CALL,
    CODES,
    LENGTH,
    NOTHING,
    RESET,
    RESTORED,
    SET,
    Trace,
    TraceLayout,
    is_plain,
)
from envhub_server.worker.gym_compat import innermost
from envhub_server.worker.row_memory import as_slice


def values_by_row(message: Any, num_envs: int) -> dict[int, bytes]:
    """The encoded value that each row of a ``SetAttr`` or a ``SetAttrRows`` gets."""
    rows, values = message.rows or range(num_envs), message.values
    return dict(zip(rows, values * len(rows) if len(values) == 1 else values))


# The first bytes of a list of up to 15 items, less their number, and of an integer of 8 bytes.
FIXED_LIST, WORD = 0x90, 0xD3
HEAD = struct.Struct(">BBq")  # an entry's, with the batch before which it was
ENCODED_MAX = 64
UNSEEDED_BATCHES = 1000  # a trace goes on over resets without a seed: to encode a generator takes as long as ten steps


class TraceWriter(Trace):
    """Notes what the envs of this process are asked."""

    def __init__(self, layout: TraceLayout, descriptor: int, arena: Arena, groups: Sequence[Any]) -> None:
        super().__init__(layout, descriptor)
        self._groups, self._is_batch, self._batches = groups, layout.groups < layout.rows, layout.batches
        self._numbers = {index: number for number, group in enumerate(groups) for index in group.indices}
        self._positions = {index: position for position, index in enumerate(self._numbers)}
        self._kept: list[dict[tuple[Any, ...], bytes]] = [{} for _ in groups]  # entries that outlive a reset
        self._new = {*range(len(groups))}  # whose env was not reset yet
        self._unseeded_batches = min(UNSEEDED_BATCHES, self._batches // 2)
        self._encoded: dict[tuple[Any, ...], tuple[Any, bytes]] = {}  # the last entries of a kind and a name
        self._copies: list[tuple[Any, Any, int, int]] = []
        self._mine = as_slice([*self._numbers])
        self._arena, self._needs_reset = arena, arena.needs_reset.data
        self._asked = self.rings[0].view(np.int64)[:, :, 0]
        self._code_words = [column.data for column in arena.action_codes]
        self._codes = [-1] * len(self._code_words)

    def step(self, groups: Sequence[Any], out_of_band: Mapping[int, bytes]) -> None:
        index, batch = groups[0].index, self.words[0]
        at = batch % self._batches
        for row, blob in out_of_band.items():
            if row in self._numbers:
                self._append_entry(self._numbers[row], ACTION, row, blob if is_plain(blob) else None)
        for words, code in zip(self._code_words, self._codes):
            if words[index] != code:
                self._copy_by([words[index] for words in self._code_words])
                break
        for target, source, width, nbytes in self._copies:
            if width:
                target[at * width : at * width + nbytes] = source
            else:
                target[at] = source
        if len(groups) < len(self._groups):
            self._asked[at] = NOTHING
            for group in groups:
                for each in group.indices:
                    self._asked[at, self._positions[each]] = self._needs_reset[each]
        self.words[0] = batch + 1

    def _copy_by(self, codes: list[int]) -> None:
        arena, self._codes = self._arena, codes
        self._copies = [self._copy(self.rings[0], arena.needs_reset, 8)]
        for leaf, code, buffer, ring in zip(arena.layout.actions, codes, arena.actions, self.rings[1:]):
            nbytes = action_bytes(leaf, code)
            if 0 < nbytes <= ring.shape[2]:
                self._copies.append(self._copy(ring, buffer[: arena.layout.rows * nbytes], nbytes))
        for number, kept in enumerate(self._kept):
            kept[(CODES,)] = self._append_entry(number, CODES, codes)

    def _copy(self, ring: np.ndarray, column: np.ndarray, nbytes: int) -> tuple[Any, Any, int, int]:
        """The target, the source, and of one row its width: as bytes, for NumPy takes several times as long for it."""
        rows = column.view(np.uint8).reshape(-1, nbytes)
        if ring.shape[1] == 1:
            return ring.reshape(-1).data, rows[self._mine].reshape(-1).data, ring.shape[2], nbytes
        return _items(ring, nbytes), _items(rows, nbytes)[self._mine], 0, nbytes

    def reset(self, group: Any, seeds: Mapping[int, Any], options: Any = None) -> None:
        """Note that rows of this group are about to be reset with these seeds, by their program or as the first."""
        # The trace begins again with a seed, after many steps, or with the first reset.
        number = self._numbers[group.index]
        seeded = None not in seeds.values()
        generator = b""
        if len(seeds) == len(group.indices) and (seeded or number in self._new or self._is_long(number)):
            self._begin(number)
            self._new.discard(number)
            generator = b"" if seeded or self._is_batch else _generator(group.env)
        # Lists are encoded in a third of the time that a dict with these keys takes.
        pairs = [[row, None if seed is None else int(seed)] for row, seed in seeds.items()]
        self._append_entry(number, RESET, pairs, b"" if options is None else _encoded(options), generator)

    def autoreset(self, group: Any) -> None:
        if self._is_long(self._numbers[group.index]):
            self.reset(group, {group.index: None})

    def restored(self, group: Any, snapshot: str) -> None:
        """Note that a row goes on from a snapshot: what it was asked before that is not here."""
        self._append_entry(self._numbers[group.index], RESTORED, snapshot)

    def made(self, group: Any) -> None:
        number = self._numbers[group.index]
        self._new.add(number)
        self._kept[number] = {key: record for key, record in self._kept[number].items() if key == (CODES,)}
        self._begin(number)

    def called(self, group: Any, rows: Sequence[int], call: Any) -> None:
        """Note a call of these rows, or an attribute that is set; the last is kept, since a reset does not undo it."""
        is_set, number = not isinstance(call, Call), self._numbers[group.index]
        each = values_by_row(call, self._arena.layout.rows) if is_set else {}
        blobs = [each.get(row, b"") for row in rows] if is_set else [call.args]
        values = blobs if all(map(is_plain, blobs)) else None
        record = self._append_entry(number, SET if is_set else CALL, rows, call.name, values)
        key = call.name, is_set, *rows
        self._kept[number].pop(key, None)
        if len(record) <= self.layout.entries_bytes // 16:
            self._kept[number][key] = record

    def taken_of(self, index: int | None) -> bytes:
        if all(group.index != index for group in self._groups):
            return b""
        try:
            return self.taken(self._numbers[index or 0])
        except ValueError as error:
            return codec.encode({"cut": str(error)})

    def _is_long(self, number: int) -> bool:
        return not self._is_batch and self.words[0] - self.words[1 + 2 * number] >= self._unseeded_batches

    def _begin(self, number: int) -> None:
        self.words[2 + 2 * number] = 0
        self.words[1 + 2 * number] = self.words[0]
        for record in self._kept[number].values():
            self._append(number, record)

    def _append_entry(self, number: int, kind: str, *fields: Any) -> bytes:
        key = number, kind, fields[1] if kind in (CALL, SET) else None
        before, tail = self._encoded.get(key, (None, b""))
        if before != fields:  # programs repeat their calls and resets
            tail = codec.encode([kind, *fields])[1:]
            if len(self._encoded) >= ENCODED_MAX:
                self._encoded.clear()
            self._encoded[key] = fields, tail
        blob = HEAD.pack(FIXED_LIST + 2 + len(fields), WORD, self.words[0]) + tail
        record = LENGTH.pack(len(blob)) + blob
        self._append(number, record)
        return record

    def _append(self, number: int, record: bytes) -> None:
        at, entries = self.words[2 + 2 * number], self.entries[number]
        end = at + len(record)
        if end <= len(entries):
            entries[at:end] = record
        self.words[2 + 2 * number] = end  # beyond the room, ``taken`` says so


def action_bytes(leaf: Leaf, code: int) -> int:
    dtype = code & ~actions.PYTHON
    return leaf.items * actions.DTYPES[dtype].itemsize if 0 <= dtype < len(actions.DTYPES) else 0


def _items(data: np.ndarray, nbytes: int) -> np.ndarray:
    """The first bytes of the last axis as one item, which NumPy copies in half the time; ``data`` is contiguous."""
    item = {"names": ["head"], "formats": [f"V{nbytes}"], "offsets": [0], "itemsize": data.shape[-1]}
    return data.view(np.dtype(item))[..., 0]["head"]  # type: ignore[call-overload]


def _encoded(value: Any) -> bytes | None:
    try:
        return codec.encode(value)
    except Exception:  # of a foreign class
        return None


def _generator(env: Any) -> bytes:
    with contextlib.suppress(Exception):  # an attribute of a foreign class may raise anything
        if (bit_generator := bit_generator_of(env)) is not None:
            return codec.encode(np.random.Generator(bit_generator))
    return b""


def bit_generator_of(env: Any) -> Any:
    """Generator of an env's random numbers, by NumPy; None if it does not have ``np_random`` as Gymnasium does."""
    generator = innermost(env).np_random
    if isinstance(generator, np.random.RandomState):  # of gym before 0.22
        return generator._bit_generator
    return generator.bit_generator if isinstance(generator, np.random.Generator) else None
