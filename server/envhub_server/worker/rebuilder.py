"""Truncates the episodes of envs that raised, and builds these envs again, in the same worker."""

from __future__ import annotations

import traceback

from envhub.arena.memory import TURN_FIRST
from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import raised_text, shortened
from envhub_server.ipc import control
from envhub_server.ipc.journal import name_of_raised
from envhub_server.worker.builder import Builder
from envhub_server.worker.calls import EnvCalls
from envhub_server.worker.context import WorkerContext
from envhub_server.worker.env_batch import RowGroup
from envhub_server.worker.failure_reports import LINE_CHARS_MAX
from envhub_server.worker.observation_checks import NotFinite

REPORTED_CHARS_MAX = 4096  # of an exception's text


class Rebuilder:
    """Rebuilds the envs of one worker.

    Attributes:
        pending: the groups whose env must be rebuilt.
    """

    def __init__(self, context: WorkerContext, builder: Builder, calls: EnvCalls) -> None:
        self._channel, self._envs, self._host, self._reports, self._progress = context
        self._builder, self._calls = builder, calls
        self.pending: list[RowGroup] = []
        self._count = 0

    def truncate(self, group: RowGroup, error: BaseException, number: int) -> None:
        """Truncate the group, whose step of this ``request`` raised; its env must be built again."""
        described = self._reports.describe(error, group.index)
        tick = self._envs.tick
        failure = EnvFailure(
            "nan" if isinstance(error, NotFinite) else "exception",
            described.message or raised_text(described.type, ""),
            restarts=self._count,
            exception=described.type,
            traceback=described.traceback,
            replay=name_of_raised(self._envs.build.replays, group.index, number) if tick >= 0 else "",
        )
        group.truncate(failure_info(failure))
        for observer in self._envs.observers:
            observer.truncated(group, failure)
        text = f"{described.type}: {shortened(described.message, LINE_CHARS_MAX)}"
        # The hub reads short headers only.
        reported = dict(failure, message=shortened(failure["message"], REPORTED_CHARS_MAX))
        self._channel.send(control.Faulted(group.index, text, number, tick, reported))
        self.pending.append(group)

    def rebuild(self) -> None:
        """Build the pending envs; the driver has their results already."""
        while self.pending:
            group = self.pending.pop()
            self._count += 1
            group.turn |= TURN_FIRST  # the hub allows the time for a build
            self._progress.begin(group)
            try:
                self._builder.rebuild(group)
                self._calls.set_all_again(group.indices)
            except BaseException:
                traceback.print_exc()
                self._host.crash()
            self._progress.show(group.index)
