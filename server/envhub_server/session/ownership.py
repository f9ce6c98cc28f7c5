"""The client of a session: its lane, the driver, and the takeover by another client."""

from __future__ import annotations

from envhub.protocol.messages import Failure
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import Driver, LaneName
from envhub_server.session.slots import Process, SlotTable, Stage

LOST = Failure("session_lost", "session", "the session has broken; make another")


class Ownership:
    """The lane, the driver and the takeover of a session.

    Attributes:
        lane: how the client steps it.
        driver: the process that posts rows.
        lent: True if a client has or had the arena's memory.
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
        """True if no client drives or was told to."""
        return self.lane is LaneName.WIRE and self.driver is Driver.HUB and not self.claimed

    def lend(self) -> Instructions:
        """Let the client drive."""
        self.lane, self.driver, self.lent = LaneName.SHARED, Driver.CLIENT, True
        return [do.Grant(), do.GiveDrive()]

    def on_side_closed(self, closed: stimuli.SideClosed) -> Instructions:
        """Continue on the wire lane."""
        self.lane = LaneName.WIRE
        return [do.CloseSide(), *(self.take_drive() if closed.quiescent else [])]

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

    def lock_out(self) -> Instructions:
        """Lock out the former client during a takeover."""
        revoked = [*self.revoke(), do.CloseSide()]
        self.lane = LaneName.WIRE
        return revoked

    def grant(self) -> Instructions:
        """Give the session to its new client; no other client has its memory."""
        self.claimed, self.driver = False, Driver.HUB
        return [do.TakeDrive(), do.AnswerAttach()]

    def refuse(self, why: Failure = LOST) -> Instructions:
        """Refuse a client that takes over, with the reason."""
        if not self.claimed:
            return []
        drop: Instructions = [do.DropOtherArena()] if self.other_made else []
        self.claimed = self.other_made = False
        return [*drop, do.FailAttach(why)]

    def begin_arena_change(self, slots: SlotTable) -> list[Process]:
        """Note that the second arena exists; return the processes that must map it."""
        self.other_made = True
        mapped = [each for each in slots.processes if each.stage in (Stage.SERVING, Stage.MAPPING, Stage.MAPPED)]
        for process in mapped:
            process.changing_arena = True
        return mapped

    def end_arena_change(self) -> Instructions:
        """Use the second arena, which all processes have mapped."""
        self.lent = self.other_made = False
        self.driver = Driver.HUB
        return [do.UseOtherArena()]
