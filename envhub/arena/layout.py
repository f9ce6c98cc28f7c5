"""The place of every field in a session's shared memory.

::

    page 0      header words: magic, layout version, rows, epoch, driver, revoked
    words       int64 per row: request, done, op, needs_reset, status, info_length, info_template, progress, begun,
                seed, since
    results     rewards float64, then terminations, then truncations, bool; one piece, for it travels as one
    infos       ``info_bytes`` per row: infos, and results of calls
    message     an int64, its length; then the encoded request of a reset, a call or actions out of band
    times       int64, nanoseconds: ``step_ns`` of some of the last steps, as the session's driver saw them,
                ``worker_ns`` of each worker's own part, at its first row, and ``env_ns`` of each env's
    actions     per action leaf, eight bytes per element, so that any accepted dtype fits; it begins with the
                batch as one contiguous array of the dtype that its code names; then an int64 per row, the code
    observations   per leaf and slot, batch-major: ``[2][rows][*shape]``
    large infos    if the memory is larger than these fields: an int64 per row, its room, and one for the message,
                   on separate pages; then a place for a large message, and one per row, all of one size, whose first
                   ``room`` bytes have memory

The magic is the bytes ``ENBUHNB1``, read as a word. Every field starts on a 64-byte boundary.
Row ``i`` of an observation field *is* the batched observation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable

import numpy as np

from envhub.errors import brief
from envhub.values.actions import RESULT_BYTES
from envhub.values.leaf import LEAVES_MAX, OBJECT, Leaf

HEADER_BYTES = 4096
ALIGNMENT = 64
SLOTS = 2
LARGE_INFO_BYTES_MAX = 1 << 25  # of one row: an info, or a result of a call such as a frame
LARGE_INFOS_BYTES_MAX = 1 << 36  # of all rows; these are addresses, which get memory only when an env needs it
MESSAGE_BYTES = 1 << 14  # of a request that has memory from the beginning
LARGE_MESSAGE_BYTES_MAX = 1 << 26  # of a larger one; a quarter of what all large places have, where that is less
ACTION_ITEM_BYTES = 8
STEPS_TIMED, ENV_STEPS_TIMED = 256, 16  # steps whose times are kept
ROW_WORDS = (
    *("request", "done", "op", "needs_reset", "status"),
    *("info_length", "info_template", "progress", "begun", "seed", "since"),
)


@dataclass(frozen=True)
class Field:
    """One array of the arena."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """All fields of an arena, as each side computes them; ``observations`` are leaves of fixed size only."""

    rows: int
    observations: tuple[Leaf, ...]
    actions: tuple[Leaf, ...]
    info_bytes: int

    def __post_init__(self) -> None:
        for kind, leaves in (("an observation", self.observations), ("an action", self.actions)):
            if len(leaves) > LEAVES_MAX:
                raise ValueError(f"{kind} space of {len(leaves)} leaves; at most {LEAVES_MAX} are carried")
        if OBJECT in self.observations:
            raise ValueError("an observation leaf of no fixed size has no place in an arena")

    def fields(self) -> dict[str, Field]:
        """Every field by name; leaves are ``action/0``, ``observation/0`` and so on, in the order of the space."""
        wanted: list[tuple[str, str, tuple[int, ...]]] = [(word, "i8", (self.rows,)) for word in ROW_WORDS]
        wanted.append(("results", "u1", (self.rows * RESULT_BYTES,)))
        wanted.append(("infos", "u1", (self.rows, self.info_bytes)))
        wanted.append(("message_length", "i8", (1,)))
        wanted.append(("message", "u1", (MESSAGE_BYTES,)))
        wanted.append(("step_ns", "i8", (STEPS_TIMED,)))
        wanted.append(("worker_ns", "i8", (self.rows, STEPS_TIMED)))
        wanted.append(("env_ns", "i8", (self.rows, ENV_STEPS_TIMED)))
        for number, leaf in enumerate(self.actions):
            wanted.append((f"action/{number}", "u1", (self.rows * leaf.items * ACTION_ITEM_BYTES,)))
            wanted.append((f"action_code/{number}", "i8", (self.rows,)))
        for number, leaf in enumerate(self.observations):
            wanted.append((f"observation/{number}", leaf.dtype, (SLOTS, self.rows, *leaf.shape)))
        fields: dict[str, Field] = {}
        offset = HEADER_BYTES
        for name, dtype, shape in wanted:
            fields[name] = Field(offset, dtype, shape)
            offset = _aligned(offset + fields[name].nbytes, ALIGNMENT)
        return fields

    def row_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.observations)

    def nbytes(self) -> int:
        last = list(self.fields().values())[-1]
        return _aligned(last.offset + last.nbytes, HEADER_BYTES)

    def rooms_bytes(self) -> int:
        return _aligned(8 * (self.rows + 1), HEADER_BYTES)

    def large_bytes(self, nbytes: int) -> tuple[int, int]:
        """The size of each row's place for a large info, and of that for a large message, in memory of ``nbytes``."""
        left = max(0, nbytes - self.nbytes() - self.rooms_bytes())
        message = min(LARGE_MESSAGE_BYTES_MAX, max(left // 4, left - self.rows * LARGE_INFO_BYTES_MAX))
        return _whole_pages(min(LARGE_INFO_BYTES_MAX, (left - message) // self.rows)), _whole_pages(message)

    def span(self, large_bytes_max: int = LARGE_INFOS_BYTES_MAX) -> int:
        """The size of the whole arena with its large places, which take at most this many bytes together."""
        most = self.rows * LARGE_INFO_BYTES_MAX + LARGE_MESSAGE_BYTES_MAX
        return self.nbytes() + self.rooms_bytes() + _whole_pages(min(most, LARGE_INFOS_BYTES_MAX, large_bytes_max))


def are_whole_workers(rows: Iterable[int], num_envs: int, workers: int) -> bool:
    """True if these rows are all rows of some workers; worker ``i`` of ``n`` has the rows whose remainder is ``i``."""
    wanted = set(rows)
    return all(wanted.issuperset(range(row % workers, num_envs, workers)) for row in wanted)


def whole_workers_text(num_envs: int, workers: int) -> str:
    worker_rows = [[*range(worker, num_envs, workers)] for worker in range(workers)]
    return f"a vector env steps all of its envs in one call: send those of whole workers, of {brief(worker_rows, 300)}"


def _aligned(offset: int, boundary: int) -> int:
    return -(-offset // boundary) * boundary


def _whole_pages(nbytes: int) -> int:
    return nbytes // HEADER_BYTES * HEADER_BYTES
