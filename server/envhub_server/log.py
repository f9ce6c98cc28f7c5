"""The hub's log: a structured line for each change of a session or worker, which never makes the hub wait."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import math
import os
import select
import socket
import stat
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envhub.errors import hide_secrets_in, printable, shortened

_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE)


class NonblockingWriter:
    """Writes to a descriptor without waiting; does not own the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def gone(self) -> bool:
        return any(events & ~select.POLLOUT for _, events in self._poll.poll(0))

    def write(self, raw: bytes) -> int:
        """Write what fits now, and return its length; lines of up to ``PIPE_BUF`` reach a pipe whole or not."""
        start = 0
        while start < len(raw):
            most = start + select.PIPE_BUF
            piece = raw[start : most if len(raw) <= most else raw.rfind(b"\n", start, most) + 1 or most]
            written = self._written(piece)
            start += written
            if written < len(piece):
                break
        return start

    def _written(self, piece: bytes) -> int:
        try:
            return os.pwritev(self.descriptor, [piece], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:  # closed or gone, or of a kind that has no such flag
            # A pipe that is ready takes PIPE_BUF bytes without waiting.
            if error.errno in _NOT_THERE and self._poll.poll(0) == [(self.descriptor, select.POLLOUT)]:
                with contextlib.suppress(OSError):
                    return os.write(self.descriptor, piece)
            return 0


class LogFile:
    """A file of lines, with mode 0600 where it is made here; opened again once its path leads to another file.

    So both ways of logrotate lose no line: ``create`` renames the file, and ``copytruncate`` empties it.
    """

    gone = False  # which a ``NonblockingWriter`` may be

    def __init__(self, path: Path) -> None:
        """Open it; raises ``OSError``."""
        self._path = path
        self.descriptor = self._opened()
        self._is_torn = False  # whether the last line lacks its end, for which the disk had no room
        self._instead = NonblockingWriter(2)

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file", str(self._path))
        return descriptor

    def _follow_rotation(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self.descriptor)):
                return
        opened, before = self._opened(), self.descriptor
        self.descriptor, self._is_torn = opened, False
        os.close(before)

    def write(self, raw: bytes) -> int:
        """Write lines; those that the file cannot take, as on a full disk, go to stderr as far as that takes them."""
        with contextlib.suppress(OSError):  # the new file cannot be opened: go on with the old one
            self._follow_rotation()
        line = b"\n" + raw if self._is_torn else raw
        try:
            written = os.write(self.descriptor, line)
        except OSError:
            written = 0
        if written < len(line):
            self._is_torn = self._is_torn or written > 0
            self._instead.write(raw)
        else:
            self._is_torn = False
        return len(raw)


class HubStream(io.TextIOBase):
    """Writes to a standard stream, and drops what cannot be written now. It neither ends nor stops a hub."""

    def __init__(self, descriptor: int, writer: NonblockingWriter | LogFile | None = None) -> None:
        self._writer = writer or NonblockingWriter(descriptor)

    def write(self, text: str) -> int:
        self._writer.write(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        return self._writer.descriptor

    def isatty(self) -> bool:
        return os.isatty(self._writer.descriptor)


LIMIT_S = 10.0  # the period of the limit
LINES_MAX = 300  # of an event, from one source, in a period: a session may have a line for each of 256 workers
SOURCES_MAX = 64  # of an event, that have lines of their own
OTHERS = "others"  # all further sources
FIELD_CHARS_MAX = 2000  # of a text in a line
NETWORK_BYTES = 8  # of an IPv6 address, of which each machine has as many as it likes


class LineLimit:
    """Selects the lines that are written, so that no peer and no env makes the log grow without bound. Pure."""

    def __init__(self) -> None:
        self._until_s = -math.inf
        self._lines: dict[str, Counter[str]] = {}  # of each event, by source
        self._written: set[Hashable] = set()  # the events, sources and kinds of lines

    def admits(self, event: str, source: str, kind: Hashable, now_s: float) -> bool:
        """True if a line is written; of one ``kind`` there is one line in a period."""
        if now_s >= self._until_s:
            self._until_s, self._lines, self._written = now_s + LIMIT_S, {}, set()
        lines = self._lines.setdefault(event, Counter())
        source = source if source in lines or len(lines) < SOURCES_MAX else OTHERS
        if lines[source] >= LINES_MAX or (event, source, kind) in self._written:
            return False
        lines[source] += 1
        self._written.add((event, source, kind))
        return True


def network_of(origin: str) -> str:
    """The part of its origin that a peer cannot vary: user on this machine, IPv4 address, or network of an IPv6 one."""
    if origin.startswith("localhost:"):  # by ipc; its process's number follows that of its user
        return ":".join(origin.split(":")[:2])
    # As an address of both families writes an IPv4 client; and the interface by which a link-local client comes.
    origin = origin.removeprefix("::ffff:").partition("%")[0]
    try:
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, origin)[:NETWORK_BYTES] + bytes(8))
    except OSError:
        return origin


