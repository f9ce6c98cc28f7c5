"""The instructions of a session's state machine, which ``hub.executor`` and ``hub.replies`` carry out."""

from __future__ import annotations

from typing import Any

from envhub.arena.layout import Layout
from envhub.env_failure import EnvFailure
from envhub.frozen import Frozen
from envhub.protocol.messages import Failure
from envhub_server.catalog.registry import EnvFacts
from envhub_server.ipc import control
from envhub_server.session.failure_text import WorkerLoss
from envhub_server.session.hang_detector import Late


class Instruction(Frozen):
    """One thing to do for a session."""


# --- workers ----------------------------------------------------------------------------------------------------------


class StartProcesses(Instruction):
    """Start processes with these numbers, which may be spares; ``WorkersNotStarted`` reports that none can be started.

    Their zygote imports these libraries for them.
    """

    processes: tuple[int, ...]
    spare: bool = False
    libraries: tuple[str, ...] = ()


class Assign(Instruction):
    """Give the slot to this spare; the slot's process, if it has one, then serves no slot."""

    slot: int
    process: int


class Tell(Instruction):
    """Send a control message to a process."""

    process: int
    message: Any


class GiveArena(Instruction):
    """Give the session's arena to a process, with the bells of this slot."""

    process: int
    slot: int
    message: control.MapArena


class HandOver(Instruction):
    """Give the rows of this slot to its process.

    ``pending`` is the slot's message of the pending request, if it has one.
    """

    slot: int
    process: int
    message: control.Serve
    pending: Any = None


class ReportLate(Instruction):
    """Log that an env has not returned; if its process is about to be killed, have it write its stacks."""

    process: int
    late: Late


class ReportClosing(Instruction):
    """Tell the client and the log that envs are slow to close, and what they execute.

    ``slow`` has of each process its number, its descriptor of the file with its stack, and the rows that it closes.
    """

    slow: tuple[tuple[int, int, tuple[int, ...]], ...]


class Kill(Instruction):
    """End a process at once."""

    process: int


class KeepReplay(Instruction):
    """Write a replay file of an env of this slot: its calls up to the failure.

    Attributes:
        slot: its index.
        process: the number of its process.
        row: the env's row; None for the env that the process ran when it ended.
        trace: what it was asked, if the process sent it; else it is read from the memory of the process.
        failure: the failure; its ``replay`` is the name of the file.
        build, mapped: the orders that the process was sent.
        memory_max: the process's memory limit in bytes; 0 for none.
    """

    slot: int
    process: int
    row: int | None
    trace: bytes
    failure: EnvFailure
    build: control.Build
    mapped: control.MapArena
    memory_max: int | None = None


# --- the arena --------------------------------------------------------------------------------------------------------


class MakeArena(Instruction):
    """Allocate the session's arena; ``ArenaRefused`` reports a lack of memory. ``GiveArena`` follows."""

    layout: Layout
    loose: bool  # whether observations have leaves outside the arena
    is_batch: bool  # whether each worker's envs are one vector env


class PostReset(Instruction):
    """Hand all rows to their workers for a reset; messages on the channels say which rows are reset."""


class PostStep(Instruction):
    """Put the actions of the request into the arena and hand all rows to their workers.

    ``ActionsRefused`` reports that they do not fit.
    """


class PostPart(Instruction):
    """Do the same for the rows of SEND; ``PartPosted`` or ``ActionsRefused`` reports it."""


class LeavePart(Instruction):
    """Report no rows posted in parts any more; they are left to the next RECEIVE."""


class TakePart(Instruction):
    """Report by ``PartDone`` once this many of the rows posted in partial batches are done."""

    rows: int


class TakeRows(Instruction):
    """Take the rows of a slot whose process has ended, and complete its step, so that no driver waits for it.

    ``resetting`` are the rows that the process had to reset in the pending reset; None without a pending reset. A
    process that has ``left`` to be recycled has said in each row's ``needs_reset`` what its next step is.
    """

    slot: int
    process: int
    loss: WorkerLoss
    resetting: tuple[int, ...] | None
    left: bool = False


class KeepRows(Instruction):
    """Complete the rows of a slot without a process unchanged: the reset names none of them."""

    slot: int


class FinishSteps(Instruction):
    """Complete the steps of a slot that have waited too long for its next process."""

    slot: int
    loss: WorkerLoss


# --- who drives -------------------------------------------------------------------------------------------------------


class Grant(Instruction):
    """Send the client at the side socket the arena and the bells; ``SideClosed`` reports that it has gone."""


class RefuseSide(Instruction):
    """Close the client's connection to the side socket: it stays on the wire lane."""


class GiveDrive(Instruction):
    """Have the client drive."""


class TakeDrive(Instruction):
    """Have the hub drive."""


class CloseSide(Instruction):
    """Close the client's side socket."""


class Revoke(Instruction):
    """Revoke the session of a client that drives; the client then asks the hub why."""


class Recall(Instruction):
    """Have the client that drives ask the hub, which tells it that another takes the session over."""


class EndRecall(Instruction):
    """Have the client that was recalled go on, if it has not asked yet."""


class WindUp(Instruction):
    """Have a client that drives begin no further step."""


# --- the client -------------------------------------------------------------------------------------------------------


class Answer(Instruction):
    """Answer the request with this message and these rows of blobs.

    The arena's arrays come before the blobs: of the whole batch if ``arrays``, else of the rows in ``part``.
    """

    message: Any
    arrays: bool = False
    rows: tuple[tuple[int, bytes], ...] = ()
    part: tuple[int, ...] | None = None


class Fail(Instruction):
    """Answer the request with a failure."""

    failure: Failure


class Transfer(Instruction):
    """Give the session the token and the owner of the client that attaches; the former client has it no more."""


class AnswerAttach(Instruction):
    """Answer the client that takes the session over."""


class FailAttach(Instruction):
    """Refuse the client that takes the session over, with the reason."""

    failure: Failure


class Goodbye(Instruction):
    """Push a GOODBYE to the client: the hub ends the session."""

    why: Failure


class Notify(Instruction):
    """Push a NOTICE to the session's client, and log it as this event."""

    event: str
    text: str


class Learn(Instruction):
    """Note facts about the session's envs for later sessions."""

    facts: EnvFacts


class Warn(Instruction):
    """Log this event as a warning, with these fields."""

    event: str
    fields: dict[str, Any]


class End(Instruction):
    """Free everything that the session holds."""


Instructions = list[Instruction]
