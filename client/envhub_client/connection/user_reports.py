"""The reports of a connection to the program's user: notices, how far a making is, and whether the hub is reached."""

from __future__ import annotations

import contextlib
import logging
import sys

from envhub import errors
from envhub.protocol import prelude
from envhub.protocol.client import ClientProtocol

SLOW_S = 2.0
REPEAT_S = 5.0  # between lines where stderr is no terminal, and every count would be one more line

_logger = logging.getLogger("envhub")


class MakingLine:
    """A line on stderr that counts the envs of a slow making, for programs that have not set up logging.

    A terminal shows the latest count; elsewhere a count is a line of its own.
    """

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
        if self._on_terminal:
            _write(f"\r{' ' * len(self._on_terminal)}\r")
            self._on_terminal = ""


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no stderr, or no reader of it
        sys.stderr.write(text)
        sys.stderr.flush()


logger = logging.getLogger("envhub")


class UserReports:
    """Logs what the protocol of one connection learns."""

    def __init__(self, address: str, protocol: ClientProtocol) -> None:
        self.making_line = MakingLine()  # its caller ends it
        self.tried = ""  # for how long, or how often, a hub that is out of reach is tried
        self.warned = False  # of a hub that is out of reach
        self._hub, self._protocol = errors.hub_at(address), protocol

    def report(self, now_s: float, waited_s: float) -> None:
        if (progress := self._protocol.progress) is not None:
            self._protocol.progress = None
            counts = progress.phase, progress.built, progress.num_envs
            doing = f"importing {progress.importing}" if progress.importing else progress.starting
            doing = f" ({errors.printable(doing)})" if doing else ""
            text = "%s is %s: %d/%d envs ready%s"
            logger.info(text, self._hub, *counts, doing, extra={"progress": counts})
            self.making_line.show(f"{progress.built} of {progress.num_envs} envs made{doing}", waited_s)
        while self._protocol.notices:
            logger.warning("%s: %s", self._hub, self._protocol.notices.pop(0))
        if self.warned:
            self.report_reach(now_s)

    def report_reach(self, now_s: float) -> None:
        trouble = self._protocol.trouble(now_s)
        if bool(trouble) is self.warned:
            return
        self.warned = bool(trouble)
        if trouble:
            tried = f"for {prelude.REFUSED_S:g} s" if self._protocol.is_refused else self.tried
            logger.warning("%s is out of reach: %s; it is tried %s", self._hub, trouble, tried)
        else:
            logger.warning("%s is within reach again", self._hub)
