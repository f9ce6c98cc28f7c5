"""A session's shared memory: one sealed memfd, mapped by the hub, its workers and on the shared lane its client.

Who may write what, and when:

* The **driver** (the hub, or on the shared lane its client) writes actions, ``op`` and ``request``, and only of rows
  whose ``done == request``; and the one message, while no row is pending. The header word ``driver`` says which of the
  two it is, and ``epoch`` counts the changes; only the hub writes them.
* From the moment a row's ``request`` exceeds its ``done`` until they are equal again, the row's results (one slot
  of its observation, reward, flags, info, ``status``, ``needs_reset``) belong to its **worker**.
* A worker stores its results first and ``done`` last. Each word is one aligned eight-byte store, so no process ever
  reads a torn word. The words are authoritative; a doorbell only wakes.
* A row's observation goes into slot ``request & 1``, and its last complete one is in slot ``done & 1``: a driver
  increases ``request`` by an odd number for a step or a reset, and by ``CALL_INCREMENT``, which is even, for a call.
  No other word holds the slot, because two words cannot be read atomically.
* A worker stores ``begun = request`` before it begins a reset or a call. A call is never repeated if it ends in the
  middle, and neither is a reset whose loss raises.

The arena has no name, so nothing is left behind when a process dies. Its seals keep a peer from truncating it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from typing import Any, Sequence, cast

import numpy as np

from envhub.arena.layout import LARGE_INFOS_BYTES_MAX, MESSAGE_BYTES, SLOTS, STEPS_TIMED, Layout
from envhub.transport.descriptors import check_sealed, new_memory
from envhub.values.actions import OUT_OF_BAND, split_results
from envhub.values.info_columns import Rows

MAGIC = 0x31424E4855424E45
VERSION = 6  # of the layout
HEADER_WORDS = ("magic", "version", "rows", "epoch", "driver", "revoked")
# The values of ``op``. In OP_PART, a step of part of the rows, the worker rings the driver for each row that is done.
# The arena's message has what all but OP_STEP and OP_PART need: the request of the protocol, encoded, and of
# OP_OUT_OF_BAND the actions as they travel.
OP_STEP, OP_RESET, OP_OUT_OF_BAND, OP_PART, OP_CALL, OP_SET_ATTR = range(1, 7)
STEPS, CALLS = (OP_STEP, OP_OUT_OF_BAND, OP_PART), (OP_CALL, OP_SET_ATTR)
# ``request`` counts a row's steps and resets, and in the bits above them its calls.
CALL_INCREMENT = 1 << 44
STATUS_OK, STATUS_RAISED, STATUS_INFO = 0, 1, 2  # INFO: the row has an info; its length is in ``info_length``
DRIVER_HUB, DRIVER_CLIENT = 1, 2
# The word ``progress``: one per worker, in the column of its first row. The hub samples it to find a hanging env.
# If the word has not changed for longer than the env's deadline, the env that it names hangs.
#   bits 0-19   ROW_BITS: the row that the worker runs; meaningless while no row of its is pending and no call runs
#   bit  20     FIRST_CALL: the env is built again, or takes its first step; the hub applies ``init_timeout``
#   bits 21-62  a counter, increased by CALL_ONE before the worker runs a row, so that two calls of one row differ
ROW_BITS, FIRST_CALL, CALL_ONE = (1 << 20) - 1, 1 << 20, 1 << 21
# The word ``since``, where ``progress`` is: when the worker began what it is at, on the monotonic clock in nanoseconds,
# and 0 while it waits. With rows that are pending it is in a step, a reset or a call, else it makes an env again.
LARGE = -1  # in ``info_template``: the info is an encoded map in the row's place for large infos
OBSERVE_TRIES = 10
REVOKED, WINDING_UP = 1, 2  # values of the header word ``revoked``

_WORD = (1 << 64) - 1
_SEEDS = (1 << 63) - 1

_EPOCH, _DRIVER, _REVOKED = (HEADER_WORDS.index(name) for name in ("epoch", "driver", "revoked"))


def allocate(layout: Layout, large_infos_bytes_max: int = LARGE_INFOS_BYTES_MAX) -> int:
    """A sealed memfd for ``layout``, its pages reserved; large infos have addresses only. Raises ``OSError``."""
    try:
        return new_memory("envhub-arena", layout.span(large_infos_bytes_max), layout.nbytes() + layout.rooms_bytes())
    except OSError:
        return new_memory("envhub-arena", layout.nbytes(), layout.nbytes())


class Arena:
    """The mapped memory, with an array for every field of the layout; it stays mapped while one is referenced.

    ``info_template`` is 0 or ``LARGE`` for an encoded map, else the template of the values, which are in the place for
    large infos if they are longer than the other one. ``rooms``: bytes of each row for a large info that have memory.
    Only the hub writes them, and it reads its own copy.
    """

    def __init__(self, layout: Layout, fd: int, in_children: bool = False) -> None:
        """Map the memory, with ``in_children`` also in forked processes; raises ``OSError`` or ``ValueError``."""
        check_sealed(fd)
        self.layout = layout
        try:
            self._memory = mmap.mmap(fd, max(os.fstat(fd).st_size, layout.nbytes()))
        except OSError:  # such as a limit of the process's address space, which is too small for large infos
            self._memory = mmap.mmap(fd, layout.nbytes())
        self._epoch = 0
        if not in_children:
            # A child process of an env must not keep the session's memory alive, nor write to it.
            self._memory.madvise(mmap.MADV_DONTFORK)
        large_infos_at = -(-(layout.nbytes() + layout.rooms_bytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
        if len(self._memory) > large_infos_at:
            # Writing a core file would allocate the memory of all large infos.
            self._memory.madvise(mmap.MADV_DONTDUMP, large_infos_at, len(self._memory) - large_infos_at)
        self._fields = layout.fields()
        self._posts = 0
        self._all_rows = np.arange(layout.rows)
        self._all_rows.flags.writeable = False
        self.header = np.frombuffer(self._memory, np.int64, len(HEADER_WORDS))
        # The ``data`` of a column of words is for single accesses: each is one aligned eight-byte load or store, and
        # faster than an access to the array.
        self._header_words = self.header.data
        self.request, self.done = self._view("request"), self._view("done")
        self.op = self._view("op")
        self.needs_reset, self.status = self._view("needs_reset"), self._view("status")
        self._request_words, self._done_words = self.request.data, self.done.data
        self._op_bytes, self._request_bytes = (column.data.cast("B") for column in (self.op, self.request))
        self.info_length, self.info_template = self._view("info_length"), self._view("info_template")
        self._length_words, self._template_words = self.info_length.data, self.info_template.data
        self.results = self._view("results")
        self.rewards, self.terminations, self.truncations = split_results(self.results, layout.rows)
        self.progress, self.begun, self.seed = self._view("progress"), self._view("begun"), self._view("seed")
        self.since = self._view("since")
        self.step_ns, self.worker_ns, self.env_ns = (self._view(f"{who}_ns") for who in ("step", "worker", "env"))
        self.infos = self._view("infos")
        self._info_bytes, self._status_words = self.infos.reshape(-1).data, self.status.data
        self._message_length, self._message = self._view("message_length").data, self._view("message").data
        self.large_infos, self.large_message, self._shared_rooms = self._large(len(self._memory))
        self._rooms, self.rooms = self._shared_rooms, self._shared_rooms[:-1]
        self.actions = [self._view(f"action/{i}") for i in range(len(layout.actions))]
        self.action_codes = [self._view(f"action_code/{i}") for i in range(len(layout.actions))]
        self.observations = [self._view(f"observation/{i}") for i in range(len(layout.observations))]

    def _view(self, name: str) -> np.ndarray[Any, Any]:
        field = self._fields[name]
        return cast(np.ndarray, np.ndarray(field.shape, field.dtype, self._memory, field.offset))

    def _large(self, nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, at = self.layout.rows, self.layout.nbytes()
        place, message = self.layout.large_bytes(nbytes)
        if nbytes < at + self.layout.rooms_bytes():
            return np.zeros((rows, 0), np.uint8), np.zeros(0, np.uint8), np.zeros(rows + 1, np.int64)
        rooms = np.ndarray(rows + 1, np.int64, self._memory, at)
        at += self.layout.rooms_bytes()
        large_message: np.ndarray = np.ndarray(message, np.uint8, self._memory, at)
        return np.ndarray((rows, place), np.uint8, self._memory, at + message), large_message, rooms

    def large_offset(self, row: int) -> int:
        """Offset of the large info of a row, or of the large message, as of ``room``."""
        at = self.layout.nbytes() + self.layout.rooms_bytes()
        is_message = row == self.layout.rows
        return at if is_message else at + len(self.large_message) + row * int(self.large_infos.shape[1])

    def memory_ref(self) -> weakref.ref[Any]:
        return weakref.ref(self._memory)

    def format(self, epoch: int) -> None:
        self._epoch = epoch
        self._rooms = self._shared_rooms.copy()
        self.rooms = self._rooms[:-1]
        self.header[:] = [MAGIC, VERSION, self.layout.rows, epoch, DRIVER_HUB, 0]

    @property
    def driver(self) -> int:
        return self._header_words[_DRIVER]

    def set_driver(self, driver: int) -> None:
        """Change the driver; only the hub calls this, and only while no row is pending."""
        self._epoch += 1  # the hub's own copy, because a client may have overwritten the word
        self._header_words[_EPOCH] = self._epoch
        self._header_words[_DRIVER] = driver

    def take_over(self) -> bool:
        """Continue after the last driver; return True if the rows' last results are not all in the same slot."""
        calls, steps = self.request // CALL_INCREMENT, self.request % CALL_INCREMENT
        self._posts = int(calls.max()) * CALL_INCREMENT + int(steps.max())
        return bool(((self.request ^ self._posts) & 1).any())

    @property
    def steps(self) -> np.ndarray:
        """Each row's number of steps and resets."""
        steps: np.ndarray = self.done % CALL_INCREMENT
        return steps

    def keep_seed(self, row: int, seed: int) -> None:
        """Keep the last seed that the program gave a row's env, from which follow those of the envs after it."""
        self.seed[row] = seed % _SEEDS + 1  # 0 is none; of a larger one another is kept

    def last_seed(self, row: int) -> int | None:
        word = int(self.seed[row])
        return (word - 1) % _SEEDS if word else None

    def give_room(self, row: int, nbytes: int) -> None:
        """Let the row store large infos of up to this many bytes, which have memory; only the hub calls this."""
        self._rooms[row] = self._shared_rooms[row] = nbytes

    def room(self, row: int) -> int:
        """The bytes of a row for a large info, or those for a large message; ``layout.rows`` stands for the message."""
        size = len(self.large_message) if row == self.layout.rows else self.large_infos.shape[1]
        return min(int(self._rooms[row]), int(size))

    def put_info(self, row: int, *pieces: Any) -> int | None:
        """Store an encoded info in the row; return its ``info_template``, or None if it is too large."""
        nbytes = sum(map(len, pieces))
        if nbytes <= self.layout.info_bytes:
            place, template = self.infos[row].data, 0
        elif nbytes <= self.room(row):
            place, template = self.large_infos[row].data, LARGE
        else:
            return None
        end = 0
        for piece in pieces:
            start, end = end, end + len(piece)
            place[start:end] = piece
        return template

    def put_message(self, message: Any) -> bool:
        """Store the message of a request that is about to be posted; False if it is too large."""
        nbytes = len(message)
        if nbytes > MESSAGE_BYTES and nbytes > self.room(self.layout.rows):
            return False
        (self._message if nbytes <= MESSAGE_BYTES else self.large_message.data)[:nbytes] = message
        self._message_length[0] = nbytes
        return True

    def message(self) -> bytes:
        """A copy of the message of the last request that has one; empty if the words make no sense."""
        nbytes = self._message_length[0]
        if nbytes < 0 or (nbytes > MESSAGE_BYTES and nbytes > self.room(self.layout.rows)):
            return b""
        return bytes((self._message if nbytes <= MESSAGE_BYTES else self.large_message.data)[:nbytes])

    def info(self, row: int) -> memoryview | None:
        """The bytes of the row's info: an encoded map or, with a template, values; None if they are not here."""
        template, nbytes = self._template_words[row], self._length_words[row]
        if template >= 0 and 0 < nbytes <= self.layout.info_bytes:
            start = row * self.layout.info_bytes
            return self._info_bytes[start : start + nbytes]
        if template and self.layout.info_bytes < nbytes <= self.room(row):
            return self.large_infos[row, :nbytes].data
        return None

    def result(self, row: int) -> memoryview | bytes | None:
        """The bytes of the result of a row's call, empty without one; None if it raised, or they are not here."""
        if self._status_words[row] == STATUS_OK:
            return b""
        return None if self._status_words[row] == STATUS_RAISED else self.info(row)

    def last_observations(self, only: int | None = None) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Each row's number of steps, whether its observation was copied between two steps, and the copies by leaf.

        With a row all that is of this row ``only``.
        """
        given = np.zeros(self.layout.rows, bool) if only is None else np.arange(self.layout.rows) != only
        steps = np.zeros(self.layout.rows, np.int64)
        copies = [np.zeros(leaf.shape[1:], leaf.dtype) for leaf in self.observations]
        for _ in range(OBSERVE_TRIES):
            rows = np.flatnonzero(~given)
            if not rows.size:
                break
            done = self.done[rows]
            steps[rows], slots = done % CALL_INCREMENT, done & 1
            for copied, leaf in zip(copies, self.observations):
                copied[rows] = leaf[slots, rows]
            given[rows] = self.done[rows] == done  # while ``done`` is the same, results go to the other slot
        return steps, given, copies

    @property
    def revoked(self) -> bool:
        """True if the client has lost the session, or is to let go of it."""
        return self._header_words[_REVOKED] == REVOKED

    def revoke(self) -> None:
        """Have the client ask the hub whether the session is still its own. Ring the client afterwards."""
        self._header_words[_REVOKED] = REVOKED

    def restore(self) -> None:
        self._header_words[_REVOKED] = 0

    @property
    def client_may_post(self) -> bool:
        words = self._header_words
        return words[_DRIVER] == DRIVER_CLIENT and not words[_REVOKED]

    def wind_up(self) -> None:
        """Tell the client to begin no further step; a step that has begun goes on."""
        self._header_words[_REVOKED] = self._header_words[_REVOKED] or WINDING_UP

    def check(self) -> None:
        words = tuple(int(word) for word in self.header[:3])
        if words != (MAGIC, VERSION, self.layout.rows):
            raise ValueError(f"not an arena of layout {VERSION} with {self.layout.rows} rows: {words}")

    def post(self, op: int) -> None:
        """Hand all rows to their workers; actions are written, and the last results in one slot. Ring afterwards."""
        self._posts = (self._posts + 1) & _WORD  # read from the arena, where it may be negative
        rows, order = self.layout.rows, sys.byteorder
        self._op_bytes[:] = op.to_bytes(8, order) * rows  # a copy of bytes is the fastest
        self._request_bytes[:] = self._posts.to_bytes(8, order) * rows

    def post_rows(self, op: int, rows: np.ndarray, count: int = 1) -> None:
        """Hand only these rows to their workers; their last results may be in different slots. Else as ``post``."""
        self.op[rows] = op
        self.request[rows] += count

    def quiescent(self) -> bool:
        return self._done_words == self._request_words

    def has_infos(self) -> bool:
        return self.status.tobytes().count(0) != self.status.nbytes

    def sent_by_channel(self) -> list[int]:
        """The rows whose workers also sent the hub a message: an env's exception, or a large info."""
        lengths, nbytes = self._length_words.tolist(), self.layout.info_bytes
        if max(lengths) <= nbytes and STATUS_RAISED not in self._status_words.tolist():
            return []  # as it mostly is, which NumPy takes longer to say
        elsewhere = (self.info_template == 0) | (self.info_length > self.rooms)
        large = (self.info_length > nbytes) & elsewhere
        rows: list[int] = np.flatnonzero((self.status == STATUS_RAISED) | large).tolist()
        return rows

    def info_form(self) -> tuple[int, int] | None:
        """Template and length of every row's info if all are in columns of one form, as they usually are; else None."""
        template, length = self._template_words[0], self._length_words[0]
        if template <= 0 or length <= 0:
            return None
        alike = (self.info_template, template), (self.info_length, length), (self.status, STATUS_INFO)
        for column, word in alike:
            if column.tobytes() != word.to_bytes(8, sys.byteorder) * self.layout.rows:
                return None
        return None if self.infos_of(slice(None), length) is None else (template, length)

    def all_infos(self) -> tuple[list[tuple[int, memoryview]], list[Rows]]:
        """Views of the encoded infos by row, and of those in columns, until the next post."""
        if (form := self.info_form()) is None:
            templates = self._template_words.tolist()
            encoded = [row for row, length in enumerate(self._length_words.tolist()) if length and templates[row] <= 0]
            blobs = [(row, blob) for row in encoded if (blob := self.info(row)) is not None]
            return blobs, self.columns(self._all_rows) if max(templates) > 0 else []
        template, nbytes = form
        return [], [Rows(template, self._all_rows, self._infos_of(nbytes)[:, :nbytes])]

    def columns(self, rows: np.ndarray) -> list[Rows]:
        templates, by_template = self.info_template[rows], []
        if not (templates > 0).any():  # such as infos of texts; faster than to sort the rows
            return []
        for template in np.unique(templates).tolist():
            where = rows[templates == template]
            nbytes = int(self.info_length[where[0]])
            if nbytes > self.layout.info_bytes:
                where = where[self.rooms[where] >= nbytes]  # a client that has not mapped the others asks the hub
            if template > 0 and nbytes > 0 and where.size:
                by_template.append(Rows(template, where, self._infos_of(nbytes)[where, :nbytes]))
        return by_template

    def infos_of(self, rows: slice, nbytes: int) -> np.ndarray | None:
        """The array in which these rows have infos of ``nbytes``; None if one has no room for them."""
        infos = self._infos_of(nbytes)
        return infos if infos is self.infos or bool((self.rooms[rows] >= nbytes).all()) else None

    def _infos_of(self, nbytes: int) -> np.ndarray:
        return self.infos if nbytes <= self.layout.info_bytes else self.large_infos

    def close(self) -> None:
        """Drop the arrays; the memory is unmapped when its last view is gone."""
        self.__dict__.clear()


