"""Reports the exceptions of a worker's envs to the hub."""

from __future__ import annotations

from dataclasses import replace

from envhub.errors import shortened
from envhub.protocol.messages import Failure
from envhub.secret import hidden
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel
from envhub_server.worker.exception_report import PendingFailure, describe_failure
from envhub_server.worker.hosted_envs import HostedEnvs
from envhub_server.worker.observation_checks import NotFinite

LINE_CHARS_MAX = 1024  # of an exception's text


class FailureReports:
    """Describes the exceptions of one worker's envs, and sends them."""

    def __init__(self, channel: Channel, envs: HostedEnvs) -> None:
        self._channel, self._envs = channel, envs

    def describe(self, error: BaseException, row: int | None, code: str = "env_raised") -> Failure:
        """The ``Failure`` of this row; never raises."""
        if isinstance(error, PendingFailure):
            pending: Failure = replace(error.args[0], env_index=row)
            return pending
        build = self._envs.build
        hide_folders = build is not None and build.hide_folders
        named_by_secret = build is not None and hidden(build.name) != build.name  # by mistake; errors repeat the name
        described: Failure = describe_failure(error, code, row, self._envs.number, hide_folders, named_by_secret)
        return described

    def in_a_line(self, error: BaseException) -> str:
        """The error in a line; its own ``repr`` may raise, or take megabytes."""
        described = self.describe(error, None)
        return f"{described.type}: {shortened(described.message, LINE_CHARS_MAX)}"

    def send(self, error: BaseException, row: int | None, code: str, number: int = 0) -> Failure:
        """Send the failure of a row or of the worker; ``number`` is the row's ``request``, 0 without an arena."""
        failure = self.describe(error, row, code)
        journaled = code == "env_raised" and number and not isinstance(error, PendingFailure)
        tick = self._envs.tick if journaled else -1
        self._channel.send(control.RowFailed(failure, number, tick, isinstance(error, NotFinite)))
        return failure
