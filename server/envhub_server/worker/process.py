"""One worker process: it hosts envs of one session and writes their results into the session's arena.

The zygote forks the worker. The worker runs on Python 3.8 and later with NumPy, msgpack and Gymnasium.

The worker parks in ``epoll_wait``. A ring of a request bell means that rows are pending in the arena. Every other
request comes over the control channel. Each subject of a message is a class of its own: ``Builder``, ``ArenaMapper``,
``Stepper``, ``Rebuilder``, ``EnvCalls`` and ``Departure``. A worker that is told to list names has a ``NameLister`` and
hosts no env.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from functools import partial
from typing import Any, NoReturn, Union, cast

from envhub.arena.memory import Arena
from envhub.values import codec, spaces
from envhub.values.info_columns import Writer
from envhub_server.ipc import control
from envhub_server.ipc.channel import FORKED_STATUS, MESSAGE_BYTES_MAX, Channel, ChannelClosed
from envhub_server.ipc.replay_file import layout_of
from envhub_server.worker.builder import Builder, Rebuilder
from envhub_server.worker.calls import EnvCalls
from envhub_server.worker.context import (
    FailureReports,
    Host,
    HostedEnvs,
    ProgressWord,
    SessionSpaces,
    StackDumps,
    WorkerContext,
)
from envhub_server.worker.name_lister import NameLister
from envhub_server.worker.stepper import Bells, Departure, Stepper, WorkerPoller
from envhub_server.worker.trace_writer import TraceWriter


class ArenaMapper:
    """Maps the arena for one worker."""

    def __init__(self, context: WorkerContext, bells: Bells) -> None:
        self._channel, self._envs, _, self._reports, self._progress = context
        self._bells = bells

    def map(self, mapped: control.MapArena) -> Arena | None:
        """Map the arena whose descriptor came with the message, for all envs; None if an env does not fit.

        Raises ``ValueError``.
        """
        names = mapped.descriptor_names
        descriptors = control.ArenaDescriptors(**dict(zip(names, self._channel.take_descriptors(len(names)))))
        self._bells.attach(descriptors)
        arena = Arena(mapped.layout(), descriptors.memory)
        os.close(descriptors.memory)
        arena.check()
        if not self._attach(mapped, arena):
            return None
        self._progress.attach(arena, self._envs.groups[0].index)
        if mapped.trace_bytes_max:
            self._open_trace(arena, mapped.trace_bytes_max, descriptors.trace)
        return arena

    def _attach(self, mapped: control.MapArena, arena: Arena) -> bool:
        build, group = self._envs.build, self._envs.groups[0]
        columns = Writer(arena.layout.info_bytes, self._send_template) if build.columns else None
        info_bytes_max = MESSAGE_BYTES_MAX if build.allow_pickle else build.info_bytes_max
        checks = build.on_invalid != "pass", info_bytes_max
        try:
            of_session = [
                spaces.build(codec.decode(blob, build.allow_pickle))
                for blob in (mapped.observation_space, mapped.action_space)
            ]
            self._envs.spaces = SessionSpaces(of_session[0], of_session[1], mapped.observation_mode)
            for group in self._envs.groups:
                self._envs.spaces.check(group.env)
                group.attach(arena, of_session[0], of_session[1], self._channel.send, columns, *checks)
        except BaseException as error:
            self._reports.send(error, group.index, "factory_failed", arena.request.data[group.index])
            return False
        return True

    def _send_template(self, number: int, example: bytes) -> None:
        self._channel.send(control.InfoTemplate(number, example))

    def _open_trace(self, arena: Arena, bytes_max: int, descriptor: int) -> None:
        is_batch = bool(self._envs.build.shares)
        layout = layout_of(len(self._envs.indices), is_batch, arena.layout.actions, bytes_max)
        self._envs.set_trace(TraceWriter(layout, descriptor, arena, self._envs.groups))
        os.close(descriptor)


Message = Union[
    control.Build,
    control.BuildRest,
    control.CallRows,
    control.CloseEnvs,
    control.Leave,
    control.ListNames,
    control.MapArena,
    control.ResetRows,
    control.Serve,
    control.SetAttrRows,
    control.StepRows,
    control.TakePlace,
]

_CAME_BACK = (
    b"envhub: a process that an env forked came back from the call in which it was forked, and was ended: "
    b"its code has to end in os._exit, or be run by multiprocessing\n"
)


class Worker:
    """The loop of a worker, and the dispatch of the hub's messages."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel, self._host = channel, host
        self._poller = WorkerPoller()
        self._poller.register(channel.fileno())
        self._envs, self._bells, self._progress = HostedEnvs(), Bells(self._poller), ProgressWord()
        reports = FailureReports(channel, self._envs)
        self._names = NameLister(channel, reports)
        context = WorkerContext(channel, self._envs, host, reports, self._progress)
        self._builder, self._calls = Builder(context), EnvCalls(context)
        self._mapper = ArenaMapper(context, self._bells)
        self._rebuilder = Rebuilder(context, self._builder, self._calls)
        self._departure = Departure(channel, self._envs, self._bells)
        self._stepper = Stepper(context, self._bells, self._rebuilder, self._departure)
        self._spin_us = 0

    def run(self) -> None:
        """Serve until the hub says ``CloseEnvs`` or is gone."""
        os.register_at_fork(after_in_child=partial(_detach_fork, self))
        channel, bells, stepper = self._channel.fileno(), self._bells, self._stepper
        try:
            while True:
                while bells.spinner.spins and bells.spinner.spin(stepper.has_work):
                    stepper.serve_rows()
                for descriptor, _ in self._poller.wait():
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
        return all(self.handle(cast("Message", message)) for message in self._channel.receive() or ())

    def handle(self, message: Message) -> bool:
        """Execute a message of the hub; return True if the worker continues."""
        if isinstance(message, control.CloseEnvs):
            self._close_envs()
            return False
        if self._departure.left:
            return True  # sent before the hub knew that this worker has left; the next one gets the same message
        if isinstance(message, control.StepRows):
            self._stepper.step_out_of_band(message)
        elif isinstance(message, control.ResetRows):
            self._stepper.reset(message)
        elif isinstance(message, control.CallRows):
            self._calls.call(message)
        elif isinstance(message, control.SetAttrRows):
            set_attributes = self._calls.set_attribute if message.number else self._calls.set_again
            set_attributes(message)
        elif isinstance(message, control.Build):
            self._departure.count_episodes(message.episodes_max)
            return self._builder.build(message)
        elif isinstance(message, control.BuildRest):
            return self._builder.build_rest(message)
        elif isinstance(message, control.TakePlace):
            self._builder.take_place(message)
        elif isinstance(message, control.MapArena):
            return self._map_arena(message)
        elif isinstance(message, control.Serve):
            self._stepper.serve(message, self._spin_us)
        elif isinstance(message, control.Leave):
            self._departure.leave(message)
        elif isinstance(message, control.ListNames):
            self._names.list(message)
            return False
        else:
            _assert_never(message)
        return True

    def serve_rows(self) -> None:
        self._stepper.serve_rows()

    def _map_arena(self, order: control.MapArena) -> bool:
        arena = self._mapper.map(order)
        if arena is None:
            return False
        self._stepper.attach(arena)
        self._departure.attach(arena)
        self._spin_us = order.spin_us
        self._channel.send(control.Mapped())
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
        self._envs.clear()
        self._poller.close()
        self._bells.close()
        self._builder.close()

    @property
    def detached_by_fork(self) -> tuple[Any, ...]:
        """The objects whose methods call envs or import modules, and the loop's bells."""
        subjects = self._names, self._builder, self._mapper, self._stepper, self._rebuilder, self._calls
        return (
            *self._envs.groups,
            *([] if self._envs.trace is None else [self._envs.trace]),
            self._envs,
            self._progress,
            *subjects,
            self._departure,
            self._bells,
            self,
        )


def _assert_never(message: NoReturn) -> NoReturn:
    raise AssertionError(f"no worker executes a {type(message).__name__}")


def main(channel: Channel, stack_dumps: StackDumps) -> None:
    """Run the worker on this control channel; never returns."""
    Worker(channel, Host(stack_dumps)).run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an env may have closed or replaced the stream
            stream.flush()
    os._exit(0)  # atexit handlers and destructors of simulators often hang or crash, and have nothing left to do


class _ForkedAway:
    """The class of a worker's objects in a process that an env forked: any access to them ends that process.

    Such a process is inside a call of the env. If it does not end there, it returns into a method of one of these
    objects, which accesses the object first, whether the call returned or raised. The worker itself pays nothing.
    """

    def __getattribute__(self, name: str) -> Any:
        with contextlib.suppress(OSError):
            os.write(2, _CAME_BACK)
        os._exit(FORKED_STATUS)


def _detach_fork(worker: Worker) -> None:
    if type(worker) is Worker:  # otherwise this is a child of a child
        for each in worker.detached_by_fork:
            object.__setattr__(each, "__class__", _ForkedAway)
