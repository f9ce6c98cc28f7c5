"""The hub's side of one worker: its channel, bell, output and pidfd."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from envhub.arena.spin import RING
from envhub.process import FILE_STACKS, STACKS
from envhub.protocol import messages, validation
from envhub.transport.descriptors import DESCRIPTORS_MAX
from envhub.values import codec
from envhub.values.info_columns import COLUMNS_BYTES_MAX
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.loop import Loop
from envhub_server.processes.worker_output import OutputStream, WorkerOutput

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")
STACKS_BYTES_MAX = 1 << 16  # of the threads of one worker


# The kernel's part in a SIGKILL.
PERHAPS_OUT_OF_MEMORY, OUT_OF_MEMORY = ", perhaps out of memory", ": the kernel killed it, out of memory"


@dataclass(frozen=True)
class ExitCause:
    """The cause of a worker's exit."""

    how: str  # words that follow the worker's name, such as "exited with status 3"
    signal: str = ""  # the name of the signal that ended the worker; empty if it exited by itself
    status: int | None = None  # the exit status, if it exited by itself
    log_tail: str = ""  # the last of its stdout, followed by the last of its stderr
    unready: str = ""  # why its interpreter cannot be used, to be told in a line; empty if it can
    started: bool = True  # whether there was a worker at all


def counter(file: Path, name: str) -> int | None:
    """The number after ``name`` in a file of the kernel with a name and a number per line; None if it has none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = file.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
    return None


def exit_cause(code: int, remark: str = "", log_tail: str = "") -> ExitCause:
    if code >= 0:
        return ExitCause(f"exited with status {code}{remark}", "", code, log_tail)
    name = signal_name(-code)
    return ExitCause(f"was ended by {name}{remark}", name, None, log_tail)


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class MemoryKills:
    """Counts the processes that the kernel killed for lack of memory."""

    def __init__(self, own: Path | None, everywhere: Path = VMSTAT) -> None:
        self._own_file, self._everywhere_file = own, everywhere
        self._own, self._everywhere = _oom_kills(own), _oom_kills(everywhere)
        self._unexplained = 0

    def forget(self) -> None:
        self._read_counters()
        self._unexplained = 0

    def explain(self) -> str:
        """Tell if the kernel killed the worker that was just reaped; every counted kill explains one worker."""
        before = self._everywhere
        self._read_counters()
        if self._unexplained:
            self._unexplained -= 1
            return OUT_OF_MEMORY
        # The whole machine's counter may have counted another container's process, but never misses one.
        return PERHAPS_OUT_OF_MEMORY if before is None or before != self._everywhere else ""

    def _read_counters(self) -> None:
        own = _oom_kills(self._own_file)
        if own is not None and self._own is not None:
            self._unexplained += max(0, own - self._own)
        self._own, self._everywhere = own, _oom_kills(self._everywhere_file)


def own_counters(own_cgroups: Path = OWN_CGROUPS, cgroups: Path = CGROUPS) -> Path | None:
    """The file of counters of this process's cgroup: v2 or v1, seen from within a container or from outside."""
    try:
        lines = [line.split(":", 2) for line in own_cgroups.read_text().splitlines()]
    except OSError:
        return None
    candidates = []
    for _, controllers, path in lines:
        cgroup = path.lstrip("/")
        if not controllers:
            candidates += [cgroups / cgroup / "memory.events", cgroups / "memory.events"]
        if "memory" in controllers.split(","):
            folder = cgroups / "memory"
            candidates += [folder / cgroup / "memory.oom_control", folder / "memory.oom_control"]
    return next((file for file in candidates if _oom_kills(file) is not None), None)


def _oom_kills(file: Path | None) -> int | None:
    return None if file is None else counter(file, "oom_kill")


@dataclass(frozen=True)
class WorkerStarted:
    """The process of this number runs, with this id."""

    process: int
    pid: int


@dataclass(frozen=True)
class WorkerMessage:
    """A process has sent a control message; it is well-formed, and its numbers are within their bounds."""

    process: int  # its number in its session
    message: Any  # the control message
    current: bool = True  # False for a message about a step or reset of a row that is not the row's last one


@dataclass(frozen=True)
class WorkerExited:
    """A process was reaped, or will never exist: its last event."""

    process: int  # its number in its session
    cause: ExitCause  # why it ended


