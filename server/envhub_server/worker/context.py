"""The objects that most subjects of a worker use: its envs, its progress word, its reports of failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from envhub.arena.memory import TURN_ONE, Arena
from envhub.errors import shortened
from envhub.protocol.messages import Failure
from envhub.secret import hidden
from envhub.values import codec, spaces
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel
from envhub_server.worker.env_batch import RowGroup
from envhub_server.worker.exception_report import PendingFailure, describe_failure
from envhub_server.worker.host import Host
from envhub_server.worker.row_places import NotFinite
from envhub_server.worker.trace_writer import TraceWriter


class SessionSpaces(NamedTuple):
    """The spaces of the session, which its envs' spaces must match in the observation mode."""

    observation: Any
    action: Any
    mode: str

    def check(self, env: Any) -> None:
        """Compare an env's spaces with them; raises ``SpaceMismatch``."""
        spaces.check_equivalent(env.observation_space, self.observation, self.mode)
        spaces.check_action_space(env.action_space, self.action, self.mode)


class HostedEnvs:
    """The envs of one worker."""

    spaces: SessionSpaces  # of the session; only once an arena is mapped

    def __init__(self) -> None:
        self.number: int | None = None  # the worker's number in its session; None if the worker only lists names
        self.build: Any = None  # the message by which the envs are built; None before it came
        self.groups: list[RowGroup] = []  # the envs; empty once another worker serves their rows
        self.trace: TraceWriter | None = None  # the requests of the envs, for replays; None for none

    @property
    def indices(self) -> list[int]:
        return [index for group in self.groups for index in group.indices]

    @property
    def allow_pickle(self) -> bool:
        """True if the envs are those of the hub's own program."""
        return bool(self.build.allow_pickle)

    @property
    def exact(self) -> codec.Unknown:
        return codec.as_pickle if self.allow_pickle else codec.refuse

    def set_trace(self, trace: TraceWriter | None) -> None:
        """Note in this trace what the envs are asked."""
        self.trace = trace
        for group in self.groups:
            group.trace = trace

    def clear(self) -> None:
        self.set_trace(None)
        self.groups.clear()


class ProgressWord:
    """Stores the word; the stepper stores it without a call, because it does so for every row.

    Attributes:
        words: of all workers, each at its first row.
        at: the index of this worker's word.
        turn: counts the calls of envs; its lower bits are free for those of the group that is called.
    """

    words: Any

    def __init__(self) -> None:
        self.at = self.turn = 0

    def attach(self, arena: Arena, at: int) -> None:
        self.words, self.at = arena.turn.data, at
        self.resume()

    def resume(self) -> None:
        """Continue to count from the present word, which another worker may have written."""
        self.turn = self.words[self.at] & ~(TURN_ONE - 1)

    def begin(self, target: Any) -> None:
        """Store that the worker is about to call this group, or this env."""
        self.turn += TURN_ONE
        self.show(target.turn)

    def show(self, bits: int) -> None:
        """Store these lower bits; 0 where no env is called."""
        self.words[self.at] = self.turn | bits


LINE_CHARS_MAX = 1024  # of an exception's text


class FailureReports:
    """Describes the exceptions of one worker's envs, and sends them."""

    def __init__(self, channel: Channel, envs: HostedEnvs) -> None:
        self._channel, self._envs = channel, envs

    def describe(self, error: BaseException, row: int | None, code: str = "env_raised") -> Failure:
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
        traced = code == "env_raised" and number and not isinstance(error, PendingFailure)
        trace = self._envs.trace.taken_of(row) if traced and self._envs.trace is not None else b""
        self._channel.send(control.RowFailed(failure, number, trace, isinstance(error, NotFinite)))
        return failure


class WorkerContext(NamedTuple):
    """The objects that the subjects of one worker share."""

    channel: Channel  # to the hub
    envs: HostedEnvs  # those of the worker
    host: Host  # the process in which they run
    reports: FailureReports  # of what they raise
    progress: ProgressWord  # the worker's word in the arena
