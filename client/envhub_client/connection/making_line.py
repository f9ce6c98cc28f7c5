"""A line on stderr that counts the envs of a slow making, for programs that have not set up logging."""

from __future__ import annotations

import contextlib
import logging
import sys

SLOW_S = 2.0
REPEAT_S = 5.0  # between lines where stderr is no terminal, and every count would be one more line

_logger = logging.getLogger("envhub")


class MakingLine:
    """The line of one making. A terminal shows the latest count; elsewhere a count is a line of its own."""

    def __init__(self) -> None:
        self._next_s = SLOW_S
        self._on_terminal = ""

    def show(self, count: str, waited_s: float) -> None:
        """Show the count of a making that takes ``waited_s`` seconds so far, if that is long.

        Nothing is shown where the logger "envhub" has been set up: it logs the count, or was told not to.
        """
        if waited_s < self._next_s or _logger.handlers or _logger.level or _logger.isEnabledFor(logging.INFO):
            return
        text = f"envhub: {count}"
        if sys.stderr is not None and sys.stderr.isatty():
            _write(f"\r{text:{len(self._on_terminal)}}")
            self._on_terminal = text
        else:
            self._next_s = waited_s + REPEAT_S
            _write(f"{text}\n")

    def end(self) -> None:
        """Take it from the terminal."""
        if self._on_terminal:
            _write(f"\r{' ' * len(self._on_terminal)}\r")
            self._on_terminal = ""


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stderr, or no reader of it
        sys.stderr.write(text)
        sys.stderr.flush()
