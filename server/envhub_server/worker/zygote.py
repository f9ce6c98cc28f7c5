"""The zygote: a process that has imported what every worker needs, and forks a worker whenever the hub asks for one.

The hub executes it as a new program, so it holds none of the hub's state. It has one thread, so forking it is safe. Its
workers share the pages of what it imported. ``bootstrap.py`` starts it, on Python 3.8 and later.

An intermediate process forks a worker and then ends. So the worker becomes a child of the hub, which is a subreaper:
the hub gets the worker's exit status, and the end of the zygote does not end the worker.

A snapshot of an env is a zygote, too: a copy of the env's worker, forked between two requests, which forks workers that
go on from there.

A channel that ends without ``Retire`` means that the hub was killed. Then the kernel ends the workers, and the zygote
ends the processes that the workers had started.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import resource
import signal
import socket
import time
import traceback
import warnings
from functools import partial
from typing import Any, Callable, Sequence

import numpy as np

from envhub.arena.memory import OP_RESET, OP_STEP, Arena, allocate
from envhub.process import (
    blocked,
    handle_job_signals,
    keep_freed_memory,
    unblock_job_signals,
    write_no_core_file,
)
from envhub.protocol import messages
from envhub.values import actions, codec
from envhub_server.ipc import control, process_marks, replay_file
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.ipc.process_marks import PR_SET_PDEATHSIG, die_with_hub, prctl, unmute_warnings
from envhub_server.worker import process
from envhub_server.worker.context import Host
from envhub_server.worker.env_sources import remember_registry
from envhub_server.worker.process import Restored, Worker
from envhub_server.worker.shared_process import reseed

ENV = "CartPole-v1"
SEED = 1  # so that the warm-up is the same in every zygote
STEPS = 100  # by then CPython has specialised the bytecode of a step, and an episode or two have ended
INFO_BYTES = 512
TRACE_BYTES = 1 << 14


def warm_up() -> bool:
    """Execute once what a worker does, and leave no descriptor behind; returns whether that succeeded."""
    # Where it does not succeed, as in an interpreter without that env, workers start more slowly.
    remember_registry()
    ends = socket.socketpair()
    with ends[0], ends[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a worker repeats those that matter
        for end in ends:
            end.setblocking(False)  # while one end writes, the other is not read
        hub, channel = map(Channel, ends)
        with contextlib.closing(Worker(channel, Host())) as worker:
            try:
                _step_in(worker, hub)
            except Exception:
                return False
    return True


def _step_in(worker: Worker, hub: Channel) -> None:

    def tell(message: object, descriptors: Sequence[int] = ()) -> None:
        hub.send(message, descriptors)
        for each in worker.channel.receive() or ():
            worker.handle(each)

    tell(control.Build(0, [0], ENV, b"", b"", "", [], "NextStep", True, columns=True))
    built: Any = next(message for message in hub.receive() or () if isinstance(message, control.Built))
    leaves = built.observation_leaves, built.action_leaves
    spaces = built.observation_spaces[0], built.action_space
    mapped = control.MapArena(1, *leaves, INFO_BYTES, *spaces, "same", 0, TRACE_BYTES)
    layout = mapped.layout()
    memory = allocate(layout)
    arena = Arena(layout, memory)
    arena.format(epoch=1)
    bell, rung = os.pipe()  # Python has no eventfd before 3.10
    os.set_blocking(rung, False)  # it is never read, and has room for all rings
    traced = replay_file.allocate(replay_file.layout_of(1, False, layout.actions, TRACE_BYTES))
    tell(mapped, control.ArenaDescriptors(memory, bell, bell, rung, rung, traced).sent)
    for descriptor in (memory, bell, rung, traced):
        os.close(descriptor)
    for column in arena.action_codes:
        column[:] = actions.DTYPES.index(np.dtype(np.int64))
    tell(control.Serve())
    arena.put_message(messages.pack(messages.Reset([SEED], options=codec.encode({}))))
    arena.post(OP_RESET)
    worker.stepper.serve_rows()
    for _ in range(STEPS):
        arena.post(OP_STEP)
        worker.stepper.serve_rows()
    tell(control.CloseEnvs())


ADOPTION_POLL_S = 0.0002
FORKED_AT_ONCE = 8  # workers per intermediate process; they wait for each other, and no other worker waits for them
OOM_SCORE_MAX = 1000
OOM_SCORE = 500  # more than the hub's, so that the kernel ends a worker first when memory is short
PR_SET_NAME = 15


def main(descriptor: int, hub: int, ready: Callable[[], None]) -> None:
    keep_freed_memory()
    warm_up()
    # From now on the zygote outlives the hub. If it was stopped, the end of the hub must continue it.
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    gc.collect()
    gc.freeze()  # a collection in a worker would write to pages that all of them share
    name_process(process_marks.ZYGOTE)
    handle_job_signals()
    ready()
    Zygote(Channel(socket.socket(fileno=descriptor)), hub).run()


class Zygote:
    """Forks workers; if the hub is killed, ends the processes that the workers started.

    A zygote of a session was forked from the session's first worker, once that had imported the code of its envs. The
    hub ends it with its session, and the kernel with the hub.
    """

    def __init__(self, channel: Channel, hub: int) -> None:
        self._channel = channel
        self._hub = hub
        self._mark = process_marks.Mark()
        self._of_session = False
        self._host: Host | None = None  # of a zygote of a session
        self._become: Callable[[int, list[int]], None] = self._become_worker
        self._guarded: set[int] = set()

    def run(self) -> None:
        try:
            while all(self._handle(message) for message in self._channel.receive() or ()):
                pass
        except ChannelClosed:
            if not self._of_session:
                process_marks.end_all(self._mark.hub, self._guarded)

    def fork_zygote(self, ends: list[int]) -> None:
        """Fork a zygote of a session, in the worker that this one became; ``ends`` as those of a worker."""
        gc.collect()
        gc.freeze()
        with blocked():  # in what a worker forks signals have their usual effects
            self._fork([ends], self._become_zygote)

    def fork_nothing(self) -> None:
        """Have libc end pools of threads, as it does before each fork."""
        with blocked():
            self._fork([], self._become)

    def fork_snapshot(self, end: int, worker: Worker) -> None:
        """Fork a snapshot of this worker, which has this end of a channel; raises ``Restored`` in what that forks."""
        worker.is_copied = True
        try:
            with blocked():
                self._fork([[end]], partial(self._become_snapshot, worker))
        finally:
            worker.is_copied = False

    def _handle(self, message: Any) -> bool:
        if isinstance(message, control.StartWorkers):
            for start in range(0, message.count, FORKED_AT_ONCE):
                count = min(FORKED_AT_ONCE, message.count - start)
                self._fork([self._channel.take_descriptors(3) for _ in range(count)], self._become)
        elif isinstance(message, control.Guard):
            self._guarded.update(message.pids)
            self._guarded.difference_update(message.ended)
        return not isinstance(message, control.Retire)

    def _fork(self, wanted: list[list[int]], become: Callable[[int, list[int]], None]) -> None:
        """Fork a process for each list of ends, in which ``become`` never returns."""
        drawn = random.getstate()
        try:
            middle = os.fork()
        except OSError as error:
            for ends in wanted:
                refuse(ends.pop(0), error)
        else:
            if not middle:
                self._be_middle(wanted, become, drawn)
            with contextlib.suppress(ChildProcessError):  # a worker's env may ignore SIGCHLD, or wait for any child
                os.waitpid(middle, 0)
        for ends in wanted:
            for end in ends:
                os.close(end)

    def _be_middle(self, wanted: list[list[int]], become: Callable[[int, list[int]], None], drawn: Any) -> None:
        try:
            parent = os.getpid()
            self._channel.close()
            while wanted:
                ends = wanted.pop(0)
                try:
                    grown = os.fork()
                except OSError as error:
                    refuse(ends.pop(0), error)
                else:
                    if not grown:
                        for end in itertools.chain.from_iterable(wanted):
                            os.close(end)
                        # Python has seeded it after each fork, as ``reseed`` does where nothing else has before.
                        random.setstate(drawn)
                        become(parent, ends)
                # The next workers must not inherit them: if another process holds a worker's end of the channel, the
                # hub does not see that the worker has ended.
                for end in ends:
                    os.close(end)
            os._exit(0)
        except Restored:
            raise
        except BaseException:
            try:
                traceback.print_exc()
            finally:
                os._exit(1)

    def _become_worker(self, parent: int, ends: list[int]) -> None:
        if not self._of_session:  # whose first worker has done so
            write_no_core_file()  # unless an env allows one
            set_oom_score(min(OOM_SCORE_MAX, oom_score() + OOM_SCORE))
        handle_job_signals()  # a zygote of a session lost its handlers when it was forked; ``Host`` has one of its own
        if self._host is not None:
            self._host.close()
        host = Host(ends[1], ends[2], self)
        unblock_job_signals()
        reseed(unless_seeded=self._of_session)
        process.main(self._join_hub(parent, ends[0], "envhub-worker", host.stacks), host)

    def _become_zygote(self, parent: int, ends: list[int]) -> None:
        for each in map(int, os.listdir("/proc/self/fd")):  # those of the worker, which its process alone may have
            if each > 2 and each not in ends:
                with contextlib.suppress(OSError):  # the one by which they were listed
                    os.close(each)
        handle_job_signals()
        self._host = Host(*ends[1:])
        self._of_session = True
        self._channel = self._join_hub(parent, ends[0], "envhub-imports")
        self.run()
        os._exit(0)

    def _become_snapshot(self, worker: Worker, parent: int, ends: list[int]) -> None:
        worker.leave_to_the_other()
        self._oom_score = oom_score()
        set_oom_score(OOM_SCORE_MAX)  # so that the kernel ends snapshots before workers
        self._of_session, self._become = True, partial(self._become_restored, worker)
        self._channel = self._join_hub(parent, ends[0], "envhub-snapshot")
        self.run()
        os._exit(0)

    def _become_restored(self, worker: Worker, parent: int, ends: list[int]) -> None:
        set_oom_score(self._oom_score)
        handle_job_signals()
        worker.host.renew(ends[1], ends[2])
        self._join_hub(parent, ends[0], "envhub-worker", worker.host.stacks, worker.channel)
        worker.renew()
        raise Restored

    def _join_hub(self, parent: int, end: int, name: str, stacks: int = -1, former: Channel | None = None) -> Channel:
        """Become a child of the hub, in a process that ``parent`` forked before it ends; returns its channel.

        A copy of a worker has the ``former`` channel, over another connection.
        """
        # A process group of its own, with all that its envs start, but not a session: Linux shares the CPUs among
        # sessions first (autogroups), and switching between 64 of them takes twice the time of switching within one.
        os.setpgid(0, 0)
        unmute_warnings()
        self._mark.renew(os.getpid())
        name_process(name)
        connection = socket.socket(fileno=end)
        channel = Channel(connection) if former is None else former.renew(connection)
        while os.getppid() == parent:
            time.sleep(ADOPTION_POLL_S)
        die_with_hub(self._hub)
        try:
            copied = resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()
            channel.send(control.Born(os.getpid(), stacks, copied))
        except ChannelClosed:
            os._exit(0)  # the hub no longer needs this process
        return channel


def refuse(descriptor: int, error: OSError) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosed):
        channel.send(control.NotBorn(str(error)))
    channel.close()


def name_process(name: str) -> None:
    prctl(PR_SET_NAME, name.encode())


def oom_score() -> int:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj") as file:
        return int(file.read())
    return 0


def set_oom_score(score: int) -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # which may be read-only
        file.write(str(score))
