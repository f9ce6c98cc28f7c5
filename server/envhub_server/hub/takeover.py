"""One client takes a session over from another."""

from __future__ import annotations

from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure
from envhub_server.hub.worker_pool import WorkerPool
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.session.state import Phase, SessionState


class Succession:
    """A takeover under way: it waits for the step under way to end, and for the workers to move to other memory.

    Attributes:
        heir: the request of who takes over, the last of them.
    """

    def __init__(self, session: SessionState, crew: WorkerPool, done_bell: int) -> None:
        """Of this session, whose workers wake the hub by ``done_bell``."""
        self.heir: Incoming | None = None
        self._session = session
        self._crew = crew
        self._done_bell = done_bell
        self._next: SessionMemory | None = None

    def settle(self, memory: SessionMemory, lent: bool) -> SessionMemory | Failure | None:
        """Go on as far as it goes now.

        Args:
            memory: which the session is in.
            lent: whether a client has it, which must be left with nothing but what is no longer used.

        Returns:
            The memory in which the session goes on, why it does not, or None while something is to be waited for.
        """
        if self._session.phase in (Phase.BROKEN, Phase.CLOSING):
            self.close()
            return Failure("session_lost", "session", "the session has broken; make another")
        if self._next is None:
            if self._session.phase is not Phase.READY or not self._session.idle or not memory.arena.quiescent():
                return None
            if not lent:
                return memory
            try:
                self._next = memory.another()
            except OSError as error:
                return Failure("limit", "hub", f"no memory for a takeover is to be had: {error}")
            assert self._session.mapped is not None
            self._crew.move(self._next, self._session.mapped, self._done_bell)
        if self._crew.moving:
            return None
        self._crew.settle_in()  # nobody serves the old memory any more, whatever is still posted there
        found, self._next = self._next, None
        return found

    def close(self) -> None:
        """Give up."""
        if self._next is not None:
            self._crew.stay_in()
            self._next.close()
            self._next = None
