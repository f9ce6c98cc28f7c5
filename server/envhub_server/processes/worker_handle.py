"""The hub's side of one worker: its channel, bell, output and pidfd."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from envhub.arena.spin import RING
from envhub.process import STACKS
from envhub.protocol import messages, validation
from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.loop import Poller
from envhub_server.processes.worker_events import (
    Events,
    ExitCause,
    MemoryKills,
    OutOfMemory,
    WorkerEvent,
    WorkerExited,
    WorkerSaid,
    WorkerStarted,
    exit_cause,
)
from envhub_server.processes.worker_output import OutputStream, WorkerOutput

# The bounds of numbers in a worker's messages: its envs may have written to its channel, too.
BOUNDS: validation.Bounds = {
    control.Building: {"built": (0, validation.ROWS_MAX)},
    control.FirstBuilt: {"private_bytes": validation.COUNT},
    control.Faulted: {"row": validation.ROW, "number": validation.WORD},
    control.Suspicious: {"row": validation.ROW},
    control.Closing: {"rows": validation.ROW, "stacks": (-1, validation.ROWS_MAX)},
    control.CallResults: {"number": validation.COUNT},
    control.CallFailed: {"number": validation.COUNT},
    control.RowInfo: {"row": validation.ROW, "number": validation.WORD},
    control.RowFailed: {"number": validation.WORD},
    control.InfoTemplate: {"number": validation.COUNT},
    messages.Failure: {"env_index": validation.ROW, "worker": validation.ROW},
}


class WorkerSupervisor(Protocol):
    """The supervisor of a worker: ``Supervisor``, whose attributes and methods are described there."""

    poller: Poller
    streams: tuple[OutputStream, OutputStream]
    message_bytes_max: int
    message_limits: codec.HeaderLimits
    memory_kills: MemoryKills

    def on_born(self, pid: int) -> None: ...
    def on_end(self, worker: WorkerHandle) -> None: ...


class WorkerHandle:
    """The hub's side of one worker, from before its birth until it is reaped."""

    def __init__(self, supervisor: WorkerSupervisor, worker: tuple[int, int], events: Events) -> None:
        """Make the channel, bell and pipes of this worker of a session; the zygote makes the process.

        Raises ``OSError`` and leaves nothing behind.
        """
        self.pid: int | None = None  # the ids of its process and process group; None until it is born
        self._poller = supervisor.poller
        self._session, self._number = worker
        self._events = events
        self._supervisor = supervisor
        self._pidfd = -1
        self.ended = False  # whether it was reaped, or will never be born
        self._killed = False  # by the hub
        self._read_error = ""
        self._last_sent: object = None
        self._not_born_reason = "what its zygote wrote to stderr says more"
        with contextlib.ExitStack() as undo:
            ours, self._far_end = socket.socketpair()
            undo.callback(ours.close)
            undo.callback(self._far_end.close)
            self._output = WorkerOutput(supervisor.streams)
            undo.callback(self._output.close)
            # Of a pipe the hub has its own end, whose O_NONBLOCK no worker can clear, as it could that of an eventfd.
            self._far_bell, self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            undo.pop_all()
        # Wakes it; has no effect on a worker that is awake. Raises BlockingIOError if it never listens.
        self.ring: Callable[[], object] = partial(os.write, self._bell, RING)
        ours.setblocking(False)
        self._channel = Channel(ours, descriptors_max=0)  # a worker has none to give
        self._channel.received_bytes_max = supervisor.message_bytes_max
        self._channel.received_limits = supervisor.message_limits
        self._poller.register(ours.fileno(), self)

    @property
    def far_ends(self) -> list[int]:
        """The descriptors for its process: its end of the channel, its stdout and its stderr."""
        return [self._far_end.fileno(), *self._output.far_ends]

    def close_far_ends(self) -> None:
        self._far_end.close()
        self._output.close_far_ends()

    @property
    def label(self) -> dict[str, Any]:
        return self._output.label

    @property
    def log_tail(self) -> str:
        """The last of its stdout, followed by the last of its stderr; 16 KiB in all."""
        return self._output.tail

    def send(self, message: object, *descriptors: int) -> None:
        """Send a message, which is lost if the worker has ended.

        A worker that lives but has closed its channel is killed, since it can receive no message.
        """
        if self.ended:
            return
        self._last_sent = message
        try:
            self._channel.send(message, descriptors)
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)
        except ChannelClosed:
            if self.pid is not None and not self.ended:
                self._kill_group()  # has no effect on a worker that is ending by itself

    def map_arena(self, message: control.MapArena, descriptors: control.ArenaDescriptors) -> None:
        """Send an arena; the ``hub_bell`` of its descriptors is the one that ``ring`` rings."""
        self.send(message, *descriptors._replace(hub_bell=self._far_bell).sent)

    def dump_stacks(self) -> None:
        """Make the worker write the stacks of its threads to stderr; ``log_tail`` ends in them milliseconds later.

        A worker that is stopped, or waits for its disk, writes none.
        """
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, STACKS)

    def kill(self) -> None:
        """End the worker and every process it started that stayed in its group."""
        if self.ended:
            return  # once it is reaped, another process may have its pid
        if self.pid is None:
            self._channel.shutdown()  # a process that is born later finds this and exits
            while self.receive() and self.pid is None:
                pass  # it may be born already
        if self.pid is None:
            if not self.ended:
                self._end(ExitCause("was not started"))
            return
        self._killed = True
        self._kill_group()

    def _kill_group(self) -> None:
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def on_ready(self, descriptor: int) -> None:
        if descriptor == self._pidfd:
            self._on_exit()
        else:
            self.receive()

    def receive_all(self) -> None:
        """Report all messages that have arrived by now; later ones wait, because they may never end."""
        if self.ended:
            return
        arrived_bytes = self._channel.arrived_bytes()
        while self._channel.received_bytes < arrived_bytes and self.receive():
            pass

    def receive(self) -> bool:
        """Report the next messages of the worker; return True if there may be more."""
        if self._read_error or self.ended:
            return False
        try:
            self._channel.flush()
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)
            received = self._channel.receive()
            for message in received or []:
                self._on_message(message)
            return received is not None
        except ChannelClosed:
            # The worker may live without its end of the channel: only the pidfd reports its exit.
            self._poller.unregister(self._channel.fileno())
            if self.pid is None:
                self._end(ExitCause(f"could not be started: {self._not_born_reason}"))
        except codec.DecodeError as error:
            # No later message is read; its exit is handled as any other.
            self._poller.unregister(self._channel.fileno())
            self._read_error = f", having sent what cannot be read: {error}"
            self.kill()
        return False

    def _on_message(self, message: object) -> None:
        validation.check(message, BOUNDS)
        match message:
            case control.Born(pid) if self.pid is None:
                self._on_born(pid)
            case control.NotBorn(reason):
                self._not_born_reason = reason
            case _:
                self._report(WorkerSaid(self._number, message))

    def _on_born(self, pid: int) -> None:
        self.pid = self.label["pid"] = pid
        try:
            self._pidfd = os.pidfd_open(pid)  # it is not reaped, so the pid is still its own
        except OSError as error:
            self.kill()
            os.waitpid(pid, 0)
            self._end(ExitCause(f"cannot be watched: {error}"))
            return
        self._poller.register(self._pidfd, self)
        self._supervisor.on_born(pid)
        self._report(WorkerStarted(self._number, pid))

    def _on_exit(self) -> None:
        assert self.pid is not None
        self._kill_group()  # the rest of its group, so that no process of it writes to the arena or the channel
        self.receive_all()  # messages from before its exit, such as why it could not build its envs
        self._poller.unregister(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        killed_by_others = code == -signal.SIGKILL and not self._killed
        out_of_memory = self._supervisor.memory_kills.explain() if killed_by_others else OutOfMemory.NO
        unread = self._last_sent if self._channel.left_unread() else None
        self._end(exit_cause(code, out_of_memory, self._read_error, self.log_tail), unread)

    def _end(self, cause: ExitCause, unread: object = None) -> None:
        self.discard()
        self._supervisor.on_end(self)
        self._report(WorkerExited(self._number, cause, unread))

    def _report(self, event: WorkerEvent) -> None:
        self._events.append((self._session, event))

    def never_born(self, how: str, unready: str) -> None:
        """Report that no zygote will fork it; ``unready`` says it if its interpreter cannot be used."""
        self._end(ExitCause(f"could not be started: {how}{': ' * bool(unready)}{unready}", unready=unready))

    def discard(self) -> None:
        """Free the hub's side; the process has ended or was never requested."""
        self.ended = True
        self.ring = lambda: None  # the session may ring it until it handles the event
        self._poller.unregister(self._channel.fileno())
        self._channel.close()
        self.close_far_ends()
        self._output.close()
        os.close(self._bell)
        os.close(self._far_bell)
