"""Steps and resets the envs of a worker, stores their results in the arena, and wakes the driver."""

from __future__ import annotations

import contextlib
import os
import select
import time
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Mapping, Sequence

from envhub.arena.memory import (
    DRIVER_CLIENT,
    DRIVER_HUB,
    FRESH,
    ONGOING,
    OP_PART,
    OP_STEP,
    REPORT_PENDING,
    STATUS_RAISED,
    TURN_ONE,
    Arena,
)
from envhub.arena.spin import HAS_FENCE, RING, Spinner, fence
from envhub.protocol import messages
from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel, moved_up
from envhub_server.ipc.control import ArenaDescriptors
from envhub_server.worker.builder import Rebuilder
from envhub_server.worker.context import HostedEnvs, PendingFailure, WorkerContext
from envhub_server.worker.env_batch import RowGroup
from envhub_server.worker.row import DISABLED
from envhub_server.worker.row_places import NotFinite, as_slice
from envhub_server.worker.shared_process import SharedState, reseed


def new_poller() -> select.epoll:
    """An epoll object whose descriptor env code does not close by accident."""
    with contextlib.closing(select.epoll()) as made:
        return select.epoll.fromfd(moved_up(os.dup(made.fileno())))


RINGS_BYTES = 1 << 16  # more than a pipe can hold


class Bells:
    """The bells of the arena."""

    def __init__(self, poller: select.epoll) -> None:
        self._poller = poller
        self.waking: tuple[int, ...] = ()  # the hub's and the client's, which wake this worker
        self.hub_bell = -1  # the hub's; -1 before there is an arena
        self.serving = False  # whether the rows in the arena are this worker's; only then the bells are watched
        self.spinner = Spinner(0, time.perf_counter_ns)  # spins before the worker parks; never before the worker serves
        self._of_drivers: dict[int, int] = {}

    def attach(self, descriptors: ArenaDescriptors) -> None:
        self.hub_bell = descriptors.hub_bell
        self.waking = descriptors.hub_bell, descriptors.client_bell
        self._of_drivers = {DRIVER_HUB: descriptors.hub_done_bell, DRIVER_CLIENT: descriptors.client_done_bell}

    def watch(self, spin_us: int) -> None:
        hub_bell, client_bell = self.waking
        self._poller.register(hub_bell, select.EPOLLIN)
        self._poller.register(client_bell, select.EPOLLIN | select.EPOLLET)
        self.spinner, self.serving = Spinner(spin_us, time.perf_counter_ns), True

    def unwatch(self) -> None:
        for bell in self.waking:
            with contextlib.suppress(OSError):  # they are not registered before the worker serves
                self._poller.unregister(bell)
        self.spinner, self.serving = Spinner(0, time.perf_counter_ns), False

    def silence(self) -> None:
        try:
            os.read(self.hub_bell, RINGS_BYTES)
        except BlockingIOError:
            pass  # a process that an env forked has read them

    def ring(self, driver: int) -> None:
        try:
            os.write(self._of_drivers.get(driver, self._of_drivers[DRIVER_HUB]), RING)
        except BlockingIOError:
            pass  # its owner has not read it

    def close(self) -> None:
        for bell in (*self.waking, *self._of_drivers.values()):
            os.close(bell)


