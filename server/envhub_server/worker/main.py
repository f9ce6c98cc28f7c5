"""One worker process: it hosts envs of one session and writes their results into the session's arena.

The zygote forks the worker. The worker runs on Python 3.8 and later with NumPy, msgpack and Gymnasium.

The worker parks in ``epoll_wait``. A ring of a request bell means that rows are pending in the arena. Every other
request comes over the control channel. The hub's bell is a pipe: no worker can make the hub wait at its end of it.
Epoll watches the client's bell by edges: each ring wakes the worker once, and the worker never reads it. An exception
of an env becomes a ``RowFailed`` to the hub.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, Sequence, Union

from envhub.arena.layout import Layout
from envhub.arena.memory import (
    DRIVER_CLIENT,
    DRIVER_HUB,
    OP_PART,
    OP_STEP,
    STATUS_RAISED,
    TURN_FIRST,
    TURN_ONE,
    Arena,
)
from envhub.arena.spin import HAS_FENCE, RING, Spinner, fence
from envhub.arena.stand_in import FRESH, ONGOING, REPORT_PENDING
from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import raised_text, shortened
from envhub.protocol import messages
from envhub.values import codec, spaces
from envhub.values.gym_api import registered
from envhub.values.info_columns import Writer
from envhub.values.leaf import OBJECT
from envhub_server.ipc import control
from envhub_server.ipc.channel import (
    FORKED_STATUS,
    MESSAGE_BYTES_MAX,
    WORKER_MESSAGE_BYTES_MAX,
    Channel,
    ChannelClosed,
    moved_up,
)
from envhub_server.ipc.journal import Journal, JournalLayout, name_of_raised
from envhub_server.ipc.packages import remedy
from envhub_server.ipc.set_attributes import SetAttributes
from envhub_server.worker import rendering
from envhub_server.worker.batch_observer import Observers
from envhub_server.worker.bootstrap import prctl
from envhub_server.worker.env_batch import EnvBatch, Part, SubEnv
from envhub_server.worker.env_family import may_share_process
from envhub_server.worker.env_sources import (
    adopt_environment,
    factories,
    modules_of,
    named,
    runner_class,
    set_up,
    source_of,
    versions_of,
    why_missing,
)
from envhub_server.worker.episode_writer import EpisodeWriter
from envhub_server.worker.exception_report import PendingFailure, describe_failure, encode_or_nothing
from envhub_server.worker.gym_compat import adapt, is_wrapped
from envhub_server.worker.journal_writer import JournalWriter, RowJournalWriter
from envhub_server.worker.native_env import NativeEnv, Share, made_by
from envhub_server.worker.other_interfaces import as_gymnasium
from envhub_server.worker.row import SAME_STEP, NotFinite, Row
from envhub_server.worker.shared_imports import shareable
from envhub_server.worker.shared_state import SharedState
from envhub_server.worker.slots import as_slice
from envhub_server.worker.stack_dumps import StackDumps
from envhub_server.worker.step_timer import StepTimer

WHY_CHARS_MAX = 300  # of the exception of a module
FACTORIES_S = 60  # time limit for importing the modules of all factories, before a client asks for an env
RINGS_BYTES = 1 << 16  # of a pipe, all of them
PR_SET_NO_NEW_PRIVS = 38
REPORTED_CHARS_MAX = 4096  # of an exception's text
PROGRESS_S = 0.5  # how often a worker that builds envs sends how many are built
NEEDS_VECTOR = "what takes num_envs makes a vector env: pass vector=True (an operator says vector = true in its table)"
RESERVED_CALLS = frozenset(["reset", "step", "close", "_setattr", "_check_spaces"])
# Methods by which the attribute of any name is reached.
ATTRIBUTE_CALLS = frozenset(
    ["get_wrapper_attr", "set_wrapper_attr", "has_wrapper_attr", "get_attr", "set_attr", "call"]
)

Target = Union[Row, SubEnv]  # of a call
NOTHING: Mapping[int, bytes] = MappingProxyType({})  # out of band

_CAME_BACK = (
    b"envhub: a process that an env forked came back from the call in which it was forked, and was ended: "
    b"its code has to end in os._exit, or be run by multiprocessing\n"
)


class Worker:
    """The envs of this process and the loop that serves them.

    Attributes:
        never_truncated: exceptions of a step that are raised also with ``on_exception="truncate"``.
    """

    never_truncated: tuple[type[BaseException], ...] = (PendingFailure,)

    def __init__(self, channel: Channel, stack_dumps: StackDumps | None = None) -> None:
        """Serve by this channel; ``stack_dumps`` are those of a process of its own."""
        self._channel = channel
        self._stack_dumps = stack_dumps
        self._number: int | None = None  # of this worker in its session; one that only lists names has none
        self._rows: list[Part] = []
        self._allow_pickle = False
        self._exact: codec.Unknown = codec.refuse  # for values that no ``repr`` may replace
        self._in_columns = False
        self._arena: Any = None
        self._bells: list[int] = []  # that wake this worker
        self._done_bells: dict[int, int] = {}  # that wake a driver, by driver
        self._spinner = Spinner(0, time.perf_counter_ns)
        self._spin_us = 0
        self._info_bytes_max = control.INFO_BYTES_MAX
        self._on_exception, self._on_invalid = "raise", "pass"
        self._build: Any = None
        self._pickled = -1  # the memory of factories that came pickled
        self._row_built = -1
        self._timer = StepTimer()
        self._shared: SharedState | None = None  # until the hub is told that it was changed
        self._broken: list[Part] = []  # whose env raised and must be built again
        self._episodes_left = 0  # until the hub is told that there were enough; 0 where it need not know
        self._leaving = False  # whether another worker takes over once all envs are between episodes
        self._cutting = False  # whether it does so in the middle of episodes
        self._serving = False  # whether the rows in the arena are this worker's
        self._left: list[Part] = []  # that another worker serves now
        self._rebuilds = 0
        self._observers = Observers()
        self._attributes = SetAttributes()
        self._poller = _moved_up_epoll()
        self._poller.register(channel.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Serve until the hub says ``CloseEnvs`` or is gone."""
        os.register_at_fork(after_in_child=partial(_detach_fork, self))
        channel = self._channel.fileno()
        try:
            while True:
                while self._spinner.spins and self._spinner.spin(self._has_work):
                    self.serve_rows()
                for descriptor, _ in self._poller.poll():
                    if descriptor in self._bells:
                        if descriptor == self._bells[0]:
                            self._silence(descriptor)
                        self.serve_rows()
                    # A bell of an arena that was replaced since the poll is no reason to wait for a message.
                    elif descriptor == channel and not self._receive():
                        return
        except ChannelClosed as closed:
            if isinstance(closed.__cause__, OSError) and closed.__cause__.errno in (errno.EBADF, errno.ENOTSOCK):
                raise  # an env closed the channel; this worker ends like one that crashed
            # Otherwise the hub has ended, and no client can use the envs any more.

    def _receive(self) -> bool:
        """Execute the messages of the hub that are here; returns whether the worker continues."""
        return all(self.handle(message) for message in self._channel.receive() or ())

    def _silence(self, bell: int) -> None:
        """Take the rings out of the hub's bell, a pipe, which would become full."""
        try:
            os.read(bell, RINGS_BYTES)
        except BlockingIOError:
            pass  # a process that an env forked has taken them

    def close(self) -> None:
        """Close all descriptors but the channel, and let go of the arena, in a process that continues without it."""
        self._rows.clear()  # which know this worker
        self._poller.close()
        self._timer.close()
        for descriptor in (*self._bells, *self._done_bells.values(), *([self._pickled] if self._pickled >= 0 else [])):
            os.close(descriptor)

    def handle(self, message: Any) -> bool:
        """Execute a message of the hub; returns whether the worker continues."""
        if self._left and type(message) is not control.CloseEnvs:
            return True  # it was sent before the hub knew; the worker that took over is told the same
        handler = getattr(self, f"_on_{type(message).__name__}")
        return handler(message) is not False

    # --- building -------------------------------------------------------------------------------------------------

    def _on_Build(self, build: Any) -> bool | None:
        self._number = build.worker
        if build.factories:
            (self._pickled,) = self._channel.take_descriptors(1)
        self._allow_pickle = build.allow_pickle
        self._exact = codec.as_pickle if build.allow_pickle else codec.refuse
        private = build.allow_pickle  # the envs are those of the hub's own program
        if not private:
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if build.memory_bytes_max:
            resource.setrlimit(resource.RLIMIT_DATA, (build.memory_bytes_max, build.memory_bytes_max))
        self._channel.sent_bytes_max = MESSAGE_BYTES_MAX if private else WORKER_MESSAGE_BYTES_MAX
        self._info_bytes_max = MESSAGE_BYTES_MAX if private else build.info_bytes_max
        self._in_columns = build.columns
        self._on_exception, self._on_invalid = build.on_exception, build.on_invalid
        self._build, self._row_built = build, build.rows[0]
        self._episodes_left = build.episodes_max
        return self._answer_build(self._build_first)

    def _on_BuildRest(self, rest: Any) -> bool | None:
        os.environ.update(rest.variables)
        self._build = replace(self._build, rows=rest.rows, kwargs_each=rest.kwargs_each)
        if not self._build.factories:
            self._factories = named(self._build)
        return self._answer_build(partial(self._build_rows, rest.rows[1:]))

    def _on_TakePlace(self, place: Any) -> None:
        os.environ.update(place.variables)
        self._pin(place.cpu)
        self._number, same = place.worker, self._build.rows == place.rows
        if same:
            return
        self._build = replace(self._build, worker=place.worker, rows=place.rows)
        if not self._build.factories:
            self._factories = named(self._build)
        self._rows, unused = self._rows[: len(place.rows)], self._rows[len(place.rows) :]
        for row, index in zip(self._rows, place.rows):
            row.move(index)
        for row in unused:
            try:
                row.env.close()
            except BaseException:
                traceback.print_exc()  # into the worker's log

    def _pin(self, cpu: int | None) -> None:
        """Keep this process, with the threads that its envs have started, to this CPU; None for any."""
        if cpu is None:
            return
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), [cpu])

    def _answer_build(self, work: Callable[[], Any]) -> bool | None:
        """Send the hub what ``work`` returns; an exception is sent as a failure of the row that was being built."""
        try:
            answer = work()
            if self._stack_dumps is not None:
                self._stack_dumps.arm()  # an env may have installed signal handlers of its own
            self._channel.send(answer)
        except ChannelClosed:
            raise
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and not self._allow_pickle:
                error.msg = f"{error}{_remedy(error)}"  # which is its text
                error.args = (error.msg,)
            self._send_failure(error, self._row_built, "factory_failed")
            return False
        return None

    def _build_first(self) -> Any:
        build = self._build
        self._pin(build.cpu)
        importing = ", ".join(module for module in modules_of(build) if module not in sys.modules)
        if importing:  # which may take long, or never end: the client is told
            self._channel.send(control.Building(0, importing))
        self._variables = adopt_environment(build)  # in which its envs begin
        set_up(build)
        self._factories = factories(build, self._pickled)
        if importing:
            self._channel.send(control.Building(0))
        self._runner = runner_class(build.runner)
        if build.says_imported:
            self._channel.send(control.Imported(shareable(self._variables)))
        if not build.first_only:
            return self._build_rows(build.rows)
        self._build_row(build.rows[0])
        return control.FirstBuilt(self._fit(), private_bytes(), shareable(self._variables))

    def _fit(self) -> bool:
        """Whether its envs are known to be fit to share a process."""
        return all(may_share_process(row.env, self._runner) for row in self._rows)

    def _build_row(self, row: int) -> None:
        self._row_built = row
        runner = self._runner(adapt(self._make_env(row)))
        self._rows.append(Row(row, runner, self._build.autoreset_mode, self._allow_pickle))

    def _make_env(self, row: int) -> Any:
        try:
            made = self._factories[row]()
            if self._has(made, row):  # as of `env = make(); [lambda: env] * 2`: a copy, as in a process of its own
                made = factories(self._build, self._pickled)[row]()
                if self._has(made, row):
                    text = f"the factory of env {row} returned an env that this process has already: each is to make"
                    raise ValueError(f"{text} its own, or with num_workers=num_envs each env has its own process")
        except TypeError as error:
            if re.search(r"missing \d+ required .*'num_envs'", str(error)):
                raise TypeError(f"{error}: {NEEDS_VECTOR}") from error
            raise
        return as_gymnasium(made, f"the factory of env {row}")

    def _has(self, made: Any, index: int) -> bool:
        """Whether another env of this process than this one is the same object, perhaps in other wrappers."""
        base = getattr(made, "unwrapped", made)
        return any(getattr(row.env, "unwrapped", None) is base for row in self._rows if row.index != index)

    def _make_batch(self, rows: Sequence[int]) -> NativeEnv:
        share = Share(rows, self._build.shares)
        return made_by(self._factories[rows[0]], share, self._build.autoreset_mode)

    def _build_rows(self, rows: Sequence[int]) -> control.Built:
        sent_s, sources = time.monotonic(), rows
        if self._build.shares:
            batch, mode = self._make_batch(rows), self._build.autoreset_mode
            self._rows.append(EnvBatch(rows, batch, mode, self._allow_pickle))
            rows, sources = (), rows[:1]  # which is that of all
        for row in rows:
            self._build_row(row)
            second = len(self._rows) == 1 and len(rows) > 1  # which may be one too many for a process
            if second or time.monotonic() > sent_s + PROGRESS_S:
                sent_s = time.monotonic()
                self._channel.send(control.Building(len(self._rows)))
        first = self._rows[0].env
        has_first = self._number == 0  # the session takes its spaces from its first env
        differ = self._build.observation_mode == "different"
        own = self._spaces_of_all()
        observed, acted = (spaces.nearest(space, self._allow_pickle) for space in own)
        described = [row.env.observation_space for row in self._rows] if differ else own[:1] if has_first else []
        leaves = spaces.leaves(observed)
        unknown = codec.as_pickle_or_repr if self._allow_pickle else codec.as_repr
        build = self._build
        # Each access to a wrapper's spec may copy it several times, which takes longer than to make a small env.
        own_spec = has_first or build.factories or build.entry or build.kwargs_each
        spec = first.spec if own_spec else None
        return control.Built(
            observation_spaces=[*map(self._described, described)],
            action_space=self._described(own[1]) if has_first else b"",
            observation_leaves=[leaf.wire() for leaf in leaves if leaf != OBJECT],
            action_leaves=[leaf.wire() for leaf in spaces.leaves(acted)],
            metadata=codec.encode(dict(first.metadata or {}), unknown) if has_first else b"",
            render_mode=first.render_mode,
            spec=encode_or_nothing(lambda: spec, self._exact) if has_first and spec is not None else b"",
            loose=OBJECT in leaves,
            sources=[source_of(self._factories[row]) for row in sources] if self._build.factories else [],
            versions=versions_of(first),
            sys_path=[place for place in sys.path if isinstance(place, str)],
            cwd=_folder(),
            plain_spec=(b"" if spec is None else encode_or_nothing(lambda: spec)) if own_spec else None,
            libraries=shareable(self._variables),
            fit=self._fit(),
            action_structure=_structure(acted) if build.observation_mode == "any" else "",
        )

    def _spaces_of_all(self) -> tuple[Any, Any]:
        """The observation and the action space for all envs of this worker: the first env's, unless any will do."""
        first = self._rows[0].env
        if self._build.observation_mode != "any":
            return first.observation_space, first.action_space
        alike = len({_structure(row.env.action_space) for row in self._rows}) == 1
        return spaces.Anything(), first.action_space if alike else spaces.Anything()

    def _described(self, space: Any) -> bytes:
        return codec.encode(spaces.describe(space, self._allow_pickle), self._exact)

    def _on_ListNames(self, wanted: Any) -> bool:
        for module in wanted.modules:
            self._channel.send(control.Building(0, module))
            try:
                importlib.import_module(module)
            except BaseException as error:
                self._send_failure(error, None, "factory_failed")
        self._channel.send(control.Building(0))
        self._channel.send(messages.EnvNames(registered()))
        signal.alarm(FACTORIES_S)
        for entry in wanted.entries:
            try:
                self._channel.send(control.Building(0, entry.partition(":")[0]))
                if missing := why_missing(entry):
                    self._channel.send(control.FactoryFailed(entry, str(missing), _remedy(missing)))
            except BaseException as error:
                self._send_failure(error, None, "factory_failed")
                text = shortened(f"{type(error).__name__}: {error}", WHY_CHARS_MAX)
                self._channel.send(control.FactoryFailed(entry, text, _remedy(error), missing=False))
        self._channel.send(control.Building(0))
        if wanted.rendering:
            self._channel.send(control.RenderingTried(rendering.why_not(wanted.rendering)))
        return False

    def _on_MapArena(self, mapped: Any) -> bool | None:
        memory, *bells = self._channel.take_descriptors(5)
        journals = self._channel.take_descriptors(1) if mapped.journal else []
        lines = self._channel.take_descriptors(2) if mapped.recording else []
        for bell in (*self._bells, *self._done_bells.values()):  # of the arena that the new one replaces
            with contextlib.suppress(OSError):  # epoll does not know the done bells
                self._poller.unregister(bell)
            os.close(bell)
        self._spinner, self._serving = Spinner(0, time.perf_counter_ns), False
        self._bells, self._done_bells = bells[:2], dict(zip((DRIVER_HUB, DRIVER_CLIENT), bells[2:]))
        layout = mapped.layout()
        self._arena = arena = Arena(layout, memory)
        os.close(memory)
        arena.check()
        self._request, self._done, self._op = arena.request.data, arena.done.data, arena.op.data
        self._status = arena.status.data
        self._began_ns, self._ended_ns, self._turns = arena.began_ns.data, arena.ended_ns.data, arena.turn.data
        indices = self._indices()
        mine = as_slice(indices)
        self._my_request, self._my_done = self._request[mine], self._done[mine]
        self._spin_us = mapped.spin_us
        columns = Writer(layout.info_bytes, self._send_template) if self._in_columns else None
        checks = self._on_invalid != "pass", self._info_bytes_max
        row = self._rows[0]
        try:
            observation_space, action_space = (
                spaces.build(codec.decode(blob, self._allow_pickle))
                for blob in (mapped.observation_space, mapped.action_space)
            )
            self._spaces = observation_space, action_space, mapped.observation_mode
            for row in self._rows:
                self._check_spaces(row)
                row.attach(arena, observation_space, action_space, self._channel.send, columns, *checks)
        except BaseException as error:
            self._send_failure(error, row.index, "factory_failed")
            return False
        for observer in self._observers.each:
            observer.attach(arena)
        self._open_journal(layout, journals)
        self._open_recording(mapped.recording, lines)
        self._turn_at = self._rows[0].index
        self._turn = self._turns[self._turn_at] & ~(TURN_ONE - 1)
        self._channel.send(control.Mapped())
        return None

    def _open_journal(self, layout: Layout, descriptors: list[int]) -> None:
        """Begin the journal in this memory, if any was given."""
        rows = len(self._indices())
        for descriptor in descriptors:
            journal = Journal(JournalLayout(rows, layout.observations, layout.actions), descriptor)
            os.close(descriptor)
            journal.format()
            writer = JournalWriter if rows > 1 else RowJournalWriter
            is_batch = bool(self._build.shares)
            self._observers.add(writer(journal, self._arena, self._rows, is_batch), self._rows)

    def _open_recording(self, wanted: dict[str, Any], descriptors: list[int]) -> None:
        """Begin to record, if that is wanted."""
        if not wanted:
            return

        def gave_up(error: BaseException) -> None:
            self._observers.remove(writer, self._rows)
            why = f"its worker records no more: {self._told(error)}"
            self._channel.send(control.Suspicious(self._indices()[0], why))

        found = wanted, self._rows, self._spaces[:2], self._build, self._rendering
        writer = EpisodeWriter(descriptors, *found, gave_up)
        self._observers.add(writer, self._rows)
        writer.attach(self._arena)

    def _indices(self) -> list[int]:
        """All rows of this worker."""
        return [index for row in self._rows for index in row.indices]

    def _check_spaces(self, row: Part) -> None:
        observation_space, action_space, mode = self._spaces
        spaces.check_equivalent(row.env.observation_space, observation_space, mode)
        spaces.check_action_space(row.env.action_space, action_space, mode)

    def _on_Serve(self, serve: Any) -> None:
        failure = None if serve.failure is None else PendingFailure(serve.failure)
        seeds, objects = (dict(zip(self._indices(), found)) for found in (serve.seeds, serve.objects))
        for row in self._rows:
            if not serve.moved:
                row.take_place(seeds, failure, serve.info, objects)
        self._turn = self._turns[self._turn_at] & ~(TURN_ONE - 1)  # another worker may have had it until now
        hubs, clients = self._bells
        self._poller.register(hubs, select.EPOLLIN)
        # Watched by edges, each ring wakes the worker once, which saves a read for every step.
        self._poller.register(clients, select.EPOLLIN | select.EPOLLET)
        self._spinner = Spinner(self._spin_us, time.perf_counter_ns)  # only now: before Serve the rows are the hub's
        self._serving = True
        if len(self._rows) > 1:
            self._shared = SharedState()
        if serve.ending:
            (row,) = self._rows
            assert isinstance(row, Row)
            complete = partial(row.complete, codec.decode(serve.ending, self._allow_pickle))
            self._step_rows([row], lambda _: complete())
        self.serve_rows()  # of rows that were posted before, the ring may be over
        if self._leaving:
            self._leave_between_episodes()

    # --- stepping -------------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._my_request != self._my_done and self._posted())

    def _posted(self) -> list[Part]:
        """The rows with a pending step that needs no message."""
        request, done, op = self._request, self._done, self._op
        found = []
        for row in self._rows:  # a comprehension is one call more
            index = row.index
            if request[index] != done[index] and op[index] in (OP_STEP, OP_PART) and row.posted:
                found.append(row)
        return found

    def _begin(self, row: Part | Target) -> None:
        """Store in the progress word that the worker is at this row."""
        self._turn += TURN_ONE
        self._turns[self._turn_at] = self._turn | row.turn

    @contextlib.contextmanager
    def _rendering(self, row: Part | Target) -> Iterator[None]:
        """Within the context, the worker is at this row, between its steps."""
        self._begin(row)
        yield
        self._turns[self._turn_at] = self._turn

    def serve_rows(self) -> None:
        """Step the envs of the rows that the driver has posted."""
        if posted := self._posted():
            self._step_rows(posted)

    def _step_rows(
        self,
        rows: list[Part],
        run: Callable[[Part], bytes | None] | None = None,
        out_of_band: Mapping[int, bytes] = NOTHING,
    ) -> None:
        """Step the envs of these rows, by ``run`` if that is given, and wake the driver."""
        at, parts, timer = self._turn_at, 0, self._timer
        clocked = self._began_ns[at]
        if clocked:
            self._began_ns[at] = time.monotonic_ns()
        timer.batches_left -= 1
        timed = not timer.batches_left
        if timed:
            timer.start()
        for observer in self._observers.each:
            observer.begin(rows, out_of_band)
        for row in rows:
            ending = self._finish(row, row.step if run is None else partial(run, row), steps=True)
            if ending is not None:
                for observer in self._observers.each:
                    observer.left(row)
                self._leave(ending)
                return
            if self._op[row.index] == OP_PART:
                parts += 1
                self._ring()
        self._turns[at] = self._turn
        if clocked:
            self._ended_ns[at] = time.monotonic_ns()
        report_due = timed and timer.stop(len(rows))
        if not parts or parts < len(rows):
            self._ring_at_end()
        for observer in self._observers.each:
            observer.end()  # the driver need not wait for it
        if report_due:
            self._channel.send(replace(timer.times, env_bytes=private_bytes() // len(self._rows)))
            self._look_at_what_is_shared()
        if self._broken:
            self._rebuild_broken()
        if self._episodes_left:
            self._count_episodes(rows)
        if self._leaving:
            self._leave_between_episodes()

    def _look_at_what_is_shared(self) -> None:
        """Tell the hub, once, which of it the envs have changed."""
        if self._shared is not None and (what := self._shared.changed()):
            self._shared = None
            self._channel.send(control.SharedChanged(what))

    # --- leaving --------------------------------------------------------------------------------------------------

    def _count_episodes(self, rows: Sequence[Part]) -> None:
        """Send the hub ``EpisodesDone`` once the envs have ended as many episodes as they are to."""
        ended = self._arena.terminations | self._arena.truncations
        self._episodes_left -= sum(int(ended[index]) for row in rows for index in row.indices)
        if self._episodes_left <= 0:
            self._episodes_left = 0
            self._channel.send(control.EpisodesDone(self._leaving))

    def _on_Leave(self, leave: Any) -> None:
        self._leaving, self._cutting = True, leave.cut
        self._episodes_left = self._build.episodes_max
        if self._build.autoreset_mode != SAME_STEP:
            self._leave_between_episodes()
        elif len(self._rows) == 1 and isinstance(self._rows[0], Row):
            self._rows[0].leaving = True  # such an env is between episodes in the middle of a step only

    def _leave_between_episodes(self) -> None:
        """Leave the rows to another worker if every env's next step is a reset, or is to be a truncation."""
        if not self._serving:
            return  # what is written into an arena before its rows have moved there is lost
        needs_reset, indices = self._arena.needs_reset.data, self._indices()
        ongoing = [index for index in indices if needs_reset[index] == ONGOING]
        reported = all(needs_reset[index] != REPORT_PENDING for index in indices)
        if reported and (self._cutting or not ongoing):
            for index in indices:
                needs_reset[index] = REPORT_PENDING if index in ongoing else FRESH
            self._leave(b"")

    def _leave(self, ending: bytes) -> None:
        for bell in self._bells:
            with contextlib.suppress(OSError):  # between two arenas epoll does not know them
                self._poller.unregister(bell)
        self._spinner = Spinner(0, time.perf_counter_ns)
        self._left, self._rows, self._leaving = self._rows, [], False
        self._observers.close()
        self._channel.send(control.Left(ending))

    def _ring_at_end(self) -> None:
        """Wake the driver, unless another worker has pending rows: the last worker sees that all rows are done."""
        if HAS_FENCE:
            fence()
            if self._request != self._done:
                return
        self._ring()

    def _ring(self) -> None:
        try:
            os.write(self._done_bells.get(self._arena.driver, self._done_bells[DRIVER_HUB]), RING)
        except BlockingIOError:
            pass  # its owner has filled it up

    def _on_StepRows(self, step: Any) -> None:
        out_of_band = dict(messages.unpack_rows(step.beside, self._arena.layout.rows))

        def run(row: Part) -> bytes | None:
            return row.step(codec.decode(out_of_band[row.index], self._allow_pickle))

        # The hub completed the other rows before this worker served.
        pending = [row for row in self._rows if self._request[row.index] != self._done[row.index]]
        self._step_rows(pending, run, out_of_band)

    def _on_ResetRows(self, reset: Any) -> None:
        seeds = dict(zip(reset.rows, reset.seeds))
        each = dict(zip(reset.rows, reset.options_each))

        def options_of(row: int) -> Any:
            # Decoded for each env, because it may keep or change its options.
            options = each.get(row, reset.options)
            return codec.decode(options, self._allow_pickle) if options else None

        for observer in self._observers.each:
            observer.begin_reset(seeds, lambda row: each.get(row, reset.options))
        own = {index: seed for row in self._rows for index, seed in row.seeds_of_first(seeds).items()}
        for row in self._rows:
            self._finish(row, partial(row.reset_by, seeds, options_of))
        self._ring_at_end()
        for observer in self._observers.each:
            observer.end_reset({**seeds, **own})

    def _finish(self, row: Any, run: Callable[[], bytes | None], steps: bool = False) -> bytes | None:
        """Run a part's step or reset, which stores its status, and store ``done`` last.

        Returns:
            Mostly None. Where the row's episode has ended in a step that another worker completes, what ``Row.step``
            returned: that worker stores ``done``.
        """
        self._turn += TURN_ONE  # ``_begin`` written out, because this runs for every row and a call costs more
        self._turns[self._turn_at] = self._turn | row.turn
        try:
            ending = run()
            if ending is not None:
                return ending
        except BaseException as error:
            policy = self._on_invalid if isinstance(error, NotFinite) else self._on_exception
            if steps and not isinstance(error, self.never_truncated) and policy == "truncate":
                self._truncate(row, error)
            else:
                row.repeat_last()
                for index in row.indices:
                    # Sent after ``repeat_last``, because an info that comes later would replace the failure in the hub.
                    failure = self._send_failure(error, index, "env_raised")
                    for observer in self._observers.each:
                        observer.raised(index, failure)
                    self._status[index] = STATUS_RAISED
        self._done[row.place] = self._request[row.place]
        return None

    def _truncate(self, row: Row, error: BaseException) -> None:
        """Truncate the row, whose step raised, and note that its env must be built again."""
        described = self._failure_of(error, row.index)
        cause = "nan" if isinstance(error, NotFinite) else "exception"
        raised = {"exception": described.type, "traceback": described.traceback}
        tick, number = self._observers.tick, self._request[row.index]
        raised["replay"] = name_of_raised(self._build.replays, row.index, number) if tick >= 0 else ""
        message = described.message or raised_text(described.type, "")
        failure = EnvFailure(cause, message, restarts=self._rebuilds, **raised)
        row.truncate(failure_info(failure))
        for observer in self._observers.each:
            observer.truncated(row, failure)
        text = f"{described.type}: {shortened(described.message, 1024)}"
        reported = dict(
            failure, message=shortened(failure.message, REPORTED_CHARS_MAX)
        )  # the hub reads short headers only
        self._channel.send(control.Faulted(row.index, text, number, tick, reported))
        self._broken.append(row)

    def _rebuild_broken(self) -> None:
        """Build the envs again that raised; the driver already has their results."""
        while self._broken:
            row = self._broken.pop()
            self._rebuilds += 1
            row.turn |= TURN_FIRST  # the hub allows the time for building an env
            self._begin(row)
            try:
                row.env.close()
            except BaseException:
                traceback.print_exc()  # into the worker's log; the env is not used any more
            try:
                if isinstance(row, EnvBatch):
                    row.rebuilt(self._make_batch(row.indices))
                else:
                    row.rebuilt(self._runner(adapt(self._make_env(row.index))))
                self._check_spaces(row)
                for message in self._attributes.again(row.indices):
                    self._on_SetAttrRows(message)
            except BaseException:
                traceback.print_exc()
                self.crash()
            self._turns[self._turn_at] = self._turn | row.index

    def crash(self) -> None:
        """End as at a crash: the hub decides how often to try again."""
        os._exit(1)

    def _send_template(self, number: int, example: bytes) -> None:
        self._channel.send(control.InfoTemplate(number, example))

    # --- calls ----------------------------------------------------------------------------------------------------

    def _on_CallRows(self, call: Any) -> None:
        def run(row: Target) -> bytes:
            env = row.env
            if call.skip_unreset and row.awaits_first_reset and not (call.reset_first and self._reset_early(row)):
                return b""
            if call.question:
                return codec.encode(_QUESTIONS[call.question](env, call.name))
            if call.only_kind:
                return codec.encode(callable(env.get_wrapper_attr(call.name)))
            if call.name in RESERVED_CALLS:
                raise ValueError(
                    f"Trying to call function `{call.name}` with `call`, use `{call.name}` directly instead."
                )
            found = env.get_wrapper_attr(call.name)
            if callable(found):
                positional, named = codec.decode(call.args, self._allow_pickle)
                if call.name in ATTRIBUTE_CALLS and not self._allow_pickle:
                    _check_name(*positional[:1], **named)
                found = found(*positional, **named)
            return codec.encode(found, self._exact)

        self._for_each_env(run, call)

    def _reset_early(self, row: Target) -> bool:
        """Reset a new env that is to be rendered; returns whether it could be."""
        for observer in self._observers.each:
            observer.called(row, "reset")  # which a replay does not run
        try:
            row.reset_early()
        except BaseException as error:
            if isinstance(error, self.never_truncated):
                raise
            traceback.print_exc()  # into the worker's log; the session's policy applies to the reset that is due
            return False
        return True

    def _on_SetAttrRows(self, wanted: Any) -> None:
        each = dict(zip(wanted.rows, wanted.each))

        def run(row: Target) -> bytes:
            blob = each.get(row.index, wanted.value)
            row.env.set_wrapper_attr(wanted.name, codec.decode(blob, self._allow_pickle))
            self._attributes.note(control.SetAttrRows([row.index], wanted.name, blob))
            return b""

        if wanted.number:
            self._for_each_env(run, wanted)
            return
        for target in self._targets(wanted):
            try:
                run(target)
            except BaseException as error:
                what = f"the attribute {wanted.name!r} cannot be set again: {self._told(error)}"
                self._channel.send(control.Suspicious(target.index, what))

    def _targets(self, call: Any) -> Iterator[Target]:
        """The envs of a call or of attributes, each once the worker begins to call it."""
        for target in [target for row in self._rows for target in row.targets(call.rows)]:
            self._begin(target)
            for observer in self._observers.each if not getattr(call, "skip_unreset", False) else ():
                observer.called(target, call.name)
            yield target

    def _for_each_env(self, run: Callable[[Target], bytes], call: Any) -> None:
        """Answer the call with what ``run`` returns for each of its rows, or with what it raises."""
        results = []
        for row in self._targets(call):
            try:
                results.append(run(row))
            except BaseException as error:
                failure = self._failure_of(error, row.index)
                self._channel.send(control.CallFailed(failure, call.number))
                return
        try:
            self._channel.send(control.CallResults(results, call.number))
        except ValueError as error:
            failure = self._failure_of(error, call.rows[0])
            self._channel.send(control.CallFailed(failure, call.number))

    # --- ending ---------------------------------------------------------------------------------------------------

    def _on_CloseEnvs(self, message: Any) -> bool:
        self._observers.close()  # before an env can hang
        for row in self._rows or self._left:
            try:
                row.env.close()
            except BaseException as error:
                self._send_failure(error, row.index, "env_raised")
        return False

    def _failure_of(self, error: BaseException, row: int | None, code: str = "env_raised") -> Any:
        hide_folders = self._build is not None and self._build.hide_folders
        return describe_failure(error, code, row, self._number, hide_folders)

    def _told(self, error: BaseException) -> str:
        """The error in a line; its own ``repr`` may raise, or take megabytes."""
        described = error.args[0] if isinstance(error, PendingFailure) else self._failure_of(error, None)
        return f"{described.type}: {shortened(described.message, 1024)}"

    def _send_failure(self, error: BaseException, row: int | None, code: str) -> messages.Failure:
        pending = isinstance(error, PendingFailure)
        failure: messages.Failure = (
            replace(error.args[0], env_index=row) if pending else self._failure_of(error, row, code)
        )
        number = 0 if row is None or self._arena is None else self._request[row]
        journaled = code == "env_raised" and number and not pending
        invalid = isinstance(error, NotFinite)
        tick = self._observers.tick if journaled else -1
        self._channel.send(control.RowFailed(failure, number, tick, invalid))
        return failure


def _structure(space: Any) -> str:
    """The structure of a space as text, which other workers' are compared with."""
    return repr(spaces.structure(space))


def _has_attribute(env: Any, name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


_QUESTIONS = {"exists": _has_attribute, "wrapped": is_wrapped}


def _check_name(name: Any = "", **others: Any) -> None:
    """Refuse a name that is not for clients on the network, as the hub refuses it in a request.

    Raises:
        ValueError: it is such a name.
    """
    if isinstance(name, str) and name.startswith("_"):
        text = f"{name!r} begins with an underscore: only the program of a private hub (hub=None) may use such a name"
        raise ValueError(text)


def private_bytes() -> int:
    """How many bytes of memory this process shares with no other; 0 where the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(line[1]) * 1024 for line in lines if line[0] in (b"Private_Dirty:", b"Private_Clean:"))


def _folder() -> str:
    """This process's folder; empty if an env went into one that is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _moved_up_epoll() -> select.epoll:
    with contextlib.closing(select.epoll()) as made:
        return select.epoll.fromfd(moved_up(os.dup(made.fileno())))


def main(channel: Channel, stack_dumps: StackDumps) -> None:
    """Run the worker on this control channel; never returns."""
    Worker(channel, stack_dumps).run()
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
    """Make this process, which an env has just forked, unable to act as the worker."""
    if type(worker) is Worker:  # otherwise this is a child of a child
        for part in (*worker._rows, worker):
            object.__setattr__(part, "__class__", _ForkedAway)


def _remedy(error: BaseException) -> str:
    """What to say besides of an exception of an import; empty where no module is missing."""
    return remedy(error) if isinstance(error, ModuleNotFoundError) else ""
