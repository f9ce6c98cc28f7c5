"""The hub's log: one structured line per change of a session or worker, on stderr, which never makes the hub wait."""

from __future__ import annotations

import logging
import os

import structlog

from envhub_server.processes.nonblocking_writer import NonblockingWriter


class Stderr:
    """Writes lines to stderr, and drops lines that have no reader: a log must neither end a hub nor stop it."""

    def __init__(self) -> None:
        self._writer = NonblockingWriter(2)

    def write(self, text: str) -> None:
        """Write as much of ``text`` as fits into stderr now."""
        self._writer.write(text.encode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Do nothing: no line is buffered."""


def configure(level: int = logging.INFO) -> None:
    """Log from this level on: for people on a terminal, else as JSON, one object a line."""
    processors = structlog.processors
    json = [processors.format_exc_info, processors.JSONRenderer()]
    rendering = [structlog.dev.ConsoleRenderer()] if os.isatty(2) else json
    structlog.configure(
        processors=[processors.add_log_level, processors.TimeStamper(fmt="iso", utc=True), *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(Stderr()),  # type: ignore[arg-type]
    )
