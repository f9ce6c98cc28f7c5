"""Steps and resets the envs of a worker, stores their results in the arena, and wakes the driver."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from functools import partial
from time import monotonic_ns
from typing import Any, Callable, Mapping, Sequence

from envhub.arena.layout import ENV_STEPS_TIMED
from envhub.arena.memory import (
    CALL_ONE,
    CALLS,
    DRIVER_CLIENT,
    DRIVER_HUB,
    FRESH,
    ONGOING,
    OP_CALL,
    OP_OUT_OF_BAND,
    OP_PART,
    OP_RESET,
    OP_STEP,
    REPORT_PENDING,
    STATUS_RAISED,
    Arena,
    StepTimes,
)
from envhub.arena.spin import HAS_FENCE, RING, Spinner, fence
from envhub.protocol import messages
from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.ipc.channel import moved_up
from envhub_server.ipc.control import ArenaDescriptors
from envhub_server.worker.builder import Builder
from envhub_server.worker.calls import EnvCalls
from envhub_server.worker.context import PendingFailure, WorkerContext
from envhub_server.worker.env_batch import RowGroup
from envhub_server.worker.row import DISABLED
from envhub_server.worker.row_memory import NotFinite, as_slice
from envhub_server.worker.shared_process import changed_since, reseed, shared_state
from envhub_server.worker.snapshot_row import SnapshotRow


def new_poller() -> select.epoll:
    """An epoll object whose descriptor env code does not close by accident."""
    with contextlib.closing(select.epoll()) as made:
        return select.epoll.fromfd(moved_up(os.dup(made.fileno())))


RINGS_BYTES = 1 << 16  # more than a pipe can hold


class Bells:
    """The bells of the arena."""

    waking: tuple[int, ...] = ()  # the hub's and the client's, which wake this worker
    hub_bell = -1  # the hub's; -1 before there is an arena

    def __init__(self, poller: select.epoll) -> None:
        self._of_drivers: dict[int, int] = {}
        self.renew(poller)

    def renew(self, poller: select.epoll) -> None:
        """Watch none of the bells; also in a copy of the process, which has this poller."""
        self._poller = poller
        self.serving = False  # whether the rows in the arena are this worker's; only then the bells are watched
        self.spinner = Spinner(0, time.perf_counter_ns)  # spins before the worker parks; never before the worker serves

    @property
    def descriptors(self) -> tuple[int, ...]:
        return *self.waking, *self._of_drivers.values()

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
        for bell in self.descriptors:
            os.close(bell)
        self.waking, self._of_drivers = (), {}


LOOK_FIRST = 8  # the number of batches before the first look for shared state that envs have changed
SLOW_TOLD_NS = 100_000_000  # between two messages


class Stepper:
    """Serves the rows of one worker, and decides when it leaves them."""

    def __init__(self, context: WorkerContext, bells: Bells, builder: Builder, calls: EnvCalls) -> None:
        self._channel, self._envs, self._host, self._reports, self._progress = context
        self._bells, self._builder, self._calls = bells, builder, calls
        self.left: list[RowGroup] = []  # the groups that another worker serves now
        # While one of these is not false, ``_end_step`` has to follow each step.
        self.episodes_left = 0  # until EpisodesDone is sent; 0 if the hub does not need it
        self._leaving = self._cutting = False
        # By its op, what carries out a request whose arguments are the arena's message; it returns False while the
        # driver has not posted all of its rows.
        self._verbs = {OP_OUT_OF_BAND: self._step_out_of_band, OP_RESET: self._reset}
        self._verbs.update(dict.fromkeys(CALLS, self._call))
        self._last: tuple[Any, bytes] = (None, b"")  # the last message, of which ``_message`` was made
        self._message: Any = None
        self._incomplete = b""  # words of a request whose last ones the driver has not stored yet
        self._reseeded = False
        self._is_copy = False  # of a process that has served these rows; until this one serves them
        self._batches, self._look_at = 0, LOOK_FIRST
        self._shared: dict[str, int] | None = None  # None once the hub knows of a change
        self._run_group: Callable[..., None] = self._finish_timed  # in the next step
        self._env_took_ns: dict[int, int] = {}  # by index of its group, if each is timed; empty between two requests
        self._tell_slow_at_ns = 0

    def attach(self, arena: Arena, spin_us: int, slow_ms: int) -> None:
        self._arena, self._spin_us = arena, spin_us
        self._slow_ns = slow_ms * 1_000_000 or sys.maxsize
        self._times = StepTimes(arena.worker_ns[self._envs.groups[0].index].data)
        self._request: Any = arena.request.data
        self._done: Any = arena.done.data
        self._op = arena.op.data
        self._status = arena.status.data
        self._rows = self._envs.indices
        mine = as_slice(self._rows)
        self._my_request, self._my_done = self._request[mine], self._done[mine]

    def renew(self) -> None:
        """Go on in a copy of the process, whose generators are as they are."""
        self._incomplete, self._is_copy, self._batches = b"", True, 0

    def serve(self, serve: control.Serve) -> None:
        failure = None if serve.failure is None else PendingFailure(serve.failure)
        seeds, objects = dict(zip(self._envs.indices, serve.seeds)), dict(zip(self._envs.indices, serve.objects))
        for group in self._envs.groups:
            group.take_over(seeds, failure, serve.info, objects)
        if not self._is_copy:
            self._reseed(seeds)
        self._is_copy = False
        self._progress.resume()
        self._progress.rest()
        self._bells.watch(self._spin_us)
        if len(self._envs.groups) > 1:
            self._shared = shared_state()
        self.serve_rows()  # rows may have been posted, and rung for, before
        self._leave_between_episodes()

    def _reseed(self, seeds: Mapping[int, int | None]) -> None:
        """Seed generators that no env has seeded, by an env's first seed, where those of its program are not known."""
        build = self._envs.build
        if self._reseeded or build.generators:
            return
        if not (seeded := [row for row, seed in seeds.items() if seed is not None]):
            return
        self._reseeded = True
        reseed([abs(seeds[seeded[0]] or 0)] * 2, build.row_offset + seeded[0], unless_seeded=True)
        if self._shared is not None:
            self._shared = shared_state()

    def has_work(self) -> bool:
        if self._my_request == self._my_done:
            return False
        return bool(self._posted()) or self._incomplete != self._my_request.tobytes()

    def _posted(self, ops: tuple[int, ...] = (OP_STEP, OP_PART)) -> list[RowGroup]:
        request, done, op = self._request, self._done, self._op
        groups = []
        for group in self._envs.groups:  # a comprehension would be one more call
            index = group.index
            if request[index] != done[index] and op[index] in ops and group.posted:
                groups.append(group)
        return groups

    def serve_rows(self) -> None:
        if not self._bells.serving:
            return  # the rows were left just now, and are another worker's
        if posted := self._posted():
            self._step(posted)
        elif self._my_request != self._my_done and self._incomplete != (words := self._my_request.tobytes()):
            pending = []
            for row in self._rows:
                if self._request[row] != self._done[row]:
                    pending.append(row)
            carry_out = self._verbs.get(self._op[pending[0]]) if pending else None
            try:
                is_posted = carry_out is not None and carry_out(pending)
            except codec.DecodeError as error:  # of the message, which only a client can have written
                is_posted = self._fail_rows(pending, error)
            if not is_posted:
                self._incomplete = words  # read before the rows were: words that have come since then are looked at

    # --- requests with a message --------------------------------------------------------------------------------------

    def _read(self, kind: Any) -> Any:
        """The message, of this kind; raises ``DecodeError``."""
        # Programs repeat their requests, and a comparison takes less time than to decode the same again.
        if (last := (kind, self._arena.message())) != self._last:
            # Without limits of a header: what is wrong here harms this session alone.
            self._last, self._message = (kind, b""), messages.unpack(*last, limits=None)
            self._last = last
        return self._message

    def _fail_rows(self, rows: Sequence[int], error: BaseException) -> bool:
        for row in rows:
            self._reports.send(error, row, "env_raised", self._request[row], is_call=True)
            self._status[row], self._done[row] = STATUS_RAISED, self._request[row]
        self._ring_at_end()
        return True

    def _step_out_of_band(self, rows: list[int]) -> bool:
        if not (groups := self._posted((OP_OUT_OF_BAND,))):
            return False
        out_of_band = dict(messages.unpack_rows(self._arena.message(), self._arena.layout.rows))
        # The hub may have completed other rows before this worker served.
        self._step(groups, out_of_band)
        return True

    def _step_by(self, group: RowGroup, out_of_band: Mapping[int, bytes]) -> None:
        group.step(codec.decode(out_of_band[group.index], self._envs.allow_pickle))

    def _call(self, rows: list[int]) -> bool:
        is_call, began_ns = self._op[rows[0]] == OP_CALL, monotonic_ns()
        message = self._read(messages.Call if is_call else messages.SetAttr)
        if rows != ([row for row in self._rows if row in message.rows] if message.rows else self._rows):
            return False
        if is_call:
            self._calls.call(message, rows)
        else:
            self._calls.set_attribute(message, rows)
        self._ring_at_end()
        self._progress.rest()
        self._tell_slow(f"{'call' if is_call else 'set'} {message.name}", rows, monotonic_ns() - began_ns)
        return True

    def _reset(self, rows: list[int]) -> bool:
        if rows != self._rows:
            return False
        reset = self._read(messages.Reset)
        begun, request, began_ns = self._arena.begun.data, self._request, monotonic_ns()
        for row in rows:
            begun[row] = request[row]
        given, each = dict(enumerate(reset.seeds)), dict(enumerate(reset.options_each))
        mask = dict(enumerate(reset.mask))
        seeds = {row: given.get(row) for row in rows if mask.get(row, not mask)}
        for row, seed in seeds.items():
            if seed is not None:
                self._arena.keep_seed(row, seed)
        self._reseed(seeds)

        def options_of(row: int) -> Any:
            # Decoded for each env, because it may keep or change its options.
            options = each.get(row, reset.options)
            return codec.decode(options, self._envs.allow_pickle) if options else None

        for group in self._envs.groups:
            if reset.snapshot and isinstance(group, SnapshotRow):
                self._finish_timed(group, partial(group.restore_by, reset.snapshot, seeds))
            else:
                self._finish_timed(group, partial(group.reset_by, seeds, options_of))
        self._ring_at_end()
        self._progress.rest()
        self._tell_slow("reset", rows, monotonic_ns() - began_ns)
        return True

    # --- times --------------------------------------------------------------------------------------------------------

    def _finish_timed(self, group: RowGroup, run: Callable[[], None], is_step: bool = False) -> None:
        began_ns = self._progress.since[self._progress.at] = monotonic_ns()
        self._finish(group, run, is_step)
        self._env_took_ns[group.index] = monotonic_ns() - began_ns

    def _keep_times(self, groups: Sequence[RowGroup], took_ns: int) -> None:
        """Keep the times of a step whose envs were timed, tell of a slow one, and have the next one's timed if due."""
        times, each = self._times, self._env_took_ns
        for row, env_ns in each.items():
            self._arena.env_ns[row, times.kept % ENV_STEPS_TIMED] = env_ns
        if each:
            times.keep(self._batches - 1, took_ns)
        self._tell_slow("step", [row for group in groups for row in group.indices], took_ns)
        # After a slow one, which may be due to one env.
        is_due = self._batches >= times.next_step or took_ns >= self._slow_ns
        self._run_group = self._finish_timed if is_due else self._finish

    def _tell_slow(self, verb: str, rows: Sequence[int], took_ns: int) -> None:
        """Tell the hub if this was slow, and which envs were, if each was timed."""
        now_ns, each = monotonic_ns(), self._env_took_ns
        if took_ns >= self._slow_ns and now_ns >= self._tell_slow_at_ns:
            self._tell_slow_at_ns = now_ns + SLOW_TOLD_NS
            slowest = {index for index, env_ns in each.items() if 2 * env_ns >= max(each.values())}
            timed = [row for group in self._envs.groups if group.index in slowest for row in group.indices]
            self._channel.send(control.Slow(verb, timed or [*rows], took_ns))
        each.clear()

    # --- steps --------------------------------------------------------------------------------------------------------

    def _step(self, groups: list[RowGroup], out_of_band: Mapping[int, bytes] | None = None) -> None:
        progress, rung, run_group = self._progress, 0, self._run_group
        since, at = progress.since, progress.at
        since[at] = began_ns = monotonic_ns()
        if self._envs.trace is not None:
            self._envs.trace.step(groups, out_of_band or {})
        for group in groups:
            step = group.step if out_of_band is None else partial(self._step_by, group, out_of_band)
            run_group(group, step, is_step=True)
            if self._op[group.index] == OP_PART:
                rung += 1
                self._bells.ring(self._arena.driver)
        took_ns = monotonic_ns() - began_ns
        progress.words[at] = progress.word
        if not rung or rung < len(groups):
            self._ring_at_end()
        since[at] = 0
        self._batches += 1
        if self._batches >= self._times.next_step or took_ns >= self._slow_ns:
            self._keep_times(groups, took_ns)
        if self._batches == self._look_at:  # once, the hub is told of shared state that the envs have changed
            self._look_at *= 4
            if self._shared is not None and (what := changed_since(self._shared)):
                self._shared = None
                self._channel.send(control.SharedChanged(what))
        if self._builder.pending:
            self._builder.rebuild()
        if self._leaving or self.episodes_left:
            self._end_step(groups)

    def _finish(self, group: RowGroup, run: Callable[[], None], is_step: bool = False) -> None:
        """Run a group's step or reset, which stores its status; store ``done`` last."""
        progress = self._progress
        progress.word += CALL_ONE  # ``ProgressWord.begin`` written out: this runs for every row, and a call costs more
        progress.words[progress.at] = progress.word | group.bits
        try:
            run()
        except BaseException as error:
            self._fail(group, error, is_step)
        self._done[group.arena_index] = self._request[group.arena_index]

    def _fail(self, group: RowGroup, error: BaseException, is_step: bool) -> None:
        build = self._envs.build
        policy = build.on_invalid if isinstance(error, NotFinite) else build.on_exception
        if is_step and not isinstance(error, PendingFailure) and policy == "truncate":
            self._builder.truncate(group, error, self._request[group.index])
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

    def report_closing(self, error: BaseException, group: RowGroup) -> None:
        number = self._request[group.index] if hasattr(self, "_arena") else 0
        self._reports.send(error, group.index, "env_raised", number)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, leave: control.Leave) -> None:
        self._leaving, self._cutting = True, leave.cut
        if leave.restored:
            self._go()
        else:
            self._leave_between_episodes()

    def _end_step(self, groups: Sequence[RowGroup]) -> None:
        """Send the hub ``EpisodesDone`` once the envs have reached their number of episodes, and leave if due."""
        if self.episodes_left:
            ended = self._arena.terminations | self._arena.truncations
            done = sum(int(ended[index]) for group in groups for index in group.indices)
            self.episodes_left = max(0, self.episodes_left - done)
            if not self.episodes_left:
                self._channel.send(control.EpisodesDone())
        self._leave_between_episodes()

    def _leave_between_episodes(self) -> None:
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
            self._go()

    def _go(self) -> None:
        self._bells.unwatch()
        self.left, self._envs.groups, self._leaving = self._envs.groups, [], False
        self._channel.send(control.HandedOver())
