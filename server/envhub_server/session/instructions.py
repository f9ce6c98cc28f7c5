"""Output of a session's state machine: instructions, which ``hub.executor`` and ``hub.replies`` carry out."""

from __future__ import annotations

from typing import Any

from envhub.arena.layout import Layout
from envhub.env_failure import EnvFailure
from envhub.frozen import Frozen
from envhub.protocol.messages import Failure
from envhub_server.catalog.step_costs import StepCost
from envhub_server.ipc import control
from envhub_server.session.failure_text import WorkerLoss
from envhub_server.session.hang_detector import Late


class Instruction(Frozen):
    """One thing to do for a session."""


# --- workers ----------------------------------------------------------------------------------------------------------


class StartProcesses(Instruction):
    """Start processes of these numbers, which may be spares; ``WorkersNotStarted`` reports that none can be had.

    Their zygote imports these libraries for them.
    """

    processes: tuple[int, ...]
    spare: bool = False
    libraries: tuple[str, ...] = ()


class Assign(Instruction):
    """This spare serves the slot from now on; the slot's process, if it has one, serves none.

    The slot is ``recycled`` if its process had not ended.
    """

    slot: int
    process: int
    recycled: bool = False


class Tell(Instruction):
    """Send a control message to a process."""

    process: int
    message: Any


class GiveArena(Instruction):
    """Hand the session's arena to a process, with the bells of this slot: the second one while processes move there."""

    process: int
    slot: int
    message: control.MapArena


class HandOver(Instruction):
    """The rows of this slot are its process's from now on.

    ``pending`` is the slot's part of the request under way, if that has one.
    """

    slot: int
    process: int
    message: control.Serve
    pending: Any = None


class ReportLate(Instruction):
    """An env has not returned: log it, and have its process write its stacks if it is about to be killed."""

    process: int
    late: Late


class Kill(Instruction):
    """End a process at once."""

    process: int


class KeepReplay(Instruction):
    """Keep in a file what an env of this slot was asked until it failed.

    Attributes:
        slot: its index.
        process: the number of its process.
        row: of the env; None for the one that the process was at when it ended.
        tick: of the process's journal, the last that counts; -1 for all of it.
        failure: what happened; ``replay`` is the name of the file.
        build, mapped: what the process was told.
        memory_max: how many bytes of memory it may have; 0 for no limit.
    """

    slot: int
    process: int
    row: int | None
    tick: int
    failure: EnvFailure
    build: control.Build
    mapped: control.MapArena
    memory_max: int | None = None


# --- the arena --------------------------------------------------------------------------------------------------------


class MakeArena(Instruction):
    """Allocate the session's memory; ``ArenaRefused`` reports that there is none. ``GiveArena`` follows."""

    layout: Layout
    loose: bool  # whether observations have leaves outside of it
    is_batch: bool  # whether each worker's envs are one vector env


class MakeOtherArena(Instruction):
    """Allocate a second arena of the same layout; ``OtherArenaMade`` or ``OtherArenaRefused`` reports it."""


class DropOtherArena(Instruction):
    """The session does not move to the second arena."""


class UseOtherArena(Instruction):
    """No worker uses the first arena any more: go on in the second one, from the state of the first."""


class PostReset(Instruction):
    """Hand all rows to their workers for a reset; what each resets is told by the channels."""


class PostStep(Instruction):
    """Put the actions of the request into the arena and hand all rows to their workers.

    ``ActionsRefused`` reports that they do not fit.
    """


class PostPart(Instruction):
    """The same for the rows of SEND; ``PartPosted`` or ``ActionsRefused`` reports it."""


class TakePart(Instruction):
    """Report by ``PartDone`` once so many rows of those posted by parts are done."""

    rows: int


class TakeRows(Instruction):
    """The rows of a slot whose process has ended are the hub's: complete its step, so that no driver waits for it.

    Of a reset that is under way the process was to reset the rows ``resetting``; None is another request, or none.
    """

    slot: int
    process: int
    loss: WorkerLoss
    resetting: tuple[int, ...] | None


class KeepRows(Instruction):
    """Complete the rows of a slot without a process unchanged: the reset leaves all of them out."""

    slot: int


class FinishSteps(Instruction):
    """Complete the steps of a slot, which have waited for its next process for long enough."""

    slot: int
    loss: WorkerLoss


# --- who drives -------------------------------------------------------------------------------------------------------


class Grant(Instruction):
    """Give the client at the side socket what it needs to drive; ``SideClosed`` reports that it has gone."""


class RefuseSide(Instruction):
    """Close the connection to the side socket: its client uses the wire."""


class GiveDrive(Instruction):
    """Have the client drive."""


class TakeDrive(Instruction):
    """Have the hub drive."""


class CloseSide(Instruction):
    """Close the client's side socket."""


class Revoke(Instruction):
    """Send a client that drives to ask what became of its session."""


class WindUp(Instruction):
    """Have a client that drives begin no other step."""


# --- the client -------------------------------------------------------------------------------------------------------


class Answer(Instruction):
    """Answer the request with this message and these rows of blobs.

    Before them come the arrays of the arena, of the whole batch if ``arrays``, else of the rows in ``part``.
    """

    message: Any
    arrays: bool = False
    rows: tuple[tuple[int, bytes], ...] = ()
    part: tuple[int, ...] | None = None


class Fail(Instruction):
    """Answer the request with a failure."""

    failure: Failure


class AnswerHops(Instruction):
    """Answer the request with the times at which the last step passed."""


class AnswerAttach(Instruction):
    """Answer the client that takes the session over."""


class FailAttach(Instruction):
    """Tell the client that takes the session over why it does not get it."""

    failure: Failure


class Goodbye(Instruction):
    """Tell the client, without being asked, that the hub ends the session."""

    why: Failure


class Notify(Instruction):
    """Tell the session's client and the log, by this event, something that nobody asked for."""

    event: str
    text: str


class LearnCost(Instruction):
    """Keep for later sessions what a step of the session's envs takes."""

    cost: StepCost


class Warn(Instruction):
    """Log this event as a warning, with these fields."""

    event: str
    fields: dict[str, Any]


class End(Instruction):
    """The session is over: free what it holds."""


Instructions = list[Instruction]
