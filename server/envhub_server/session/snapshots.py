"""The snapshots of a session: which there are, how one is taken, and how rows are restored from one.

A snapshot of some rows is a process for each, which the row's worker has forked between two requests, and which forks
copies of itself. A row is restored by a copy that takes its place, as a spare does. All copies are ready before the
first row changes hands, so a restore that fails leaves everything as it is. A client with rows on several hubs has each
hub prepare its copies, and then each commit: a restore that is prepared is held until then, or for ``call_timeout``.

Where no more processes are to be kept, a snapshot of a row is the process of an earlier one and what its env was asked
since then, which a copy is asked again. The process of a dropped snapshot is kept as long as later ones need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from envhub.errors import shortened
from envhub.protocol.messages import Failure, SnapshotRequest, Table
from envhub_server.ipc import control
from envhub_server.session.launcher import Launcher
from envhub_server.session.replacement import Replacement
from envhub_server.session.requests import refusal
from envhub_server.session.slots import Process, Slot, Stage
from envhub_server.session.supervision import EnvClosing

NBYTES_MAX = 1 << 32  # of memory that a session's snapshots share with no other process
REQUESTS_BYTES_MAX = 1 << 28  # of requests that the hub keeps for a session
DEPTH_MAX = 24  # living snapshots that a snapshot descends from: each makes the next fork dearer
LISTED_MAX = 10_000  # copies of envs in all snapshots of a session
AGE_MAX_S = 7 * 24 * 3600.0
NAME_CHARS_MAX = 64
TEXT_CHARS_MAX = 2048  # of what cannot be copied
REFUSED, LIMIT, LOST = "snapshot_refused", "snapshot_limit", "snapshot_lost"  # codes of failures


@dataclass(eq=False)
class EnvCopy:
    """A snapshot of one row: a process, or the process of an earlier one with requests."""

    name: str
    row: int
    serial: int  # unique in the session
    parent: EnvCopy | None  # the snapshot that the row's worker was forked from, if any
    forks: bool  # True if it is a process of its own
    taken_s: float
    is_answered: bool = False  # whether the row's worker has said that it was taken
    is_born: bool = False
    problem: str = ""  # why it cannot be used, which follows the name of its env
    code: str = LOST  # of a failure by this problem
    steps: int = 0  # of the episode
    episode: int = 0
    ended: bool = False  # whether the episode had ended
    nbytes: int = 0  # of its memory, when it was born, or of its requests
    base: EnvCopy | None = None  # if it is no process of its own
    requests: bytes | None = None
    users: int = 0  # how many others it is the base of
    is_dropped: bool = False

    @property
    def why_lost(self) -> str:
        return self.problem or ("" if self.base is None else self.base.problem)

    @property
    def depth(self) -> int:
        """The number of snapshots whose processes live and that its process descends from, and one."""
        if self.base is not None:
            return self.base.depth
        while self.parent is not None and self.parent.problem:
            self.parent = self.parent.parent
        return 1 if self.parent is None else 1 + self.parent.depth


@dataclass
class Restore:
    """Rows that are about to change hands."""

    name: str
    copies: dict[int, EnvCopy]  # by row, the snapshot that its next process is a copy of
    is_held: bool  # whether the rows keep their processes until the client commits it
    processes: dict[int, Process] = field(default_factory=dict)  # the next ones, by row
    handed_over: bool = False  # whether all were ready; then the rows change hands

    @property
    def is_ready(self) -> bool:
        return not self.handed_over and all(each.stage is Stage.MAPPED for each in self.processes.values())


class Snapshots:
    """The snapshots of one session.

    A request is answered by the table or the failure that a method returns, at once or when something has happened.
    """

    def __init__(self, launcher: Launcher, replacement: Replacement, closing: EnvClosing) -> None:
        self._launcher, self._replacement, self._closing = launcher, replacement, closing
        self._make, self._slots, self._effects = launcher.make, launcher.slots, launcher.effects
        self._taken: dict[str, dict[int, EnvCopy]] = {}  # by name and row, the oldest first
        self._processes: dict[int, EnvCopy] = {}  # those that are processes, by serial number
        self._of_rows: dict[int, EnvCopy] = {}  # the snapshot that a row's worker is a copy of
        self._following: set[int] = set()  # rows whose workers may keep what their envs are asked, for later snapshots
        self._taking = ""  # the name of the snapshot that is being taken
        self.restoring: Restore | None = None
        self._by_s = math.inf  # until when it has to be taken, or the rows restored
        self._count = 0  # of all copies that were taken

    def next_s(self) -> float:
        return min(self._by_s, self._too_old_s)

    @property
    def _too_old_s(self) -> float:
        """The time from which on the oldest snapshot is too old."""
        taken_s = (copy.taken_s for copies in self._taken.values() for copy in copies.values())
        return next(taken_s, math.inf) + AGE_MAX_S

    @property
    def nbytes(self) -> int:
        """The memory that the snapshots share with no other process."""
        return sum(copy.nbytes for copy in self._processes.values())

    def _failure(self, code: str, text: str, row: int | None = None) -> Failure:
        """The failure of a request; of a ``row`` the text follows the name of its env."""
        text = text if row is None else f"env {self._make.row_offset + row} {text}"
        is_env = row is not None and row < self._make.num_envs
        return Failure(code, "request", text, env_index=row if is_env else None)

    def table(self, *names: str) -> Table:
        """The snapshots of these names, or all; what a client learns of each."""
        rows: list[dict[str, Any]] = []
        for name in names or self._taken:
            copies = self._taken[name]
            each = [copies[row] for row in sorted(copies)]
            rows.append(
                {
                    "name": name,
                    "rows": sorted(copies),
                    "steps": [copy.steps for copy in each],
                    "episodes": [copy.episode for copy in each],
                    "ended": [copy.ended for copy in each],
                    "nbytes": sum(copy.nbytes for copy in each),
                    "depth": max(copy.depth for copy in each),
                    "problems": [copy.why_lost for copy in each],
                }
            )
        return Table(rows)

    def drop(self, names: Sequence[str], why: str = "was dropped") -> None:
        for name in names:
            for copy in self._taken.pop(name, {}).values():
                copy.is_dropped = True
                if copy.base is not None:
                    copy.base.users -= 1
                self._release(copy.base or copy, why)

    def _release(self, copy: EnvCopy, why: str) -> None:
        """End the process of a dropped snapshot that no other needs."""
        if copy.is_dropped and not copy.users:
            copy.problem = copy.problem or why
            self._processes.pop(copy.serial, None)
            self._effects.drop_snapshot(copy.serial)
        self._forget_requests()

    def _forget_requests(self) -> None:
        """Have workers keep no requests, if no snapshot is left from which they could be made again."""
        for row in [] if self._processes else sorted(self._following):
            if (worker := self._slots.of_row(row).serving) is not None:
                self._effects.tell(worker.number, control.ForgetRequests())
                self._following.remove(row)

    # --- taking -------------------------------------------------------------------------------------------------------

    def take(self, wanted: SnapshotRequest, now_s: float) -> Failure | None:
        rows = wanted.rows or [*range(self._make.num_envs)]
        if problem := self._problem(wanted.name, rows):
            return problem
        name = wanted.name
        while not name or name in self._taken:
            self._count += 1
            name = f"snapshot-{self._count}"
        self._taking, self._by_s, unsafe = name, now_s + self._make.faults.call_s, self._make.snapshots == "unsafe"
        self._taken[name] = copies = dict[int, EnvCopy]()
        kept, processes_max = [*self._processes], self._launcher.rules.snapshots_max
        self._following.update(rows)
        for row in rows:
            self._count += 1
            copies[row] = copy = EnvCopy(name, row, self._count, self._of_rows.get(row), True, now_s)
            copy.forks = len(self._processes) < processes_max and copy.depth <= DEPTH_MAX and self.nbytes < NBYTES_MAX
            if copy.forks:
                self._processes[copy.serial] = copy
            process = self._slots.of_row(row).process
            assert process is not None
            order = control.TakeSnapshot(name, copy.serial, unsafe, copy.forks, [] if copy.forks else kept)
            self._effects.take_snapshot(process.number, order)
        return None

    def _problem(self, name: str, rows: Sequence[int]) -> Failure | None:
        if not self._make.snapshots:
            return self._failure(REFUSED, "these envs were made without snapshots=True")
        if not self._launcher.rules.snapshots_max:
            return self._failure(REFUSED, "the hub's operator says snapshots_max=0")
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            return refusal(f"the name of a snapshot has at most {NAME_CHARS_MAX} printable characters")
        if name in self._taken:
            return refusal(f"there is a snapshot {name!r} already: drop it first")
        if list(rows) != sorted(set(rows)) or rows[-1] >= self._make.num_envs:
            return refusal(f"the rows of a snapshot must ascend, and be less than {self._make.num_envs}")
        if sum(map(len, self._taken.values())) + len(rows) > LISTED_MAX:
            return self._failure(LIMIT, f"a session keeps snapshots of {LISTED_MAX} envs at most: drop some")
        for row in rows:
            slot = self._slots.of_row(row)
            if len(slot.rows) > 1:
                text = f"shares its process with envs {slot.rows}: make them with a process each"
                return self._failure(REFUSED, text, row)
            if slot.serving is None:
                return self._failure(REFUSED, "is being started again: reset or step it first", row)
        return None

    def on_taken(self, row: int, taken: control.SnapshotTaken) -> Failure | Table | None:
        copy = self._taken.get(self._taking, {}).get(row)
        if copy is None or copy.serial != taken.serial:
            return None
        copy.is_answered, copy.steps, copy.episode, copy.ended = True, taken.steps, taken.episode, taken.ended
        if taken.problems:
            why = shortened("; ".join(taken.problems), TEXT_CHARS_MAX)
            copy.code, copy.problem = REFUSED, f"cannot be copied, because of {why}"
        elif not copy.forks:
            self._derive(copy, self._processes.get(taken.base), taken.requests)
        return self._advance()

    def _derive(self, copy: EnvCopy, base: EnvCopy | None, requests: bytes) -> None:
        copies = (copy for copies in self._taken.values() for copy in copies.values())
        if base is None or sum(len(copy.requests or b"") for copy in copies) > REQUESTS_BYTES_MAX:
            limits = f"snapshots_max={self._launcher.rules.snapshots_max}, {NBYTES_MAX} bytes, {DEPTH_MAX} in a row"
            text = "there is no snapshot of it from which the same actions lead here, or they are too many"
            copy.code, copy.problem = LIMIT, f"gets no more processes ({limits}), and {text}: drop snapshots"
            return
        copy.base, copy.requests, copy.nbytes, copy.is_born = base, requests, len(requests), True
        base.users += 1

    def on_born(self, serial: int, private_bytes: int) -> Failure | Table | None:
        if (copy := self._processes.get(serial)) is None:
            return None
        copy.is_born, copy.nbytes = True, private_bytes
        return self._advance()

    def on_ended(self, serial: int, how: str) -> Failure | Table | None:
        if (copy := self._processes.pop(serial, None)) is None:
            return None
        copy.problem = copy.problem or f"has lost its snapshot, whose process {how}"
        self._forget_requests()
        return self._advance()

    def on_worker_lost(self, row: int) -> Failure | Table | None:
        self._of_rows.pop(row, None)
        copy = self._taken.get(self._taking, {}).get(row)
        if copy is None or copy.is_answered:
            return None
        copy.is_answered, copy.problem = True, "was lost while its snapshot was taken"
        return self._advance()

    def _advance(self) -> Failure | Table | None:
        copies = self._taken.get(self._taking, {}).values()
        if not self._taking or not all(copy.is_answered and (copy.is_born or copy.problem) for copy in copies):
            return None
        name, self._taking, self._by_s = self._taking, "", math.inf
        failed = next((copy for copy in copies if copy.problem), None)
        if failed is None:
            return self.table(name)
        self.drop([name])
        return self._failure(failed.code, failed.problem, failed.row)

    # --- restoring ----------------------------------------------------------------------------------------------------

    def restore(self, wanted: SnapshotRequest, now_s: float) -> Failure | None:
        copies = self._taken.get(wanted.name)
        if copies is None:
            return self._failure(LOST, f"this session has no snapshot {wanted.name!r}: it was dropped")
        rows = wanted.rows or sorted(copies)
        sources = wanted.sources or rows
        if list(rows) != sorted(set(rows)) or rows[-1] >= self._make.num_envs or len(sources) != len(rows):
            return refusal("the rows to restore must ascend, be envs of this session, and have a source each")
        for source in sources:
            if source not in copies:
                text = f"is none of the envs {sorted(copies)} of snapshot {wanted.name!r}"
                return self._failure(REFUSED, text, source)
            if why := copies[source].why_lost:
                return self._failure(LOST, why, source)
        by_row = dict(zip(rows, map(copies.__getitem__, sources), strict=True))
        self.restoring = restore = Restore(wanted.name, by_row, wanted.action == "prepare")
        self._by_s = now_s + self._make.faults.call_s
        for row, copy in restore.copies.items():
            restore.processes[row] = self._start(self._slots.of_row(row), copy, now_s, spare=True)
        return None

    def _start(self, slot: Slot, copy: EnvCopy, now_s: float, spare: bool) -> Process:
        serial = (copy.base or copy).serial
        self._following.add(slot.rows[0])
        return self._launcher.start_restored(slot, serial, copy.name, copy.requests, now_s, spare)

    def restart(self, slot: Slot, now_s: float) -> None:
        """Start the next process of a slot from the newest snapshot of its row, if there is one."""
        if (copy := self._newest(slot.rows[0])) is not None:
            self._of_rows[copy.row] = copy.base or copy
            self._start(slot, copy, now_s, spare=False)

    def _newest(self, row: int) -> EnvCopy | None:
        of_row = (copies[row] for copies in reversed(self._taken.values()) if row in copies)
        return next((copy for copy in of_row if not copy.why_lost), None)

    def on_restart_failed(self, slot: Slot, why: str) -> None:
        """Have the next process of a slot made from an older snapshot than the newest, or without one."""
        if (copy := self._newest(slot.rows[0])) is not None:
            copy.problem = why

    def on_mapped(self, process: Process, now_s: float) -> Failure | Table | None:
        if process.stage is not Stage.MAPPING:  # it is about to be killed
            return None
        process.stage, restore = Stage.MAPPED, self.restoring
        if restore is None or not restore.is_ready:
            return None
        if restore.is_held:
            self._by_s = now_s + self._make.faults.call_s
            return Table([])
        return self._hand_over(restore, now_s)

    def commit(self, wanted: SnapshotRequest, now_s: float) -> Failure | Table | None:
        """Have the rows change hands for which all is prepared."""
        restore = self.restoring
        if restore is None or restore.name != wanted.name or not restore.is_ready:
            text = f"no restore from snapshot {wanted.name!r} is prepared: its processes have ended"
            return self._failure(LOST, text)
        return self._hand_over(restore, now_s)

    def _hand_over(self, restore: Restore, now_s: float) -> Table | None:
        restore.is_held, restore.handed_over, outcome = False, True, None
        slots = [self._slots.of_row(row) for row in restore.processes]
        for slot, successor in zip(slots, restore.processes.values(), strict=True):
            slot.successor = successor
            if slot.serving is not None:
                self._effects.tell(slot.serving.number, control.Leave(restored=True))
        for slot in slots:
            if slot.serving is None:
                outcome = self.on_left(slot, now_s)
        return outcome

    def on_left(self, slot: Slot, now_s: float) -> Table | None:
        """Give the slot to its successor: its former process has left, has ended, or did not serve."""
        former, successor, slot.successor = slot.process, slot.successor, None
        if former is not None and former.stage is Stage.SERVING:
            self._closing.ask(former, now_s)
            self._slots.vacate(slot, former)
        restore, row = self.restoring, slot.rows[0]
        assert successor is not None and restore is not None
        before = self._slots.assign(slot, successor)
        if before is not None:  # it was still to make its env
            before.stage = Stage.LEAVING
            self._effects.kill(before.number)
        self._of_rows[row] = restore.copies[row].base or restore.copies[row]
        slot.loss = None
        self._launcher.restarts.serves(slot.index, now_s)
        self._replacement.hand_over(slot, now_s)
        return self._restored()

    def _restored(self) -> Table | None:
        restore = self.restoring
        if restore is None or any(self._slots.of_row(row).successor is not None for row in restore.processes):
            return None
        self.restoring, self._by_s = None, math.inf
        self._following.update(restore.processes)
        self._forget_requests()  # the last snapshot may have been dropped before these served
        return Table([])

    def on_restored_ended(self, process: Process, how: str) -> Failure | Table | None:
        """Note that a restored process is of no use; unless all were ready, no row is restored."""
        restore = self.restoring
        if restore is None or restore.handed_over:
            slot = self._slots[process.slot_index]
            slot.successor = None if slot.successor is process else slot.successor
            return self._restored()
        row = next((row for row, each in restore.processes.items() if each is process), None)
        return None if row is None else self.give_up(how, row)

    def give_up(self, text: str = "", row: int | None = None) -> Failure:
        """End the processes of a restore, which may be prepared; the failure of its request."""
        restore, self.restoring, self._by_s = self.restoring, None, math.inf
        for each in restore.processes.values() if restore is not None else ():
            if self._slots.process(each.number) is not None:
                each.stage = Stage.LEAVING
                self._effects.kill(each.number)
        return self._failure(LOST, text, row)

    def on_elapsed(self, now_s: float) -> Failure | None:
        """Drop what is too old, and give up what takes too long."""
        if now_s >= self._too_old_s:
            self.drop([next(iter(self._taken))], f"was older than {AGE_MAX_S:g} s")
        if now_s < self._by_s:
            return None
        text = f"was not done within call_timeout={self._make.faults.call_s:g} s"
        if self._taking:
            self.drop([self._taking])
            self._taking, self._by_s = "", math.inf
            return self._failure(LOST, f"the snapshot {text}")
        restore = self.restoring
        assert restore is not None
        if not restore.handed_over:
            return self.give_up(f"the restore {text}")
        self._by_s = math.inf
        for slot in map(self._slots.of_row, restore.processes):
            if slot.successor is not None and slot.process is not None:  # it is to leave, and is stopped or hangs
                self._effects.kill(slot.process.number)
        return None
