"""Builds the envs of a worker, describes them to the hub, and builds envs again that raised."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Sequence

from envhub.arena.memory import FIRST_CALL
from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import raised_text, shortened
from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT
from envhub_server.ipc import control, process_marks
from envhub_server.ipc.channel import MESSAGE_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX, ChannelClosed
from envhub_server.ipc.packages import remedy_of
from envhub_server.ipc.process_marks import private_bytes
from envhub_server.ipc.replay_file import name_of_raised
from envhub_server.worker import env_sources
from envhub_server.worker.calls import EnvCalls
from envhub_server.worker.context import LINE_CHARS_MAX, WorkerContext, encode_or_nothing
from envhub_server.worker.env_batch import EnvBatch, RowGroup
from envhub_server.worker.gym_compat import adapt, call_before_first_env
from envhub_server.worker.native_env import made_by
from envhub_server.worker.other_interfaces import as_gymnasium
from envhub_server.worker.row import Row
from envhub_server.worker.row_memory import NotFinite
from envhub_server.worker.shared_process import ImportWatch, is_cheap, may_share_process, reseed
from envhub_server.worker.snapshot_row import RequestLog, SnapshotRow

PR_SET_NO_NEW_PRIVS = 38
PROGRESS_S = 0.5  # interval at which a building worker sends the number of built envs
REPORTED_CHARS_MAX = 4096  # of an exception's text
NEEDS_VECTOR = "what takes num_envs makes a vector env: pass vector=True (an operator says vector = true in its table)"


class Builder:
    """Builds the envs of one worker by the hub's messages, and again where they raised."""

    # A method that executes a message returns whether the worker continues.

    def __init__(self, context: WorkerContext, calls: EnvCalls) -> None:
        self._channel, self._envs, self._host, self._reports, self._progress = context
        self._calls = calls
        self._memory = -1  # descriptor of pickled factories
        self._row = -1  # the row that is being built
        self._imports: ImportWatch | None = None  # of the first worker, until the others may start
        self.pending: list[RowGroup] = []  # the groups whose env must be rebuilt
        self._rebuilds = 0

    def build(self, build: control.Build) -> bool:
        self._envs.number = build.worker
        if build.factories:
            (self._memory,) = self._channel.take_descriptors(1)
        if not build.allow_pickle:  # True only for envs of the hub's own program
            process_marks.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if build.memory_bytes_max:
            resource.setrlimit(resource.RLIMIT_DATA, (build.memory_bytes_max, build.memory_bytes_max))
        self._channel.sent_bytes_max = MESSAGE_BYTES_MAX if build.allow_pickle else WORKER_MESSAGE_BYTES_MAX
        self._envs.build, self._row = build, build.rows[0]
        return self._answer(self._build_first)

    def build_rest(self, rest: control.BuildRest) -> bool:
        os.environ.update(rest.variables)
        self._envs.build = replace(self._envs.build, rows=rest.rows, kwargs_each=rest.kwargs_each)
        self._rename_factories()
        return self._answer(partial(self._build_rows, rest.rows[1:]))

    def take_slot(self, order: control.TakeSlot) -> None:
        envs = self._envs
        os.environ.update(order.variables)
        self._host.pin(order.cpu)
        envs.number = order.worker
        if envs.build.rows == order.rows:
            return
        envs.build = replace(envs.build, worker=order.worker, rows=order.rows)
        self._rename_factories()
        envs.groups, unused = envs.groups[: len(order.rows)], envs.groups[len(order.rows) :]
        for group, index in zip(envs.groups, order.rows):
            group.move(index)
        for group in unused:
            _close(group)

    def another(self) -> Any:
        """Make one more env as that of the first row."""
        return adapt(self._make_env(self._envs.build.rows[0]))

    def truncate(self, group: RowGroup, error: BaseException, number: int) -> None:
        described = self._reports.describe(error, group.index)
        trace = b"" if self._envs.trace is None else self._envs.trace.taken_of(group.index)
        failure = EnvFailure(
            "nan" if isinstance(error, NotFinite) else "exception",
            described.message or raised_text(described.type, ""),
            restarts=self._rebuilds,
            exception=described.type,
            traceback=described.traceback,
            replay=name_of_raised(self._envs.build.replays, group.index, number) if trace else "",
        )
        group.truncate(failure_info(failure))
        text = f"{described.type}: {shortened(described.message, LINE_CHARS_MAX)}"
        # The hub reads short headers only.
        reported = dict(failure, message=shortened(failure["message"], REPORTED_CHARS_MAX))
        self._channel.send(control.Faulted(group.index, text, number, trace, reported))
        self.pending.append(group)

    def rebuild(self) -> None:
        while self.pending:
            group = self.pending.pop()
            self._rebuilds += 1
            group.bits |= FIRST_CALL  # the hub allows the time for a build
            self._progress.begin(group)
            try:
                _close(group)
                if isinstance(group, EnvBatch):
                    group.rebuilt(made_by(self._factories[group.index], group.indices, self._envs.build))
                else:
                    group.rebuilt(self._make_runner(group.index))
                self._envs.check_spaces(group.env)
                self._calls.set_all_again(group.indices)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            self._progress.show(group.index)
            self._progress.rest()

    def _rename_factories(self) -> None:
        if not self._envs.build.factories:
            self._factories = env_sources.named(self._envs.build)

    def _answer(self, work: Callable[[], Any]) -> bool:
        try:
            answer = work()
            self._host.arm_stack_dumps()  # an env may have installed signal handlers of its own
            self._channel.send(answer)
        except ChannelClosed:
            raise
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError):
                remedy = remedy_of(error, served=not self._envs.allow_pickle)
                error.msg = f"{error}{remedy}"  # ``msg`` is the text of an ImportError
                error.args = (error.msg,)
            self._reports.send(error, self._row, "factory_failed")
            return False
        return True

    def _build_first(self) -> control.Built | control.FirstBuilt:
        build = self._envs.build
        self._host.pin(build.cpu)
        importing = ", ".join(module for module in env_sources.modules_of(build) if module not in sys.modules)
        if importing:  # the client is told, because an import may take long or never end
            self._channel.send(control.Building(0, importing))
        self._reseed(build.rows[0])  # before code of the envs is imported
        env_sources.adopt_environment(build)
        self._imports = ImportWatch(build.variables) if build.says_imported else None
        env_sources.set_up(build)
        self._factories = env_sources.factories(build, self._memory)
        if importing:
            self._channel.send(control.Building(0))
        self._runner = env_sources.runner_class(build.runner)
        if build.factories and self._imports is not None and not self._imports.imported:
            call_before_first_env(self._share_imports)  # a factory may have Gymnasium import what it needs
        else:
            self._share_imports()
        if not build.first_only:
            return self._build_rows(build.rows)
        self._build_row(build.rows[0])
        fits, (first,) = self._may_share_process(), self._envs.groups
        return control.FirstBuilt(fits, private_bytes(), fits and is_cheap(first.env))

    def _share_imports(self) -> None:
        """Have the session's other workers forked with what this one has imported, if they may be; only once."""
        imports, self._imports = self._imports, None
        if imports is None:
            return
        shareable = imports.shareable()
        self._channel.send(control.Imported(shareable, imports.files() if shareable else []))
        while shareable:
            for message in self._channel.receive() or ():
                if not isinstance(message, control.ForkZygote):
                    raise ChannelClosed(f"{message} ends it")
                self._host.zygote.fork_zygote(self._channel.take_descriptors(3))
                shareable = False

    def _build_rows(self, rows: Sequence[int]) -> control.Built:
        envs, sent_s = self._envs, time.monotonic()
        sources = envs.build.rows  # also the one whose env was built first, of which the rows are the rest
        if envs.build.batch_workers:
            self._reseed(rows[0])
            batch = made_by(self._factories[rows[0]], rows, envs.build)
            self._share_imports()
            envs.groups.append(EnvBatch(rows, batch, envs.build))
            rows, sources = (), rows[:1]  # one source for all rows
        for row in rows:
            self._build_row(row)
            second = len(envs.groups) == 1 and len(rows) > 1  # else the hub blames the first if it hangs
            if second or time.monotonic() > sent_s + PROGRESS_S:
                sent_s = time.monotonic()
                self._channel.send(control.Building(len(envs.groups)))
        pickled = [self._factories[row] for row in sources] if envs.build.factories else []
        return self._described(pickled)

    def _described(self, factories: Sequence[Any]) -> control.Built:

        def encoded(space: Any) -> bytes:
            return codec.encode(spaces.describe(space, envs.allow_pickle), envs.exact)

        envs, build, groups = self._envs, self._envs.build, self._envs.groups
        first, has_first, is_any = groups[0].env, envs.number == 0, build.observation_mode == "any"
        own = first.observation_space, first.action_space
        if is_any:
            alike = len({repr(spaces.structure(group.env.action_space)) for group in groups}) == 1
            own = spaces.Anything(), first.action_space if alike else spaces.Anything()
        observed, acted = (spaces.nearest(space, envs.allow_pickle) for space in own)
        differ = build.observation_mode == "different"
        described = [group.env.observation_space for group in groups] if differ else own[:1] if has_first else []
        leaves = spaces.leaves(observed)
        unknown = codec.as_pickle_or_repr if envs.allow_pickle else codec.as_repr
        # Each access to a wrapper's spec may copy it several times, which takes longer than to make a small env.
        own_spec = has_first or build.factories or build.entry or build.kwargs_each
        spec = first.spec if own_spec else None
        return control.Built(
            observation_spaces=[*map(encoded, described)],
            action_space=encoded(own[1]) if has_first else b"",
            observation_leaves=[leaf.wire() for leaf in leaves if leaf != OBJECT],
            action_leaves=[leaf.wire() for leaf in spaces.leaves(acted)],
            metadata=codec.encode(dict(first.metadata or {}), unknown) if has_first else b"",
            render_mode=first.render_mode,
            spec=encode_or_nothing(lambda: spec, envs.exact) if has_first and spec is not None else b"",
            has_object_leaves=OBJECT in leaves,
            sources=[*map(env_sources.source_of, factories)],
            sys_path=[folder for folder in sys.path if isinstance(folder, str)],
            cwd=process_marks.own_folder(),
            plain_spec=(b"" if spec is None else encode_or_nothing(lambda: spec)) if own_spec else None,
            may_share_process=self._may_share_process(),
            action_structure=repr(spaces.structure(acted)) if is_any else "",
        )

    def _may_share_process(self) -> bool:
        return all(may_share_process(group.env, self._runner) for group in self._envs.groups)

    def _reseed(self, row: int) -> None:
        if (build := self._envs.build).generators:
            reseed(build.generators, build.row_offset + row, build.incarnation)

    def _build_row(self, row: int) -> None:
        self._row, build = row, self._envs.build
        self._reseed(row)
        runner = self._make_runner(row)
        self._share_imports()
        self._envs.groups.append((SnapshotRow if build.snapshots else Row)(row, runner, build))

    def _make_runner(self, row: int) -> Any:
        runner = self._runner(adapt(self._make_env(row)))
        return RequestLog(runner) if self._envs.build.snapshots else runner

    def _make_env(self, row: int) -> Any:
        name = f"the factory of env {self._envs.build.row_offset + row}"
        try:
            made = self._factories[row]()
            if self._has(made, row):  # such as `env = make(); [lambda: env] * 2`: copied, as separate processes would
                made = env_sources.factories(self._envs.build, self._memory)[row]()
                if self._has(made, row):
                    text = f"{name} returned an env that this process has already"
                    own = "each is to make its own, or with num_workers=num_envs each env has its own process"
                    raise ValueError(f"{text}: {own}")
        except TypeError as error:
            if re.search(r"missing \d+ required .*'num_envs'", str(error)):
                raise TypeError(f"{error}: {NEEDS_VECTOR}") from error
            raise
        return as_gymnasium(made, name)

    def _has(self, made: Any, index: int) -> bool:
        # The same object may be in other wrappers.
        base = getattr(made, "unwrapped", made)
        return any(getattr(group.env, "unwrapped", None) is base for group in self._envs.groups if group.index != index)


def _close(group: RowGroup) -> None:
    try:
        group.env.close()
    except BaseException:
        traceback.print_exc()  # into the worker's log
