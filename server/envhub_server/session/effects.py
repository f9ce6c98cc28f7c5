"""The effects of a session's state machine: it calls these methods in the order in which they take effect.

They act on the session's processes, memory and client. What comes of one, such as actions that do not fit, is told to
the machine after the method in which it made the call has returned.
"""

from __future__ import annotations

from typing import Any, Protocol

from envhub.arena.layout import Layout
from envhub.env_failure import EnvFailure
from envhub.protocol.messages import Failure
from envhub_server.ipc import control
from envhub_server.session.slots import Late, WorkerLoss

RowBlobs = tuple[tuple[int, bytes], ...]  # rows, each with what the reply has for it


class Effects(Protocol):
    """Effects of one session: the hub's, and in tests a list of the calls."""

    # --- workers ------------------------------------------------------------------------------------------------------

    def start_processes(self, processes: tuple[int, ...], spare: bool = False, shares_imports: bool = False) -> None:
        """Start processes with these numbers, which may be spares; ``on_not_started`` is told if none can be.

        With ``shares_imports`` the session's zygote forks them.
        """

    def start_restored(self, process: int, snapshot: int) -> None:
        """Have a snapshot fork the process of this number; ``on_not_started`` is told if it cannot."""

    def take_snapshot(self, process: int, wanted: control.TakeSnapshot) -> None:
        """Have a process take a snapshot; if it forks, ``on_snapshot_born`` or ``on_exited`` of ``-serial`` follows."""

    def drop_snapshot(self, serial: int) -> None: ...
    def repeat_requests(self, process: int, name: str, requests: bytes) -> None:
        """Have a restored process make these requests again, up to the snapshot of this name."""

    def fork_zygote(self, process: int, files: tuple[str, ...]) -> None:
        """Have a process that waits for this fork the session's zygote; ``on_not_started`` is told if it cannot.

        Later sessions may use it as long as these files are unchanged.
        """

    def assign(self, slot: int, process: int) -> None:
        """Give the slot to this spare; the slot's process, if it has one, then serves no slot."""

    def tell(self, process: int, message: Any) -> None: ...
    def give_arena(self, process: int, slot: int, message: control.MapArena) -> None:
        """Give the session's arena to a process, with the bells of this slot."""

    def hand_over(self, slot: int, process: int, message: control.Serve, replaced: int) -> None:
        """Give the rows of this slot to its process, which carries out what is posted, with seeds for its envs.

        Their slot's process was ``replaced`` so often.
        """

    def report_late(self, process: int, late: Late) -> None:
        """Log that an env has not returned; if its process is about to be killed, have it write its stacks."""

    def report_closing(self, slow: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        """Tell the client and the log that envs are slow to close, and what they execute.

        ``slow`` has of each process its number, and the rows that it closes.
        """

    def kill(self, process: int) -> None: ...
    def keep_replay(
        self, slot: int, process: int, failure: EnvFailure, row: int | None = None, trace: bytes = b""
    ) -> None:
        """Write a file of what an env of this slot was asked up to the failure, whose ``replay`` is the file's name.

        Without a row it is the env that the process ran when it ended; without a trace that is read from its memory.
        """

    # --- the arena ----------------------------------------------------------------------------------------------------

    def make_arena(self, layout: Layout, has_object_leaves: bool, is_batch: bool) -> None:
        """Allocate the arena; ``on_arena_refused`` is told of a lack of memory. ``give_arena`` follows.

        With ``is_batch`` each worker's envs are one vector env.
        """

    def post_message(self) -> None:
        """Put the request, a reset or a call, into the arena and hand its rows to their workers.

        ``on_not_posted`` is told if it does not fit.
        """

    def post_step(self) -> None:
        """Do the same for a step and its actions."""

    def post_part(self) -> str:
        """Do the same for the rows of SEND; returns why they do not fit, or nothing."""

    def take_part(self, rows: int) -> None:
        """Tell ``on_part_done`` once this many of the rows posted in partial batches are done."""

    def take_rows(self, slot: int, process: int, loss: WorkerLoss, left: bool = False) -> None:
        """Take the rows of a slot whose process has ended, and complete its step, so that no driver waits for it.

        A process that has ``left`` to be recycled has said in each row's ``needs_reset`` what its next step is.
        """

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

    def answer(self, message: Any, arrays: bool = False, rows: RowBlobs = ()) -> None:
        """Answer the request with this message, the arena's results of it if ``arrays``, and these blobs."""

    def fail(self, failure: Failure) -> None: ...
    def keep_waiting(self) -> None: ...  # the request is answered by one of these, as are those before it
    def answer_part(self, rows: RowBlobs = (), part: tuple[int, ...] = ()) -> None:
        """Answer the oldest request that is kept with the arrays of the rows in ``part``, and these blobs of theirs."""

    def fail_part(self, failure: Failure) -> None: ...
    def transfer(self) -> None:
        """Give the session the token and the owner of the client that attaches; the former client has it no more."""

    def answer_attach(self) -> None: ...
    def fail_attach(self, failure: Failure) -> None: ...
    def goodbye(self, why: Failure) -> None: ...
    def notify(self, event: str, text: str) -> None: ...  # by a NOTICE, and in the log as this event
    def learn(self, shares_imports: bool) -> None: ...
    def warn(self, event: str, fields: dict[str, Any]) -> None: ...
    def end(self) -> None: ...
