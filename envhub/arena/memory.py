"""A session's shared memory: one sealed memfd, mapped by the hub, its workers and on the shared lane its client.

Who may write what, and when:

* The **driver** (the hub, or on the shared lane its client) writes actions, ``op`` and ``request``, and only of rows
  whose ``done == request``. The header word ``driver`` says which of the two it is, and ``epoch`` counts the changes;
  only the hub writes them.
* From the moment a row's ``request`` runs ahead of its ``done`` until they are equal again, the row's results (one slot
  of its observation, reward, flags, info, ``status``, ``needs_reset``) belong to its **worker**.
* A worker stores its results first and ``done`` last. Each word is one aligned eight-byte store, so no process ever
  reads half of one. The words are authoritative; a doorbell only wakes.
* A row's observation goes into slot ``request & 1``, and its last complete one is in slot ``done & 1``: a driver
  increases ``request`` by an odd number. No other word says it, because two words cannot be read at one time.

The arena has no name, so nothing is left behind whichever process dies; its seals keep a peer from truncating it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from typing import Any, cast

import numpy as np

from envhub.arena.layout import HEADER_WORDS, LARGE_INFOS_BYTES_MAX, MAGIC, VERSION, Layout, split_results
from envhub.sealing import check_sealed, new_memory
from envhub.values.info_columns import Rows

# What a row is to do. A message on the worker's channel brings the arguments of a reset, and the actions of a step that
# travel out of band. Of OP_PART, a step of some rows, the driver is rung for each row that is done.
OP_STEP, OP_RESET, OP_OUT_OF_BAND, OP_PART = 1, 2, 3, 4
STATUS_OK, STATUS_RAISED, STATUS_INFO = 0, 1, 2  # INFO: the row left one, whose length is in ``info_length``
DRIVER_HUB, DRIVER_CLIENT = 1, 2
# The progress word ``turn``: one per worker, in the column of its first row. The hub samples it to find a hanging env.
# If the word has not changed for longer than the env's deadline, the env that it names has not returned.
#   bits 0-19   TURN_ROW: the row that the worker is at; meaningless while none of its rows is pending and no call runs
#   bit  20     TURN_FIRST: the env is built again, or takes its first step; the hub applies ``init_timeout``
#   bits 21-62  a counter, increased by TURN_ONE before the worker turns to a row, so that two turns of one row differ
TURN_ROW, TURN_FIRST, TURN_ONE = (1 << 20) - 1, 1 << 20, 1 << 21
LARGE = -1  # in ``info_template``: the info is an encoded map in the row's place for a large one
CLOCKED = 1  # in ``began_ns``: the worker is to write down when its batches begin and end
OBSERVE_TRIES = 10
REVOKED, WINDING_UP = 1, 2  # of the header word ``revoked``

_WORD = (1 << 64) - 1

_EPOCH, _DRIVER, _REVOKED = (HEADER_WORDS.index(name) for name in ("epoch", "driver", "revoked"))


def allocate(layout: Layout, large_infos_bytes_max: int = LARGE_INFOS_BYTES_MAX) -> int:
    """A sealed memfd large enough for ``layout``, its pages reserved; the caller owns the descriptor.

    The places of large infos, of at most ``large_infos_bytes_max`` together, are addresses only, until the hub gives a
    row memory there. There are none where the process may have no file of that size.

    Raises:
        OSError: the memory cannot be had (ENOSPC, ENOMEM); nothing is left behind.
    """
    try:
        return new_memory("envhub-arena", layout.span(large_infos_bytes_max), layout.nbytes() + layout.rooms_bytes())
    except OSError:
        return new_memory("envhub-arena", layout.nbytes(), layout.nbytes())


def _mapped(layout: Layout, fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, max(os.fstat(fd).st_size, layout.nbytes()))
    except OSError:  # such as a limit of the process's addresses, which are too few for large infos
        return mmap.mmap(fd, layout.nbytes())


class Arena:
    """The mapped memory, every field of it an array.

    The arrays are views: the memory stays mapped as long as one of them is referred to.

    Attributes:
        request, done, op, needs_reset, status, info_length: int64 words, one per row.
        info_template: one per row; 0 and ``LARGE`` say that the info is an encoded map, else it is the values of one.
        began_ns, ended_ns: one per row; in a worker's first row, when its last batch began and ended. A worker writes
            both where it finds ``began_ns`` not 0: the hub stores ``CLOCKED`` there once they are asked for.
        turn: one per row; in a worker's first row, its progress word (see ``TURN_ROW``).
        rewards, terminations, truncations: one per row; ``results`` is the bytes of all three, as they travel.
        infos: uint8, ``(rows, info_bytes)``.
        large_infos: uint8, one place per row, of no bytes where this process has no large infos.
        rooms: int64, one per row: how many bytes of its place for a large info have memory. Only the hub writes them,
            and it reads a copy of its own.
        actions: one uint8 array per action leaf; ``action_codes``, per leaf, how to read each row of it.
        observations: per leaf, ``(2, rows, *shape)``.
    """

    def __init__(self, layout: Layout, fd: int, in_children: bool = False) -> None:
        """Map it; with ``in_children`` it stays mapped in processes that this one forks.

        Raises:
            OSError: this is no memfd.
            ValueError: it is too small, or whoever gave it could make it smaller: reading what is gone is SIGBUS.
        """
        check_sealed(fd)
        self.layout = layout
        self._memory = _mapped(layout, fd)
        self._epoch = 0
        if hasattr(mmap, "MADV_DONTFORK") and not in_children:
            # A child that an env forks must not keep the session's memory alive, nor write to it.
            self._memory.madvise(mmap.MADV_DONTFORK)
        places = -(-(layout.nbytes() + layout.rooms_bytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTDUMP") and len(self._memory) > places:
            # Writing a core file would give all places of large infos their memory.
            self._memory.madvise(mmap.MADV_DONTDUMP, places, len(self._memory) - places)
        self._fields = layout.fields()
        self._posts = 0
        self._all_rows = np.arange(layout.rows)
        self._all_rows.flags.writeable = False
        self.header = np.frombuffer(self._memory, np.int64, len(HEADER_WORDS))
        # The ``data`` of a column of words is for single accesses: each is one aligned eight-byte load or store, and
        # quicker than one of an array.
        self._header_words = self.header.data
        self.request, self.done = self._view("request"), self._view("done")
        self.op = self._view("op")
        self.needs_reset, self.status = self._view("needs_reset"), self._view("status")
        self._request_words, self._done_words = self.request.data, self.done.data
        self._op_bytes, self._request_bytes = (column.data.cast("B") for column in (self.op, self.request))
        self.info_length, self.info_template = self._view("info_length"), self._view("info_template")
        self._length_words, self._template_words = self.info_length.data, self.info_template.data
        self.began_ns, self.ended_ns = self._view("began_ns"), self._view("ended_ns")
        self.results = self._view("results")
        self.rewards, self.terminations, self.truncations = split_results(self.results, layout.rows)
        self.turn, self.infos = self._view("turn"), self._view("infos")
        self.large_infos, self._shared_rooms = self._large(len(self._memory))
        self.rooms = self._shared_rooms
        self.actions = [self._view(f"action/{i}") for i in range(len(layout.actions))]
        self.action_codes = [self._view(f"action_code/{i}") for i in range(len(layout.actions))]
        self.observations = [self._view(f"observation/{i}") for i in range(len(layout.observations))]

    def _view(self, name: str) -> np.ndarray[Any, Any]:
        field = self._fields[name]
        return cast(np.ndarray, np.ndarray(field.shape, field.dtype, self._memory, field.offset))

    def _large(self, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of large infos, and their rooms, in memory of ``nbytes``."""
        rows, at, place = self.layout.rows, self.layout.nbytes(), self.layout.large_info_bytes(nbytes)
        if not place:
            return np.zeros((rows, 0), np.uint8), np.zeros(rows, np.int64)
        places = np.ndarray((rows, place), np.uint8, self._memory, at + self.layout.rooms_bytes())
        return places, np.ndarray(rows, np.int64, self._memory, at)

    def large_info_offset(self, row: int) -> int:
        """Offset in the memory of the row's place for a large info."""
        return self.layout.nbytes() + self.layout.rooms_bytes() + row * int(self.large_infos.shape[1])

    def memory_ref(self) -> weakref.ref[Any]:
        """Refers to the mapped memory as long as there is a view of it."""
        return weakref.ref(self._memory)

    def format(self, epoch: int) -> None:
        """Write the header of a fresh arena, driven by the hub."""
        self._epoch = epoch
        self.rooms = self._shared_rooms.copy()
        self.header[:] = [MAGIC, VERSION, self.layout.rows, epoch, DRIVER_HUB, 0]

    @property
    def driver(self) -> int:
        """The process that drives, ``DRIVER_HUB`` or ``DRIVER_CLIENT``."""
        return self._header_words[_DRIVER]

    def hand_over(self, driver: int) -> None:
        """Change the driver; only the hub does, and only while no row is with a worker."""
        self._epoch += 1  # its own copy, for a client may have written over the word
        self._header_words[_EPOCH] = self._epoch
        self._header_words[_DRIVER] = driver

    def take_over(self) -> bool:
        """Go on where the last driver was; returns whether the rows' last results are not all in the same slot."""
        self._posts = int(self.request.max())
        return bool(((self.request ^ self._posts) & 1).any())

    def move_from(self, other: Arena) -> None:
        """Take the place of another arena of the same layout, which no worker serves any more.

        Rows that are pending there are pending here: their workers step them once they serve. Large infos are taken
        along where this arena has room for them.
        """
        nbytes = self.layout.nbytes()
        self._memory[:nbytes] = memoryview(other._memory)[:nbytes]
        for row in np.flatnonzero(other.info_template == LARGE).tolist():
            blob = other.info(row)
            if blob is None or self.put_info(row, bytes(blob)) is None:
                self.info_template[row] = self.info_length[row] = 0
        rooms = self.rooms
        self.format(other._epoch + 1)
        self.rooms = rooms

    def give_room(self, row: int, nbytes: int) -> None:
        """Let the row store large infos of up to so many bytes, for which there is memory; only the hub does."""
        self.rooms[row] = self._shared_rooms[row] = nbytes

    def put_info(self, row: int, blob: bytes) -> int | None:
        """Store an encoded info in the row; returns its ``info_template``, or None where it is too large."""
        nbytes = len(blob)
        if nbytes <= self.layout.info_bytes:
            self.infos[row, :nbytes] = np.frombuffer(blob, np.uint8)
            return 0
        if nbytes > min(int(self.rooms[row]), self.large_infos.shape[1]):
            return None
        self.large_infos[row, :nbytes] = np.frombuffer(blob, np.uint8)
        return LARGE

    def info(self, row: int) -> memoryview | None:
        """The row's encoded info, where it is in the arena."""
        template, nbytes = self._template_words[row], self._length_words[row]
        if template == 0 and 0 < nbytes <= self.layout.info_bytes:
            return self.infos[row, :nbytes].data
        if template == LARGE and 0 < nbytes <= min(int(self.rooms[row]), self.large_infos.shape[1]):
            return self.large_infos[row, :nbytes].data
        return None

    def last_observations(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Each row's last observation, whichever process drives: its number of steps, whether it is given, and copies.

        A row is not given if its worker has stepped during every attempt to copy it.
        """
        given = np.zeros(self.layout.rows, bool)
        steps = np.zeros(self.layout.rows, np.int64)
        found = [np.zeros(leaf.shape[1:], leaf.dtype) for leaf in self.observations]
        for _ in range(OBSERVE_TRIES):
            rows = np.flatnonzero(~given)
            if not rows.size:
                break
            steps[rows] = done = self.done[rows]
            slots = done & 1
            for copied, leaf in zip(found, self.observations):
                if rows.size == given.size and (slots == slots[0]).all():
                    copied[:] = leaf[slots[0]]  # without another copy in between
                else:
                    copied[rows] = leaf[slots, rows]
            given[rows] = self.done[rows] == done  # until it changes, results go to the other slot
        return steps, given, found

    @property
    def revoked(self) -> bool:
        """True if the session no longer is its client's."""
        return self._header_words[_REVOKED] == REVOKED

    def revoke(self) -> None:
        """Tell the client, which no longer has the session, to ask the hub why. Ring the client afterwards."""
        self._header_words[_REVOKED] = REVOKED

    @property
    def client_may_post(self) -> bool:
        """True if the client drives and may begin another step."""
        words = self._header_words
        return words[_DRIVER] == DRIVER_CLIENT and not words[_REVOKED]

    def wind_up(self) -> None:
        """Tell the client to begin no other step; a step that has begun goes on."""
        self._header_words[_REVOKED] = self._header_words[_REVOKED] or WINDING_UP

    def check(self) -> None:
        """Refuse memory that is not an arena of this layout.

        Raises:
            ValueError: the header says otherwise.
        """
        found = tuple(int(word) for word in self.header[:3])
        if found != (MAGIC, VERSION, self.layout.rows):
            raise ValueError(f"not an arena of layout {VERSION} with {self.layout.rows} rows: {found}")

    def post(self, op: int) -> None:
        """Hand all rows to their workers; actions must be written already. Ring afterwards.

        The rows' last results must all be in one slot.
        """
        self._posts = (self._posts + 1) & _WORD  # it comes from the arena, where it may be negative
        rows, order = self.layout.rows, sys.byteorder
        self._op_bytes[:] = op.to_bytes(8, order) * rows  # as bytes it is quickest
        self._request_bytes[:] = self._posts.to_bytes(8, order) * rows

    def post_rows(self, op: int, rows: np.ndarray) -> None:
        """Hand only these rows to their workers, whatever slots their last results are in; otherwise as ``post``."""
        self.op[rows] = op
        self.request[rows] += 1

    def quiescent(self) -> bool:
        """True if no row is with a worker."""
        return self._done_words == self._request_words

    def noted(self) -> bool:
        """True if a row has another status than ``STATUS_OK``."""
        return self.status.tobytes().count(0) != self.status.nbytes

    def said_by_channel(self) -> np.ndarray:
        """Mask of the rows that have sent the hub more than is in the arena: an env's exception, or a large info."""
        large = self.info_length > self.layout.info_bytes
        if large.any():
            large &= (self.info_template != LARGE) | (self.info_length > self.rooms)
        mask: np.ndarray = (self.status == STATUS_RAISED) | large
        return mask

    def info_form(self) -> tuple[int, int] | None:
        """Template and length of every row's info, where all are in columns of one form, as mostly; else None."""
        template, length = self._template_words[0], self._length_words[0]
        if template <= 0 or not 0 < length <= self.layout.info_bytes:
            return None
        alike = (self.info_template, template), (self.info_length, length), (self.status, STATUS_INFO)
        for column, word in alike:
            if column.tobytes() != word.to_bytes(8, sys.byteorder) * self.layout.rows:
                return None
        return template, length

    def all_infos(self) -> tuple[list[tuple[int, memoryview]], list[Rows]]:
        """The infos of all rows that are in the arena: the encoded ones by row, and copies of those in columns."""
        if (form := self.info_form()) is None:
            return self._small_infos(), self.columns(self._all_rows)
        template, nbytes = form
        return [], [Rows(template, self._all_rows, self.infos[:, :nbytes].copy())]

    def _small_infos(self) -> list[tuple[int, memoryview]]:
        filled = ((self.info_length != 0) & (self.info_template <= 0)).nonzero()[0].tolist()
        return [(row, blob) for row in filled if (blob := self.info(row)) is not None]

    def columns(self, rows: np.ndarray) -> list[Rows]:
        """Copies of the infos in columns of these rows."""
        templates, found = self.info_template[rows], []
        if not (templates > 0).any():  # as where infos are texts, and quicker than to sort them
            return []
        for template in np.unique(templates).tolist():
            where = rows[templates == template]
            nbytes = min(max(int(self.info_length[where[0]]), 0), self.layout.info_bytes)
            if template > 0 and nbytes:
                found.append(Rows(template, where, self.infos[where, :nbytes]))
        return found

    def close(self) -> None:
        """Let go of the memory; it is unmapped when the last view of it is gone."""
        self.__dict__.clear()
