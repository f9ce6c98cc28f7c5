"""The journal of a worker: the last calls of its envs, in memory that the hub also maps and that outlives the worker.

The hub makes a sealed memfd for each process of a slot; the process writes (``worker.journal_writer``), and once an
env has failed the hub reads what that env was asked. A **tick** is one batch that the worker served: a step of some or
all of its rows, or a reset. The memory is::

    words       int64: magic, ticks begun, ticks whose observations are digested, and of the notes: the positions in
                bytes, ever increasing, of the first that is kept, and after the last
    kinds       uint8 [ticks][rows]: what the row was asked, see below
    codes       uint8 [ticks][action leaves]: how to read the actions, as in ``envhub.values.actions``; one for all rows
    actions     uint8 per leaf, [ticks][rows][8 bytes per element]
    digests     uint8 [ticks][rows][digest bytes], of the observation that followed
    notes       a ring of bytes with one record for each reset, and for what has no fixed size

The first four are rings: tick ``t`` is at ``t % ticks``. An observation of one leaf and up to ``RAW_BYTES_MAX`` bytes
is its own digest. Of any other the digest is the sum of its words, modulo 2**64, which costs a fraction of a checksum
and differs whenever one number does.

A worker runs foreign code, which may write anything here: ``JournalCopy`` checks everything that it reads.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, List, NamedTuple, Sequence

import numpy as np

from envhub.arena.layout import ACTION_ITEM_BYTES
from envhub.arena.stand_in import ONGOING
from envhub.sealing import new_memory
from envhub.values import codec
from envhub.values.leaf import OBJECT, Leaf

MAGIC = 0x4C4E52554F4A4845
TICKS_MAX = 1 << 14
RING_BYTES_MAX = 1 << 22  # of all rings of one worker but the notes
NOTES_BYTES = 1 << 18
NOTE_BYTES_MAX = 1 << 15  # a larger note is left out, and with it the ticks before it
RAW_BYTES_MAX = 64

# Kinds. Below them is the row's ``needs_reset`` (``envhub.arena.stand_in``) before a step, which decides what that is.
NOTHING, RESET, AUTORESET = 255, 254, 253  # AUTORESET: of an episode that ended in this tick, in mode SAME_STEP
MIXED = 0xFF  # instead of a code: the rows of this tick have different codes
PRIME = np.uint64(0x9E3779B97F4A7C15)  # so that the leaves of an observation do not cancel each other out

# Notes: of a reset by request, of the first reset of a new env, of an autoreset, of the values of an action that travel
# out of band, of a call or a changed attribute, and that an env was made.
BY_REQUEST, FIRST, AGAIN, OUT_OF_BAND, CALL, MADE = range(6)

_WORDS = ("magic", "begun", "digested", "notes_begin", "notes_end")
_HEADER_BYTES = 4096
_LENGTH = struct.Struct("<I")


def name_of_raised(prefix: str, row: int, number: int) -> str:
    """The name of the replay of an env that raised in the step or reset of this number."""
    return f"{prefix}-env{row}-{number}"


class Note(NamedTuple):
    """A record.

    Attributes:
        tick: the tick that it belongs to, or comes before.
        position: of its row among the worker's.
        kind: see above.
        seed: of a reset.
        options: of a reset, or the values of an action, encoded; the name of a call.
        generator: the env's encoded random number generator before a reset without a seed; empty if it is not known.
    """

    tick: int
    position: int
    kind: int
    seed: int | None = None
    options: bytes = b""
    generator: bytes = b""


@dataclass(frozen=True)
class JournalLayout:
    """Places of everything in the journal of some rows of a session with these leaves."""

    rows: int
    observations: tuple[Leaf, ...]
    actions: tuple[Leaf, ...]

    @property
    def widths(self) -> list[int]:
        """The room for one row's action, per leaf."""
        return [0 if leaf == OBJECT else leaf.items * ACTION_ITEM_BYTES for leaf in self.actions]

    @property
    def raw(self) -> bool:
        """True if an observation is its own digest."""
        return len(self.observations) == 1 and self._observation_bytes <= RAW_BYTES_MAX

    @property
    def _observation_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.observations)

    @property
    def digest_bytes(self) -> int:
        """The size of a digest; 0 where observations have no part of fixed size."""
        return self._observation_bytes if self.raw else 8 if self._observation_bytes else 0

    @property
    def ticks(self) -> int:
        """Ticks that are kept."""
        tick_bytes = self.rows * (1 + sum(self.widths) + self.digest_bytes) + len(self.actions)
        return max(2, min(TICKS_MAX, RING_BYTES_MAX // tick_bytes))

    @property
    def row_bytes(self) -> int:
        """Bytes that are kept of one row, besides notes."""
        return self.ticks * (1 + sum(self.widths) + self.digest_bytes + len(self.actions))

    @property
    def nbytes(self) -> int:
        """The size of the memory."""
        return self.fields()[1]

    def fields(self) -> tuple[list[tuple[int, tuple[int, ...]]], int]:
        """Offset and shape of each ring of bytes, the notes last, and the size of it all."""
        ticks, rows = self.ticks, self.rows
        shapes: list[tuple[int, ...]] = [(ticks, rows), (ticks, len(self.actions))]
        shapes += [(ticks, rows, width) for width in self.widths]
        shapes += [(ticks, rows, self.digest_bytes), (NOTES_BYTES,)]
        rings, offset = [], _HEADER_BYTES
        for shape in shapes:
            rings.append((offset, shape))
            offset += -(-int(np.prod(shape)) // 64) * 64
        return rings, offset


def allocate(layout: JournalLayout) -> int:
    """A sealed memfd for a journal; the caller owns the descriptor. Its pages are taken as they are written.

    Raises:
        OSError: it cannot be had; nothing is left behind.
    """
    return new_memory("envhub-journal", layout.nbytes)


@dataclass(frozen=True)
class History:
    """Calls of one env, or of all envs of a vector env, from a point from which they can be repeated.

    Attributes:
        unrepeatable: why it cannot be run again from there, or empty.
        begins: "made" (from the env's making), "seed" (from a reset with a seed) or "generator" (from a reset whose
            random numbers are known).
        kinds, codes, actions, digests: as in the journal, one per call; ``actions`` per leaf.
        notes: of these calls; the ticks count from the first call, and the positions from the first of these envs.
        digested: how many of the calls have a digest.
        rows: how many envs these are.
    """

    unrepeatable: str = ""
    begins: str = ""
    kinds: bytes = b""
    codes: bytes = b""
    actions: List[bytes] = field(default_factory=list)
    digests: bytes = b""
    notes: List[Note] = field(default_factory=list)
    digested: int = 0
    rows: int = 1

    @property
    def calls(self) -> int:
        """Number of calls."""
        return len(self.kinds) // self.rows

    def kind(self, call: int) -> int:
        """Kind of this call, of the first env that had one."""
        kinds = self.kinds[call * self.rows : (call + 1) * self.rows]
        return next((kind for kind in kinds if kind != NOTHING), NOTHING)


class Journal:
    """The mapped memory.

    Attributes:
        layout: of it.
        words: the header's words.
        kinds, codes, actions, digests: the rings, as arrays.
    """

    def __init__(self, layout: JournalLayout, descriptor: int) -> None:
        """Map it.

        Raises:
            OSError, ValueError: this is no memory of this layout.
        """
        self.layout = layout
        fields, nbytes = layout.fields()
        self._memory = mmap.mmap(descriptor, nbytes)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._memory.madvise(mmap.MADV_DONTFORK)  # as of the arena: a child of an env must not write to it
        self.words = np.frombuffer(self._memory, np.int64, len(_WORDS)).data
        rings = [np.ndarray(shape, np.uint8, self._memory, offset) for offset, shape in fields]
        self.kinds, self.codes, *self.actions = rings[:-2]
        self.digests, self._notes = rings[-2:]
        self._lengths: deque[int] = deque()  # of the notes that are kept; the writer's

    def format(self) -> None:
        """Begin an empty journal."""
        self.words[0] = MAGIC

    # --- notes --------------------------------------------------------------------------------------------------------

    def note(self, note: Note) -> None:
        """Append a note; the oldest give way. One that is too large leaves only its place."""
        blob = codec.encode(list(note))
        if len(blob) > NOTE_BYTES_MAX:
            blob = codec.encode([note.tick, note.position, None, None, b"", b""])
        record = _LENGTH.pack(len(blob)) + blob
        begin, end = self.words[3], self.words[4]
        while end + len(record) - begin > NOTES_BYTES:
            begin += self._lengths.popleft()
        self._lengths.append(len(record))
        self.words[3] = begin
        place = end % NOTES_BYTES
        data, room = np.frombuffer(record, np.uint8), NOTES_BYTES - place
        self._notes[place : place + len(record)] = data[:room]
        self._notes[: max(0, len(record) - room)] = data[room:]
        self.words[4] = end + len(record)

    # --- reading ------------------------------------------------------------------------------------------------------

    def copied(self, positions: range) -> JournalCopy:
        """Copy what it has now of the rows at these positions; its worker may go on meanwhile."""
        words, ticks = [*self.words], self.layout.ticks
        held, rows = slice(words[1]), slice(positions.start, positions.stop)
        return JournalCopy(
            ticks=ticks,
            positions=positions,
            words=words,
            kinds=self.kinds[held, rows].copy(),
            codes=self.codes[held].copy(),
            actions=[ring[held, rows].copy() for ring in self.actions],
            digests=self.digests[held, rows].copy(),
            notes_ring=self._notes[: words[4]].tobytes(),
            # Read after the copies: what comes before them the worker may have been writing over.
            notes_begin=self.words[3],
            lowest=max(0, max(words[1], self.words[1]) - ticks + 1),
        )


@dataclass(frozen=True)
class JournalCopy:
    """Copy of a journal's content for some rows.

    Attributes:
        ticks: how many are kept.
        positions: of the rows among the worker's.
        words: of the header, before anything else was copied.
        kinds, codes, actions, digests: the rings.
        notes_ring: the notes of all rows.
        notes_begin, lowest: the first note, and the first tick, that are whole.
    """

    ticks: int
    positions: range
    words: List[int]
    kinds: np.ndarray
    codes: np.ndarray
    actions: List[np.ndarray]
    digests: np.ndarray
    notes_ring: bytes
    notes_begin: int
    lowest: int

    @property
    def nbytes(self) -> int:
        """The size of the copy."""
        rings = [self.kinds, self.codes, *self.actions, self.digests]
        return len(self.notes_ring) + sum(ring.nbytes for ring in rings)

    def notes(self) -> list[Note]:
        """The notes that were kept, in order.

        Raises:
            ValueError: they are damaged.
        """
        begin, end = self.notes_begin, self.words[4]
        if not 0 <= begin <= end <= begin + NOTES_BYTES:
            raise ValueError("the journal's notes have no valid place")
        whole = (self.notes_ring * 2)[begin % NOTES_BYTES :][: end - begin]
        notes, at = [], 0
        while at < len(whole):
            (length,) = _LENGTH.unpack_from(whole.ljust(at + _LENGTH.size), at)
            at += _LENGTH.size
            if length > NOTE_BYTES_MAX or at + length > len(whole):
                raise ValueError("the journal's notes are damaged")
            notes.append(checked_note(codec.decode(whole[at : at + length])))
            at += length
        return notes

    def history(self, last: int | None = None) -> History:
        """Calls of the env of these rows, up to this tick, or all.

        It begins with the env's making if the journal still has that, else with the last reset by a seed, else with a
        reset whose random numbers are known; before the last call in any case, so that a reset that fails is run
        after what came before it, too.

        Raises:
            ValueError: the journal is damaged.
        """
        (magic, begun, digested, *_), rows = self.words, len(self.positions)
        if magic != MAGIC or not 0 <= begun < 1 << 62:
            raise ValueError("the memory is no journal")
        last = begun - 1 if last is None else last
        if not self.lowest <= last + 1 <= begun:
            return History(unrepeatable="the journal has moved on", rows=rows)
        notes = self.notes()
        complete_since = 0 if not self.notes_begin else notes[0].tick + 1 if notes else begun
        own = [note for note in notes if note.position in self.positions and note.tick <= last + 1]
        first, begins = _beginning(own, max(self.lowest, complete_since), last, rows)
        if not begins:
            text = f"its episode is longer than the journal, which holds {self.ticks} batches of its worker"
            return History(unrepeatable=text, rows=rows)
        ticks = np.arange(first, last + 1) % self.ticks
        codes, kinds = self.codes[ticks], self.kinds[ticks]
        asked = (kinds != NOTHING).any(1)
        if (codes[asked & (kinds < AUTORESET).any(1)] == MIXED).any():
            text = "the actions of its worker's envs were of several kinds at one time"
            return History(unrepeatable=text, rows=rows)
        chosen = ticks[asked]
        number = np.cumsum(asked) - 1  # of the call, by tick
        calls = {first + at: int(call) for at, (call, is_asked) in enumerate(zip(number, asked)) if is_asked}
        after = int(asked.sum())
        kept_notes = [
            note._replace(tick=calls.get(note.tick, after), position=self.positions.index(note.position))
            for note in own
            if first <= note.tick and (note.kind == CALL or note.tick in calls) and note.kind != MADE
        ]
        kinds = kinds[asked]
        if begins == "generator" and kinds.size and kinds[0, 0] == ONGOING:
            kinds[0] = AUTORESET  # in mode SAME_STEP it followed a step, which is left out
        return History(
            begins=begins,
            kinds=kinds.tobytes(),
            codes=codes[asked].tobytes(),
            actions=[ring[chosen].tobytes() for ring in self.actions],
            digests=self.digests[chosen].tobytes(),
            notes=kept_notes,
            digested=int((asked[: max(0, min(digested, last + 1) - first)]).sum()),
            rows=rows,
        )


def _beginning(own: Sequence[Note], lowest: int, last: int, rows: int) -> tuple[int, str]:
    """The tick from which the envs of these ``rows`` can be run again, and the reason; the reason is empty if none."""
    # The env may have been made again since: after this failure, and before the hub reads of it.
    made = [note.tick for note in own if note.kind == MADE and note.tick <= last]
    if made and made[-1] >= lowest:
        return made[-1], "made"
    resets = [note for note in own if note.kind in (BY_REQUEST, FIRST, AGAIN) and lowest <= note.tick <= last]
    for begins, usable in (
        ("seed", _ticks_of_all([note for note in resets if note.seed is not None], rows)),
        ("generator", _ticks_of_all([note for note in resets if note.generator], rows)),
    ):
        before = [tick for tick in usable if tick < last] or usable
        if before:
            return before[-1], begins
    return 0, ""


def _ticks_of_all(notes: Sequence[Note], rows: int) -> list[int]:
    """The ticks in which each of ``rows`` envs has a note, in order."""
    positions: dict[int, set[int]] = {}
    for note in notes:
        positions.setdefault(note.tick, set()).add(note.position)
    return [tick for tick, noted in positions.items() if len(noted) == rows]


def checked_note(fields: Any) -> Note:
    """The note in a decoded record, of a journal or a file; a record that was too large has no kind.

    Raises:
        ValueError: it is damaged.
    """
    kinds = (int,), (int,), (int, type(None)), (int, type(None)), (bytes,), (bytes,)
    if not (
        isinstance(fields, list) and len(fields) == len(kinds) and all(type(x) in k for x, k in zip(fields, kinds))
    ):
        raise ValueError("the journal's notes are damaged")
    return Note(*fields)


class Digester:
    """Digests observations of an arena's leaves, of the rows of one worker."""

    def __init__(self, journal: Journal, observations: Sequence[np.ndarray], mine: slice) -> None:
        """Into this journal, of these leaves, each ``(2, rows, *shape)``, of which ``mine`` are the worker's rows."""
        self._raw, leaves = journal.layout.raw, [leaf for leaf in observations if leaf.size]
        batches = [_words(leaf, self._raw)[:, mine] for leaf in leaves]
        self._slots = [[batch[slot] for batch in batches] for slot in range(2)]
        has_words = bool(batches) and not self._raw
        digests, nbytes = journal.digests, journal.layout.digest_bytes
        self._digests = digests.view(np.uint64)[:, :, 0] if has_words else in_items(digests, nbytes)
        self._one: tuple[list[memoryview], memoryview, int] | None = None
        if self._raw and batches and digests.shape[1] == 1:  # as bytes one is copied in a fraction of the time
            self._one = [flat(leaves[0][slot, mine]) for slot in range(2)], flat(digests), nbytes

    def digest(self, place: int, slot: int) -> None:
        """Digest each row's observation in this slot, into this place of the ring."""
        batches = self._slots[slot]
        if not batches:
            return  # observations without elements
        if self._one is not None:
            observations, ring, nbytes = self._one
            ring[place * nbytes : (place + 1) * nbytes] = observations[slot]
        elif self._raw:
            self._digests[place] = batches[0]
        else:
            total = np.add.reduce(batches[0], 1, np.uint64)
            for batch in batches[1:]:
                total *= PRIME
                total += np.add.reduce(batch, 1, np.uint64)
            self._digests[place] = total


def _words(leaf: np.ndarray, raw: bool) -> np.ndarray:
    """The leaf as ``(2, rows)`` items, or as ``(2, rows, words)`` of the largest words that make up a row."""
    data = leaf.reshape(*leaf.shape[:2], -1).view(np.uint8)
    if raw:
        return in_items(data, data.shape[2])
    size = next(size for size in (8, 4, 2, 1) if not data.shape[2] % size)
    return data.view(f"u{size}")


def flat(data: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return data.reshape(-1).view(np.uint8).data


def in_items(data: np.ndarray, nbytes: int) -> np.ndarray:
    """The first bytes of the last axis as one item, which NumPy copies in half the time; ``data`` is contiguous."""
    if not nbytes:
        return data[..., :0]
    item = {"names": ["head"], "formats": [f"V{nbytes}"], "offsets": [0], "itemsize": data.shape[-1]}
    return data.view(np.dtype(item))[..., 0]["head"]  # type: ignore[call-overload]
