"""The audit file: who connected, left, was refused, made, took over or ended a session, and which keys changed."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from envhub.regular_file import open_regular_file
from envhub_server.log import Logger, stamped
from envhub_server.log_events import LEFT_OUT
from envhub_server.repeats import Repeats, network_of, shortened

KEYS_READ = "keys_read"
_NAMES = ("op", "owner")  # of fields of a line, whose values are few, and which count apart what is left out

log = Logger("envhub.hub")

# Not blocking, since a pipe without a reader would hold the hub at its start; in a regular file it changes nothing.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class AuditError(ValueError):
    """The file cannot be opened, or is no regular file."""


class Audit:
    """Appends one JSON object a line to a file, if there is one; has no secret in it.

    A file that is renamed or removed, as by logrotate, is followed by a new one of its name.
    """

    def __init__(self, path: Path | None, on_left_out: Callable[[], None] = lambda: None) -> None:
        """Open the file, of mode 0600 if it is new.

        ``on_left_out`` is called whenever a line is left out, so that ``tell_left_out`` is called later.

        Raises:
            AuditError: it cannot be opened, or is no regular file.
        """
        self._path = path
        self._descriptor = -1 if path is None else _opened(path)
        self._is_cut = path is not None and _ends_in_half_a_line(path)
        self._repeats = Repeats()
        self._on_left_out = on_left_out

    def write(self, event: str, client: str, origin: str = "", **fields: str | int) -> None:
        """Write what happened: of which client, from where, and why.

        Of equal lines within ``repeats.REPEAT_S`` the first is written, and of those of one client, from one place, a
        bounded number; ``tell_left_out`` counts the others. Each change of keys has a line of its own:
        no client can cause one, and the last line says who is admitted. ``origin`` is an IP address, or by ipc
        ``localhost:UID:GID:PID``. A line that cannot be written is lost; the hub logs it and goes on.
        """
        if self._path is None or self._descriptor < 0:
            return
        if event != KEYS_READ:
            names = {"client": client, **{name: fields[name] for name in _NAMES if name in fields}}
            kind = (origin, *fields.values())
            if not self._repeats.admits(event, names, network_of(origin), kind, time.monotonic()):
                self._on_left_out()
                return
        self._write({"event": event, "client": client, "from": origin, **fields})

    def tell_left_out(self, ends: bool = False) -> bool:
        """Write how many lines were left out in the last while, if any were; whether there may be more to tell later.

        ``ends`` says that it is not called again.
        """
        for count in self._repeats.take_left_out(math.inf if ends else time.monotonic()):
            self._write({"event": LEFT_OUT, "from": count.pop("origin", ""), **count})
        return self._repeats.pending

    def _write(self, fields: dict[str, str | int]) -> None:
        if self._path is None or self._descriptor < 0:
            return
        line = stamped({name: shortened(value) for name, value in fields.items()})
        try:
            self._follow(self._path)
        except AuditError as error:
            log.error("audit_failed", why=f"{error}; the old file is written to")
        try:
            self._append(json.dumps(line).encode() + b"\n")
        except OSError as error:
            log.error("audit_failed", why=str(error))

    def _follow(self, path: Path) -> None:
        """Open the file again if its name is another file's by now, or no file's."""
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
        """Write what was left out, and close the file."""
        self.tell_left_out(ends=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _opened(path: Path) -> int:
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        # ENXIO: a pipe without a reader, or a socket.
        advice = f"{error.strerror}; name a file in a folder of yours that exists"
        why = "this is no regular file" if error.errno == errno.ENXIO else advice
        raise AuditError(f"audit {path}: {why}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AuditError(f"audit {path}: this is no regular file")
    return descriptor


def _ends_in_half_a_line(path: Path) -> bool:
    """True if a hub was cut off in a line, by a full disk or its end; False of a file that may not be read."""
    with contextlib.suppress(OSError), open_regular_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")
    return False