TIMED_EVERY = 61  # a prime number, lest episodes of one length have all or none of their resets timed
TIMED_ALWAYS_NS = 5_000_000  # steps that take as long are all timed


class StepTimes:
    """Times of some steps of one process, in the arena: of the last ones, in no order.

    A process times its step number ``next_step``, or a later one.
    """

    def __init__(self, words: Any) -> None:
        self._words = words
        self.kept = self.next_step = 0

    def keep(self, step: int, took_ns: int) -> None:
        self._words[self.kept % STEPS_TIMED] = took_ns
        self.kept += 1
        self.next_step = step + (1 if took_ns >= TIMED_ALWAYS_NS else TIMED_EVERY)


# Values of ``needs_reset``:
#   ONGOING         the row's episode goes on
#   ENDED           its episode has ended
#   FRESH           its env is new, and in every autoreset mode its first step is a reset
#   REPORT_PENDING  its env is new, and the client has not seen the former env's failure yet
ONGOING, ENDED, FRESH, REPORT_PENDING = 0, 1, 2, 3


def repeat_observation(arena: Arena, row: int) -> None:
    """Copy the last complete observation, which is in the other slot, to the slot of the request."""
    slot = int(arena.request[row]) & 1
    for leaf in arena.observations:
        leaf[slot, row] = leaf[1 - slot, row]


