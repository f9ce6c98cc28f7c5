"""The hub's log: one structured line per change of a session or worker, on stderr, which never makes the hub wait."""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any

from envhub_server.log_events import LEFT_OUT, LOG_EVENTS
from envhub_server.processes.nonblocking_writer import NonblockingWriter
from envhub_server.repeats import Repeats, network_of, shortened


class HubStream(io.TextIOBase):
    """Writes to a standard stream, and drops what cannot be written now. It neither ends nor stops a hub."""

    def __init__(self, descriptor: int) -> None:
        self._writer = NonblockingWriter(descriptor)

    def write(self, text: str) -> int:
        """Write as much of ``text`` as fits now."""
        self._writer.write(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        """The descriptor."""
        return self._writer.descriptor

    def isatty(self) -> bool:
        """True if it is a terminal."""
        return os.isatty(self._writer.descriptor)


def _stderr() -> Any:
    """The stream of the log: of a program whose envs are its own, on another system than Linux, its usual one."""
    return HubStream(2) if sys.platform == "linux" else sys.stderr


_PROGRESS = "session_making"  # that equal lines were left out of it is no news
# That belong together, of other events than these: a session may have a line for each of 256 workers.
LINES_MAX = 300
_repeats = Repeats()
_on_left_out: Callable[[], None] = lambda: None  # noqa: E731


def _without_repeats(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop lines that peers cause again and again; ``tell_left_out`` logs their number."""
    event = line["event"]
    if event == LEFT_OUT:
        return line
    repeated = LOG_EVENTS[event].repeats if event in LOG_EVENTS else None
    kind = None if repeated is None else tuple(map(str, map(line.get, repeated)))
    names = {"client": line["client"]} if "client" in line else {}
    origin = network_of(str(line.get("host", line.get("uid", ""))))
    lines_max = {} if repeated else {"lines_max": LINES_MAX}
    if not _repeats.admits(event, names, origin, kind, time.monotonic(), **lines_max):
        if event != _PROGRESS:
            _on_left_out()
        from structlog import DropEvent

        raise DropEvent
    return {name: shortened(value) for name, value in line.items()}


def on_left_out(called: Callable[[], None]) -> None:
    """Set the function that is called whenever a line is left out, so that ``tell_left_out`` is called later."""
    global _on_left_out
    _on_left_out = called


def tell_left_out(ends: bool = False) -> bool:
    """Log the number of lines that were left out, if any; return True if there may be more later.

    With ``ends`` this is the last call.
    """
    for fields in _repeats.take_left_out(math.inf if ends else time.monotonic()):
        if fields["of"] != _PROGRESS:
            Logger("envhub.hub").warning(LEFT_OUT, **fields)
    return _repeats.pending


_level: int | None = None  # from which on lines are written; None where a program's own structlog writes them


def configure(level: int = logging.INFO) -> None:
    """Log from this level on: for people on a terminal, else as JSON, one object a line."""
    global _level
    _level = level
    if level < logging.ERROR:
        _own_logger()


def configured_by_program() -> bool:
    """True if the program, in whose process this is, has configured structlog for itself."""
    return "structlog" in sys.modules and sys.modules["structlog"].is_configured()


@functools.cache
def _own_logger() -> Any:
    """A logger of structlog's. Importing that takes 0.1 s, and a hub that logs errors only seldom needs it."""
    import structlog

    processors = structlog.processors
    json = [processors.format_exc_info, processors.JSONRenderer()]
    rendering = [structlog.dev.ConsoleRenderer()] if os.isatty(2) else json
    return structlog.wrap_logger(
        structlog.WriteLogger(_stderr()),
        processors=[
            _without_repeats,
            processors.add_log_level,
            processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
    )


def _programs_logger(name: str) -> Any:
    import structlog

    return structlog.get_logger(name)


def stamped(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the audit file, with its ``time``."""
    from structlog.processors import TimeStamper

    return dict(TimeStamper(fmt="iso", utc=True, key="time")(None, "", line))


def writes_json() -> bool:
    """True if this process writes its log as JSON, and not for people on a terminal or by a program's own structlog."""
    return _level is not None and not os.isatty(2)


def json_line(event: str, **fields: Any) -> bytes:
    """A line as the log has it, for what is written to another stream, or without a look at repeats."""
    from structlog.processors import JSONRenderer, TimeStamper

    line = TimeStamper(fmt="iso", utc=True)(None, "", {**fields, "event": event, "level": "info"})
    rendered: Any = JSONRenderer()(None, "", line)
    return f"{rendered}\n".encode()


class Logger:
    """Logs by structlog, with these fields in each line.

    Its ``name`` is for a program that configures structlog for itself, and has the lines of envs in its own process.
    """

    def __init__(self, name: str, **fields: Any) -> None:
        self._name, self._fields = name, fields

    def bind(self, **fields: Any) -> Logger:
        """A logger with these fields, too."""
        return Logger(self._name, **self._fields, **fields)

    def debug(self, event: str, **fields: Any) -> None:
        """Log a detail for the search for a defect."""
        self._log("debug", logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log a change that is expected."""
        self._log("info", logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log a condition that an operator may want to change."""
        self._log("warning", logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log a failure."""
        self._log("error", logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Log a failure, with the exception that is being handled."""
        self._log("exception", logging.ERROR, event, fields)

    def _log(self, method: str, level: int, event: str, fields: dict[str, Any]) -> None:
        if _level is not None and level < _level:
            return
        try:
            logger = _own_logger() if _level is not None else _programs_logger(self._name)
        except (ImportError, OSError):  # no descriptor is left to import structlog with
            _stderr().write(f"{event} {self._fields} {fields}\n{traceback.format_exc()}")
        else:
            getattr(logger, method)(event, **self._fields, **fields)
