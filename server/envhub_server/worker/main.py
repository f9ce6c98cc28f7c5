"""One worker process: hosts envs of one session and steps them straight into the session's arena.

It is forked by the zygote. It runs on Python 3.8 and later with NumPy, msgpack and Gymnasium.

The worker parks in ``epoll_wait`` on its request bells, which mean that rows wait in the arena, and on the control
channel, by which everything else comes. Bells are watched by edges: each ring wakes it once, and it reads none of them.
Whatever the env's code raises becomes a ``RowFailed`` to the hub.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Sequence

from envhub.arena.layout import Layout
from envhub.arena.memory import (
    DRIVER_CLIENT,
    DRIVER_HUB,
    OP_PART,
    OP_STEP,
    STATUS_INFO,
    STATUS_OK,
    STATUS_RAISED,
    TURN_FIRST,
    TURN_ONE,
    Arena,
)
from envhub.arena.spin import HAS_FENCE, Spinner, fence
from envhub.protocol import messages
from envhub.values import codec, spaces
from envhub.values.gym_api import registered, unfit
from envhub.values.info_columns import Writer
from envhub.values.leaf import OBJECT, Leaf
from envhub_server.ipc import control
from envhub_server.ipc.channel import FORKED_STATUS, Channel, ChannelClosed, moved_up
from envhub_server.worker.env_family import computes_in_process
from envhub_server.worker.env_sources import factories, missing, runner_class
from envhub_server.worker.exception_report import Owed, carried, describe_failure
from envhub_server.worker.gym_compat import adapted
from envhub_server.worker.row import NotFinite, Row
from envhub_server.worker.stack_dumps import Dumps
from envhub_server.worker.step_timer import StepTimer

FACTORIES_S = 60  # for the import of every factory's module, before anybody wants an env; it is not tried for longer
PROGRESS_S = 0.5  # how often a worker that builds envs tells how many stand
RESERVED_CALLS = frozenset(["reset", "step", "close", "_setattr", "_check_spaces"])

_ONE = (1).to_bytes(8, sys.byteorder)
_CAME_BACK = (
    b"envhub: a process that an env forked came back from the call in which it was forked, and was ended: "
    b"its code has to end in os._exit, or be run by multiprocessing\n"
)


class Worker:
    """The envs of this process and the loop that serves them."""

    def __init__(self, channel: Channel, dumps: Dumps) -> None:
        self._channel = channel
        self._dumps = dumps
        self._number: int | None = None  # of this worker in its session; one that only lists names has none
        self._rows: list[Row] = []
        self._allow_pickle = False
        self._exact: codec.Unknown = codec.refuse
        self._in_columns = False
        self._arena: Any = None
        self._bells: list[int] = []  # by which it is woken
        self._done_bells: dict[int, int] = {}  # by whom each wakes
        self._spinner = Spinner(0, time.perf_counter_ns)
        self._spin_us = 0
        self._on_exception, self._on_invalid = "raise", "pass"
        self._build: Any = None
        self._row_built = -1
        self._timer = StepTimer()
        self._broken: list[Row] = []  # whose env raised, and is to be made anew
        self._mended = 0
        self._poller = _moved_up_epoll()
        self._poller.register(channel.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Serve until the hub says ``CloseEnvs`` or is gone."""
        os.register_at_fork(after_in_child=partial(_leave, self))
        try:
            while True:
                while self._spinner.spins and self._spinner.spin(self._has_work):
                    self.serve_rows()
                for descriptor, _ in self._poller.poll():
                    if descriptor in self._bells:
                        self.serve_rows()
                    elif not all(self.handle(message) for message in self._channel.receive() or ()):
                        return
        except ChannelClosed as closed:
            if isinstance(closed.__cause__, OSError) and closed.__cause__.errno in (errno.EBADF, errno.ENOTSOCK):
                raise  # an env closed it; its worker ends as one that crashed
            # Else the hub is gone, and with it everybody who could use the envs.

    def end(self) -> None:
        """End this process."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # an env may have closed or replaced it
                stream.flush()
        os._exit(0)  # atexit handlers and destructors of simulators hang or crash often, and have nothing left to do

    def parts(self) -> list[object]:
        """Every object of the worker's that a call of an env's returns to."""
        return [*self._rows, self]

    def close(self) -> None:
        """Free its descriptors but the channel, in a process that goes on without it."""
        self._poller.close()
        self._timer.close()
        for bell in (*self._bells, *self._done_bells.values()):
            os.close(bell)

    def handle(self, message: Any) -> bool:
        """Do what the hub says; whether the worker goes on afterwards."""
        handler = getattr(self, f"_on_{type(message).__name__}")
        return handler(message) is not False

    # --- building -------------------------------------------------------------------------------------------------

    def _on_Build(self, build: Any) -> bool | None:
        self._number = build.worker
        self._allow_pickle = build.allow_pickle
        self._exact = codec.as_pickle if build.allow_pickle else codec.refuse
        self._in_columns = build.columns
        self._on_exception, self._on_invalid = build.on_exception, build.on_invalid
        self._build, self._row_built = build, build.rows[0]
        return self._in_building(self._build_first)

    def _on_BuildRest(self, rest: Any) -> bool | None:
        return self._in_building(partial(self._build_rows, rest.rows[1:]))

    def _in_building(self, work: Callable[[], Any]) -> bool | None:
        """Do this, and tell what comes of it; whoever asked is told of an error by the row that is being built."""
        try:
            told = work()
        except BaseException as error:
            self._report(error, self._row_built, "factory_failed")
            return False
        self._dumps.arm()  # an env may have taken the signals
        self._channel.send(told)
        return None

    def _build_first(self) -> Any:
        build = self._build
        if build.cpu is not None:
            os.sched_setaffinity(0, [build.cpu])
        self._factories = factories(build)
        self._runner = runner_class(build.runner)
        if not build.first_only:
            return self._build_rows(build.rows)
        self._build_row(build.rows[0])
        return control.FirstBuilt(computes_in_process(self._rows[0].env, self._runner), private_bytes())

    def _build_row(self, row: int) -> None:
        self._row_built = row
        runner = self._runner(adapted(self._made(row)))
        self._rows.append(Row(row, runner, self._build.autoreset_mode, self._allow_pickle))

    def _made(self, row: int) -> Any:
        """What the factory of the row makes.

        Raises:
            TypeError: it is no single env.
        """
        env = self._factories[row]()
        problem = unfit(env)
        if problem:
            raise TypeError(f"the factory of env {row} returned {problem}")
        return env

    def _build_rows(self, rows: Sequence[int]) -> control.Built:
        told_s = time.monotonic()
        for row in rows:
            self._build_row(row)
            if time.monotonic() > told_s + PROGRESS_S:
                told_s = time.monotonic()
                self._channel.send(control.Building(len(self._rows)))
        first = self._rows[0].env
        tells = self._number == 0  # what the session's first env is; of the others it is only compared with that
        differ = self._build.observation_mode != "same"
        seen = self._rows if differ else self._rows[:1] if tells else []
        leaves = spaces.leaves(first.observation_space)
        unknown = codec.as_pickle_or_repr if self._allow_pickle else codec.as_repr
        return control.Built(
            observation_spaces=[self._described(row.env.observation_space) for row in seen],
            action_space=self._described(first.action_space) if tells else b"",
            observation_leaves=[leaf.wire() for leaf in leaves if leaf != OBJECT],
            action_leaves=[leaf.wire() for leaf in spaces.leaves(first.action_space)],
            metadata=codec.encode(dict(first.metadata or {}), unknown),
            render_mode=first.render_mode,
            spec=carried(lambda: first.spec, self._exact) if tells and first.spec is not None else b"",
            loose=OBJECT in leaves,
        )

    def _described(self, space: Any) -> bytes:
        return codec.encode(spaces.describe(space, self._allow_pickle), self._exact)

    def _on_ListNames(self, wanted: Any) -> bool:
        for module in wanted.modules:
            try:
                importlib.import_module(module)
            except BaseException as error:
                self._report(error, None, "factory_failed")
        self._channel.send(messages.EnvNames(registered()))
        signal.alarm(FACTORIES_S)
        for entry in wanted.entries:
            try:
                why = missing(entry)
                if why:
                    self._channel.send(control.FactoryMissing(entry, why))
            except BaseException as error:
                self._report(error, None, "factory_failed")
        return False

    def _on_MapArena(self, mapped: Any) -> bool | None:
        memory, *bells = self._channel.take_descriptors(5)
        for bell in (*self._bells, *self._done_bells.values()):  # of an arena that this one takes the place of
            with contextlib.suppress(OSError):  # those that it rings were never registered
                self._poller.unregister(bell)
            os.close(bell)
        self._spinner = Spinner(0, time.perf_counter_ns)
        self._bells, self._done_bells = bells[:2], dict(zip((DRIVER_HUB, DRIVER_CLIENT), bells[2:]))
        layout = Layout(
            mapped.num_envs,
            tuple(Leaf.from_wire(leaf) for leaf in mapped.observation_leaves),
            tuple(Leaf.from_wire(leaf) for leaf in mapped.action_leaves),
            mapped.info_bytes,
        )
        self._arena = Arena(layout, memory)
        os.close(memory)
        self._arena.check()
        self._request, self._done = self._arena.words(self._arena.request), self._arena.words(self._arena.done)
        self._op, self._status = self._arena.words(self._arena.op), self._arena.words(self._arena.status)
        self._info_length = self._arena.words(self._arena.info_length)
        self._began_ns, self._ended_ns = map(self._arena.words, (self._arena.began_ns, self._arena.ended_ns))
        indices = [row.index for row in self._rows]
        mine = slice(indices[0], indices[-1] + 1, indices[1] - indices[0] if len(indices) > 1 else 1)
        self._my_request, self._my_done = self._request[mine], self._done[mine]
        self._spin_us = mapped.spin_us
        observation_space, action_space = (
            spaces.build(codec.decode(blob, self._allow_pickle))
            for blob in (mapped.observation_space, mapped.action_space)
        )
        self._spaces = observation_space, action_space, mapped.observation_mode
        columns = Writer(layout.info_bytes, self._send_template) if self._in_columns else None
        for row in self._rows:
            try:
                self._check_spaces(row)
                row.attach(self._arena, observation_space, action_space, self._send_info, columns)
                row.look_after(self._on_invalid != "pass", self._suspect)
            except BaseException as error:
                self._report(error, row.index, "factory_failed")
                return False
        self._turns = self._arena.words(self._arena.turn)
        self._turn_at = self._rows[0].index
        self._turn = self._turns[self._turn_at] & ~(TURN_ONE - 1)
        self._channel.send(control.Mapped())
        return None

    def _check_spaces(self, row: Row) -> None:
        observation_space, action_space, mode = self._spaces
        spaces.check_equivalent(row.env.observation_space, observation_space, mode)
        spaces.check_action_space(row.env.action_space, action_space)

    def _on_Serve(self, serve: Any) -> None:
        owed = None if serve.failure is None else Owed(serve.failure)
        for number, row in enumerate(self._rows):
            row.go_on()
            if not serve.moved:
                objects = serve.objects[number] if serve.objects else b""
                row.owe(serve.seeds[number] if serve.seeds else None, owed, serve.info, objects)
        for bell in self._bells:
            # By edges each ring wakes it once, and a read for every step is saved.
            self._poller.register(bell, select.EPOLLIN | select.EPOLLET)
        self._spinner = Spinner(self._spin_us, time.perf_counter_ns)  # not before: till now the rows were the hub's
        self.serve_rows()  # what was posted, and rung for, before there was anybody to hear

    # --- stepping -------------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._my_request != self._my_done and self._posted())

    def _posted(self) -> list[Row]:
        """The rows that wait for a step which comes by the arena alone."""
        request, done, op = self._request, self._done, self._op
        return [
            row
            for row in self._rows
            if request[row.index] != done[row.index] and (op[row.index] == OP_STEP or op[row.index] == OP_PART)
        ]

    def _begin(self, row: Row) -> None:
        """Say which row is served from now on: the hub looks whether that goes on."""
        self._turn += TURN_ONE
        self._turns[self._turn_at] = self._turn | row.turn

    def serve_rows(self) -> None:
        """Step the envs whose rows the driver has posted, if there are any."""
        posted = self._posted()
        if posted:
            self._step_rows(posted)

    def _step_rows(self, rows: list[Row], run: Callable[[Row], None] | None = None) -> None:
        """Step these rows' envs, or ``run`` them, and wake who waits for them."""
        at, parts, timer = self._turn_at, 0, self._timer
        self._began_ns[at] = time.monotonic_ns()
        timer.batches_left -= 1
        timed = not timer.batches_left
        if timed:
            timer.start()
        for row in rows:
            self._finish(row, row.step if run is None else partial(run, row), steps=True)
            if self._op[row.index] == OP_PART:
                parts += 1
                self._ring()
        self._turns[at] = self._turn
        self._ended_ns[at] = time.monotonic_ns()
        worth_telling = timed and timer.stop(len(rows))
        if not parts or parts < len(rows):
            self._ring_at_end()
        if worth_telling:
            self._channel.send(replace(timer.times, env_bytes=private_bytes() // len(self._rows)))
        if self._broken:
            self._mend()

    def _ring_at_end(self) -> None:
        """Wake the driver, unless another worker still has rows of the batch: the last one sees that all are done."""
        if HAS_FENCE:
            fence()
            if self._request != self._done:
                return
        self._ring()

    def _ring(self) -> None:
        os.write(self._done_bells.get(self._arena.driver, self._done_bells[DRIVER_HUB]), _ONE)

    def _on_StepRows(self, step: Any) -> None:
        beside = dict(messages.unpack_rows(step.beside, self._arena.layout.rows))

        def run(row: Row) -> None:
            row.step(codec.decode(beside[row.index], self._allow_pickle))

        # Of others the hub did the step, before there was this worker.
        self._step_rows([row for row in self._rows if self._request[row.index] != self._done[row.index]], run)

    def _on_ResetRows(self, reset: Any) -> None:
        seeds = dict(zip(reset.rows, reset.seeds))

        def run(row: Row) -> None:
            # Decoded once per row: an env may keep or change its options.
            row.reset(seeds[row.index], codec.decode(reset.options, self._allow_pickle) if reset.options else None)

        for row in self._rows:
            self._finish(row, partial(run, row) if row.index in seeds else row.stay)
        self._ring_at_end()

    def _finish(self, row: Any, run: Callable[[], None], steps: bool = False) -> None:
        """Run one row's step or reset, store its status, and last of all that it is done."""
        self._turn += TURN_ONE  # as ``_begin`` does: a call costs more than the rest of it, and this is for every row
        self._turns[self._turn_at] = self._turn | row.turn
        try:
            run()
            self._status[row.index] = STATUS_INFO if self._info_length[row.index] else STATUS_OK
        except BaseException as error:
            if steps and not isinstance(error, Owed) and self._policy(error) == "truncate":
                self._truncate(row, error)
            else:
                row.stay()
                self._report(error, row.index, "env_raised")  # last: an info of the row's takes its place
                self._status[row.index] = STATUS_RAISED
        self._done[row.index] = self._request[row.index]

    def _policy(self, error: BaseException) -> str:
        return self._on_invalid if isinstance(error, NotFinite) else self._on_exception

    def _truncate(self, row: Row, error: BaseException) -> None:
        """Have the row's step be the end of its episode, though its env gave none; the env is made anew soon."""
        told = describe_failure(error, "env_raised", row.index, self._number)
        failure = {
            "cause": "nan" if isinstance(error, NotFinite) else "exception",
            "message": told.message,
            "exception": told.type,
            "traceback": told.traceback,
            "restarts": self._mended,
        }
        row.truncate(codec.encode({"env_failure": failure, "invalid_transition": True}))
        self._channel.send(control.Faulted(row.index, f"{told.type}: {told.message[:1024]}"))
        self._broken.append(row)

    def _mend(self) -> None:
        """Make those envs anew that raised, now that nobody waits for them."""
        while self._broken:
            row = self._broken.pop()
            self._mended += 1
            row.turn |= TURN_FIRST  # as at the first making: so long it may take
            self._begin(row)
            try:
                row.env.close()
            except BaseException:
                traceback.print_exc()  # it is in the worker's log; the env is broken anyhow
            try:
                row.rebuilt(self._runner(adapted(self._made(row.index))))
                self._check_spaces(row)
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # as one that crashed: it is the hub that knows how often to try
            self._turns[self._turn_at] = self._turn | row.index

    def _send_info(self, row: int, info: bytes) -> None:
        self._channel.send(control.RowInfo(row, info, self._request[row]))

    def _suspect(self, row: int, what: str) -> None:
        self._channel.send(control.Suspicious(row, what))

    def _send_template(self, number: int, example: bytes) -> None:
        self._channel.send(control.InfoTemplate(number, example))

    # --- calls ----------------------------------------------------------------------------------------------------

    def _on_CallRows(self, call: Any) -> None:
        def run(place: int, env: Any) -> bytes:
            if call.skip_unreset and self._rows[place].awaits_first_reset:
                return b""
            if call.only_kind:
                return codec.encode(callable(env.get_wrapper_attr(call.name)))
            if call.name in RESERVED_CALLS:
                raise ValueError(
                    f"Trying to call function `{call.name}` with `call`, use `{call.name}` directly instead."
                )
            found = env.get_wrapper_attr(call.name)
            if callable(found):
                positional, named = codec.decode(call.args, self._allow_pickle)
                found = found(*positional, **named)
            return codec.encode(found, self._exact)

        self._for_each_env(run, call.number)

    def _on_SetAttrRows(self, wanted: Any) -> None:
        def run(place: int, env: Any) -> bytes:
            blob = wanted.each[place] if wanted.each else wanted.value
            env.set_wrapper_attr(wanted.name, codec.decode(blob, self._allow_pickle))
            return b""

        self._for_each_env(run, wanted.number)

    def _for_each_env(self, run: Callable[[int, Any], bytes], number: int) -> None:
        """Answer the call of this number with what ``run`` returns for every place and env, or with what it raises."""
        results = []
        for place, row in enumerate(self._rows):
            self._begin(row)
            try:
                results.append(run(place, row.env))
            except BaseException as error:
                failure = describe_failure(error, "env_raised", row.index, self._number)
                self._channel.send(control.CallFailed(failure, number))
                return
        self._channel.send(control.CallResults(results, number))

    # --- ending ---------------------------------------------------------------------------------------------------

    def _on_CloseEnvs(self, message: Any) -> bool:
        for row in self._rows:
            try:
                row.env.close()
            except BaseException as error:
                self._report(error, row.index, "env_raised")
        return False

    def _report(self, error: BaseException, row: int | None, code: str) -> None:
        told = error.failure_of(row) if isinstance(error, Owed) else describe_failure(error, code, row, self._number)
        self._channel.send(control.RowFailed(told, 0 if row is None or self._arena is None else self._request[row]))


def private_bytes() -> int:
    """How much memory this process shares with no other; 0 where the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(line[1]) * 1024 for line in lines if line[0] in (b"Private_Dirty:", b"Private_Clean:"))


def _moved_up_epoll() -> select.epoll:
    with contextlib.closing(select.epoll()) as made:
        return select.epoll.fromfd(moved_up(os.dup(made.fileno())))


def main(channel: Channel, dumps: Dumps) -> None:
    """Run the worker on this control channel until its end; it does not return."""
    worker = Worker(channel, dumps)
    worker.run()
    worker.end()


class _Left:
    """What the objects of a worker are in a process that its env forked: an access to one of them ends that process.

    Such a process is in the middle of a call of the env's. Where it does not end there by itself it comes back to the
    worker's code, which begins with such an access, whether the call returned or raised. This costs the worker nothing.
    """

    def __getattribute__(self, name: str) -> Any:
        with contextlib.suppress(OSError):
            os.write(2, _CAME_BACK)
        os._exit(FORKED_STATUS)


def _leave(worker: Worker) -> None:
    """Have this process, a child of the worker's that has just been forked, never be taken for the worker."""
    if type(worker) is Worker:  # else it is a child of a child
        for part in worker.parts():
            object.__setattr__(part, "__class__", _Left)
