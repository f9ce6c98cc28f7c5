"""What a worker says of an exception, in strings and encoded values: nobody else has its class."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any, Callable

from envhub.protocol import messages
from envhub.values import codec

MESSAGE_CHARS_MAX = 1 << 16
ARGUMENT_BYTES_MAX = 1 << 16  # of an exception, and as many of its attributes
TRACEBACK_CHARS_MAX = 16384


class Owed(Exception):
    """What the hub said of an env's last worker, to be told at its next step."""

    def __init__(self, failure: Any) -> None:
        super().__init__(failure)
        self._failure = failure

    def failure_of(self, row: Any) -> Any:
        """The failure, of this row."""
        return dataclasses.replace(self._failure, env_index=row)


def describe_failure(error: BaseException, code: str, row: int | None, worker: int | None) -> Any:
    """A ``Failure`` that says everything about ``error`` in strings; it never raises, whatever the error is."""
    try:
        message = str(error)
    except BaseException:  # an exception whose own text raises is still worth reporting
        message = f"<{type(error).__name__}, whose text cannot be read>"
    # An OSError keeps the file's name apart; the class takes it as a third argument.
    file = [error.filename] if isinstance(error, OSError) and len(error.args) == 2 and error.filename else []
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except BaseException:
        lines = traceback.format_tb(error.__traceback__)
    return messages.Failure(
        code=code,
        scope="env",
        message=message if len(message) <= MESSAGE_CHARS_MAX else f"{message[:MESSAGE_CHARS_MAX]} ... (cut)",
        env_index=row,
        worker=worker,
        type=f"{type(error).__module__}.{type(error).__qualname__}",
        args=carried(lambda: [*error.args, *file]),
        attributes=carried(lambda: dict(vars(error))),
        traceback="".join(lines)[-TRACEBACK_CHARS_MAX:],
    )


def carried(read: Callable[[], Any], unknown: codec.Unknown = codec.refuse) -> bytes:
    """The encoded value; nothing where it cannot travel or is too large: the other side goes without."""
    try:
        blob = codec.encode(read(), unknown)
    except Exception:  # anything may raise in a foreign class
        return b""
    return blob if len(blob) <= ARGUMENT_BYTES_MAX else b""
