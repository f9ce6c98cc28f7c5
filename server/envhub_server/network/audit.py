"""The audit file: who connected, was refused, made, took over or ended a session, and which keys changed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from envhub_server.log import Logger, stamped
from envhub_server.repeats import Repeats

log = Logger("envhub.hub")


class AuditError(ValueError):
    """The file cannot be opened."""


class Audit:
    """Appends one JSON object a line to a file, if there is one; has no secret in it."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, of mode 0600 if it is new.

        Raises:
            AuditError: it cannot be opened.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = -1 if path is None else os.open(path, flags, 0o600)
        except OSError as error:
            raise AuditError(f"audit {path}: {error.strerror}") from error
        self._repeats = Repeats()

    def write(self, event: str, client: str, origin: str = "", **fields: str | int) -> None:
        """Write what happened: of which client, from where, and why.

        Equal lines within ``repeats.REPEAT_S`` are counted in the next one. ``origin`` is an IP address, or by ipc
        ``localhost:UID:GID:PID``.
        """
        if self._descriptor < 0:
            return
        left_out = self._repeats.left_out((event, client, origin, *fields.values()), time.monotonic())
        if left_out is None:
            return
        repeats = {"repeats": left_out} if left_out else {}
        line = stamped({"event": event, "client": client, "from": origin, **fields, **repeats})
        try:
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")
        except OSError as error:
            log.error("audit_failed", why=str(error))

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
