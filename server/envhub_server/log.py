"""The hub's log: one structured line per change of a session or worker, on stderr, which can never hold the hub up."""

from __future__ import annotations

import logging
import os

import structlog

from envhub_server.processes.nonblocking_writer import NonblockingWriter


class Stderr:
    """Writes whole lines to stderr, and drops what nobody takes: a log must neither end a hub nor stop it.

    Attributes:
        dropped: how many lines nobody took, since their reader is gone or does not read.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._sink = NonblockingWriter(2)

    def write(self, text: str) -> None:
        """Write ``text``, as far as a reader has room for it now."""
        raw = text.encode("utf-8", "backslashreplace")
        if self._sink.write(raw) < len(raw):
            self.dropped += 1

    def flush(self) -> None:
        """Nothing is kept back."""


def configure(level: int = logging.INFO) -> None:
    """Log from this level on: for people on a terminal, else as JSON, one object a line."""
    processors = structlog.processors
    rendering = [processors.format_exc_info, processors.JSONRenderer()]
    structlog.configure(
        processors=[
            processors.add_log_level,
            processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.dev.ConsoleRenderer()] if os.isatty(2) else rendering),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(Stderr()),  # type: ignore[arg-type]
    )
