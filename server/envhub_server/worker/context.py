"""The objects that most subjects of a worker use: its envs, its progress word, its reports of failures."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import resource
import sys
import time
import traceback
from dataclasses import replace
from typing import Any, Callable, Iterable, NamedTuple

import envhub
from envhub.arena.memory import CALL_ONE, Arena
from envhub.errors import FULL_TRACEBACKS, hidden, hide_folders_in, hide_secrets_in, shortened
from envhub.process import FILE_STACKS, STACKS
from envhub.protocol import messages
from envhub.protocol.messages import Failure
from envhub.values import codec, spaces
from envhub.values.gym_api import api
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel, moved_up
from envhub_server.worker.env_batch import RowGroup
from envhub_server.worker.row_memory import NotFinite
from envhub_server.worker.trace_writer import TraceWriter


class Host:
    """The process of a worker: it writes the stacks of its threads when the hub wants them and at a crash."""

    def __init__(self, output: int = -1, error: int = -1, zygote: Any = None) -> None:
        """Replace the standard output and error by these pipes, and close both; without them, write no stacks."""
        self.zygote = zygote  # the ``Zygote`` that became this worker, which forks others like it
        self.renew(output, error)

    def renew(self, output: int, error: int) -> None:
        """Print by these pipes, and write stacks, as a new process does; also in a copy of it."""
        self.stacks = -1  # the descriptor of the file in memory for stacks that are nothing to print; -1 for none
        self._descriptor = error
        if error < 0:
            return
        # A copy of its own: an env may close or redirect its standard error.
        self._descriptor = moved_up(os.dup(error))
        with contextlib.suppress(OSError, AttributeError):  # no descriptor is left, or the system has no such files
            self.stacks = moved_up(os.memfd_create(control.STACKS_FILE))
            # The hub, which reads it, empties it before.
            fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)
        for standard, pipe in ((1, output), (2, error)):
            os.dup2(pipe, standard)
            os.close(pipe)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A killed worker loses no line, and no other process writes into the middle of one.
                stream.reconfigure(line_buffering=True, write_through=False)
        self.arm_stack_dumps()

    def arm_stack_dumps(self) -> None:
        """Write stacks again on the signals whose handlers an env may have replaced."""
        if self._descriptor < 0:
            return
        faulthandler.disable()  # else it ignores a second call
        faulthandler.enable(self._descriptor)
        for number, descriptor in ((STACKS, self._descriptor), (FILE_STACKS, self.stacks)):
            faulthandler.unregister(number)
            if descriptor >= 0:
                faulthandler.register(number, descriptor, all_threads=True)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self._descriptor, self.stacks

    def close(self) -> None:
        """In a copy of the process, leave what the other one prints, and its stacks, to that."""
        faulthandler.disable()
        for number in (STACKS, FILE_STACKS):
            faulthandler.unregister(number)
        for descriptor in (self._descriptor, self.stacks):
            if descriptor >= 0:
                os.close(descriptor)
        with open(os.devnull, "r+b") as null:
            for standard in (1, 2):
                os.dup2(null.fileno(), standard)

    def pin(self, cpu: int | None) -> None:
        if cpu is None:
            return
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), [cpu])


MESSAGE_CHARS_MAX = 1 << 16
ARGUMENT_BYTES_MAX = 1 << 16  # of the arguments of an exception, and the same for its attributes
TRACEBACK_CHARS_MAX = 16384

# Frames of these files and folders stand between an env and the step of its user. The envs of Gymnasium are not there.
_GYMNASIUM = os.path.dirname(str(api.__file__))
_LIBRARY = tuple(
    f'File "{path}'
    for path in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
        os.path.dirname(os.path.abspath(envhub.__file__)) + os.sep,
        *(os.path.join(_GYMNASIUM, name) for name in ("core.py", "wrappers", "utils")),
        os.path.join(_GYMNASIUM, "envs", "registration.py"),
    )
)


class PendingFailure(Exception):
    """A ``Failure`` that says how the worker before this one ended; the first step of each of its rows raises it."""


def describe_failure(error: BaseException, code: str, row: int | None, worker: int | None, build: Any = None) -> Any:
    """A ``Failure`` that describes ``error`` in strings; never raises."""
    # They may name no folder of this machine where ``build`` says so, the order by which the envs were made.
    is_named_by_secret = build is not None and hidden(build.name) != build.name  # by mistake; errors repeat the name

    def allowed(value: Any) -> Any:
        value = hide_folders_in(value) if build is not None and build.hide_folders else value
        return hide_secrets_in(value) if is_named_by_secret else value

    try:
        message = str(error)
    except BaseException:  # an exception whose own text raises is still worth reporting
        message = f"<{type(error).__name__}, whose text cannot be read>"
    if isinstance(error, MemoryError):
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if limit != resource.RLIM_INFINITY:
            message += f" (the hub lets a worker have --worker-memory {limit} bytes)"
    # An OSError keeps the file's name apart; the class takes it as a third argument.
    file = [error.filename] if isinstance(error, OSError) and len(error.args) == 2 and error.filename else []
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except BaseException:
        lines = traceback.format_tb(error.__traceback__)
    if not os.environ.get(FULL_TRACEBACKS):
        lines = folded(lines)
    return messages.Failure(
        code=code,
        scope="env",
        message=allowed(shortened(message, MESSAGE_CHARS_MAX)),
        env_index=row,
        worker=worker,
        type=f"{type(error).__module__}.{type(error).__qualname__}",
        args=encode_or_nothing(lambda: allowed([*error.args, *file])),
        attributes=encode_or_nothing(lambda: allowed(dict(vars(error)))),
        traceback=allowed("".join(lines)[-TRACEBACK_CHARS_MAX:]),
    )


def folded(lines: Iterable[str]) -> list[str]:
    """The entries of a formatted traceback, with each run of frames of the library but the innermost as one line."""
    kept: list[str] = []
    run: list[str] = []
    for line in lines:
        if line.lstrip(" |").startswith(_LIBRARY):
            run.append(line)
            continue
        if line.lstrip(" |").startswith('File "'):
            kept += _one_line(run)
        elif run:  # the exception itself: the last frame is where it was raised
            kept += [*_one_line(run[:-1]), run[-1]]
        kept.append(line)
        run = []
    return kept + run


def _one_line(run: list[str]) -> list[str]:
    frames = f"{len(run)} frame{'s' * (len(run) > 1)} of EnvHub and Gymnasium; {FULL_TRACEBACKS}=1 shows them"
    return [f"  [{frames}]\n"] if run else []


def encode_or_nothing(read: Callable[[], Any], unknown: codec.Unknown = codec.refuse) -> bytes:
    try:
        blob = codec.encode(read(), unknown)
    except Exception:  # a foreign class may raise anything
        return b""
    return blob if len(blob) <= ARGUMENT_BYTES_MAX else b""


class HostedEnvs:
    """The envs of one worker."""

    spaces: tuple[Any, Any, str]  # of observations and actions, and the mode; only once there is an arena

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

    def check_spaces(self, env: Any) -> None:
        observation, action, mode = self.spaces
        spaces.check_equivalent(env.observation_space, observation, mode)
        spaces.check_action_space(env.action_space, action, mode)

    def set_trace(self, trace: TraceWriter | None) -> None:
        self.trace = trace
        for group in self.groups:
            group.trace = trace


class ProgressWord:
    """Stores the word; the stepper stores it without a call, because it does so for every row."""

    words: Any  # of all workers, each at its first row
    since: Any  # likewise the words ``since``

    def __init__(self) -> None:
        self.at = 0  # the index of this worker's word
        self.word = 0  # counts the calls of envs; its lower bits are free for those of the group that is called

    def attach(self, arena: Arena, at: int) -> None:
        self.words, self.since, self.at = arena.progress.data, arena.since.data, at
        self.resume()

    def resume(self) -> None:
        self.word = self.words[self.at] & ~(CALL_ONE - 1)

    def begin(self, target: Any) -> None:
        self.word += CALL_ONE
        self.since[self.at] = time.monotonic_ns()
        self.words[self.at] = self.word | target.bits

    def rest(self) -> None:
        """Store that the worker waits."""
        self.since[self.at] = 0

    def show(self, bits: int) -> None:
        """Store these lower bits; 0 where no env is called."""
        self.words[self.at] = self.word | bits


LINE_CHARS_MAX = 1024  # of an exception's text


class FailureReports:
    """Describes the exceptions of one worker's envs, and sends them."""

    def __init__(self, channel: Channel, envs: HostedEnvs) -> None:
        self._channel, self._envs = channel, envs

    def describe(self, error: BaseException, row: int | None, code: str = "env_raised") -> Failure:
        if isinstance(error, PendingFailure):
            pending: Failure = replace(error.args[0], env_index=row)
            return pending
        described: Failure = describe_failure(error, code, row, self._envs.number, self._envs.build)
        return described

    def one_line(self, error: BaseException) -> str:
        described = self.describe(error, None)  # its own ``repr`` may raise, or take megabytes
        return f"{described.type}: {shortened(described.message, LINE_CHARS_MAX)}"

    def send(self, error: BaseException, row: int | None, code: str, number: int = 0, is_call: bool = False) -> Failure:
        failure = self.describe(error, row, code)
        traced = code == "env_raised" and number and not is_call and not isinstance(error, PendingFailure)
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
