"""The hub's log: one structured line per change of a session or worker, on stderr, which never makes the hub wait."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import MutableMapping
from typing import Any

import structlog

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
        raise structlog.DropEvent
    return {**line, "repeats": left_out} if left_out else line


def configure(level: int = logging.INFO) -> None:
    """Log from this level on: for people on a terminal, else as JSON, one object a line."""
    processors = structlog.processors
    json = [processors.format_exc_info, processors.JSONRenderer()]
    rendering = [structlog.dev.ConsoleRenderer()] if os.isatty(2) else json
    structlog.configure(
        processors=[
            _without_repeats,
            processors.add_log_level,
            processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(Stderr()),  # type: ignore[arg-type]
    )
