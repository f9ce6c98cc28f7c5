"""One worker process: it hosts envs of one session and writes their results into the session's arena.

The zygote forks the worker, on Python 3.8 and later with NumPy, msgpack and Gymnasium. It parks in ``epoll_wait``. A
ring of a request bell means that rows are pending in the arena. Every other request, such as a reset, or a step whose
actions travel out of band, comes over the control channel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from functools import partial
from typing import Any, Callable

from envhub.arena.memory import Arena
from envhub.values import codec, spaces
from envhub.values.info_columns import Writer
from envhub_server.ipc import control
from envhub_server.ipc.channel import FORKED_STATUS, MESSAGE_BYTES_MAX, Channel, ChannelClosed
from envhub_server.ipc.replay_file import layout_of
from envhub_server.worker.builder import Builder, Rebuilder
from envhub_server.worker.calls import EnvCalls
from envhub_server.worker.context import FailureReports, Host, HostedEnvs, ProgressWord, SessionSpaces, WorkerContext
from envhub_server.worker.name_lister import NameLister
from envhub_server.worker.stepper import Bells, Departure, Stepper, new_poller
from envhub_server.worker.trace_writer import TraceWriter

_CAME_BACK = (
    b"envhub: a process that an env forked came back from the call in which it was forked, and was ended: "
    b"its code has to end in os._exit, or be run by multiprocessing\n"
)


class Worker:
    """The loop of a worker, and the dispatch of the hub's messages."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel, self._host = channel, host
        self._poller = new_poller()
        self._poller.register(channel.fileno(), select.EPOLLIN)
        self._envs, self._bells, self._progress = HostedEnvs(), Bells(self._poller), ProgressWord()
        self._reports = FailureReports(channel, self._envs)
        self._names = NameLister(channel, self._reports)
        context = WorkerContext(channel, self._envs, host, self._reports, self._progress)
        self._builder, self._calls = Builder(context), EnvCalls(context)
        self._rebuilder = Rebuilder(context, self._builder, self._calls)
        self._departure = Departure(channel, self._envs, self._bells)
        self._stepper = Stepper(context, self._bells, self._rebuilder, self._departure)
        # What executes a message; False ends the worker.
        self._handlers: dict[type, Callable[[Any], bool | None]] = {
            control.Build: self._build,
            control.BuildRest: self._builder.build_rest,
            control.CallRows: self._calls.call,
            control.Leave: self._departure.leave,
            control.ListNames: self._names.list,
            control.MapArena: self._map_arena,
            control.ResetRows: self._stepper.reset,
            control.Serve: self._stepper.serve,
            control.SetAttrRows: self._calls.set_attribute,
            control.StepRows: self._stepper.step_out_of_band,
            control.TakePlace: self._builder.take_place,
        }

    def run(self) -> None:
        os.register_at_fork(after_in_child=partial(_detach_fork, self))
        channel, bells, stepper = self._channel.fileno(), self._bells, self._stepper
        try:
            while True:
                while bells.spinner.spins and bells.spinner.spin(stepper.has_work):
                    stepper.serve_rows()
                for descriptor, _ in self._poller.poll():
                    if descriptor in bells.waking:
                        if descriptor == bells.hub_bell:
                            bells.silence()
                        stepper.serve_rows()
                    elif descriptor == channel and not self._receive():
                        return
        except ChannelClosed as closed:
            if isinstance(closed.__cause__, OSError) and closed.__cause__.errno in (errno.EBADF, errno.ENOTSOCK):
                raise  # an env closed the channel; this worker ends like one that crashed
            # Otherwise the hub has ended, and no client can use the envs any more.

    def _receive(self) -> bool:
        return all(self.handle(message) for message in self._channel.receive() or ())

    def handle(self, message: Any) -> bool:
        """Execute a message of the hub; return True if the worker continues."""
        if isinstance(message, control.CloseEnvs):
            self._close_envs()
            return False
        # Else it was sent before the hub knew that this worker has left; the next one gets the same message.
        return bool(self._departure.left) or self._handlers[type(message)](message) is not False

    def _build(self, build: control.Build) -> bool:
        self._departure.count_episodes(build.episodes_max)
        return self._builder.build(build)

    def serve_rows(self) -> None:
        self._stepper.serve_rows()

    def _map_arena(self, mapped: control.MapArena) -> bool:
        envs, count = self._envs, len(control.ArenaDescriptors._fields) - (not mapped.trace_bytes_max)  # it is the last
        descriptors = control.ArenaDescriptors(*self._channel.take_descriptors(count))
        self._bells.attach(descriptors)
        arena = Arena(mapped.layout(), descriptors.memory)
        os.close(descriptors.memory)
        arena.check()
        if not self._attach_rows(mapped, arena):
            return False
        self._progress.attach(arena, envs.groups[0].index)
        if mapped.trace_bytes_max:
            layout = layout_of(len(envs.indices), bool(envs.build.shares), arena.layout.actions, mapped.trace_bytes_max)
            envs.set_trace(TraceWriter(layout, descriptors.trace, arena, envs.groups))
            os.close(descriptors.trace)
        self._stepper.attach(arena, mapped.spin_us)
        self._departure.attach(arena)
        self._channel.send(control.Mapped())
        return True

    def _attach_rows(self, mapped: control.MapArena, arena: Arena) -> bool:
        def send_template(number: int, example: bytes) -> None:
            self._channel.send(control.InfoTemplate(number, example))

        build, group = self._envs.build, self._envs.groups[0]
        columns = Writer(arena.layout.info_bytes, send_template) if build.columns else None
        info_bytes_max = MESSAGE_BYTES_MAX if build.allow_pickle else build.info_bytes_max
        try:
            observed, acted = (
                spaces.build(codec.decode(blob, build.allow_pickle))
                for blob in (mapped.observation_space, mapped.action_space)
            )
            self._envs.spaces = SessionSpaces(observed, acted, mapped.observation_mode)
            for group in self._envs.groups:
                self._envs.spaces.check(group.env)
                finite_only = build.on_invalid != "pass"
                group.attach(arena, observed, acted, self._channel.send, columns, finite_only, info_bytes_max)
        except BaseException as error:
            self._reports.send(error, group.index, "factory_failed", arena.request.data[group.index])
            return False
        return True

    def _close_envs(self) -> None:
        stacks = self._host.keep_stacks()
        for group in self._envs.groups or self._departure.left:
            self._channel.send(control.Closing(list(group.indices), stacks))
            try:
                group.env.close()
            except BaseException as error:
                self._stepper.report_closing(error, group)
        self._channel.send(control.Closing([]))

    def close(self) -> None:
        self._envs.set_trace(None)
        self._envs.groups.clear()
        self._poller.close()
        self._bells.close()
        self._builder.close()

    @property
    def detached_by_fork(self) -> tuple[Any, ...]:
        """The objects whose methods call envs or import modules, and the loop's bells."""
        subjects = self._names, self._builder, self._stepper, self._rebuilder, self._calls, self._departure
        traces = [] if self._envs.trace is None else [self._envs.trace]
        return (*self._envs.groups, *traces, self._envs, self._progress, *subjects, self._bells, self)


def main(channel: Channel, host: Host) -> None:
    Worker(channel, host).run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an env may have closed or replaced the stream
            stream.flush()
    os._exit(0)  # atexit handlers and destructors of simulators often hang or crash, and have nothing left to do


class _ForkedAway:
    """The class of a worker's objects in a process that an env forked: any access to them ends that process."""

    # Such a process is inside a call of the env. If it does not end there, it returns into a method of one of these
    # objects, which accesses the object first, whether the call returned or raised. The worker itself pays nothing.

    def __getattribute__(self, name: str) -> Any:
        with contextlib.suppress(OSError):
            os.write(2, _CAME_BACK)
        os._exit(FORKED_STATUS)


def _detach_fork(worker: Worker) -> None:
    if type(worker) is Worker:  # otherwise this is a child of a child
        for each in worker.detached_by_fork:
            object.__setattr__(each, "__class__", _ForkedAway)
