"""The stimuli of a session's state machine.

They are the client's requests, the workers' events (``processes.worker_events``), the results of instructions, and the
passing of time. Each has the facts of the shared memory that its handler needs, because the machine reads no memory.
``quiescent`` is True if every row is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from envhub.frozen import Frozen
from envhub.protocol.messages import Failure
from envhub_server.processes.worker_events import WorkerExited, WorkerSaid
from envhub_server.session.hang_detector import Progress


class SessionStimulus(Frozen):
    """Stimuli of a session's state machine, besides the events of its workers."""


# --- of the client and the hub ----------------------------------------------------------------------------------------


class SessionMade(SessionStimulus):
    """The session was made: start its workers."""


class Requested(SessionStimulus):
    """The client's next request."""

    message: Any
    quiescent: bool = True


class Attached(SessionStimulus):
    """Another client is to take the session over."""

    quiescent: bool


class AttachGivenUp(SessionStimulus):
    """The client that waits for another to let go is gone itself."""


class SideConnected(SessionStimulus):
    """The client, which is this process, has connected to the side socket with the session's ticket."""

    quiescent: bool
    process: int = 0


class SideClosed(SessionStimulus):
    """The client has closed its side socket or has ended."""

    quiescent: bool


class LeaseExpired(SessionStimulus):
    """The lease of the client has run out."""

    quiescent: bool


class Draining(SessionStimulus):
    """The hub drains: begin no request, and end once the pending request is answered, or at ``by_s``.

    After ``end_by_s`` no env gets more time to close.
    """

    by_s: float
    end_by_s: float
    quiescent: bool


class Abandoned(SessionStimulus):
    """The hub ends the session at once."""

    why: Failure


# --- what came of an instruction --------------------------------------------------------------------------------------


class WorkersNotStarted(SessionStimulus):
    """None of the processes with these numbers could be started."""

    processes: tuple[int, ...]
    reason: str


class ArenaRefused(SessionStimulus):
    """The shared memory that the session needs is not available."""

    reason: str


class ActionsRefused(SessionStimulus):
    """The actions do not fit the arena; no env has moved."""

    problem: str


class PartPosted(SessionStimulus):
    """A partial batch, of this many rows, is with its workers."""

    rows: int


class PartDone(SessionStimulus):
    """The done rows of a RECEIVE, as many as it waits for; or one row that ``raised``, and no other.

    ``small`` has the encoded infos in the arena, ``large`` the rows whose infos came on the channel.
    """

    rows: tuple[int, ...]
    small: tuple[tuple[int, bytes], ...] = ()
    large: tuple[int, ...] = ()
    raised: int | None = None


class StandInFailed(SessionStimulus):
    """The hub completed a row of an ended worker with this failure."""

    failure: Failure


class StandInInfo(SessionStimulus):
    """The hub completed a row of an ended worker with an info that is too large for the arena."""

    row: int
    info: bytes


class RowsWaiting(SessionStimulus):
    """Steps were posted to a slot whose process has ended; its rows wait for the next one."""

    slot: int


# --- of the arena and of time -----------------------------------------------------------------------------------------


class RowsDone(SessionStimulus):
    """Every row is done."""


class Elapsed(SessionStimulus):
    """The time of ``next_deadline_s`` has come; ``progress`` has each slot's progress, None for an idle slot.

    ``memory`` has the bytes of memory of each process, if the state machine ``measures`` it now.
    """

    quiescent: bool
    progress: tuple[Progress | None, ...]
    memory: Mapping[int, int] = field(default_factory=dict)


Stimulus = SessionStimulus | WorkerSaid | WorkerExited