WorkerEvent = WorkerStarted | WorkerMessage | WorkerExited
# Events, each with the number of its session, in the order in which they happened. The hub's loop takes them out; an
# object that puts one in is never called back.
Events = deque[tuple[int, Any]]


# The bounds of numbers in a worker's messages: its envs may have written to its channel, too.
BOUNDS: validation.Bounds = {
    control.Building: {"built": (0, validation.ROWS_MAX)},
    control.FirstBuilt: {"private_bytes": validation.COUNT},
    control.Faulted: {"row": validation.ROW, "number": validation.WORD},
    control.Suspicious: {"row": validation.ROW},
    control.Slow: {"rows": validation.ROW, "took_ns": validation.WORD},
    control.Closing: {"rows": validation.ROW},
    control.SnapshotTaken: dict.fromkeys(("serial", "steps", "episode", "base"), validation.COUNT),
    control.Drawn: {"number": validation.COUNT, "shape": (0, control.FRAME_SIDE_MAX)},
    control.SetAttrRows: {"rows": validation.ROW},
    control.RowInfo: {"row": validation.ROW, "number": validation.WORD},
    control.RowFailed: {"number": validation.WORD},
    control.InfoTemplate: {"number": validation.COUNT, "nbytes": (0, COLUMNS_BYTES_MAX)},
    messages.Failure: {"env_index": validation.ROW, "worker": validation.ROW},
}


class ProcessSupervisor(Protocol):
    """The supervisor of workers and zygotes: ``Supervisor``, whose attributes and methods are described there."""

    loop: Loop
    events: Events
    streams: tuple[OutputStream, OutputStream]
    message_bytes_max: int
    message_limits: codec.HeaderLimits
    memory_kills: MemoryKills

    def on_ready(self, descriptor: int) -> None: ...
    def on_born(self, pid: int) -> None: ...
    def on_end(self, worker: WorkerHandle) -> None: ...


