"""The events of a worker's process: its start, its messages and its exit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from envhub_server.processes.exit_cause import ExitCause


@dataclass(frozen=True)
class WorkerStarted:
    """The process of this number runs, with this id."""

    process: int
    pid: int


@dataclass(frozen=True)
class WorkerSaid:
    """A process has sent a control message; it is well-formed, and its numbers are within their bounds.

    Attributes:
        process: its number in its session.
        message: the control message.
        current: False for a message about a step or reset of a row that is not the row's last one.
    """

    process: int
    message: Any
    current: bool = True


@dataclass(frozen=True)
class WorkerExited:
    """A process was reaped, or will never exist: its last event.

    Attributes:
        process: its number in its session.
        cause: why it ended.
        unread: the last message that was sent to it, if it is known that the worker had not read all of it.
    """

    process: int
    cause: ExitCause
    unread: Any = None


WorkerEvent = WorkerStarted | WorkerSaid | WorkerExited
# Events, each with the number of its session, in the order in which they happened. The hub's loop takes them out; an
# object that puts one in is never called back.
Events = deque[tuple[int, Any]]
