"""One worker process: it hosts envs of one session and writes their results into the session's arena.

The zygote forks the worker, on Python 3.8 and later with NumPy, msgpack and Gymnasium. It parks in ``epoll_wait``. A
ring of a request bell means that rows are pending in the arena: for a step, a reset or a call. What the worker is told
of its own life comes over the control channel.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import sys
from functools import partial
from typing import Any, Callable

from envhub.arena.memory import Arena
from envhub.values import codec, spaces
from envhub.values.info_columns import COLUMNS_BYTES_MAX, Writer
from envhub_server.ipc import control
from envhub_server.ipc.channel import FORKED_STATUS, Channel, ChannelClosed
from envhub_server.ipc.replay_file import layout_of
from envhub_server.worker import copyable
from envhub_server.worker.builder import Builder
from envhub_server.worker.calls import EnvCalls
from envhub_server.worker.context import FailureReports, Host, HostedEnvs, ProgressWord, WorkerContext
from envhub_server.worker.name_lister import list_names
from envhub_server.worker.snapshot_row import SnapshotRow
from envhub_server.worker.stepper import Bells, Stepper, new_poller
from envhub_server.worker.trace_writer import TraceWriter

SPUN_MAX = 256  # requests that a spin ended with, one after another; then the channel is looked at, too

_CAME_BACK = (
    b"envhub: a process that an env forked came back from the call in which it was forked, and was ended: "
    b"its code has to end in os._exit, or be run by multiprocessing\n"
)


class Restored(BaseException):
    """Leads a process that a snapshot has forked from the depth of its fork back into the worker's loop."""


ARENA_MEMORY = ("/memfd:envhub-arena", "/memfd:envhub-trace")
UNFROZEN_TAKES = 64  # the collector looks at all objects again once in this number of snapshots


