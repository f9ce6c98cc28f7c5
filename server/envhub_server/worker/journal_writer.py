"""Writes the calls of a worker's envs into its journal, with a few copies per batch."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import numpy as np

from envhub.arena.memory import OP_PART, Arena
from envhub.values import actions, codec
from envhub.values.leaf import OBJECT
from envhub_server.ipc.journal import (
    AGAIN,
    BY_REQUEST,
    CALL,
    FIRST,
    MADE,
    MIXED,
    NOTHING,
    OUT_OF_BAND,
    RESET,
    Digester,
    Journal,
    Note,
    flat,
    in_items,
)
from envhub_server.worker.batch_observer import BatchObserver, Seeds
from envhub_server.worker.gym_compat import innermost
from envhub_server.worker.slots import SlotOrSlots, Slots, as_slice

CHECKPOINT_TICKS = 1000  # interval at which an env's random number generator is noted, at the end of an episode


class JournalWriter(BatchObserver):
    """Writes the journal of one worker."""

    def __init__(self, journal: Journal, arena: Arena, groups: Sequence[Any], is_batch: bool = False) -> None:
        """Write the calls of these groups, whose rows are in ``arena``; ``is_batch`` if a group is a vector env."""
        self._journal = journal
        self._words, self._kinds = journal.words, journal.kinds
        self._ticks = journal.layout.ticks
        self._groups, self._is_batch = groups, is_batch
        self._rows = [(index, group) for group in groups for index in group.indices]
        self._positions = {index: position for position, (index, _) in enumerate(self._rows)}
        self._checkpoint_tick = 0  # from which on the random numbers of every env are to be noted again, ...
        self._unnoted: set[int] = set()  # ... each at the end of its episode; positions
        self.attach(arena)
        for group in groups:
            self.built(group)

    def attach(self, arena: Arena) -> None:
        """Use these rows of the arena."""
        indices = [index for index, _ in self._rows]
        mine = as_slice(indices)
        self._first = indices[0]
        self._where, self._ops = Slots(arena, mine), arena.op.data
        self._needs_reset = arena.needs_reset[mine]
        self._leaves = [
            _ActionLeaf(self._journal, arena, number, mine, leaf.items)
            for number, leaf in enumerate(arena.layout.actions)
            if leaf != OBJECT
        ]
        self._objects = [number for number, leaf in enumerate(arena.layout.actions) if leaf == OBJECT]
        self._digester = Digester(self._journal, arena.observations, mine)
        self._slots: SlotOrSlots = 0

    @property
    def tick(self) -> int:
        """The tick that began last."""
        return self._words[1] - 1

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, groups: Sequence[Any], out_of_band: Mapping[int, bytes]) -> None:
        """Note the actions of these groups."""
        tick = self._words[1]
        place = tick % self._ticks
        if tick >= self._checkpoint_tick:
            self._ask_for_checkpoints(tick)
        if out_of_band:
            self._note_out_of_band(tick, out_of_band)
        whole = len(groups) == len(self._groups) and self._ops[self._first] != OP_PART
        self._slots = self._where.posted(whole)
        if whole:
            self._kinds[place] = self._needs_reset
            for leaf in self._leaves:
                leaf.take(place)
        else:
            chosen = [self._positions[index] for group in groups for index in group.indices]
            self._kinds[place] = NOTHING
            self._kinds[place, chosen] = self._needs_reset[chosen]
            for leaf in self._leaves:
                leaf.take_some(place, chosen)
        for number in self._objects:
            self._journal.codes[place, number] = actions.OUT_OF_BAND
        self._words[1] = tick + 1

    def _ask_for_checkpoints(self, tick: int) -> None:
        self._checkpoint_tick = tick + CHECKPOINT_TICKS
        if not self._is_batch:  # a vector env may have a generator for each of its envs, or others
            self._unnoted = set(range(len(self._rows)))

    def end(self) -> None:
        """Digest the observations of the last batch."""
        begun = self._words[1]
        place = (begun - 1) % self._ticks
        slots = self._slots
        if isinstance(slots, int):
            self._digester.digest(place, slots)
        else:
            self._digester.digest(place, 0)
            first = self._journal.digests[place].copy()
            self._digester.digest(place, 1)
            self._journal.digests[place] = np.where(slots[:, None] == 0, first, self._journal.digests[place])
        self._words[2] = begun

    def _note_out_of_band(self, tick: int, values: Mapping[int, bytes]) -> None:
        for row, blob in values.items():
            if row in self._positions:
                self._journal.note(Note(tick, self._positions[row], OUT_OF_BAND, options=blob))

    # --- resets -------------------------------------------------------------------------------------------------------

    def begin_reset(self, seeds: Seeds, options_of: Callable[[int], bytes]) -> None:
        """Note the seeds, the options and the random numbers of these resets."""
        tick = self._words[1]
        place = tick % self._ticks
        self._kinds[place] = NOTHING
        for row, seed in seeds.items():
            position = self._positions[row]
            self._kinds[place, position] = RESET
            self._note_reset(tick, position, BY_REQUEST, seed, options_of(row))
        self._slots = self._where.posted(whole=False)
        self._words[1] = tick + 1

    def end_reset(self, seeds: Seeds) -> None:
        """Digest the observations."""
        self.end()

    def first_reset(self, group: Any, seeds: Sequence[Any]) -> None:
        """Note these seeds, and the random numbers."""
        for index, seed in zip(group.indices, seeds):
            self._note_reset(self.tick, self._positions[index], FIRST, seed)

    def autoreset(self, group: Any) -> None:
        """Note now and then the random numbers that the env has left at the end of an episode."""
        position = self._positions[group.index]
        if position in self._unnoted:
            self._note_reset(self.tick, position, AGAIN, None)

    def _note_reset(self, tick: int, position: int, kind: int, seed: Any, options: bytes = b"") -> None:
        noted_seed, (_, group) = None if seed is None else int(seed), self._rows[position]
        wanted = noted_seed is None and not self._is_batch
        generator = _encoded_generator(group.env) if wanted else b""
        self._unnoted.discard(position)
        self._journal.note(Note(tick, position, kind, noted_seed, options, generator))

    # --- what else happens --------------------------------------------------------------------------------------------

    def built(self, group: Any) -> None:
        """Note that the group has a new env."""
        for index in group.indices:
            self._journal.note(Note(self._words[1], self._positions[index], MADE))

    def called(self, target: Any, name: str) -> None:
        """Note a call of a method, or a change of an attribute, which is not run again."""
        self._journal.note(Note(self._words[1], self._positions[target.index], CALL, options=name.encode()[:256]))


class RowJournalWriter(JournalWriter):
    """Writes the journal of a worker with one row word by word: for one row NumPy takes several times as long."""

    def attach(self, arena: Arena) -> None:
        """Use this row of the arena."""
        super().attach(arena)
        self._kind_bytes = flat(self._journal.kinds)
        self._request_words, self._needs_reset_words = arena.request.data, arena.needs_reset.data
        leaves = range(len(arena.layout.actions))
        self._action_rows = [_ActionRow(self._journal, arena, number, self._first) for number in leaves]

    def begin(self, groups: Sequence[Any], out_of_band: Mapping[int, bytes]) -> None:
        """Note the action of the row."""
        tick, row = self._words[1], self._first
        place = tick % self._ticks
        if tick >= self._checkpoint_tick:
            self._ask_for_checkpoints(tick)
        if out_of_band:
            self._note_out_of_band(tick, out_of_band)
        self._slots = self._request_words[row] & 1
        self._kind_bytes[place] = self._needs_reset_words[row] & 0xFF  # a client may write anything there
        for leaf in self._action_rows:
            leaf.take(place)
        self._words[1] = tick + 1


class _ActionLeaf:
    """Copies one leaf of the actions of a worker's rows into the journal."""

    def __init__(self, journal: Journal, arena: Arena, number: int, mine: slice, items: int) -> None:
        self._buffer, self._rows, self._items, self._mine = arena.actions[number], arena.layout.rows, items, mine
        self._column = arena.action_codes[number][mine]
        self._codes, self._ring = journal.codes[:, number].data, journal.actions[number]
        self._last_codes = b""  # the codes of all rows in the last batch
        self._code, self._source, self._target = MIXED, self._ring[0, :, :0], self._ring[:, :, :0]

    def take(self, place: int) -> None:
        """Copy the actions of all rows."""
        codes = self._column.tobytes()
        if codes != self._last_codes:
            self._last_codes = codes
            self._read_as(self._column)
        self._codes[place] = self._code
        self._target[place] = self._source

    def take_some(self, place: int, chosen: Sequence[int]) -> None:
        """Copy the actions of the rows at these positions."""
        self._last_codes = b""
        self._read_as(self._column[chosen])
        self._codes[place] = self._code
        self._target[place, chosen] = self._source[chosen]

    def _read_as(self, codes: np.ndarray) -> None:
        """Copy by these codes, of which there is one, else nothing."""
        kinds = set(codes.tolist())
        self._code, nbytes = _read_as(kinds.pop() if len(kinds) == 1 else MIXED, self._items)
        self._source = in_items(self._buffer[: self._rows * nbytes].reshape(self._rows, nbytes), nbytes)[self._mine]
        self._target = in_items(self._ring, nbytes)


