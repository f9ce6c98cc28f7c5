"""A session's shared memory in the hub: the arena, its descriptor, and its bells."""

from __future__ import annotations

import os

import numpy as np

from envhub.arena.driver import ArenaDriver
from envhub.arena.layout import HEADER_BYTES, Layout
from envhub.arena.memory import CLOCKED, OP_RESET, TURN_FIRST, TURN_ROW, Arena, allocate
from envhub_server.memory.step_io import StepFrames
from envhub_server.session.failover import Words
from envhub_server.session.hang_detector import Progress

INFO_BYTES = 2048  # room for an info in the arena, per row; it grows where an env shows more
INFO_GROWTH = 1.25  # room for an info that is a little larger than the last one


class ArenaBudget:
    """The shared memory that all sessions of a hub, or of one of its clients, together may use."""

    def __init__(self, bytes_max: int, whole: ArenaBudget | None = None) -> None:
        """Make a budget of this size, in bytes; a part of the ``whole`` budget, if one is given."""
        self.bytes_max = bytes_max
        self._whole = whole
        self._used = 0

    @property
    def left(self) -> int:
        """The bytes that are not used."""
        left = self.bytes_max - self._used
        return left if self._whole is None else min(left, self._whole.left)

    def use(self, nbytes: int) -> None:
        """Note that this many more bytes are used; a negative number means fewer."""
        self._used += nbytes
        if self._whole is not None:
            self._whole.use(nbytes)


class SessionMemory:
    """The arena, and the driver that steps in it while the hub drives.

    Attributes:
        arena: the mapped memory.
        nbytes: how much of it was reserved.
        descriptor: of the memory, for workers and a client.
        client_bell: the eventfd by which workers wake the client.
        slot_bells: by slot, the eventfd by which the client wakes its process.
        driver: steps in the arena.
        frames: reads the frames of steps, and makes those of replies.
    """

    def __init__(self, layout: Layout, slots: int, budget: ArenaBudget) -> None:
        """Allocate and map it, within this budget, in which it counts until ``unread_memory`` finds it unmapped.

        Raises:
            OSError: there is no memory, address space, descriptor or budget left; nothing is left behind.
        """
        self.slot_bells: list[int] = []
        self.client_bell = self.descriptor = -1
        nbytes = self.nbytes = layout.nbytes()  # the rooms, 8 bytes of a row, are not counted
        if nbytes > budget.left:
            raise OSError(f"of arena_bytes_max {budget.left} are left")
        try:
            self.client_bell = new_bell()
            for _ in range(slots):
                self.slot_bells.append(new_bell())
            # A client of the shared lane may write to all of its places, whatever the hub has given rows there.
            self.descriptor = allocate(layout, max(0, budget.left - nbytes))
            self.arena = Arena(layout, self.descriptor)
        except OSError:
            self.close()
            raise
        budget.use(nbytes)
        self.arena.format(epoch=1)
        self.driver = ArenaDriver(self.arena)
        self.frames = StepFrames(self.arena, self.driver)

    def grow(self, row: int, nbytes: int, budget: ArenaBudget) -> None:
        """Give the row room for infos of this size; without memory for it, they come on the worker's channel."""
        place, room = self.arena.large_infos.shape[1], int(self.arena.rooms[row])
        wanted = min(-(-int(nbytes * INFO_GROWTH) // HEADER_BYTES) * HEADER_BYTES, place)
        if nbytes > wanted or wanted <= room or wanted - room > budget.left:
            return
        try:
            os.posix_fallocate(self.descriptor, self.arena.large_info_offset(row) + room, wanted - room)
        except OSError:
            return
        budget.use(wanted - room)
        self.nbytes += wanted - room
        self.arena.give_room(row, wanted)

    @property
    def steps(self) -> int:
        """Number of steps and resets that its rows have done."""
        return int(self.arena.done.sum())

    def rows(self, slot: int) -> np.ndarray:
        """The rows of this slot."""
        return np.arange(slot, self.arena.layout.rows, len(self.slot_bells))

    def words(self, slot: int) -> Words:
        """The arena's words of this slot's rows."""
        arena, rows = self.arena, self.rows(slot)
        return Words(rows, arena.request[rows], arena.done[rows], arena.op[rows], arena.needs_reset[rows])

    def is_current(self, slot: int, row: int | None, number: int) -> bool:
        """True if this number is that of the step or reset which this slot's row was posted last."""
        return row in self.rows(slot).tolist() and int(self.arena.request[row]) == number

    def progress(self, slot: int) -> Progress:
        """The row and call that this slot's process executes, or that it must execute next."""
        rows, request, done, *_ = self.words(slot)
        turn = int(self.arena.turn[slot])
        row, first = turn & TURN_ROW, bool(turn & TURN_FIRST)
        named = row if row in rows else int(rows[0])
        pending = rows[request != done]
        if not pending.size:
            return Progress(turn, named, "")
        # A worker that makes an env again also writes a first turn, of a row that need not be pending.
        if row not in pending and not (first and row in rows):
            row = int(pending[0])  # it has not begun with a pending row
        kind = "reset" if self.arena.op[row] == OP_RESET else "init" if first else "step"
        return Progress(turn, row, kind)

    def batches(self) -> tuple[list[int], list[int]]:
        """Times at which each worker's last batch began and ended, in nanoseconds of the monotonic clock.

        Workers write this down from the first call on; of a batch before it both are 0.
        """
        began, ended = (column[: len(self.slot_bells)] for column in (self.arena.began_ns, self.arena.ended_ns))
        began[began == 0] = CLOCKED
        return [0 if time_ns == CLOCKED else time_ns for time_ns in began.tolist()], ended.tolist()

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last view of it."""
        for descriptor in (*self.slot_bells, self.client_bell, self.descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self.slot_bells, self.client_bell, self.descriptor = [], -1, -1


def new_bell() -> int:
    """An eventfd; the caller owns the descriptor."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
