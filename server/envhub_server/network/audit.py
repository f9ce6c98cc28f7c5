"""The audit file: who connected, was refused, made, took over or ended a session, and which keys changed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from pathlib import Path

from envhub_server.log import Logger, stamped
from envhub_server.repeats import Repeats

KEYS_READ = "keys_read"

log = Logger("envhub.hub")

# Not blocking, since a pipe without a reader would hold the hub at its start; in a regular file it changes nothing.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class AuditError(ValueError):
    """The file cannot be opened, or is no regular file."""


class Audit:
    """Appends one JSON object a line to a file, if there is one; has no secret in it.

    A file that is renamed or removed, as by logrotate, is followed by a new one of its name.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file, of mode 0600 if it is new.

        Raises:
            AuditError: it cannot be opened, or is no regular file.
        """
        self._path = path
        self._descriptor = -1 if path is None else _opened(path)
        self._is_cut = path is not None and _ends_in_half_a_line(path)
        self._repeats = Repeats()

    def write(self, event: str, client: str, origin: str = "", **fields: str | int) -> None:
        """Write what happened: of which client, from where, and why.

        Equal lines within ``repeats.REPEAT_S`` are counted in the next one. Each change of keys has a line of its own:
        no client can cause one, and the last line says who is admitted. ``origin`` is an IP address, or by ipc
        ``localhost:UID:GID:PID``. A line that cannot be written is lost; the hub logs it and goes on.
        """
        if self._path is None or self._descriptor < 0:
            return
        left_out: int | None = 0
        if event != KEYS_READ:
            left_out = self._repeats.left_out((event, client, origin, *fields.values()), time.monotonic())
        if left_out is None:
            return
        repeats = {"repeats": left_out} if left_out else {}
        line = stamped({"event": event, "client": client, "from": origin, **fields, **repeats})
        try:
            self._follow(self._path)
        except AuditError as error:
            log.error("audit_failed", why=f"{error}; the old file is written to")
        try:
            self._append(json.dumps(line).encode() + b"\n")
        except OSError as error:
            log.error("audit_failed", why=str(error))

    def _follow(self, path: Path) -> None:
        """Open the file anew if its name is another file's by now, or no file's."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(path), os.fstat(self._descriptor)):
                return
        opened = _opened(path)
        os.close(self._descriptor)
        self._descriptor, self._is_cut = opened, _ends_in_half_a_line(path)

    def _append(self, line: bytes) -> None:
        """Write a line; what a full disk has kept of the one before it stays a line of its own."""
        line = b"\n" + line if self._is_cut else line
        written = os.write(self._descriptor, line)
        self._is_cut = not line[:written].endswith(b"\n")
        if written < len(line):
            raise OSError(errno.ENOSPC, "only a part of a line was written")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _opened(path: Path) -> int:
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        # ENXIO: a pipe without a reader, or a socket.
        why = "this is no regular file" if error.errno == errno.ENXIO else error.strerror
        raise AuditError(f"audit {path}: {why}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AuditError(f"audit {path}: this is no regular file")
    return descriptor


def _ends_in_half_a_line(path: Path) -> bool:
    """Whether a hub was cut off in a line, by a full disk or its end; False of a file that may not be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")
    return False
