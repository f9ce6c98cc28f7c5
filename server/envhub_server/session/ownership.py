"""The client of a session: its lane, who drives, and how another client takes the session over."""

from __future__ import annotations

from envhub.protocol.messages import Failure
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import Driver, LaneName
from envhub_server.session.slots import Process, SlotTable, Stage

LOST = Failure("session_lost", "session", "the session has broken; make another")


class Ownership:
    """Owner of a session.

    Attributes:
        lane: how the client steps it.
        driver: the process that posts rows.
        lent: True if a client has the arena's memory, or has had it.
        claimed: True if a client that takes the session over waits for its answer, also while the envs are made.
        other_made: True if the second arena exists.
    """

    def __init__(self) -> None:
        self.lane = LaneName.WIRE
        self.driver = Driver.HUB
        self.lent = self.claimed = self.other_made = False

    # --- who drives ---------------------------------------------------------------------------------------------------

    @property
    def lendable(self) -> bool:
        """True if no client drives or is to."""
        return self.lane is LaneName.WIRE and self.driver is Driver.HUB and not self.claimed

    def lend(self) -> Instructions:
        """Let the client drive."""
        self.lane, self.driver, self.lent = LaneName.SHARED, Driver.CLIENT, True
        return [do.Grant(), do.GiveDrive()]

    def on_side_closed(self, closed: stimuli.SideClosed) -> Instructions:
        """Go on over the wire."""
        self.lane = LaneName.WIRE
        return [do.CloseSide(), *(self.take_drive() if closed.quiescent else [])]

    def take_drive(self) -> Instructions:
        """Have the hub drive; every row is done."""
        if self.driver is Driver.HUB:
            return []
        self.driver = Driver.HUB
        return [do.TakeDrive()]

    def revoke(self) -> Instructions:
        """Send a client that drives to ask what became of its session."""
        return [do.Revoke()] if self.lane is LaneName.SHARED else []

    # --- takeover -----------------------------------------------------------------------------------------------------

    def lock_out(self) -> Instructions:
        """Lock out the client that has the session, for the one that takes it over."""
        revoked = [*self.revoke(), do.CloseSide()]
        self.lane = LaneName.WIRE
        return revoked

    def grant(self) -> Instructions:
        """Give the session, whose memory no other client has, to the client that takes it over."""
        self.claimed, self.driver = False, Driver.HUB
        return [do.TakeDrive(), do.AnswerAttach()]

    def refuse(self, why: Failure = LOST) -> Instructions:
        """Tell a client that takes over why it does not get the session."""
        if not self.claimed:
            return []
        drop: Instructions = [do.DropOtherArena()] if self.other_made else []
        self.claimed = self.other_made = False
        return [*drop, do.FailAttach(why)]

    def begin_move(self, slots: SlotTable) -> list[Process]:
        """Note that the second arena exists; returns the processes that are to map it."""
        self.other_made = True
        mapped = [each for each in slots.processes if each.stage in (Stage.SERVING, Stage.MAPPING, Stage.MAPPED)]
        for process in mapped:
            process.moving = True
        return mapped

    def end_move(self) -> Instructions:
        """Use the second arena, which all processes have mapped."""
        self.lent = self.other_made = False
        self.driver = Driver.HUB
        return [do.UseOtherArena()]
