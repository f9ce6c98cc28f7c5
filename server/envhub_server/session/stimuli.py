"""Input of a session's state machine.

They are what the client asks, what its workers report (``processes.worker_events``), and what came of an instruction or
of the passing of time. Each carries the facts of the shared memory that its handling depends on, since the machine
reads no memory. ``quiescent`` says that every row is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from envhub.frozen import Frozen
from envhub.protocol.messages import Failure
from envhub_server.processes.worker_events import WorkerExited, WorkerSaid
from envhub_server.session.failure_text import Overrun
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
    """Another client takes the session over; the one before is locked out."""

    quiescent: bool


class SideConnected(SessionStimulus):
    """The client has connected to the side socket with the session's ticket."""

    quiescent: bool


class SideClosed(SessionStimulus):
    """The client has closed its side socket, or has ended."""

    quiescent: bool


class LeaseExpired(SessionStimulus):
    """The client was away for longer than its lease."""

    quiescent: bool


class Draining(SessionStimulus):
    """The hub shuts down: begin nothing, and end when the request under way is answered, or at ``by_s``.

    From ``end_by_s`` on no env gets more time to close.
    """

    by_s: float
    end_by_s: float
    quiescent: bool


class QuotaOverrun(SessionStimulus):
    """The workers of its client have more memory than they may, and this one has the most of them."""

    process: int
    overrun: Overrun


class Abandoned(SessionStimulus):
    """The hub ends the session at once."""

    why: Failure


# --- what came of an instruction --------------------------------------------------------------------------------------


class WorkersNotStarted(SessionStimulus):
    """No process could be asked for, for none of these numbers."""

    processes: tuple[int, ...]
    reason: str


class ArenaRefused(SessionStimulus):
    """The shared memory that the session needs is not available."""

    reason: str


class OtherArenaMade(SessionStimulus):
    """There is a second arena, for the client that takes the session over."""


class OtherArenaRefused(SessionStimulus):
    """There is no memory for a second arena."""

    reason: str


class ActionsRefused(SessionStimulus):
    """The actions do not fit the arena; no env has moved."""

    problem: str


class PartPosted(SessionStimulus):
    """A part of the batch, of this many rows, is with its workers."""

    rows: int


class PartDone(SessionStimulus):
    """Rows of a RECEIVE that are done, as many as it waits for; or one of them ``raised``, and no other is taken.

    ``small`` are the encoded infos that are in the arena, ``large`` the rows whose infos came by the channel.
    """

    rows: tuple[int, ...]
    small: tuple[tuple[int, bytes], ...] = ()
    large: tuple[int, ...] = ()
    raised: int | None = None


class StandInFailed(SessionStimulus):
    """A row was completed in place of its worker, as one that raised this."""

    failure: Failure


class StandInInfo(SessionStimulus):
    """A row was completed in place of its worker, with an info that is too large for the arena."""

    row: int
    info: bytes


class RowsWaiting(SessionStimulus):
    """Steps were posted to a slot whose process has ended; its rows wait for the next one."""

    slot: int


# --- of the arena and of time -----------------------------------------------------------------------------------------


class RowsDone(SessionStimulus):
    """Every row is done."""


class Elapsed(SessionStimulus):
    """The time of ``next_deadline_s`` has come; ``progress`` is what each slot is at, None where that is nothing.

    ``memory`` is how many bytes each process has, if the state machine ``measures`` that now.
    """

    quiescent: bool
    progress: tuple[Progress | None, ...]
    memory: Mapping[int, int] = field(default_factory=dict)


Stimulus = SessionStimulus | WorkerSaid | WorkerExited
