"""One worker as the hub sees it: its channel, bell, output and pidfd, from before its birth until it is reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from envhub.arena.spin import RING
from envhub.protocol import messages, validation
from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.loop.poller import Poller
from envhub_server.processes.exit_cause import ExitCause, OutOfMemory, ending
from envhub_server.processes.worker_events import Events, WorkerExited, WorkerSaid, WorkerStarted
from envhub_server.processes.worker_output import Output, Streams

LAST_READS_MAX = 256  # of a worker that has ended; a child of its that still talks must not be heard for ever


# Of what a worker says, where its envs may have written to its channel, too.
BOUNDS: validation.Bounds = {
    control.Building: {"built": (0, validation.ROWS_MAX)},
    control.FirstBuilt: {"private_bytes": validation.COUNT},
    control.StepTimes: dict.fromkeys(("steps", "cpu_ns", "wait_ns", "env_bytes"), validation.COUNT),
    control.Faulted: {"row": validation.ROW},
    control.Suspicious: {"row": validation.ROW},
    control.CallResults: {"number": validation.COUNT},
    control.CallFailed: {"number": validation.COUNT},
    control.RowInfo: {"row": validation.ROW, "number": validation.WORD},
    control.RowFailed: {"number": validation.WORD},
    control.InfoTemplate: {"number": validation.COUNT},
    messages.Failure: {"env_index": validation.ROW, "worker": validation.ROW},
}


class Guardian(Protocol):
    """Who minds all workers of a hub."""

    def on_born(self, pid: int) -> None:
        """A worker has this process id from now on."""

    def on_end(self, worker: WorkerHandle) -> None:
        """It is reaped, or will never be born."""

    def explain_kill(self) -> OutOfMemory:
        """Whether a worker that something else killed was killed for want of memory."""


def _ring_nobody() -> None:
    """The worker has no bell any more."""


class WorkerHandle:
    """One worker as the hub sees it, from before its birth until it is reaped.

    Attributes:
        pid: its process id, which is also its process group's; None until it is born.
        ring: wakes it, also where it is awake: no word of the arena says whether it sleeps.
    """

    def __init__(
        self, poller: Poller, streams: Streams, worker: tuple[int, int], events: Events, guardian: Guardian
    ) -> None:
        """Make the channel, bell and pipes of this worker of a session; the zygote makes the process.

        Raises:
            OSError: no descriptor is to be had; nothing is left behind.
        """
        self.pid: int | None = None
        self._poller = poller
        self._session, self._number = worker
        self._events = events
        self._guardian = guardian
        self._pidfd = -1
        self._over = False
        self._killed = False  # by the hub
        self._nonsense = ""
        self._why = "what its zygote wrote to stderr says more"
        with contextlib.ExitStack() as undo:
            ours, self._far_end = socket.socketpair()
            undo.callback(ours.close)
            undo.callback(self._far_end.close)
            self._output = Output(streams)
            undo.callback(self._output.close)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.pop_all()
        self.ring: Callable[[], object] = partial(os.write, self._bell, RING)
        ours.setblocking(False)
        self._channel = Channel(ours, descriptors_max=0)  # a worker has none to give
        poller.register(ours.fileno(), self)

    @property
    def far_ends(self) -> list[int]:
        """What its process is to have: its end of the channel, its standard output and its standard error."""
        return [self._far_end.fileno(), *self._output.far_ends]

    def close_far_ends(self) -> None:
        """Leave them to the process, which has copies."""
        self._far_end.close()
        self._output.close_far_ends()

    @property
    def log_tail(self) -> str:
        """The last of what it has written to stdout and then to stderr, 16 KiB in all."""
        return self._output.tail

    def tell(self, message: Any, *descriptors: int) -> None:
        """Send a message; to one that has ended it is lost, and its end is about to be reported.

        One that lives but has closed its channel would never hear it: it is killed.
        """
        if self._over:
            return
        try:
            self._channel.send(message, descriptors)
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)
        except ChannelClosed:
            if self.pid is not None and not self._over:
                self._kill_group()  # one that is ending by itself ends as it would have

    def map_arena(self, message: control.MapArena, memory: int, *bells: int) -> None:
        """Send the arena with the bell that ``ring`` rings, the client's, and those by which it wakes them."""
        self.tell(message, memory, self._bell, *bells)

    def dump(self) -> None:
        """Have it write the stacks of its threads to its stderr, whatever it is doing; ``log_tail`` soon ends in them.

        It takes milliseconds; what is stopped, or waits for its disk, writes none.
        """
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)

    def kill(self) -> None:
        """End the worker and every process it started that stayed in its group."""
        if self._over:
            return  # once reaped, the number may be somebody else's
        if self.pid is None:
            self._channel.shutdown()  # should its process come yet, it finds that and ends
            while self.hear() and self.pid is None:
                pass  # it may have come already, and have work to do
        if self.pid is None:
            if not self._over:
                self._end(ExitCause("was not started"))
            return
        self._killed = True
        self._kill_group()

    def _kill_group(self) -> None:
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def on_ready(self, descriptor: int) -> None:
        """Read what the worker has said, or reap it."""
        if descriptor == self._pidfd:
            self._on_exit()
        else:
            self.hear()

    def hear(self) -> bool:
        """Report the next of what the worker has said; whether there may be more."""
        if self._nonsense or self._over:
            return False
        try:
            self._channel.flush()
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)
            found = self._channel.receive()
            for message in found or []:
                self._on_message(message)
            return found is not None
        except ChannelClosed:
            # No proof of an end: a child that the env forked may hold the other end. The pidfd decides.
            self._poller.unregister(self._channel.fileno())
            if self.pid is None:
                self._end(ExitCause(f"could not be started: {self._why}"))
        except codec.DecodeError as error:
            # Nothing that it says from now on counts; its exit is handled as any other.
            self._poller.unregister(self._channel.fileno())
            self._nonsense = f", having sent what cannot be read: {error}"
            self.kill()
        return False

    def _on_message(self, message: Any) -> None:
        validation.check(message, BOUNDS)
        match message:
            case control.Born(pid) if self.pid is None:
                self._on_born(pid)
            case control.NotBorn(reason):
                self._why = reason
            case _:
                self._report(WorkerSaid(self._number, message))

    def _on_born(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)  # it is not reaped, so the number is still its own
        except OSError as error:
            self.kill()
            os.waitpid(pid, 0)
            self._end(ExitCause(f"cannot be watched: {error}"))
            return
        self._poller.register(self._pidfd, self)
        self._guardian.on_born(pid)
        self._report(WorkerStarted(self._number, pid))

    def _on_exit(self) -> None:
        assert self.pid is not None
        self._kill_group()  # the rest of it, so that nobody writes to the arena or the channel any more
        for _ in range(LAST_READS_MAX):  # what it said before it ended, such as why it could not build its envs
            if not self.hear():
                break
        self._poller.unregister(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        by_others = code == -signal.SIGKILL and not self._killed
        out_of_memory = self._guardian.explain_kill() if by_others else OutOfMemory.NO
        self._end(ending(code, out_of_memory, self._nonsense, self.log_tail))

    def _end(self, how: ExitCause) -> None:
        self.discard()
        self._guardian.on_end(self)
        self._report(WorkerExited(self._number, how))

    def _report(self, event: Any) -> None:
        self._events.append((self._session, event))

    def discard(self) -> None:
        """Free what the hub holds of it; its process has ended or was never asked for."""
        self._over = True
        self.ring = _ring_nobody  # its end is reported, and perhaps not heard of yet
        self._poller.unregister(self._channel.fileno())
        self._channel.close()
        self.close_far_ends()
        self._output.close()
        os.close(self._bell)