_limit = LineLimit()


def _is_admitted(event: str, line: Mapping[str, Any], once_per: Sequence[str] | None) -> bool:
    kind = hash(tuple(str(line.get(name)) for name in once_per or line))
    source = f"{line.get('client', '')}@{network_of(str(line.get('host', line.get('uid', ''))))}"
    return _limit.admits(event, source, kind, time.monotonic())


_level: int | None = None  # from which on lines are written; None where a program's own structlog writes them
_file: LogFile | None = None  # in place of stderr


def configure(level: str = "info", file: Path | None = None) -> None:
    """Log from this level on: for people on a terminal, else as JSON, one object a line; raises ``OSError``."""
    global _file
    _file = None if file is None else LogFile(file)
    set_level(level)


def set_level(level: str) -> None:
    global _level
    _level = number = getattr(logging, level.upper())
    if number < logging.ERROR:
        _own_logger()


@functools.cache
def _own_logger() -> Any:
    """A logger of structlog's. Importing that takes 0.1 s, and a hub that logs errors only seldom needs it."""
    import structlog

    stderr: Any = HubStream(2, _file)
    processors = structlog.processors
    json = [processors.format_exc_info, processors.JSONRenderer()]
    rendering = json if writes_json() else [lambda _, __, line: printable(line), _console_renderer()]
    return structlog.wrap_logger(
        structlog.WriteLogger(stderr),
        processors=[processors.add_log_level, processors.TimeStamper(fmt="iso", utc=True), *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
    )


def _console_renderer() -> Any:
    """A renderer whose colours are those of the commands: by NO_COLOR and TERM."""
    from rich.console import Console
    from structlog.dev import ConsoleRenderer, plain_traceback

    terminal = Console(force_terminal=True)
    if terminal.no_color or terminal.color_system is None:
        return ConsoleRenderer(colors=False, exception_formatter=plain_traceback)
    return ConsoleRenderer()


def writes_json() -> bool:
    return _level is not None and (_file is not None or not os.isatty(2))


def writer_to(descriptor: int, as_events: bool) -> NonblockingWriter | LogFile:
    """The writer of what workers print to a standard stream of the hub; their events go where the log goes."""
    return _file if as_events and _file is not None else NonblockingWriter(descriptor)


_copy: Callable[[bytes], None] | None = None  # gets each line that is written, as JSON


def copy_to(copy: Callable[[bytes], None] | None) -> None:
    global _copy
    _copy = copy


def copied(line: bytes) -> bytes:
    if _copy is not None:
        _copy(line)
    return line


def json_line(event: str, level: str = "info", **fields: Any) -> bytes:
    from structlog.processors import JSONRenderer, TimeStamper

    line = TimeStamper(fmt="iso", utc=True)(None, "", {**fields, "event": event, "level": level})
    rendered: Any = JSONRenderer()(None, "", line)
    return f"{rendered}\n".encode()


class Logger:
    """Logs by structlog, under this name, with these fields in each line.

    A comment at a call, ``# Event: ...``, says what the event is, for the table in ``server/docs/monitoring.md``. Equal
    lines, or those equal in the fields ``once_per``, are written once in ``LIMIT_S``.
    """

    def __init__(self, name: str, **fields: Any) -> None:
        self._name, self._fields = name, fields

    def bind(self, **fields: Any) -> Logger:
        return Logger(self._name, **self._fields, **fields)

    def _log(self, method: str, level: int, event: str, once_per: Sequence[str] | None = None, **fields: Any) -> None:
        if _level is not None and level < _level:
            return
        given = {**self._fields, **fields}
        if _level is not None and not _is_admitted(event, given, once_per):
            return
        line = {name: hide_secrets_in(value) for name, value in given.items()}
        line |= {name: shortened(text, FIELD_CHARS_MAX) for name, text in line.items() if isinstance(text, str)}
        try:
            if _level is not None:
                logger = _own_logger()
            else:
                import structlog

                logger = structlog.get_logger(self._name)
        except (ImportError, OSError):  # no descriptor is left to import structlog with
            HubStream(2).write(f"{event} {line}\n{traceback.format_exc()}")
        else:
            getattr(logger, method)(event, **line)
            if _copy is not None:
                copied(json_line(event, "error" if method == "exception" else method, **line))

    debug = functools.partialmethod(_log, "debug", logging.DEBUG)
    info = functools.partialmethod(_log, "info", logging.INFO)
    warning = functools.partialmethod(_log, "warning", logging.WARNING)
    error = functools.partialmethod(_log, "error", logging.ERROR)
    exception = functools.partialmethod(_log, "exception", logging.ERROR)


log = Logger("envhub.hub")  # of all parts of the hub but those with a name of their own