class _ActionRow:
    """Copies one leaf of one row's actions into the journal."""

    def __init__(self, journal: Journal, arena: Arena, number: int, row: int) -> None:
        self._words, self._row, self._data = arena.action_codes[number].data, row, flat(arena.actions[number])
        self._codes, self._ring = journal.codes[:, number].data, flat(journal.actions[number])
        self._items, self._width = arena.layout.actions[number].items, journal.layout.widths[number]
        self._word = self._code = -1
        self._source = self._data[:0]

    def take(self, place: int) -> None:
        """Copy the action."""
        word = self._words[self._row]
        if word != self._word:
            self._word, (self._code, nbytes) = word, _read_as(word, self._items)
            self._source = self._data[self._row * nbytes : (self._row + 1) * nbytes]
        self._codes[place] = self._code
        at = place * self._width
        self._ring[at : at + len(self._source)] = self._source


def _read_as(word: int, items: int) -> tuple[int, int]:
    """The code in this word, and the size of an action of ``items`` items in the arena by this code."""
    code = word & 0xFF
    dtype = code & ~actions.PYTHON
    return code, items * actions.DTYPES[dtype].itemsize if dtype < len(actions.DTYPES) else 0


def _encoded_generator(env: Any) -> bytes:
    """The state of the env's random number generator; empty where it has none of NumPy's that can be carried."""
    try:
        bit_generator = bit_generator_of(env)
        return b"" if bit_generator is None else codec.encode(np.random.Generator(bit_generator))
    except Exception:  # an attribute of a foreign class may raise anything, and is no part of the env's interface
        return b""


def bit_generator_of(env: Any) -> Any:
    """Generator of the env's random numbers, by NumPy; None if it does not have ``np_random`` as Gymnasium does."""
    generator = innermost(env).np_random
    if isinstance(generator, np.random.RandomState):  # of gym before 0.22
        return generator._bit_generator
    return generator.bit_generator if isinstance(generator, np.random.Generator) else None
