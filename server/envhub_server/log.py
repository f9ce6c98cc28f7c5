"""The hub's log: one structured line per change of a session or worker, on stderr, which never makes the hub wait."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import MutableMapping
from typing import Any

from envhub_server.processes.nonblocking_writer import NonblockingWriter
from envhub_server.repeats import Repeats


class Stderr:
    """Writes lines to stderr, and drops lines that have no reader: a log must neither end a hub nor stop it."""

    def __init__(self) -> None:
        self._writer = NonblockingWriter(2)

    def write(self, text: str) -> None:
        """Write as much of ``text`` as fits into stderr now."""
        self._writer.write(text.encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Do nothing: no line is buffered."""


# What a client can cause as often as it likes, each with what tells one from another.
_REPEATED = {
    "request_failed": ("session", "code"),
    "client_refused": ("why", "host"),
    "connection_ended": ("client", "why"),
    "replay_not_kept": ("why",),
    "env_not_recorded": ("session", "env"),
    "answer_dropped": ("session", "worker", "message"),
}
_repeats = Repeats()


def _without_repeats(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Leave out what was logged moments ago; the next line of its kind says how often."""
    if line["event"] not in _REPEATED:
        return line
    kind = (line["event"], *(line.get(name) for name in _REPEATED[line["event"]]))
    left_out = _repeats.left_out(kind, time.monotonic())
    if left_out is None:
        raise _structlog().DropEvent
    return {**line, "repeats": left_out} if left_out else line


_level: int | None = None  # below which nothing is logged, once that is configured


def configure(level: int = logging.INFO) -> None:
    """Log from this level on: for people on a terminal, else as JSON, one object a line."""
    global _level
    _level = level
    if level < logging.ERROR:
        _structlog()


def is_configured() -> bool:
    """Whether the log is configured, by ``configure`` or by a program that configures structlog for itself."""
    return _level is not None or ("structlog" in sys.modules and sys.modules["structlog"].is_configured())


@functools.cache
def _structlog() -> Any:
    """structlog, configured; a hub that logs errors only imports it when there is one, since that takes 0.1 s."""
    import structlog

    if _level is not None:
        processors = structlog.processors
        json = [processors.format_exc_info, processors.JSONRenderer()]
        structlog.configure(
            processors=[
                _without_repeats,
                processors.add_log_level,
                processors.TimeStamper(fmt="iso", utc=True),
                *([structlog.dev.ConsoleRenderer()] if os.isatty(2) else json),
            ],
            logger_factory=structlog.WriteLoggerFactory(Stderr()),  # type: ignore[arg-type]
        )
    return structlog


@functools.cache
def _stamper() -> Any:
    return _structlog().processors.TimeStamper(fmt="iso", utc=True, key="time")


def stamped(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the audit file, with its ``time``."""
    return _stamper()(None, "", line)  # type: ignore[no-any-return]


class Logger:
    """Logs by structlog, with these fields in each line."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def bind(self, **fields: Any) -> Logger:
        """A logger with these fields, too."""
        return Logger(**self._fields, **fields)

    def debug(self, event: str, **fields: Any) -> None:
        """Log what helps to find a defect."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log a change that is expected."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log what an operator may want to change."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log what has failed."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Log what has failed, with the exception that is being handled."""
        self._log(logging.ERROR, event, {**fields, "exc_info": True})

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if level < (_level or logging.NOTSET):
            return
        try:
            structlog = _structlog()
        except OSError:  # no descriptor is left to import it with
            Stderr().write(f"{event} {self._fields} {fields}\n")
        else:
            structlog.get_logger().log(level, event, **self._fields, **fields)
