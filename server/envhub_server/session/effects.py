"""The effects of a session's state machine: it calls these methods in the order in which they take effect.

They act on the session's processes, memory and client. What comes of one, such as actions that do not fit, is told to
the machine after the method in which it made the call has returned.
"""

from __future__ import annotations

from typing import Any, Protocol

from envhub.arena.layout import Layout
from envhub.env_failure import EnvFailure
from envhub.frozen import Frozen
from envhub.protocol.messages import Failure
from envhub_server.catalog.registry import EnvFacts
from envhub_server.ipc import control
from envhub_server.session.slots import Late, WorkerLoss

RowBlobs = tuple[tuple[int, bytes], ...]  # rows, each with what the reply has for it


class ReplayOrder(Frozen):
    """The order to write a replay file of an env of a slot: its calls up to the failure."""

    slot: int  # its index
    process: int  # the number of its process
    row: int | None  # the env's row; None for the env that the process ran when it ended
    trace: bytes  # what it was asked, if the process sent it; else it is read from the memory of the process
    failure: EnvFailure  # the failure; its ``replay`` is the name of the file
    build: control.Build  # the orders that the process was sent
    mapped: control.MapArena
    memory_max: int | None = None  # the process's memory limit in bytes; 0 for none


class Effects(Protocol):
    """Effects of one session: the hub's, and in tests a list of the calls."""

    # --- workers ------------------------------------------------------------------------------------------------------

    def start_processes(self, processes: tuple[int, ...], spare: bool = False, libraries: tuple[str, ...] = ()) -> None:
        """Start processes with these numbers, which may be spares; ``on_not_started`` is told if none can be.

        Their zygote imports these libraries for them.
        """

    def assign(self, slot: int, process: int) -> None:
        """Give the slot to this spare; the slot's process, if it has one, then serves no slot."""

    def tell(self, process: int, message: Any) -> None: ...
    def give_arena(self, process: int, slot: int, message: control.MapArena) -> None:
        """Give the session's arena to a process, with the bells of this slot."""

    def hand_over(self, slot: int, process: int, message: control.Serve, pending: Any = None) -> None:
        """Give the rows of this slot to its process; ``pending`` is the slot's message of the pending request."""

    def report_late(self, process: int, late: Late) -> None:
        """Log that an env has not returned; if its process is about to be killed, have it write its stacks."""

    def report_closing(self, slow: tuple[tuple[int, int, tuple[int, ...]], ...]) -> None:
        """Tell the client and the log that envs are slow to close, and what they execute.

        ``slow`` has of each process its number, its descriptor of the file with its stack, and the rows that it closes.
        """

    def kill(self, process: int) -> None: ...
    def keep_replay(self, order: ReplayOrder) -> None: ...

    # --- the arena ----------------------------------------------------------------------------------------------------

    def make_arena(self, layout: Layout, has_object_leaves: bool, is_batch: bool) -> None:
        """Allocate the arena; ``on_arena_refused`` is told of a lack of memory. ``give_arena`` follows.

        With ``is_batch`` each worker's envs are one vector env.
        """

    def post_reset(self) -> None:
        """Hand all rows to their workers for a reset; messages on the channels say which rows are reset."""

    def post_step(self) -> None:
        """Put the actions of the request into the arena and hand all rows to their workers.

        ``on_actions_refused`` is told if they do not fit.
        """

    def post_part(self) -> None:
        """Do the same for the rows of SEND; ``on_part_posted`` or ``on_actions_refused`` is told."""

    def leave_part(self) -> None:
        """Report no rows posted in parts any more; they are left to the next RECEIVE."""

    def take_part(self, rows: int) -> None:
        """Tell ``on_part_done`` once this many of the rows posted in partial batches are done."""

    def take_rows(
        self, slot: int, process: int, loss: WorkerLoss, resetting: tuple[int, ...] | None, left: bool = False
    ) -> None:
        """Take the rows of a slot whose process has ended, and complete its step, so that no driver waits for it.

        ``resetting`` are the rows that the process had to reset in the pending reset; None without a pending reset. A
        process that has ``left`` to be recycled has said in each row's ``needs_reset`` what its next step is.
        """

    def keep_rows(self, slot: int) -> None:
        """Complete the rows of a slot without a process unchanged: the reset names none of them."""

    def finish_steps(self, slot: int, loss: WorkerLoss) -> None:
        """Complete the steps of a slot that have waited too long for its next process."""

    # --- who drives ---------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Send the client at the side socket the arena and the bells; ``on_side_closed`` is told if it has gone."""

    def refuse_side(self) -> None: ...  # the client stays on the wire lane
    def give_drive(self) -> None: ...
    def take_drive(self) -> None: ...
    def close_side(self) -> None: ...
    def revoke(self) -> None:
        """Revoke the session of a client that drives; the client then asks the hub why."""

    def recall(self) -> None:
        """Have the client that drives ask the hub, which tells it that another takes the session over."""

    def end_recall(self) -> None: ...
    def wind_up(self) -> None: ...  # a client that drives begins no further step

    # --- the client ---------------------------------------------------------------------------------------------------

    def answer(
        self, message: Any, arrays: bool = False, rows: RowBlobs = (), part: tuple[int, ...] | None = None
    ) -> None:
        """Answer the request with this message and these rows of blobs.

        The arena's arrays come before the blobs: of the whole batch if ``arrays``, else of the rows in ``part``.
        """

    def fail(self, failure: Failure) -> None: ...
    def transfer(self) -> None:
        """Give the session the token and the owner of the client that attaches; the former client has it no more."""

    def answer_attach(self) -> None: ...
    def fail_attach(self, failure: Failure) -> None: ...
    def goodbye(self, why: Failure) -> None: ...
    def notify(self, event: str, text: str) -> None: ...  # by a NOTICE, and in the log as this event
    def learn(self, facts: EnvFacts) -> None: ...
    def warn(self, event: str, fields: dict[str, Any]) -> None: ...
    def end(self) -> None: ...
