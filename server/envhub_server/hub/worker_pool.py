"""The worker processes of one session: started, told, woken, read and killed, by their numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from envhub_server.ipc import control
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.memory_use import memory_bytes
from envhub_server.processes.worker_events import WorkerEvent

Event = TypeVar("Event", bound=WorkerEvent)


class StartedWorker(Protocol):
    """A worker as its session uses it: ``WorkerHandle``, whose methods are described there."""

    @property
    def pid(self) -> int | None: ...  # noqa: D102
    @property
    def log_tail(self) -> str: ...  # noqa: D102
    @property
    def label(self) -> dict[str, Any]: ...  # noqa: D102
    def send(self, message: object, /, *descriptors: int) -> None: ...  # noqa: D102
    def map_arena(self, message: control.MapArena, memory: int, *bells: int) -> None: ...  # noqa: D102
    def ring(self) -> object: ...  # noqa: D102
    def receive_all(self) -> None: ...  # noqa: D102
    def dump_stacks(self) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


class WorkerStarter(Protocol):
    """What starts workers: a hub's ``Supervisor``, as processes."""

    def start(
        self,
        session: int,
        numbers: Sequence[int],
        key: InterpreterKey,
        environ: Mapping[str, str] | None,
        libraries: Sequence[str],
    ) -> Sequence[StartedWorker]:
        """Start the workers of these numbers; errors as for ``Supervisor.start``."""

    def orphans(self) -> Mapping[int, Sequence[int]]: ...  # noqa: D102
    def inherited_bytes(self, pid: int, /) -> int: ...  # noqa: D102


class WorkerPool:
    """The processes; what they say and how they end is reported by the hub's events.

    A worker without a process hears nothing: whatever it has to know, its next process is told. A process may become
    another worker's, so its events carry a number of its own.
    """

    def __init__(
        self,
        session: int,
        name: str,
        supervisor: WorkerStarter,
        key: InterpreterKey,
        environ: Mapping[str, str] | None,
    ) -> None:
        """Of this session, whose processes run this interpreter in this environment (if None, that of all sessions).

        ``name`` is the session's in the log.
        """
        self._session, self._name = session, name
        self._supervisor = supervisor
        self._key = key
        self._environ = environ
        self._handles: dict[int, StartedWorker] = {}
        self._rung: dict[int, StartedWorker] = {}  # those that are no spares
        self._workers: dict[int, int] = {}  # whose each process is, which has a number that is used once
        self._started = 0
        self._inherited_bytes: dict[int, int] = {}  # of each process, by its process id

    def start(self, workers: Collection[int], spares: bool = False, libraries: Sequence[str] = ()) -> None:
        """Ask for the processes of these workers, or of spares, which nobody rings, with these libraries.

        Raises:
            OSError: there are no descriptors or processes left; none was started.
        """
        processes = range(self._started, self._started + len(workers))
        started = self._supervisor.start(self._session, processes, self._key, self._environ, libraries)
        self._started += len(workers)
        handles = dict(zip(workers, started, strict=True))
        self._handles.update(handles)
        self._label(*workers)
        self._workers.update(zip(processes, workers, strict=True))
        if not spares:
            self._rung.update(handles)

    def of_worker(self, event: Event) -> Event:
        """The event of a process as one of the worker that has the process now."""
        number = self._workers[event.worker]
        return event if number == event.worker else replace(event, worker=number)

    def swap(self, worker: int, spare: int) -> None:
        """Make the process of a spare this worker's; that of the worker, if it has one, becomes the spare's."""
        new = {worker: spare, spare: worker}
        self._workers = {process: new.get(number, number) for process, number in self._workers.items()}
        self._handles = {new.get(number, number): handle for number, handle in self._handles.items()}
        self._rung[worker] = self._handles[worker]
        self._label(worker, spare)

    def _label(self, *workers: int) -> None:
        """Have what they print from now on be told as theirs."""
        for worker in workers:
            if worker in self._handles:
                self._handles[worker].label.update(session=self._name, worker=worker)

    def remove(self, worker: int) -> None:
        """Forget a process that has ended."""
        handle = self._handles.pop(worker, None)
        if handle is not None and handle.pid is not None:
            self._inherited_bytes.pop(handle.pid, None)
        self._rung.pop(worker, None)
        self._workers = {process: number for process, number in self._workers.items() if number != worker}

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [handle.pid for handle in self._handles.values() if handle.pid is not None]

    def memory(self) -> Mapping[int, int]:
        """How many bytes of memory each worker has that has a process, with what it started."""
        pids = {number: each.pid for number, each in self._handles.items() if each.pid is not None}
        orphans = self._supervisor.orphans()
        return {number: memory_bytes(pid, *orphans.get(pid, ())) for number, pid in pids.items()}

    def born(self, pid: int) -> None:
        """Note what a process has of its zygote when it begins."""
        self._inherited_bytes[pid] = self._supervisor.inherited_bytes(pid)

    def own_memory(self) -> Mapping[int, int]:
        """As ``memory``, without what the processes had of their zygote when they began."""
        inherited = {number: self._inherited_bytes.get(each.pid or 0, 0) for number, each in self._handles.items()}
        return {number: max(0, nbytes - inherited[number]) for number, nbytes in self.memory().items()}

    def output(self, worker: int) -> str:
        """The last output of a process; empty once it has ended."""
        return self._handles[worker].log_tail if worker in self._handles else ""

    def tell(self, worker: int, message: Any, *descriptors: int) -> None:
        """Send a message, with copies of these descriptors."""
        if worker in self._handles:
            self._handles[worker].send(message, *descriptors)

    def map_arena(self, worker: int, message: control.MapArena, memory: int, *bells: int) -> None:
        """Hand over an arena: its descriptor, and the bells by which the worker is woken and wakes others."""
        if worker in self._handles:
            self._handles[worker].map_arena(message, memory, *bells)

    def ring(self) -> None:
        """Wake all but spares."""
        for handle in self._rung.values():
            try:  # costs nothing, which ``suppress`` would
                handle.ring()
            except BlockingIOError:
                pass  # it has not listened for thousands of rings

    def ring_some(self, workers: Collection[int]) -> None:
        """Wake these."""
        for worker in workers:
            if worker in self._handles:
                try:
                    self._handles[worker].ring()
                except BlockingIOError:
                    pass  # as above

    def read(self) -> None:
        """Report all that they have said until now."""
        for handle in [*self._handles.values()]:
            handle.receive_all()

    def dump(self, worker: int) -> None:
        """Have a worker write the stacks of its threads."""
        if worker in self._handles:
            self._handles[worker].dump_stacks()

    def kill(self, worker: int) -> None:
        """End a worker at once."""
        if worker in self._handles:
            self._handles[worker].kill()

    def kill_all(self) -> None:
        """End all workers and spares at once."""
        for handle in [*self._handles.values()]:
            handle.kill()
