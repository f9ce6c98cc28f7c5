"""Descriptions of a worker's exceptions, as strings and encoded values: no other process has the class."""

from __future__ import annotations

import os
import resource
import traceback
from typing import Any, Callable, Iterable

import envhub
from envhub.errors import FULL_TRACEBACKS, shortened, without_folders, without_secrets
from envhub.protocol import messages
from envhub.values import codec
from envhub.values.gym_api import api

MESSAGE_CHARS_MAX = 1 << 16
ARGUMENT_BYTES_MAX = 1 << 16  # of the arguments of an exception, and the same for its attributes
TRACEBACK_CHARS_MAX = 16384

# Frames of these files and folders stand between an env and the step of its user. The envs of Gymnasium are not there.
_GYMNASIUM = os.path.dirname(str(api.__file__))
_LIBRARY = tuple(
    f'File "{place}'
    for place in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
        os.path.dirname(os.path.abspath(envhub.__file__)) + os.sep,
        *(os.path.join(_GYMNASIUM, name) for name in ("core.py", "wrappers", "utils")),
        os.path.join(_GYMNASIUM, "envs", "registration.py"),
    )
)


class PendingFailure(Exception):
    """A ``Failure`` that says how the worker before this one ended; the first step of each of its rows raises it."""


def describe_failure(
    error: BaseException,
    code: str,
    row: int | None,
    worker: int | None,
    hide_folders: bool = False,
    hide_secrets: bool = False,
) -> Any:
    """A ``Failure`` that describes ``error`` in strings; never raises.

    They may name no folder of this machine, or have nothing that may be a secret.
    """

    def shown(value: Any) -> Any:
        value = without_folders(value) if hide_folders else value
        return without_secrets(value) if hide_secrets else value

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
        message=shown(shortened(message, MESSAGE_CHARS_MAX)),
        env_index=row,
        worker=worker,
        type=f"{type(error).__module__}.{type(error).__qualname__}",
        args=encode_or_nothing(lambda: shown([*error.args, *file])),
        attributes=encode_or_nothing(lambda: shown(dict(vars(error)))),
        traceback=shown("".join(lines)[-TRACEBACK_CHARS_MAX:]),
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
            kept += _in_a_line(run)
        elif run:  # the exception itself: the last frame is where it was raised
            kept += [*_in_a_line(run[:-1]), run[-1]]
        kept.append(line)
        run = []
    return kept + run


def _in_a_line(run: list[str]) -> list[str]:
    frames = f"{len(run)} frame{'s' if len(run) > 1 else ''} of EnvHub and Gymnasium; {FULL_TRACEBACKS}=1 shows them"
    return [f"  [{frames}]\n"] if run else []


def encode_or_nothing(read: Callable[[], Any], unknown: codec.Unknown = codec.refuse) -> bytes:
    """The encoded value; empty if the codec cannot carry it or it is too large."""
    try:
        blob = codec.encode(read(), unknown)
    except Exception:  # a foreign class may raise anything
        return b""
    return blob if len(blob) <= ARGUMENT_BYTES_MAX else b""
