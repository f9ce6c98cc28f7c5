"""Holdings of a session on this machine: its processes, its shared memory, its bells and its client's requests."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure
from envhub.transport.address import TICKET_BYTES
from envhub_server.catalog.registry import EnvFactsTable
from envhub_server.hub.background_thread import BackgroundThread
from envhub_server.hub.session_observer import SessionObserver
from envhub_server.hub.worker_pool import WorkerPool
from envhub_server.log import Logger
from envhub_server.loop import Clock, Poller
from envhub_server.memory.session_memory import ArenaBudget, SessionMemory, SharedLaneGrant, UnreadMemory, new_bell
from envhub_server.memory.stand_ins import StandIns
from envhub_server.network.rights import Holder
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_events import Events
from envhub_server.session import stimuli
from envhub_server.session.build_order import interpreter_of
from envhub_server.session.machine import SessionMachine
from envhub_server.session.stimuli import Stimulus

_log = Logger("envhub.hub")


class Attaching(NamedTuple):
    """A client that is to get a session: its request, who it is, and its budget of shared memory."""

    request: Incoming
    client: Holder
    budget: ArenaBudget


@dataclass(frozen=True)
class Services:
    """Resources that all sessions of a hub have in common.

    ``transferred`` is called when the session of a number is about to be another client's, and ``forget`` when a
    token is of no session any more.
    """

    poller: Poller
    supervisor: Supervisor
    protocol: HubProtocol
    clock: Clock
    events: Events
    env_facts: EnvFactsTable
    unread: UnreadMemory
    transferred: Callable[[int, Attaching], None]
    forget: Callable[[bytes], None]
    compression: BackgroundThread | None = None


class Holdings:
    """Holdings of one session. They refer to nothing that refers to them: an ended session must go at once.

    Attributes:
        number: the session's, which never changes; its events carry it.
        token: its token, another one after each takeover.
        state: its state machine.
        services: of its hub.
        owner: the name of the client that it belongs to, see ``network.rights``; empty for the hub's user.
        budget: of that client's shared memory.
        connections: by which replies were sent under an earlier token, or were before the session ended.
        interpreter: of its workers.
        pool: its processes.
        observers: the features that it has, such as its replays.
        factories: the memory of pickled factories, which the session closes; -1 for none.
        memory: its arena, once there is one.
        stand_ins: what completes rows in place of processes, once there is an arena.
        lane: of the client that may drive.
        side: the socket of a client that has shown the ticket.
        ticket: for the side socket, once; empty where there is none.
        done_bell: by which the processes wake the hub.
        arrived: the last request, which may wait in the queue.
        under_way: the last one that was handled.
        attaching: the client that takes the session over, until it is answered.
        part_rows: how many of the rows of SEND the RECEIVE under way waits for.
        steps: how many its rows had done when its memory was freed.
        has_infos: True if a row of the last move has something to say besides its arrays.
    """

    def __init__(
        self,
        number: int,
        token: bytes,
        state: SessionMachine,
        services: Services,
        tickets: bool,
        owner: str,
        budget: ArenaBudget,
        factories: int = -1,
    ) -> None:
        """Hold a new session.

        ``tickets`` says whether the hub has a side socket; ``budget`` is that of the client's shared memory.
        ``factories`` is the memory of pickled factories, which the session closes; -1 for none.

        Raises:
            OSError: there is no descriptor left.
        """
        self.number, self.token, self.state, self.services = number, token, state, services
        self.owner, self.budget = owner, budget
        self.connections: set[int] = set()
        world = None if state.recipe.settings.python else state.make.world
        environ = None if world is None else world.environ
        self.interpreter: InterpreterKey = interpreter_of(state.recipe.settings.interpreter, world)
        self.pool = WorkerPool(number, token.hex()[:8], services.supervisor, self.interpreter, environ)
        self.observers: tuple[SessionObserver, ...] = ()
        self.factories = factories
        self.memory: SessionMemory | None = None
        self.stand_ins: StandIns | None = None
        self.lane = SharedLaneGrant(services.poller)
        self.side: socket.socket | None = None
        self._tickets = tickets
        self.ticket = self.new_ticket()
        self.arrived: Incoming | None = None
        self.under_way: Incoming | None = None
        self.attaching: Attaching | None = None
        self.part_rows = 0
        self.steps = 0
        self.has_infos = False
        self.done_bell = new_bell()

    def new_ticket(self) -> bytes:
        """A ticket for the side socket; empty where the hub has none."""
        return secrets.token_bytes(TICKET_BYTES) if self._tickets else b""

    def close_side(self) -> None:
        """Close the connection of a client that has shown the ticket and not been given the lane."""
        if self.side is not None:
            self.side.close()
            self.side = None

    def transfer(self) -> None:
        """Give the session to the client that attaches; the former client has its token no more."""
        attaching = self.attaching
        assert attaching is not None
        if self.memory is not None:
            self.budget.use(-self.memory.nbytes)
            attaching.budget.use(self.memory.nbytes)
        self.services.transferred(self.number, attaching)
        self.token, self.ticket = attaching.request.token, self.new_ticket()
        self.owner, self.budget = attaching.client.name, attaching.budget

    @property
    def quiescent(self) -> bool:
        """True if every row is done."""
        return self.memory is None or self.memory.arena.quiescent()

    @property
    def log(self) -> Logger:
        """The log, with the session's name."""
        return _log.bind(session=self.token.hex()[:8])

    def report(self, stimulus: Stimulus) -> None:
        """Put a stimulus into the hub's queue of events."""
        self.services.events.append((self.number, stimulus))

    def broke(self, error: Exception) -> None:
        """Report a bug of the hub, or what a client has written into its memory: no other session pays for it."""
        history = [kind.__name__ for kind in self.state.history]
        # Event: A bug in the hub: please report the line. A session that it concerns is ended.
        self.log.error("internal_error", once_per=("error",), error=repr(error), history=history, exc_info=error)
        why = Failure("internal", "session", f"a bug in the hub or a worker: {error!r}")
        self.report(stimuli.Abandoned(why))
