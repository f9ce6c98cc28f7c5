"""The hub's log: one structured line per change of a session or worker, on stderr, which can never hold the hub up."""

from __future__ import annotations

import logging
import os
import select

import structlog


class Stderr:
    """Writes whole lines to stderr, and drops what nobody takes: a log must neither end a hub nor stop it.

    Attributes:
        dropped: how many lines nobody took, since their reader is gone or does not read.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def write(self, text: str) -> None:
        """Write ``text``, as far as a reader has room for it now."""
        raw = text.encode("utf-8", "backslashreplace")
        for start in range(0, len(raw), select.PIPE_BUF):  # of a pipe that is ready, so much never waits
            if not self._written(raw[start : start + select.PIPE_BUF]):
                self.dropped += 1
                return

    def _written(self, piece: bytes) -> bool:
        try:
            return self._poll.poll(0) == [(2, select.POLLOUT)] and os.write(2, piece) == len(piece)
        except OSError:  # stderr is closed, or its terminal is gone
            return False

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
