"""The zygote: a process that has imported what every worker needs, and forks a worker whenever the hub asks for one.

The hub executes it as a new program, so it holds none of the hub's state. It has one thread, so forking it is safe. Its
workers share the pages of what it imported. ``bootstrap.py`` starts it, on Python 3.8 and later.

An intermediate process forks a worker and then ends. So the worker becomes a child of the hub, which is a subreaper:
the hub gets the worker's exit status, and the end of the zygote does not end the worker.

A channel that ends without ``Retire`` means that the hub was killed. Then the kernel ends the workers, and the zygote
ends the processes that the workers had started.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import time
import traceback
import warnings
from typing import Any, Callable, Sequence

import numpy as np

from envhub.arena.memory import OP_RESET, OP_STEP, Arena, allocate
from envhub.process import handle_job_signals, keep_freed_memory, unblock_job_signals, write_no_core_file
from envhub.values import actions, codec
from envhub_server.ipc import control, process_marks, replay_file
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.ipc.process_marks import PR_SET_PDEATHSIG, die_with_hub, prctl, unmute_warnings
from envhub_server.worker import process
from envhub_server.worker.context import Host
from envhub_server.worker.env_sources import remember_registry, remember_variables
from envhub_server.worker.process import Worker
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
    remember_variables()
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a worker repeats those that matter
        ends = socket.socketpair()
        for end in ends:
            stack.callback(end.close)
            end.setblocking(False)  # while one end writes, the other is not read
        hub, channel = map(Channel, ends)
        worker = Worker(channel, Host())
        stack.callback(worker.close)
        try:
            _step_in(worker, hub, channel)
        except Exception:
            return False
    return True


def _step_in(worker: Worker, hub: Channel, channel: Channel) -> None:

    def tell(message: object, descriptors: Sequence[int] = ()) -> None:
        hub.send(message, descriptors)
        for each in channel.receive() or ():
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
    heard, rung = os.pipe()  # Python has no eventfd before 3.10
    os.set_blocking(rung, False)  # it is never read, and has room for all rings
    traced = replay_file.allocate(replay_file.layout_of(1, False, layout.actions, TRACE_BYTES))
    tell(mapped, control.ArenaDescriptors(memory, heard, heard, rung, rung, traced).sent)
    for descriptor in (memory, heard, rung, traced):
        os.close(descriptor)
    for column in arena.action_codes:
        column[:] = actions.DTYPES.index(np.dtype(np.int64))
    tell(control.Serve())
    arena.post(OP_RESET)
    tell(control.ResetRows([0], [SEED], codec.encode({})))
    for _ in range(STEPS):
        arena.post(OP_STEP)
        worker.serve_rows()
    tell(control.CloseEnvs())


ADOPTION_POLL_S = 0.0002
FORKED_AT_ONCE = 8  # workers per intermediate process; they wait for each other, and no other worker waits for them
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
    """Forks workers; if the hub is killed, ends the processes that the workers started."""

    def __init__(self, channel: Channel, hub: int) -> None:
        self._channel = channel
        self._hub = hub
        self._mark = process_marks.Mark()
        self._guarded: set[int] = set()

    def run(self) -> None:
        try:
            while all(self._handle(message) for message in self._channel.receive() or ()):
                pass
        except ChannelClosed:
            process_marks.end_all(self._mark.hub, self._guarded)

    def _handle(self, message: Any) -> bool:
        if isinstance(message, control.StartWorkers):
            for start in range(0, message.count, FORKED_AT_ONCE):
                count = min(FORKED_AT_ONCE, message.count - start)
                self._fork_workers([self._channel.take_descriptors(3) for _ in range(count)])
        elif isinstance(message, control.Guard):
            self._guarded.update(message.pids)
        elif isinstance(message, control.Reaped):
            self._guarded.discard(message.pid)
        return not isinstance(message, control.Retire)

    def _fork_workers(self, wanted: list[list[int]]) -> None:
        try:
            middle = os.fork()
        except OSError as error:
            for ends in wanted:
                refuse(ends.pop(0), error)
        else:
            if not middle:
                self._be_middle(wanted)
            os.waitpid(middle, 0)
        for ends in wanted:
            for end in ends:
                os.close(end)

    def _be_middle(self, wanted: list[list[int]]) -> None:
        try:
            parent = os.getpid()
            self._channel.close()
            yield_memory()
            while wanted:
                ends = wanted.pop(0)
                try:
                    grown = os.fork()
                except OSError as error:
                    refuse(ends.pop(0), error)
                else:
                    if not grown:
                        self._become_worker(parent, ends, wanted)
                # The next workers must not inherit them: if another process holds a worker's end of the channel, the
                # hub does not see that the worker has ended.
                for end in ends:
                    os.close(end)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become_worker(self, parent: int, ends: list[int], others: list[list[int]]) -> None:
        """Become a worker of the hub, in a process that ``parent`` forked before it ends; never returns."""
        for end in itertools.chain.from_iterable(others):
            os.close(end)
        # A process group of its own, with all that its envs start, but not a session: Linux shares the CPUs among
        # sessions first (autogroups), and switching between 64 of them takes twice the time of switching within one.
        os.setpgid(0, 0)
        unmute_warnings()
        self._mark.renew(os.getpid())
        name_process("envhub-worker")
        host = Host(*ends[1:])
        unblock_job_signals()
        reseed()
        channel = Channel(socket.socket(fileno=ends[0]))
        while os.getppid() == parent:
            time.sleep(ADOPTION_POLL_S)
        die_with_hub(self._hub)
        try:
            channel.send(control.Born(os.getpid()))
        except ChannelClosed:
            os._exit(0)  # the hub no longer needs this worker
        process.main(channel, host)


def refuse(descriptor: int, error: OSError) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosed):
        channel.send(control.NotBorn(str(error)))
    channel.close()


def name_process(name: str) -> None:
    prctl(PR_SET_NAME, name.encode())


def yield_memory() -> None:
    """Let the kernel end this process first when memory is short, and write no core file unless an env allows one."""
    write_no_core_file()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:  # which may be read-only
        score = min(1000, int(file.read()) + OOM_SCORE)
        file.seek(0)
        file.write(str(score))
