"""The reports of a connection to the program's user: notices, how far a making is, and whether the hub is reached."""

from __future__ import annotations

import logging

from envhub import errors
from envhub.protocol import prelude
from envhub.protocol.client import ClientProtocol
from envhub_client.connection.making_line import MakingLine

logger = logging.getLogger("envhub")


class UserReports:
    """Logs what the protocol of one connection learns.

    Attributes:
        making_line: shows how far a making is, until its caller ends it.
        tried: the time for which a hub that is out of reach is tried, for messages.
        warned: True while the hub is out of reach, and the user was warned of it.
    """

    def __init__(self, address: str, protocol: ClientProtocol) -> None:
        self.making_line = MakingLine()
        self.tried = ""
        self.warned = False
        self._hub, self._protocol = errors.hub_at(address), protocol

    def report(self, now_s: float, waited_s: float) -> None:
        """Report what is new, after ``waited_s`` seconds of the pending request."""
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
        """Report that the hub is out of reach, or is reached again, if that is new."""
        trouble = self._protocol.trouble(now_s)
        if bool(trouble) is self.warned:
            return
        self.warned = bool(trouble)
        if trouble:
            tried = f"for {prelude.REFUSED_S:g} s" if self._protocol.is_refused else self.tried
            logger.warning("%s is out of reach: %s; it is tried %s", self._hub, trouble, tried)
        else:
            logger.warning("%s is within reach again", self._hub)