class Departure:
    """Decides when a worker leaves its rows."""

    def __init__(self, channel: Channel, envs: HostedEnvs, bells: Bells) -> None:
        self._channel, self._envs, self._bells = channel, envs, bells
        # Whether a step may be the last before something is due: ``note_step`` has to follow each one.
        self.awaited = False
        self.left: list[RowGroup] = []  # the groups that another worker serves now
        self._episodes_left = 0  # until EpisodesDone is sent; 0 if the hub does not need it
        self._leaving = self._cutting = False

    def attach(self, arena: Arena) -> None:
        self._arena = arena

    def count_episodes(self, episodes_max: int) -> None:
        self._episodes_left = episodes_max
        self._await()

    def _await(self) -> None:
        self.awaited = self._leaving or self._episodes_left > 0

    def leave(self, leave: control.Leave) -> None:
        self._leaving, self._cutting = True, leave.cut
        self._await()
        self.leave_between_episodes()

    def note_step(self, groups: Sequence[RowGroup]) -> None:
        """Send the hub ``EpisodesDone`` once the envs have reached their number of episodes, and leave if due."""
        if self._episodes_left:
            ended = self._arena.terminations | self._arena.truncations
            self._episodes_left -= sum(int(ended[index]) for group in groups for index in group.indices)
            if self._episodes_left <= 0:
                self._episodes_left = 0
                self._channel.send(control.EpisodesDone())
                self._await()
        self.leave_between_episodes()

    def leave_between_episodes(self) -> None:
        if not self._leaving or not self._bells.serving:
            return  # a result that is written into an arena before its rows have moved there is lost
        needs_reset, indices = self._arena.needs_reset.data, self._envs.indices
        ongoing = [index for index in indices if needs_reset[index] == ONGOING]
        reported = all(needs_reset[index] != REPORT_PENDING for index in indices)
        if reported and (self._cutting or not ongoing):
            # The first reset of a new vector env is one of all its rows; with DISABLED its program resets some.
            has_batch = any(len(group.indices) > 1 for group in self._envs.groups)
            if has_batch and self._envs.build.autoreset_mode == DISABLED:
                ongoing = [*indices]
            for index in indices:
                needs_reset[index] = REPORT_PENDING if index in ongoing else FRESH
            self._bells.unwatch()
            self.left, self._envs.groups, self._leaving = self._envs.groups, [], False
            self._await()
            self._channel.send(control.Left())


LOOK_FIRST = 8  # the number of batches before the first look for shared state that envs have changed
NONE_OUT_OF_BAND: Mapping[int, bytes] = MappingProxyType({})


