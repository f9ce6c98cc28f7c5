"""The client of a session: its lane, the driver, and the takeover by another client.

A client on the shared lane has the arena until it lets go: a closed side socket is the sign of that. A client that
attaches meanwhile waits for it; the hub asks the holder to let go. Only then the session changes hands.
"""

from __future__ import annotations

import math

from envhub.protocol.messages import Failure
from envhub_server.session.effects import Effects
from envhub_server.session.phases import Driver, LaneName

LOST = Failure("session_lost", "session", "the session has broken; make another")


class Ownership:
    """The lane, the driver and the takeover of a session.

    Attributes:
        lane: how the client steps it; on the shared lane the client has the arena.
        driver: the process that posts rows.
        holder: the process id of the client on the shared lane; 0 if it is not known here.
        takeover_pending: True if a client that takes over waits for its answer, also while the envs are made.
        let_go_by_s: time until which the client that attaches waits for the holder.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self.lane = LaneName.WIRE
        self.driver = Driver.HUB
        self.holder = 0
        self.takeover_pending = False
        self.let_go_by_s = math.inf

    # --- who drives ---------------------------------------------------------------------------------------------------

    @property
    def can_grant(self) -> bool:
        """True if no client drives or was told to."""
        return self.lane is LaneName.WIRE and self.driver is Driver.HUB and not self.takeover_pending

    def lend(self, holder: int) -> None:
        """Let the client drive, which is this process."""
        self.lane, self.driver, self.holder = LaneName.SHARED, Driver.CLIENT, holder
        self._effects.grant()
        self._effects.give_drive()

    def on_side_closed(self, quiescent: bool) -> None:
        """Continue on the wire lane: the client has let go of the arena, or has ended."""
        self.lane, self.let_go_by_s = LaneName.WIRE, math.inf
        self._effects.close_side()
        if self.takeover_pending:
            self._effects.transfer()
        if quiescent:
            self.take_drive()

    def take_drive(self) -> None:
        """Have the hub drive; every row is done."""
        if self.driver is Driver.CLIENT:
            self.driver = Driver.HUB
            self._effects.take_drive()

    def revoke(self) -> None:
        """Revoke the session of a client that drives; the client then asks the hub why."""
        if self.lane is LaneName.SHARED:
            self._effects.revoke()

    # --- takeover -----------------------------------------------------------------------------------------------------

    def recall(self, until_s: float) -> None:
        """Ask the holder to let go of the session until then."""
        self.let_go_by_s = until_s
        self._effects.recall()

    def keep_holder(self, waited_s: float) -> None:
        """Let the holder, which has not let go, keep the session, and refuse the other client."""
        by = f"process {self.holder}" if self.holder else "a process of another container"
        text = f"{by} has this session on the shared lane, and has not let go of it within restart_wait={waited_s:g} s"
        refusal = Failure("refused", "request", f"{text}: it is stopped, or too busy; attach again, or end the session")
        self._effects.end_recall()
        self.refuse(refusal)

    def grant(self) -> None:
        """Give the session to its new client; no other client has its memory."""
        self.takeover_pending, self.driver = False, Driver.HUB
        self._effects.take_drive()
        self._effects.answer_attach()

    def refuse(self, why: Failure = LOST) -> None:
        """Refuse a client that takes over, with the reason."""
        if self.takeover_pending:
            self.takeover_pending, self.let_go_by_s = False, math.inf
            self._effects.fail_attach(why)