class WorkerHandle:
    """The hub's side of one worker, from before its birth until it is reaped."""

    reported: tuple[type, ...] = (WorkerStarted, WorkerMessage, WorkerExited)  # the events that its session is told

    def __init__(self, supervisor: ProcessSupervisor, session: int = 0, number: int = 0) -> None:
        self.pid: int | None = None  # the ids of its process and process group; None until it is born
        self._poller = supervisor.loop.poller
        self._session, self._number = session, number
        self._supervisor = supervisor
        self._pidfd = self._stacks = -1
        self.private_bytes = 0  # of a snapshot, when it was born
        self.ended = False  # whether it was reaped, or will never be born
        self._killed = False  # by the hub
        self._read_error = ""
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
        self.far_ends = [self._far_end.fileno(), *self._output.far_ends]
        self.label = self._output.label  # who it is, in events of what it prints
        # Wakes it; has no effect on a worker that is awake. Raises BlockingIOError if it never listens.
        self.ring: Callable[[], object] = partial(os.write, self._bell, RING)
        ours.setblocking(False)
        self._channel = Channel(ours, descriptors_max=0)  # a worker has none to give
        self._channel.received_bytes_max = supervisor.message_bytes_max
        self._channel.received_limits = supervisor.message_limits
        self._poller.register(ours.fileno(), self.on_ready)

    def close_far_ends(self) -> None:
        self._far_end.close()
        self._output.close_far_ends()

    @property
    def log_tail(self) -> str:
        return self._output.tail

    def send(self, message: object, *descriptors: int) -> None:
        """Send a message, which is lost if the worker has ended."""
        # A worker that lives but has closed its channel is killed, since it can receive no message.
        if self.ended:
            return
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
        """Make the worker write the stacks of its threads to stderr; ``log_tail`` ends in them milliseconds later."""
        # A worker that is stopped, or waits for its disk, writes none.
        self._signal(STACKS)

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def write_stacks(self) -> None:
        """Make the worker write them where ``stacks`` reads them milliseconds later, which is nothing to print."""
        with contextlib.suppress(OSError), self._stacks_file() as file:  # an env may have put another there
            os.ftruncate(file, 0)
            self._signal(FILE_STACKS)  # which else would end the worker, or write into a file of the env

    @property
    def stacks(self) -> str:
        """The stacks of its threads as of the last ``write_stacks``; empty as long as it has written none."""
        with contextlib.suppress(OSError), self._stacks_file() as file:
            return os.read(file, STACKS_BYTES_MAX).decode(errors="replace")
        return ""

    @contextlib.contextmanager
    def _stacks_file(self) -> Iterator[int]:
        """A descriptor of the worker's file for its stacks; raises ``OSError`` if there is none."""
        if self.ended:
            raise ProcessLookupError(f"process {self.pid} has ended")  # another may have its number
        file = os.open(f"/proc/{self.pid}/fd/{self._stacks}", os.O_RDWR | os.O_NONBLOCK)
        try:
            if not os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{control.STACKS_FILE} "):
                raise FileNotFoundError(f"its descriptor {self._stacks} is another file's")
            yield file
        finally:
            os.close(file)

    def kill(self) -> None:
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
        """Report all messages that have arrived; later ones wait, because they may never end."""
        if self.ended:
            return
        arrived_bytes = self._channel.arrived_bytes()
        while self._channel.received_bytes < arrived_bytes and self.receive():
            pass

    def receive(self) -> bool:
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
            case control.Born(pid, stacks, private_bytes) if self.pid is None:
                self._stacks, self.private_bytes = stacks, max(0, private_bytes)
                self._on_born(pid)
            case control.NotBorn(reason):
                self._not_born_reason = reason
            case _:
                self._report(WorkerMessage(self._number, message))

    def _on_born(self, pid: int) -> None:
        self.pid = self.label["pid"] = pid
        try:
            self._pidfd = os.pidfd_open(pid)  # it is not reaped, so the pid is still its own
        except OSError as error:
            self.kill()
            os.waitpid(pid, 0)
            self._end(ExitCause(f"cannot be watched: {error}"))
            return
        self._poller.register(self._pidfd, self.on_ready)
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
        out_of_memory = self._supervisor.memory_kills.explain() if killed_by_others else ""
        self._end(exit_cause(code, out_of_memory + self._read_error, self.log_tail))

    def _end(self, cause: ExitCause) -> None:
        self.discard()
        self._supervisor.on_end(self)
        self._report(WorkerExited(self._number, cause))

    def _report(self, event: WorkerEvent) -> None:
        if isinstance(event, self.reported):
            self._supervisor.events.append((self._session, event))

    def never_born(self, how: str, unready: str) -> None:
        self._end(ExitCause(f"could not be started: {how}{': ' * bool(unready)}{unready}", unready=unready))

    def discard(self) -> None:
        self.ended = True
        self.ring = lambda: None  # the session may ring it until it handles the event
        self._poller.unregister(self._channel.fileno())
        self._channel.close()
        self.close_far_ends()
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._output.close()
        for bell in (self._bell, self._far_bell):
            if bell >= 0:
                os.close(bell)
        self._bell = self._far_bell = -1


DESCRIPTORS_PER_WORKER = 3  # its channel, its standard output and its standard error


def request_workers(channel: Channel, workers: Sequence[WorkerHandle]) -> None:
    """Request the processes of these workers from a zygote, and close the hub's far ends of them."""
    at_once = DESCRIPTORS_MAX // DESCRIPTORS_PER_WORKER
    try:
        for start in range(0, len(workers), at_once):
            part = workers[start : start + at_once]
            channel.send(control.StartWorkers(len(part)), [end for worker in part for end in worker.far_ends])
    except (ChannelClosed, RuntimeError) as error:
        raise OSError(f"the zygote does not answer: {error}") from error
    finally:
        for worker in workers:
            worker.close_far_ends()


class SessionZygote(WorkerHandle):
    """The zygote of a session, which its first worker forks once it has imported the code of the envs."""

    reported: tuple[type, ...] = ()

    def fork(self, workers: Sequence[WorkerHandle]) -> None:
        """Request these processes; where it has ended, or ends before, they report that they could not be started."""
        request_workers(self._channel, workers)


class SnapshotProcess(SessionZygote):
    """The process that has a snapshot of an env, which the env's worker forks; its number is below zero."""

    reported = WorkerStarted, WorkerExited

    def __init__(self, supervisor: ProcessSupervisor, session: int, number: int) -> None:
        super().__init__(supervisor, session, number)
        self._close_pipes()  # it prints nothing, and nothing rings it: there may be hundreds
