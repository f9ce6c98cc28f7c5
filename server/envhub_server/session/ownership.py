"""The client of a session: its lane, the driver, and the takeover by another client.

A client on the shared lane has the arena until it lets go: ``SideClosed`` is the sign of that. A client that attaches
meanwhile waits for it; the hub asks the holder to let go (``Recall``). Only then the session changes hands
(``Transfer``).
"""

from __future__ import annotations

import math

from envhub.protocol.messages import Failure
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import Driver, LaneName

LOST = Failure("session_lost", "session", "the session has broken; make another")


class Ownership:
    """The lane, the driver and the takeover of a session.

    Attributes:
        lane: how the client steps it; on the shared lane the client has the arena.
        driver: the process that posts rows.
        holder: the process id of the client on the shared lane; 0 if it is not known here.
        claimed: True if a client that takes the session over waits for its answer, also while the envs are made.
        let_go_by_s: time until which the client that attaches waits for the holder.
    """

    def __init__(self) -> None:
        self.lane = LaneName.WIRE
        self.driver = Driver.HUB
        self.holder = 0
        self.claimed = False
        self.let_go_by_s = math.inf

    # --- who drives ---------------------------------------------------------------------------------------------------

    @property
    def lendable(self) -> bool:
        """True if no client drives or was told to."""
        return self.lane is LaneName.WIRE and self.driver is Driver.HUB and not self.claimed

    def lend(self, holder: int) -> Instructions:
        """Let the client drive, which is this process."""
        self.lane, self.driver, self.holder = LaneName.SHARED, Driver.CLIENT, holder
        return [do.Grant(), do.GiveDrive()]

    def on_side_closed(self, closed: stimuli.SideClosed) -> Instructions:
        """Continue on the wire lane: the client has let go of the arena, or has ended."""
        self.lane, self.let_go_by_s = LaneName.WIRE, math.inf
        transferred: Instructions = [do.Transfer()] if self.claimed else []
        return [do.CloseSide(), *transferred, *(self.take_drive() if closed.quiescent else [])]

    def take_drive(self) -> Instructions:
        """Have the hub drive; every row is done."""
        if self.driver is Driver.HUB:
            return []
        self.driver = Driver.HUB
        return [do.TakeDrive()]

    def revoke(self) -> Instructions:
        """Revoke the session of a client that drives; the client then asks the hub why."""
        return [do.Revoke()] if self.lane is LaneName.SHARED else []

    # --- takeover -----------------------------------------------------------------------------------------------------

    def recall(self, until_s: float) -> Instructions:
        """Ask the holder to let go of the session until then."""
        self.let_go_by_s = until_s
        return [do.Recall()]

    def keep_holder(self, waited_s: float) -> Instructions:
        """Let the holder, which has not let go, keep the session, and refuse the other client."""
        by = f"process {self.holder}" if self.holder else "a process of another container"
        text = f"{by} has this session on the shared lane, and has not let go of it within restart_wait={waited_s:g} s"
        refusal = Failure("refused", "request", f"{text}: it is stopped, or too busy; attach again, or end the session")
        return [do.EndRecall(), *self.refuse(refusal)]

    def grant(self) -> Instructions:
        """Give the session to its new client; no other client has its memory."""
        self.claimed, self.driver = False, Driver.HUB
        return [do.TakeDrive(), do.AnswerAttach()]

    def refuse(self, why: Failure = LOST) -> Instructions:
        """Refuse a client that takes over, with the reason."""
        if not self.claimed:
            return []
        self.claimed, self.let_go_by_s = False, math.inf
        return [do.FailAttach(why)]
