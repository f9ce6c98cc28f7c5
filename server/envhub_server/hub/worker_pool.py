"""The worker processes of one session: started, told, woken, read and killed, by their numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from envhub_server.ipc import control
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.memory_use import memory_bytes


class StartedWorker(Protocol):
    """A worker as its session uses it: ``WorkerHandle``, whose methods are described there."""

    @property
    def pid(self) -> int | None: ...  # noqa: D102
    def send(self, message: object, /) -> None: ...  # noqa: D102
    def map_arena(self, message: control.MapArena, memory: int, *bells: int) -> None: ...  # noqa: D102
    def ring(self) -> object: ...  # noqa: D102
    def receive(self) -> bool: ...  # noqa: D102
    def dump_stacks(self) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


class WorkerStarter(Protocol):
    """What starts workers: a hub's ``Supervisor``, as processes."""

    def start(
        self, session: int, numbers: Sequence[int], key: InterpreterKey, environ: Mapping[str, str] | None
    ) -> Sequence[StartedWorker]:
        """Start the workers of these numbers; errors as for ``Supervisor.start``."""


class WorkerPool:
    """The processes; what they say and how they end is reported by the hub's events.

    A worker without a process hears nothing: whatever it has to know, its next process is told.
    """

    def __init__(
        self, session: int, supervisor: WorkerStarter, key: InterpreterKey, environ: Mapping[str, str] | None
    ) -> None:
        """Of this session, whose processes run this interpreter in this environment (if None, that of all sessions)."""
        self._session = session
        self._supervisor = supervisor
        self._key = key
        self._environ = environ
        self._handles: dict[int, StartedWorker] = {}

    def start(self, workers: Collection[int]) -> None:
        """Ask for the processes of these workers.

        Raises:
            OSError: there are no descriptors or processes left; none was started.
        """
        started = self._supervisor.start(self._session, [*workers], self._key, self._environ)
        self._handles.update(zip(workers, started, strict=True))

    def remove(self, worker: int) -> None:
        """Forget a process that has ended."""
        self._handles.pop(worker, None)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [handle.pid for handle in self._handles.values() if handle.pid is not None]

    def memory(self) -> Mapping[int, int]:
        """How many bytes of memory each worker has that has a process, with what it started."""
        return {number: memory_bytes(each.pid) for number, each in self._handles.items() if each.pid is not None}

    def tell(self, worker: int, message: Any) -> None:
        """Send a message."""
        if worker in self._handles:
            self._handles[worker].send(message)

    def map_arena(self, worker: int, message: control.MapArena, memory: int, *bells: int) -> None:
        """Hand over an arena: its descriptor, and the bells by which the worker is woken and wakes others."""
        if worker in self._handles:
            self._handles[worker].map_arena(message, memory, *bells)

    def ring(self) -> None:
        """Wake all."""
        for handle in self._handles.values():
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
            while handle.receive():
                pass

    def dump(self, worker: int) -> None:
        """Have a worker write the stacks of its threads."""
        if worker in self._handles:
            self._handles[worker].dump_stacks()

    def kill(self, worker: int) -> None:
        """End a worker at once."""
        if worker in self._handles:
            self._handles[worker].kill()
