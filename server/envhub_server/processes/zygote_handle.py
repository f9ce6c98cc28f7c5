"""The hub's side of the zygote, which forks workers and, if the hub is killed, ends the processes that are left."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

from envhub_server.ipc import control, process_marks
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.processes.interpreter import START_VARIABLES, Environment, ZygoteProcess
from envhub_server.processes.worker_handle import ProcessSupervisor, WorkerHandle, exit_cause, request_workers
from envhub_server.processes.worker_output import WorkerOutput

SAID_READ_BYTES = 4096
LOOK_S = 0.5  # interval at which a starting interpreter is checked; one that hangs is reported within 2 s
IDLE_LOOKS = 2  # one after the other, in which it sleeps and takes little CPU time, and so waits for something
IDLE_TICKS_MAX = 3  # of 10 ms of CPU time, from one look to the next
START_S_MAX = 60  # for one that computes all the while


class ZygoteHandle:
    """The process that forks workers, of one interpreter, in one environment and working directory."""

    def __init__(self, supervisor: ProcessSupervisor, executed: ZygoteProcess, guarded: Sequence[int] = ()) -> None:
        """Own the process, which guards these workers, and which ``supervisor`` must ``reap``."""
        self.key, self.environ = executed.key, executed.environ  # with which it was started
        self.ready = False  # whether it forks workers at once
        self.problem = ""  # why it cannot be used, to be told in a line, as far as that is known
        self._loop, self._poller = supervisor.loop, supervisor.loop.poller
        self._channel_closed = False
        self._retiring = False
        self._waiting: list[WorkerHandle] = []  # to be forked once it is ready
        with contextlib.ExitStack() as undo:
            undo.callback(executed.discard)
            self._output = WorkerOutput(supervisor.streams, executed.outputs)
            self._output.label.update(process="zygote", pid=executed.process.pid)
            undo.pop_all()
        self._start, self._process, self.pidfd = executed.start, executed.process, executed.pidfd
        self._start_pipe = executed.start_pipe
        self._channel = Channel(executed.control, descriptors_max=0)
        self._cpu_ticks = 0
        self._idle_looks = 0
        self._starting_s = 0.0
        self._look_in(LOOK_S)
        self._poller.register(self.pidfd, supervisor.on_ready)
        for descriptor in (self._channel.fileno(), self._start_pipe):
            self._poller.register(descriptor, self.on_ready)
        self.send(control.Guard([*guarded]))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def starting(self) -> str:
        return self._start.progress if self._starting_s and not self.ready else ""

    def serves(self, environ: Environment) -> bool:
        """True if it can fork workers, whose start environment is this one."""
        self.on_ready(-1)  # a zygote that is being killed has closed its channel
        names = (name for name in self.environ.keys() | environ.keys() if name.startswith(START_VARIABLES))
        alike = all(self.environ.get(name) == environ.get(name) for name in names)
        return alike and not self._channel_closed and self._process.poll() is None

    def fork(self, workers: Sequence[WorkerHandle]) -> None:
        """Request the processes of these workers, now or once it is ready, and close the hub's far ends of them."""
        # If it never becomes ready, ``problem`` says why, and ``reap`` returns the workers.
        if not self.ready:
            self._waiting += workers
            return
        request_workers(self._channel, workers)

    def _fork_waiting(self) -> None:
        waiting, self._waiting = [each for each in self._waiting if not each.ended], []
        try:
            self.fork(waiting)
        except OSError as error:
            for worker in waiting:
                worker.never_born(str(error), "")

    def _read_start(self) -> None:
        if self._start_pipe < 0:
            return
        ended = False
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._start_pipe, SAID_READ_BYTES):
                self._start.feed(chunk)
            ended = True
        if self._start.last.ready and not self.ready:
            self.ready = True
            self._end_start()
            self._fork_waiting()
            if self._retiring:
                self.retire()
        elif ended:
            self._stop_reading()

    def _end_start(self) -> None:
        self._stop_reading()
        self._look_in(math.inf)

    def _look_in(self, seconds: float) -> None:
        self._loop.schedule.set(self._look, self._loop.clock.now_s() + seconds)

    def _stop_reading(self) -> None:
        if self._start_pipe >= 0:
            self._poller.unregister(self._start_pipe)
            os.close(self._start_pipe)
            self._start_pipe = -1

    def _look(self) -> None:
        """End an interpreter that waits for something in place of starting, or takes too long."""
        self._read_start()
        if self.ready:
            return
        self._starting_s += LOOK_S
        # A script may compute in a program that it starts.
        stats = [process_marks.stat(pid) for pid in process_marks.family(self.pid, every=True)]
        before, self._cpu_ticks = self._cpu_ticks, sum(sum(map(int, stat[11:13])) for stat in stats)
        sleeps = {*(stat[0] for stat in stats if stat)} == {b"S"} and not self._output.is_paused
        idle = sleeps and self._cpu_ticks - before < IDLE_TICKS_MAX
        self._idle_looks = self._idle_looks + 1 if idle else 0
        if (self._idle_looks >= IDLE_LOOKS and self.key.is_other) or self._starting_s >= START_S_MAX:
            self.problem = self._start.why_ended
            self.kill()
        else:
            self._look_in(LOOK_S)

    def send(self, message: object) -> None:
        with contextlib.suppress(ChannelClosed):  # it has ended, and is about to be reaped
            self._channel.send(message)
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)

    def on_ready(self, descriptor: int) -> None:
        if descriptor == self._start_pipe:
            self._read_start()
            return
        if self._channel_closed:
            return
        try:
            self._channel.flush()
            self._channel.receive()
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)
        except ChannelClosed:
            self._channel_closed = True
            self._poller.unregister(self._channel.fileno())

    def retire(self) -> None:
        if not self.ready:
            self._retiring = True
            if not self._waiting:
                self.kill()
            return
        self.send(control.Retire())
        if self._channel.backlogged:  # a channel that ends without this message means that the hub was killed
            self.kill()
        self._close_channel()

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> list[WorkerHandle]:
        code = self._process.wait()
        self._read_start()
        if not self.ready:
            self.problem = self.problem or self._start.what_is_wrong(exit_cause(code).how, self._output.tail)
        self._end_start()
        self._poller.unregister(self.pidfd)
        os.close(self.pidfd)
        self._close_channel()
        self._output.close()
        waiting, self._waiting = self._waiting, []
        return [worker for worker in waiting if not worker.ended]

    def _close_channel(self) -> None:
        self._poller.unregister(self._channel.fileno())
        self._channel.close()
