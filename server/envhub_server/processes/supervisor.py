"""The processes of a hub: a zygote started by exec, the workers that it forks, and the orphans that envs leave behind.

A pidfd reports the exit of each worker, and a worker is ended with its process group. A process that left the group
becomes an orphan of the hub, which is a subreaper, and is ended with its worker (``OrphanReaper``). If the hub is
killed, the kernel ends the workers, and the zygote ends all other processes. All of this runs in the hub's main thread:
the kernel ends a worker when the thread ends that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from envhub.arena.spin import RING
from envhub.values.codec import KNOWN
from envhub_server.ipc import control, process_marks
from envhub_server.ipc.channel import MESSAGE_BYTES_MAX, WORKER_LIMITS, WORKER_MESSAGE_BYTES_MAX
from envhub_server.ipc.process_marks import NO_WORKER
from envhub_server.log import Logger, writes_json
from envhub_server.loop import Loop
from envhub_server.processes.interpreter import OWN, Environment, InterpreterKey, InterpreterUnusable, ZygoteProcess
from envhub_server.processes.worker_handle import (
    Events,
    MemoryKills,
    SessionZygote,
    SnapshotProcess,
    WorkerHandle,
    own_counters,
)
from envhub_server.processes.worker_output import OutputStream
from envhub_server.processes.zygote_handle import ZygoteHandle

REMEMBERED_S = 10.0  # for an ended worker: its grandchildren become the hub's children only when their parents end
CLOSE_TIMEOUT_S = 1.0
CLOSE_POLL_S = 0.002


class OrphanReaper:
    """Finds, ends and reaps the children of this process that it did not start."""

    def __init__(self, hub: str) -> None:
        """Reap orphans with this hub's mark; the children that exist now are no orphans and are left alone."""
        self._hub = hub
        self._foreign = frozenset(process_marks.children(os.getpid()))
        self.spared: set[int] = set()  # until their owners have reaped them, for another may have the number then
        self._adopted: dict[int, int] = {}  # by pid of an orphan, the pid of its worker, or NO_WORKER
        self._ended: dict[int, float] = {}  # by pid of an ended worker, until when it is remembered

    def worker_ended(self, pid: int) -> None:
        self._ended[pid] = time.monotonic() + REMEMBERED_S

    def sweep(self, others: Collection[int], workers: Collection[int], births: bool) -> None:
        """Reap orphans that have exited, and end orphans whose worker has ended; ``others`` are reaped elsewhere."""
        # With ``births`` there may be workers whose pid the hub does not know yet: then nothing is reaped, and only
        # orphans of workers that ended lately are ended.
        now_s = time.monotonic()
        self._ended = {pid: until for pid, until in self._ended.items() if until > now_s and pid not in workers}
        before, self._adopted = self._adopted, {}
        for pid in process_marks.children(os.getpid()):
            if pid in others or pid in self.spared:
                continue
            if not births and _reaped(pid):  # a new worker must not be reaped here
                continue
            worker = before[pid] if pid in before else process_marks.worker_of(pid, self._hub) or NO_WORKER
            self._adopted[pid] = worker
            # A new worker may have orphans before the hub knows its pid.
            if worker in self._ended or not (births or worker in workers or worker in (NO_WORKER, pid)):
                process_marks.kill_tree(pid)

    def orphans_by_worker(self, others: Collection[int]) -> Mapping[int, Sequence[int]]:
        orphans: dict[int, list[int]] = {}
        for pid in process_marks.listed_children(os.getpid()) or ():
            if pid in others:
                continue
            worker = self._adopted.get(pid) or process_marks.worker_of(pid, self._hub) or NO_WORKER
            if worker not in (NO_WORKER, pid):  # any other pid is about to be a worker, or to execute a program
                self._adopted[pid] = worker
                orphans.setdefault(worker, []).append(pid)
        return orphans

    def end_all(self) -> None:
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            orphans = [pid for pid in process_marks.children(os.getpid()) if pid not in self._foreign | self.spared]
            for pid in orphans:
                process_marks.kill_tree(pid)
                _reaped(pid)
            if not orphans:
                return
            time.sleep(CLOSE_POLL_S)


