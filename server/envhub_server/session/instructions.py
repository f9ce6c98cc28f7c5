"""What goes in and out of a session's state machine: events, and the instructions that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envhub.arena.layout import Layout
from envhub.protocol.messages import Failure
from envhub_server.catalog.step_costs import StepCost
from envhub_server.ipc import control
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.session.failure_text import Outcome
from envhub_server.session.hang_detector import Late

# --- events besides the messages of clients and workers -------------------------------------------------------------


@dataclass(frozen=True)
class Exited:
    """A worker's process has ended, perhaps because one of its envs was ``late``."""

    ending: ExitCause
    late: Late | None = None


@dataclass(frozen=True)
class ArenaRefused:
    """The memory the session asked for is not to be had."""

    reason: str


@dataclass(frozen=True)
class Sent:
    """A part of the batch was handed to its workers."""


@dataclass(frozen=True)
class Received:
    """So many rows are done as were waited for; or one of them ``raised``, and none is taken."""

    rows: tuple[int, ...]
    small: tuple[tuple[int, bytes], ...] = ()
    large: tuple[int, ...] = ()
    raised: int | None = None


# --- instructions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWorkers:
    """Start workers of these numbers."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """Send a control message to a worker."""

    worker: int
    message: Any


@dataclass(frozen=True)
class MakeArena:
    """Allocate the session's memory and hand it to every worker, with this message."""

    layout: Layout
    message: control.MapArena
    loose: bool  # whether observations have leaves beside it


@dataclass(frozen=True)
class MapArena:
    """Hand the session's memory to a worker that takes another one's place."""

    worker: int
    message: control.MapArena


@dataclass(frozen=True)
class TakeOver:
    """The rows of a worker that ended are the hub's: finish its step, so that nobody waits for it."""

    worker: int
    outcome: Outcome


@dataclass(frozen=True)
class HandOver:
    """A worker's rows are its own from now on."""

    worker: int
    message: control.Serve


@dataclass(frozen=True)
class Drive:
    """Hand all rows to their workers; the actions of a step stand in the arena."""

    op: int


@dataclass(frozen=True)
class Answer:
    """Answer the request with this message and these rows of blobs.

    Before them come the arrays of the arena, of the whole batch if ``arrays``, else of the rows in ``part``.
    """

    message: Any
    arrays: bool = False
    rows: tuple[tuple[int, bytes], ...] = ()
    part: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Fail:
    """Answer the request with a failure."""

    failure: Failure


@dataclass(frozen=True)
class LearnCost:
    """Know for later sessions what a step of the session's envs takes."""

    cost: StepCost


@dataclass(frozen=True)
class Notify:
    """Tell the session's client and the log something that it did not ask for."""

    text: str


@dataclass(frozen=True)
class Kill:
    """End a worker at once."""

    worker: int


@dataclass(frozen=True)
class End:
    """The session is over: free what it holds."""


Instruction = (
    StartWorkers
    | Tell
    | MakeArena
    | MapArena
    | TakeOver
    | HandOver
    | Drive
    | Answer
    | Fail
    | LearnCost
    | Notify
    | Kill
    | End
)
Instructions = list[Instruction]