class Worker:
    """The loop of a worker, and the dispatch of the hub's messages."""

    is_copied = False  # True while a fork is a copy of this worker, and no process of an env

    def __init__(self, channel: Channel, host: Host) -> None:
        self.channel, self.host = channel, host
        self._takes = 0
        self._stale: list[Any] = []  # of other processes; to free them would unmap what is at their addresses now
        self._poller = new_poller()
        self._poller.register(channel.fileno(), select.EPOLLIN)
        self._envs, self._bells, self._progress = HostedEnvs(), Bells(self._poller), ProgressWord()
        self.reports = FailureReports(channel, self._envs)
        context = WorkerContext(channel, self._envs, host, self.reports, self._progress)
        self._calls = EnvCalls(context)
        self._builder = Builder(context, self._calls)
        self.stepper = Stepper(context, self._bells, self._builder, self._calls)
        # What executes a message; False ends the worker.
        self._handlers: dict[type, Callable[[Any], bool | None]] = {
            control.Build: self._build,
            control.BuildRest: self._builder.build_rest,
            control.Draw: self._calls.draw,
            control.ForgetRequests: self._forget_requests,
            control.Leave: self.stepper.leave,
            control.ListNames: partial(list_names, self),
            control.MapArena: self._map_arena,
            control.RepeatRequests: self._replay,
            control.Serve: self.stepper.serve,
            control.SetAttrRows: self._calls.set_again,
            control.TakeSlot: self._builder.take_slot,
            control.TakeSnapshot: self._take_snapshot,
            control.Try: partial(self._try, context),
        }

    def run(self) -> None:
        os.register_at_fork(after_in_child=partial(_detach_fork, self))
        is_over = False
        while not is_over:
            with contextlib.suppress(Restored):  # then this process is another one, with another channel and poller
                self._run()
                is_over = True

    def _run(self) -> None:
        channel, bells, stepper = self.channel.fileno(), self._bells, self.stepper
        try:
            while True:
                spun = 0
                while spun < SPUN_MAX and bells.spinner.spins and bells.spinner.spin(stepper.has_work):
                    stepper.serve_rows()
                    spun += 1
                for descriptor, _ in self._poller.poll(0 if spun == SPUN_MAX else None):
                    if descriptor in bells.waking:
                        if descriptor == bells.hub_bell:
                            bells.silence()
                        stepper.serve_rows()
                    elif descriptor == channel and not all(map(self.handle, self.channel.receive() or ())):
                        return
        except ChannelClosed as closed:
            if isinstance(closed.__cause__, OSError) and closed.__cause__.errno in (errno.EBADF, errno.ENOTSOCK):
                raise  # an env closed the channel; this worker ends like one that crashed
            # Otherwise the hub has ended, and no client can use the envs any more.

    def handle(self, message: Any) -> bool:
        """Execute a message of the hub; return True if the worker continues."""
        if isinstance(message, control.CloseEnvs):
            self._close_envs()
            return False
        # Else it was sent before the hub knew that this worker has left; the next one gets the same message.
        return bool(self.stepper.left) or self._handlers[type(message)](message) is not False

    def _build(self, build: control.Build) -> bool:
        self.stepper.episodes_left = build.episodes_max
        return self._builder.build(build)

    def _try(self, context: WorkerContext, wanted: control.Try) -> bool:
        from envhub_server.worker.trial import EnvTrial  # few workers need it

        return EnvTrial(context, self._builder).run(wanted)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _take_snapshot(self, wanted: control.TakeSnapshot) -> None:
        row = self._row
        if row is not None and not wanted.forks:
            self.channel.send(row.derived(wanted))
            return
        (end,) = self.channel.take_descriptors(1)
        problems = ["the envs of its process, which are one vector env"] if row is None else row.keep(wanted)
        if not problems and not wanted.unsafe:
            problems = _with_remedy(copyable.what_cannot_be_copied(self._own_descriptors() | {end}))
        if problems:
            os.close(end)
        else:
            self._prepare_for_fork()
            self.host.zygote.fork_snapshot(end, self)
            problems = [] if wanted.unsafe else _with_remedy([f"the thread {name}" for name in copyable.threads_left()])
        nothing = control.SnapshotTaken(wanted.serial, problems)
        self.channel.send(nothing if row is None else row.described(wanted.serial, problems))

    def _replay(self, wanted: control.RepeatRequests) -> None:
        row, (memory,) = self._row, self.channel.take_descriptors(1)
        assert row is not None
        try:
            with open(memory, "rb") as file:
                file.seek(0)
                why = row.replay(wanted.name, file.read())
        except Exception as error:
            why = f"cannot be asked the same again: {self.reports.one_line(error)}"
        if why:
            self.channel.send(control.NotRepeated(why))

    def _forget_requests(self, _: control.ForgetRequests) -> None:
        if (row := self._row) is not None:
            row.forget_requests()

    @property
    def _row(self) -> SnapshotRow | None:
        (row,) = self._envs.groups
        return row if isinstance(row, SnapshotRow) else None

    def _prepare_for_fork(self) -> None:
        copyable.pause_openmp()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # an env may have closed or replaced the stream
                stream.flush()
        self._takes += 1
        if self._takes % UNFROZEN_TAKES == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()  # a collection would write to pages that this process and its copies share

    def _own_descriptors(self) -> set[int]:
        """All descriptors of this process that are not the env's, without those of ``OWN_MEMORY``."""
        bells, host = self._bells.descriptors, self.host.descriptors
        return {self.channel.fileno(), self._poller.fileno(), *bells, *host}

    def leave_to_the_other(self) -> None:
        """Close what a copy of this process must not have: the hub would not see the end of the other one."""
        copyable.reopen_files(self._own_descriptors())
        self.host.close()
        self.channel.close()
        self._poller.close()
        self._bells.close()
        self._stale += [self.stepper._arena, self._envs.trace]
        for file in copyable.open_files(()):
            if file.path.startswith(ARENA_MEMORY):  # mmap has copies of its own
                os.close(file.number)

    def renew(self) -> None:
        """Be a worker of its own, which a snapshot has forked."""
        self._poller = new_poller()
        self._poller.register(self.channel.fileno(), select.EPOLLIN)
        self._bells.renew(self._poller)
        self._envs.set_trace(None)
        if (row := self._row) is not None:
            row.renew()
        self.stepper.renew()
        copyable.reopen_files(self._own_descriptors())
        self.is_copied = False

    def _map_arena(self, mapped: control.MapArena) -> bool:
        envs, count = self._envs, len(control.ArenaDescriptors._fields) - (not mapped.trace_bytes_max)  # it is the last
        descriptors = control.ArenaDescriptors(*self.channel.take_descriptors(count))
        self._bells.attach(descriptors)
        arena = Arena(mapped.layout(), descriptors.memory)
        os.close(descriptors.memory)
        arena.check()
        if not self._attach_rows(mapped, arena):
            return False
        self._progress.attach(arena, envs.groups[0].index)
        if mapped.trace_bytes_max:
            layout = layout_of(
                len(envs.indices), bool(envs.build.batch_workers), arena.layout.actions, mapped.trace_bytes_max
            )
            envs.set_trace(TraceWriter(layout, descriptors.trace, arena, envs.groups))
            os.close(descriptors.trace)
        self.stepper.attach(arena, mapped.spin_us, mapped.slow_ms)
        self._calls.attach(arena)
        self.channel.send(control.Mapped())
        return True

    def _attach_rows(self, mapped: control.MapArena, arena: Arena) -> bool:
        build, group = self._envs.build, self._envs.groups[0]
        row_bytes = COLUMNS_BYTES_MAX if build.allow_pickle else min(build.info_bytes_max, COLUMNS_BYTES_MAX)
        columns = Writer(row_bytes, lambda *each: self.channel.send(control.InfoTemplate(*each)))
        try:
            observed, acted = (
                spaces.build(codec.decode(blob, build.allow_pickle))
                for blob in (mapped.observation_space, mapped.action_space)
            )
            self._envs.spaces = observed, acted, mapped.observation_mode
            for group in self._envs.groups:
                self._envs.check_spaces(group.env)
                group.attach(arena, observed, acted, self.channel.send, columns if build.columns else None)
        except BaseException as error:
            self.reports.send(error, group.index, "factory_failed", arena.request.data[group.index])
            return False
        return True

    def _close_envs(self) -> None:
        for group in self._envs.groups or self.stepper.left:
            self.channel.send(control.Closing(list(group.indices)))
            try:
                group.env.close()
            except BaseException as error:
                self.stepper.report_closing(error, group)
        self.channel.send(control.Closing([]))

    def close(self) -> None:
        self._envs.set_trace(None)
        self._envs.groups.clear()
        self._poller.close()
        self._bells.close()

    @property
    def detached_by_fork(self) -> tuple[Any, ...]:
        """The objects whose methods call envs or import modules, and the loop's bells."""
        subjects = self._builder, self.stepper, self._calls
        traces = [] if self._envs.trace is None else [self._envs.trace]
        return (*self._envs.groups, *traces, self._envs, self._progress, *subjects, self._bells, self)


def main(channel: Channel, host: Host) -> None:
    Worker(channel, host).run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an env may have closed or replaced the stream
            stream.flush()
    os._exit(0)  # atexit handlers and destructors of simulators often hang or crash, and have nothing left to do


def _with_remedy(problems: list[str]) -> list[str]:
    return [*problems, "snapshots='unsafe' copies it all the same"] if problems else []


class _ForkedAway:
    """The class of a worker's objects in a process that an env forked: any access to them ends that process."""

    # Such a process is inside a call of the env. If it does not end there, it returns into a method of one of these
    # objects, which accesses the object first, whether the call returned or raised. The worker itself pays nothing.

    def __getattribute__(self, name: str) -> Any:
        with contextlib.suppress(OSError):
            os.write(2, _CAME_BACK)
        os._exit(FORKED_STATUS)


def _detach_fork(worker: Worker) -> None:
    if type(worker) is Worker and not worker.is_copied:  # otherwise this is a child of a child, or a copy
        for each in worker.detached_by_fork:
            object.__setattr__(each, "__class__", _ForkedAway)