def _reaped(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    return True


PR_SET_CHILD_SUBREAPER = 36
ZYGOTES_MAX = 3  # started in place of ended ones within ZYGOTES_WINDOW_S
ZYGOTES_WINDOW_S = 60.0
KEPT_MAX = 4  # zygotes of sessions; the one used longest ago ends for another
FILES_MAX = 256  # of the code of its envs, which are looked at for every new session

log = Logger("envhub.supervisor")


class KeptZygotes:
    """Zygotes of sessions, by a key, for later sessions of a private hub whose first workers would import the same."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[SessionZygote, dict[str, object]]] = {}  # the one used last is the last

    def find(self, key: str) -> SessionZygote | None:
        """The zygote of this key; None if there is none, or a file that it has imported has changed since."""
        zygote, stamps = self._kept.pop(key, (None, {}))
        if zygote is None or zygote.ended:
            return None
        if _stamps(stamps) != stamps:
            zygote.kill()
            return None
        self._kept[key] = zygote, stamps
        return zygote

    def keep(self, key: str, zygote: SessionZygote, files: Collection[str]) -> None:
        if key not in self._kept and len(files) <= FILES_MAX:
            self._kept[key] = zygote, _stamps(files)
            if len(self._kept) > KEPT_MAX:
                self._kept.pop(next(iter(self._kept)))[0].kill()

    def release(self, zygote: SessionZygote) -> None:
        """End the zygote of a session that has ended, unless it is kept."""
        if all(kept is not zygote for kept, _ in self._kept.values()):
            zygote.kill()


def _stamps(files: Collection[str]) -> dict[str, object]:
    stamps = dict[str, object]()
    for file in files:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            stamps[file] = status.st_mtime_ns, status.st_size
    return stamps


class Supervisor:
    """Starts the zygotes and the workers, and ends all processes that they leave behind."""

    def __init__(
        self,
        loop: Loop,
        events: Events,
        environ: Environment,
        private: bool = False,
        zygote: ZygoteProcess | None = None,
    ) -> None:
        """Make this process the subreaper of its descendants; workers have this environment."""
        # A ``zygote`` runs already, under this interpreter and in this environment, and forks the first workers.
        # A worker that sends a larger message is ended.
        self.message_bytes_max = MESSAGE_BYTES_MAX if private else WORKER_MESSAGE_BYTES_MAX
        self.message_limits = KNOWN if private else WORKER_LIMITS
        self._private = private  # whether the envs are those of its own program
        self.events = events
        self._environ = environ
        # The hub's name in the marks of its processes.
        self.hub = process_marks.new_hub() if zygote is None else zygote.hub
        self.orphan_reaper = OrphanReaper(self.hub)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.loop = loop
        as_events = writes_json() and not private  # what envs print there is the program's own output
        self.streams = OutputStream(loop, 1, as_events), OutputStream(loop, 2, as_events)
        self.memory_kills = MemoryKills(own_counters())  # tells whether the kernel killed a worker for lack of memory
        self._in_use: dict[InterpreterKey, ZygoteHandle] = {}
        self._retired: list[ZygoteHandle] = []  # about to end
        self.zygotes = KeptZygotes()
        self._replaced_s: deque[float] = deque(maxlen=ZYGOTES_MAX)  # when a zygote was started in place of an ended one
        self._workers: set[WorkerHandle] = set()
        self._unswept: list[int] = []  # pids of workers that ended since the last sweep
        self._sweep_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.poller.register(self._sweep_bell, self.on_ready)
        if zygote is not None:
            self._in_use[zygote.key] = ZygoteHandle(self, zygote)

    def start(
        self,
        session: int,
        numbers: Sequence[int],
        key: InterpreterKey = OWN,
        environ: Environment | None = None,
        zygote: SessionZygote | None = None,
    ) -> list[WorkerHandle]:
        # ``environ`` is that of the session's program, if it has one. The session may have a ``zygote`` of its own.
        self.memory_kills.forget()
        workers: list[WorkerHandle] = []
        try:
            for number in numbers:
                workers.append(WorkerHandle(self, session, number))
            if zygote is not None and not zygote.ended:
                zygote.fork(workers)
            else:
                self._zygote(key, self._environ if environ is None else environ).fork(workers)
        except InterpreterUnusable as error:
            for worker in workers:
                worker.never_born("its interpreter does not start", str(error))
            return workers
        except OSError:
            for worker in workers:
                worker.discard()
            raise
        self._workers.update(workers)
        return workers

    def session_zygote(self, key: str, files: Collection[str]) -> SessionZygote:
        """The zygote that a worker is about to fork; it is kept by this key, if it has one."""
        zygote = SessionZygote(self)
        self._workers.add(zygote)
        if key:
            self.zygotes.keep(key, zygote, files)
        return zygote

    def snapshot(self, session: int, number: int) -> SnapshotProcess:
        """The process that a worker is about to fork; its events have this number, which is below zero."""
        snapshot = SnapshotProcess(self, session, number)
        self._workers.add(snapshot)
        return snapshot

    def starting(self, key: InterpreterKey) -> str:
        return self._in_use[key].starting if key in self._in_use else ""

    def _zygotes(self) -> list[ZygoteHandle]:
        return [*self._in_use.values(), *self._retired]

    def _zygote(self, key: InterpreterKey, environ: Environment) -> ZygoteHandle:
        """The zygote with this start environment, which a fork cannot change: so another environment needs another."""
        current = self._in_use.get(key)
        if current is not None and current.serves(environ):
            return current
        guarded = self._pids()
        zygote = ZygoteHandle(self, ZygoteProcess(self.hub, key, environ, len(guarded), self._private), guarded)
        if current is not None:
            self._retired.append(current)
            current.retire()
        self._in_use[key] = zygote
        return zygote

    def on_ready(self, descriptor: int) -> None:
        if descriptor == self._sweep_bell:
            self._sweep()
            return
        zygote = next(zygote for zygote in self._zygotes() if zygote.pidfd == descriptor)
        in_use = self._in_use.get(zygote.key) is zygote
        if in_use:
            del self._in_use[zygote.key]
        else:
            self._retired.remove(zygote)
        waiting = zygote.reap()
        self.reap_orphans()
        for worker in waiting:
            worker.never_born("its interpreter does not start", zygote.problem)
        if in_use and not zygote.problem and self._pids():
            self._replace(zygote)

    def _replace(self, zygote: ZygoteHandle) -> None:
        now_s = time.monotonic()
        if len(self._replaced_s) == ZYGOTES_MAX and now_s < self._replaced_s[0] + ZYGOTES_WINDOW_S:
            # Event: The process that forks workers has ended, and no other is started now.
            log.error("zygote_ended", why=f"{ZYGOTES_MAX} in {ZYGOTES_WINDOW_S:g} s; the next session starts another")
            return
        self._replaced_s.append(now_s)
        try:
            another = self._zygote(zygote.key, zygote.environ)
        except (OSError, InterpreterUnusable) as error:
            log.error("zygote_ended", why=f"another cannot be started: {error}")
        else:
            # Event: The process that forks workers had ended; another was started.
            log.warning("zygote_replaced", pid=another.pid)

    def _pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def on_born(self, pid: int) -> None:
        """Have every zygote guard this worker, since any of them may end before the hub."""
        for zygote in self._in_use.values():
            zygote.send(control.Guard([pid]))
        self.reap_orphans()  # a sweep before may have been without reaping

    def on_end(self, worker: WorkerHandle) -> None:
        self._workers.discard(worker)
        if worker.pid is not None:
            self.orphan_reaper.worker_ended(worker.pid)
            self._unswept.append(worker.pid)
        self.reap_orphans()

    def orphans(self) -> Mapping[int, Sequence[int]]:
        return self.orphan_reaper.orphans_by_worker({*self._pids(), *(zygote.pid for zygote in self._zygotes())})

    def reap_orphans(self) -> None:
        """Sweep orphans in the next iteration of the loop: once, however many workers end in it."""
        os.write(self._sweep_bell, RING)

    def _sweep(self) -> None:
        os.read(self._sweep_bell, 8)
        workers = set(self._pids())
        others = workers | {zygote.pid for zygote in self._zygotes()}
        try:
            self.orphan_reaper.sweep(others, workers, births=len(workers) < len(self._workers))
        except OSError as error:  # no descriptor or memory left; the next child that ends causes another sweep
            # Event: Processes that envs have left could not be looked for.
            log.warning("orphan_sweep_failed", why=str(error))
            return
        # Only after the sweep: if the hub is killed before, the zygote must end the orphans of these workers.
        ended, self._unswept = self._unswept, []
        for zygote in self._in_use.values() if ended else ():
            zygote.send(control.Guard([], ended))

    def close(self) -> None:
        """End the zygotes and all orphans; sessions end their own workers."""
        self._workers.clear()  # so that the end of a zygote starts no other
        for zygote in self._zygotes():
            zygote.kill()
            zygote.reap()
        self._in_use.clear()
        self._retired.clear()
        self.orphan_reaper.end_all()
        for stream in self.streams:
            stream.close()
        self.loop.poller.unregister(self._sweep_bell)
        os.close(self._sweep_bell)
