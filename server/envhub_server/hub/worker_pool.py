"""The processes of one session: started, told, woken, read and killed, by their numbers."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from envhub_server.ipc import control
from envhub_server.ipc.process_marks import memory_bytes
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import WorkerHandle

STACK_BYTES_MAX = 16384


class WorkerPool:
    """The processes; what they say and how they end is reported by the hub's events.

    A number without a process hears nothing: whatever a slot has to know, its next process is told.
    """

    def __init__(
        self,
        session: int,
        name: str,
        supervisor: Supervisor,
        key: InterpreterKey,
        environ: Mapping[str, str] | None,
    ) -> None:
        """Serve this session, whose processes run this interpreter in this environment (None: that of all sessions).

        ``name`` is the session's in the log.
        """
        self._session, self._name = session, name
        self._supervisor = supervisor
        self._key = key
        self._environ = environ
        self._handles: dict[int, WorkerHandle] = {}
        self._serving: dict[int, WorkerHandle] = {}  # by slot

    def start(self, processes: Sequence[int], libraries: Sequence[str] = ()) -> None:
        """Ask for the processes of these numbers, which no other had, with these libraries.

        Raises:
            OSError: there are no descriptors or processes left; none was started.
        """
        started = self._supervisor.start(self._session, processes, self._key, self._environ, libraries)
        self._handles.update(zip(processes, started, strict=True))

    def serve(self, slot: int, process: int) -> None:
        """Ring this process from now on when the slot is rung."""
        if process in self._handles:
            self._serving[slot] = self._handles[process]

    def label(self, process: int, worker: int) -> None:
        """Log what the process prints from now on as the output of this worker."""
        if process in self._handles:
            self._handles[process].label.update(session=self._name, worker=worker)

    def remove(self, process: int) -> None:
        """Forget a process that has ended."""
        handle = self._handles.pop(process, None)
        if handle is None:
            return
        self._serving = {slot: each for slot, each in self._serving.items() if each is not handle}

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [handle.pid for handle in self._handles.values() if handle.pid is not None]

    def memory(self) -> Mapping[int, int]:
        """Number of bytes of memory each process has, with what it started."""
        pids = {number: each.pid for number, each in self._handles.items() if each.pid is not None}
        orphans = self._supervisor.orphans()
        return {number: memory_bytes(pid, *orphans.get(pid, ())) for number, pid in pids.items()}

    def output(self, process: int) -> str:
        """The last output of a process; empty once it has ended."""
        return self._handles[process].log_tail if process in self._handles else ""

    def tell(self, process: int, message: Any, *descriptors: int) -> None:
        """Send a message, with copies of these descriptors."""
        if process in self._handles:
            self._handles[process].send(message, *descriptors)

    def map_arena(self, process: int, message: control.MapArena, descriptors: control.ArenaDescriptors) -> None:
        """Have a process map an arena; the ``hub_bell`` is that of the process."""
        if process in self._handles:
            self._handles[process].map_arena(message, descriptors)

    def ring(self) -> None:
        """Wake the processes that serve slots."""
        for handle in self._serving.values():
            try:  # costs nothing, which ``suppress`` would
                handle.ring()
            except BlockingIOError:
                pass  # it has not listened for thousands of rings

    def ring_some(self, slots: Collection[int]) -> None:
        """Wake the processes that serve these slots."""
        for slot in slots:
            if slot in self._serving:
                try:
                    self._serving[slot].ring()
                except BlockingIOError:
                    pass  # as above

    def read(self) -> None:
        """Report all that they have said until now."""
        for handle in [*self._handles.values()]:
            handle.receive_all()

    def dump(self, process: int) -> None:
        """Have a process write the stacks of its threads."""
        if process in self._handles:
            self._handles[process].dump_stacks()

    def stack(self, process: int, descriptor: int) -> str:
        """The stack that a process has written into this file of its own; empty if it has not."""
        try:
            file = os.open(f"/proc/{self._handles[process].pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        except (KeyError, OSError):
            return ""
        try:
            return os.read(file, STACK_BYTES_MAX).decode(errors="replace")
        except OSError:  # an env has put something else there
            return ""
        finally:
            os.close(file)

    def kill(self, process: int) -> None:
        """End a process at once."""
        if process in self._handles:
            self._handles[process].kill()

    def kill_all(self) -> None:
        """End all processes at once."""
        for handle in [*self._handles.values()]:
            handle.kill()