def truncate(arena: Arena, row: int, info_bytes: int, template: int = 0) -> None:
    """End the row's episode without a step of its env; its info, of ``info_bytes``, must be stored already."""
    mark_no_step(arena, row, info_bytes, template)
    arena.rewards[row] = 0.0
    arena.terminations[row] = False
    arena.truncations[row] = True
    arena.needs_reset[row] = FRESH


def mark_no_step(arena: Arena, row: int, info_bytes: int = 0, template: int = 0) -> None:
    """Mark that the row did not step: its episode goes on. Its info, of ``info_bytes``, must be stored already."""
    repeat_observation(arena, row)
    arena.info_template[row] = template
    arena.info_length[row] = info_bytes
    arena.status[row] = STATUS_INFO if info_bytes else STATUS_OK


class ArenaDriver:
    """Drives an arena, in the hub or on the shared lane in its client.

    Where all rows step together the batch is a view of one slot. After partial batches rows may be in different slots.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rows = np.arange(arena.layout.rows)
        self._done = arena.done.data
        self._views = [[leaf[slot] for leaf in arena.observations] for slot in range(SLOTS)]
        self._knows_slots = False  # whether ``mixed`` is up to date with the arena's words
        self.mixed = False  # whether the rows' last results are not all in the same slot
        self._codes = b""  # the codes of the actions in the arena; empty if unknown
        self._buffers: list[np.ndarray] = []  # buffers of the leaves that have an array by these codes
        self.sent = bytearray(arena.layout.rows)  # 1 if ``post_rows`` posted the row and its result was not taken
        self._sent = np.frombuffer(self.sent, np.bool_)
        self._item_sizes: list[int] = []  # item sizes of the actions of the sent rows

    def forget(self) -> None:
        """Have the next post read the arena's words, because another driver may have written them."""
        self._codes, self._knows_slots = b"", False

    def take_over(self) -> None:
        self.forget()
        self._sent[:] = False

    def post_call(self, op: int, rows: Sequence[int]) -> list[int]:
        """Hand these rows, or all if there are none, to their workers for a call; its message is stored. Ring then."""
        self._knows_slots = False
        self._arena.post_rows(op, np.array(rows) if rows else self._rows, CALL_INCREMENT)
        return [*(rows or range(len(self._rows)))]

    def post(self, op: int, codes: bytes = b"", actions: Sequence[Any] = ()) -> None:
        """Hand all rows, of which none is pending, to their workers, with an array or bytes per leaf. Ring then."""
        arena = self._arena
        if codes and codes != self._codes:
            self._codes = b""  # until all actions are written: an interrupt may come in between
            for column, code in zip(arena.action_codes, codes):
                column[:] = code
            self._buffers = [buffer for buffer, code in zip(arena.actions, codes) if code != OUT_OF_BAND]
            self._codes = codes
        for buffer, batch in zip(self._buffers, actions):
            batch_bytes = np.frombuffer(batch, np.uint8)
            buffer[: batch_bytes.size] = batch_bytes
        if not self._knows_slots:
            self.mixed = arena.take_over()
        self._knows_slots = False  # until all words are written
        if self.mixed:
            arena.post_rows(op, self._rows)
        else:
            arena.post(op)
        self._knows_slots = True

    def observations(self) -> list[np.ndarray]:
        """The last observations by leaf: views until the next post but one, or copies if the slots are ``mixed``."""
        if self.mixed:
            slots = self._arena.done & 1
            return [leaf[slots, self._rows] for leaf in self._arena.observations]
        return self._views[self._done[0] & 1]

    def post_rows(self, rows: np.ndarray, codes: bytes, actions: Sequence[np.ndarray]) -> None:
        """Hand these rows to their workers with an array of actions per leaf; raises ``ValueError``."""
        arena = self._arena
        under_way = self._sent | (arena.done != arena.request)
        if under_way[rows].any():
            raise ValueError(f"envs {rows[under_way[rows]].tolist()} are under way; receive them first")
        item_sizes = [batch.dtype.itemsize for batch in actions]
        if self._sent.any() and item_sizes != self._item_sizes:  # the offset of an action depends on its size
            raise ValueError("other envs are under way with actions of a dtype of another size; receive them first")
        self.forget()
        for buffer, batch in zip(arena.actions, actions):
            room = buffer[: batch[:1].nbytes * arena.layout.rows].view(batch.dtype)
            room.reshape(arena.layout.rows, *batch.shape[1:])[rows] = batch
        for column, code in zip(arena.action_codes, codes):
            column[rows] = code
        self._item_sizes = item_sizes
        arena.post_rows(OP_PART, rows)
        self.mark_sent(rows)  # last, so that after an interrupt old results do not count as new ones

    def mark_sent(self, rows: np.ndarray) -> None:
        self._sent[rows] = True

    def done(self) -> int:
        return int((self._arena.done == self._arena.request)[self._sent].sum())

    def ready(self) -> tuple[np.ndarray, int | None]:
        """The sent rows that are done, and None; or no rows, and the first that raised. Reported until ``taken``."""
        arena = self._arena
        rows = np.flatnonzero(self._sent & (arena.done == arena.request))
        raised = rows[arena.status[rows] == STATUS_RAISED]
        return (rows[:0], int(raised[0])) if raised.size else (rows, None)

    def taken(self, rows: Any) -> None:
        self._sent[rows] = False

    def results(self, rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        arena, slots = self._arena, self._arena.done[rows] & 1
        observations = [leaf[slots, rows] for leaf in arena.observations]
        return observations, arena.rewards[rows], arena.terminations[rows], arena.truncations[rows]

    def infos(self, rows: np.ndarray) -> tuple[dict[int, bytes], list[int]]:
        """The encoded infos of these rows, and the rows whose infos are too large for the arena."""
        arena = self._arena
        encoded = rows[arena.info_template[rows] <= 0].tolist()
        small = {row: bytes(blob) for row in encoded if (blob := arena.info(row)) is not None}
        return small, sorted({*rows.tolist()}.intersection(arena.sent_by_channel()))