class Stepper:
    """Serves the rows of one worker."""

    def __init__(self, context: WorkerContext, bells: Bells, rebuilder: Rebuilder, departure: Departure) -> None:
        self._channel, self._envs, self._host, self._reports, self._progress = context
        self._bells, self._rebuilder, self._departure = bells, rebuilder, departure
        self._reseeded = False
        self._batches, self._look_at = 0, LOOK_FIRST
        self._shared: SharedState | None = None  # None once the hub knows of a change

    def attach(self, arena: Arena, spin_us: int) -> None:
        self._arena, self._spin_us = arena, spin_us
        self._request: Any = arena.request.data
        self._done: Any = arena.done.data
        self._op = arena.op.data
        self._status = arena.status.data
        mine = as_slice(self._envs.indices)
        self._my_request, self._my_done = self._request[mine], self._done[mine]

    def serve(self, serve: control.Serve) -> None:
        failure = None if serve.failure is None else PendingFailure(serve.failure)
        seeds, objects = dict(zip(self._envs.indices, serve.seeds)), dict(zip(self._envs.indices, serve.objects))
        for group in self._envs.groups:
            group.take_place(seeds, failure, serve.info, objects)
        self._reseed(seeds)
        self._progress.resume()
        self._bells.watch(self._spin_us)
        if len(self._envs.groups) > 1:
            self._shared = SharedState()
        self.serve_rows()  # rows may have been posted, and rung for, before
        self._departure.leave_between_episodes()

    def _reseed(self, seeds: Mapping[int, int | None]) -> None:
        """Seed generators that no env has seeded, by an env's first seed, where those of its program are not known."""
        build, seeded = self._envs.build, [row for row, seed in seeds.items() if seed is not None]
        if self._reseeded or build.generators or not seeded:
            return
        self._reseeded = True
        reseed([abs(seeds[seeded[0]] or 0)] * 2, build.row_offset + seeded[0], unless_seeded=True)
        if self._shared is not None:
            self._shared = SharedState()

    def has_work(self) -> bool:
        return bool(self._my_request != self._my_done and self._posted())

    def _posted(self) -> list[RowGroup]:
        request, done, op = self._request, self._done, self._op
        groups = []
        for group in self._envs.groups:  # a comprehension would be one more call
            index = group.index
            if request[index] != done[index] and op[index] in (OP_STEP, OP_PART) and group.posted:
                groups.append(group)
        return groups

    def serve_rows(self) -> None:
        if posted := self._posted():
            self._step(posted)

    def step_out_of_band(self, step: control.StepRows) -> None:
        out_of_band = dict(messages.unpack_rows(step.out_of_band, self._arena.layout.rows))

        def run(group: RowGroup) -> None:
            group.step(codec.decode(out_of_band[group.index], self._envs.allow_pickle))

        # The hub completed the other rows before this worker served.
        pending = [group for group in self._envs.groups if self._request[group.index] != self._done[group.index]]
        self._step(pending, run, out_of_band)

    def _step(
        self,
        groups: list[RowGroup],
        run: Callable[[RowGroup], None] | None = None,
        out_of_band: Mapping[int, bytes] = NONE_OUT_OF_BAND,
    ) -> None:
        progress, rung = self._progress, 0
        if self._envs.trace is not None:
            self._envs.trace.step(groups, out_of_band)
        for group in groups:
            self._finish(group, group.step if run is None else partial(run, group), is_step=True)
            if self._op[group.index] == OP_PART:
                rung += 1
                self._bells.ring(self._arena.driver)
        progress.words[progress.at] = progress.turn
        if not rung or rung < len(groups):
            self._ring_at_end()
        self._batches += 1
        if self._batches == self._look_at:  # once, the hub is told of shared state that the envs have changed
            self._look_at *= 4
            if self._shared is not None and (what := self._shared.changed()):
                self._shared = None
                self._channel.send(control.SharedChanged(what))
        if self._rebuilder.pending:
            self._rebuilder.rebuild()
        if self._departure.awaited:
            self._departure.note_step(groups)

    def _finish(self, group: RowGroup, run: Callable[[], None], is_step: bool = False) -> None:
        """Run a group's step or reset, which stores its status; store ``done`` last."""
        progress = self._progress
        progress.turn += TURN_ONE  # ``ProgressWord.begin`` written out: this runs for every row, and a call costs more
        progress.words[progress.at] = progress.turn | group.turn
        try:
            run()
        except BaseException as error:
            self._fail(group, error, is_step)
        self._done[group.place] = self._request[group.place]

    def _fail(self, group: RowGroup, error: BaseException, is_step: bool) -> None:
        build = self._envs.build
        policy = build.on_invalid if isinstance(error, NotFinite) else build.on_exception
        if is_step and not isinstance(error, PendingFailure) and policy == "truncate":
            self._rebuilder.truncate(group, error, self._request[group.index])
            return
        group.repeat_last()
        for index in group.indices:
            # Sent after ``repeat_last``, because an info that comes later would replace the failure in the hub.
            self._reports.send(error, index, "env_raised", self._request[index])
            self._status[index] = STATUS_RAISED

    def _ring_at_end(self) -> None:
        """Wake the driver, unless another worker has pending rows: the last worker sees that all rows are done."""
        if HAS_FENCE:
            fence()
            if self._request != self._done:
                return
        self._bells.ring(self._arena.driver)

    def reset(self, reset: control.ResetRows) -> None:
        seeds = dict(zip(reset.rows, reset.seeds))
        each = dict(zip(reset.rows, reset.options_each))
        self._reseed(seeds)

        def options_of(row: int) -> Any:
            # Decoded for each env, because it may keep or change its options.
            options = each.get(row, reset.options)
            return codec.decode(options, self._envs.allow_pickle) if options else None

        for group in self._envs.groups:
            self._finish(group, partial(group.reset_by, seeds, options_of))
        self._ring_at_end()

    def report_closing(self, error: BaseException, group: RowGroup) -> None:
        number = self._request[group.index] if hasattr(self, "_arena") else 0
        self._reports.send(error, group.index, "env_raised", number)
