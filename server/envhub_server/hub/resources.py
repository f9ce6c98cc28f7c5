"""Resources of a session on this machine: its processes, its shared memory, its bells and its client's requests."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from envhub.protocol import messages
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure, Make, Step
from envhub.transport.address import TICKET_BYTES
from envhub_server.catalog.registry import EnvFactsTable, Recipe
from envhub_server.hub.background_thread import BackgroundThread
from envhub_server.hub.session_observer import SessionObserver
from envhub_server.hub.worker_pool import WorkerPool
from envhub_server.log import Logger
from envhub_server.loop import Clock, Poller, Ringer
from envhub_server.memory.session_memory import ArenaBudget, SessionMemory, SharedLaneGrant, UnreadMemory, new_bell
from envhub_server.memory.stand_ins import StandIns
from envhub_server.network.rights import Holder
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Events
from envhub_server.session.build_order import interpreter_of
from envhub_server.session.machine import SessionMachine
from envhub_server.session.phases import Driver, Phase
from envhub_server.session.transitions import Event

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


# Events of a step, and one in place of a ring: the words in the arena say whether all rows are done.
STEP_REQUESTED = SessionMachine.on_request, (Step(b""), True)  # the state machine does not look at the codes
ROWS_DONE = SessionMachine.on_rows_done, ()
ROWS_STOOD_IN = object()


class SessionResources:
    """Resources of one session on this machine, and the rows in its arena.

    Attributes:
        number: the session's, which never changes; its events carry it.
        token: its token, another one after each takeover.
        make, recipe: what its client asked for, and the recipe of its envs.
        state: its state machine, which refers to this; deleted with the session, so that all of it goes at once.
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
        has_infos: True if a row of the last move has something to say besides its arrays.
        heard_ns: when its last request arrived, whatever came of it.
    """

    def __init__(
        self,
        number: int,
        token: bytes,
        make: Make,
        recipe: Recipe,
        services: Services,
        tickets: bool,
        owner: str,
        budget: ArenaBudget,
        factories: int = -1,
    ) -> None:
        """Hold the resources of a new session, whose machine is made afterwards.

        ``tickets`` says whether the hub has a side socket; ``budget`` is that of the client's shared memory.
        ``factories`` is the memory of pickled factories, which the session closes; -1 for none.

        Raises:
            OSError: there is no descriptor left.
        """
        self.number, self.token, self.services = number, token, services
        self.make, self.recipe = make, recipe
        self.state: SessionMachine
        self.owner, self.budget = owner, budget
        self.connections: set[int] = set()
        program_environment = None if recipe.settings.python else make.program_environment
        environ = None if program_environment is None else program_environment.environ
        self.interpreter: InterpreterKey = interpreter_of(recipe.settings.interpreter, program_environment)
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
        self._steps = 0  # that its rows had done when its memory was freed
        self.has_infos = False
        self.heard_ns = 0
        self._client_ringer = Ringer()
        self.done_bell = new_bell()
        # The bell is never read. By edges each ring is reported once, with a system call less.
        services.poller.register(self.done_bell, self, edges=True)

    def new_ticket(self) -> bytes:
        """A ticket for the side socket; empty where the hub has none."""
        return secrets.token_bytes(TICKET_BYTES) if self._tickets else b""

    def refuse_side(self) -> None:
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
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return self.pool.pids

    @property
    def arena_bytes(self) -> int:
        """Amount of shared memory the session holds."""
        return 0 if self.memory is None else self.memory.nbytes

    @property
    def steps(self) -> int:
        """Number of steps and resets of its envs."""
        return self._steps if self.memory is None else self.memory.steps

    @property
    def observed_bytes(self) -> int:
        """The size of what ``observe`` copies."""
        memory = self.memory
        return 0 if memory is None else sum(leaf[0].nbytes for leaf in memory.arena.observations)

    def observe(self, described: bool) -> tuple[messages.Observed, list[np.ndarray]]:
        """Last observations of its envs, once they are made."""
        memory, made = self.memory, self.state.made
        assert memory is not None and made is not None
        steps, given, observations = memory.arena.last_observations()
        spaces = [] if described else made.observation_spaces
        return messages.Observed(self.state.make.num_envs, steps.tolist(), given.tolist(), spaces), observations

    def observe_by(self, observer: SessionObserver | None) -> None:
        """Have an observer, if there is one, learn of what happens from now on; of several the first learns first."""
        if observer is not None:
            self.observers = (*self.observers, observer)

    @property
    def quiescent(self) -> bool:
        """True if every row is done."""
        return self.memory is None or self.memory.arena.quiescent()

    @property
    def log(self) -> Logger:
        """The log, with the session's name."""
        return _log.bind(session=self.token.hex()[:8])

    def report(self, method: Callable[..., None], *facts: Any) -> None:
        """Have the machine told by this method, with these facts, once it has handled all earlier events."""
        self.services.events.append((self.number, (method, facts)))

    def broke(self, error: Exception) -> None:
        """Report a bug of the hub, or what a client has written into its memory: no other session pays for it."""
        history = [*self.state.history]
        # Event: A bug in the hub: please report the line. A session that it concerns is ended.
        self.log.error("internal_error", once_per=("error",), error=repr(error), history=history, exc_info=error)
        why = Failure("internal", "session", f"a bug in the hub or a worker: {error!r}")
        self.report(SessionMachine.on_abandoned, why)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def on_ready(self, descriptor: int) -> None:
        """A bell has rung, or the client has left its side socket."""
        try:
            if descriptor == self.done_bell:
                self.on_bell()
            elif self.lane.has(descriptor):
                self.report(SessionMachine.on_side_closed, self.quiescent)
            elif self.memory is not None and self.stand_ins is not None and descriptor in self.memory.slot_bells:
                self.stand_in(self.stand_ins.posted(self.memory.slot_bells.index(descriptor)))
        except Exception as error:
            self.broke(error)

    def on_bell(self) -> None:
        """Report that rows are done if the words in the arena say so: a bell only wakes."""
        memory = self.memory
        if memory is None:
            return
        if self.part_rows:
            self.report_part(memory)
        if self.state.phase is not Phase.MOVING or not memory.arena.quiescent():
            return
        self.has_infos = memory.arena.noted()
        if self.has_infos and memory.arena.info_form() is None and memory.arena.said_by_channel().any():
            self.pool.read()  # it was sent before the rows were done, so it is here by now
        self.services.events.append((self.number, ROWS_DONE))

    def report_part(self, memory: SessionMemory) -> None:
        """Report that the rows are done that RECEIVE waits for, once they are."""
        driver = memory.driver
        if driver.done() < self.part_rows:
            return
        self.part_rows = 0
        rows, raised = driver.ready()
        driver.taken(rows if raised is None else raised)
        small, large = driver.infos(rows)
        if large or raised is not None:
            self.pool.read()  # it was sent before the rows were done, so it is here by now
        done = tuple(rows.tolist()), tuple(small.items()), tuple(large), raised
        self.report(SessionMachine.on_part_done, *done)

    def ring_client(self) -> None:
        """Wake the client that drives."""
        assert self.memory is not None
        self._client_ringer.ring(self.memory.client_bell)

    def post_to_stand_ins(self) -> None:
        """Complete the steps that were posted to slots without a process, as far as they are to be."""
        assert self.stand_ins is not None
        for slot in [*self.stand_ins.losses]:
            self.stand_in(self.stand_ins.posted(slot))

    def stand_in(self, reports: list[Event]) -> None:
        """Report what was done in place of a worker, and wake the driver if there are rows done."""
        for method, facts in reports:
            self.report(method, *facts)
        assert self.memory is not None and self.stand_ins is not None
        if not self.stand_ins.unrung:
            return
        self.stand_ins.unrung = False
        if self.state.ownership.driver is Driver.CLIENT:
            self.ring_client()
        else:
            # Not by the bell, which a worker may have filled.
            self.services.events.append((self.number, ROWS_STOOD_IN))
