"""The requests to a hub itself, and those that make a session or take one over."""

from __future__ import annotations

import os
import random
import secrets

from envhub.errors import shortened
from envhub.protocol import messages
from envhub.protocol.hub import FIRST_OPS, HubProtocol, Incoming
from envhub.protocol.messages import SESSION_OPS, Failure, Make, Op
from envhub_server.config import HubConfig, has_quota, memory_available_bytes, processes_left, usable_cpus
from envhub_server.hub import planner
from envhub_server.hub.connection_supervisor import ConnectionSupervisor
from envhub_server.hub.directory import ClientUsage, Directory
from envhub_server.hub.planner import SessionPlan
from envhub_server.hub.replay_keeper import ReplayKeeper, ReplayWriter
from envhub_server.hub.resources import Services
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.hub.status import Offers, Status
from envhub_server.ipc.factories_memory import held
from envhub_server.log import Logger
from envhub_server.memory.session_memory import INFO_BYTES, UnreadObservations
from envhub_server.network import descriptor_guard
from envhub_server.network.access import Access
from envhub_server.network.connections import Holder
from envhub_server.network.listener import SideSocket
from envhub_server.replay import name_beginning
from envhub_server.session.failure_text import logged
from envhub_server.session.launcher import Machine, Restarts
from envhub_server.session.machine import SessionMachine
from envhub_server.session.sizing import SHARE

HUB_OPS = (frozenset(Op) - SESSION_OPS) | FIRST_OPS
log = Logger("envhub.hub")
_STILL_CLOSING = Failure("session_lost", "session", "the session of this token is still closing")


class SessionStarter:
    """Starts the sessions of one hub, by plans of ``planner``. It owns no session: the directory does."""

    def __init__(
        self,
        config: HubConfig,
        services: Services,
        directory: Directory,
        usage: ClientUsage,
        offers: Offers,
        replays: ReplayWriter | None,
        side_socket: SideSocket,
    ) -> None:
        self._config, self._services, self._directory = config, services, directory
        self._usage, self._offers, self._replays, self._side_socket = usage, offers, replays, side_socket

    def make(self, request: Incoming, holder: Holder) -> Failure | None:
        if failure := self._refusal(request, holder):
            return failure
        planned = self._plan(request, holder)
        if isinstance(planned, Failure):
            return planned
        try:
            runtime = self._build(planned, request, holder)
        except OSError as error:
            return Failure("limit", "hub", f"a session cannot be made: {error.strerror}")
        self._directory.add(runtime, request, holder)
        runtime.start(request._replace(message=runtime.state.make))
        return None

    def attach(self, request: Incoming, holder: Holder) -> Failure | None:
        return self._refusal(request, holder) or self._directory.attach(request, holder, self._usage.budget(holder))

    def _refusal(self, request: Incoming, holder: Holder) -> Failure | None:
        """Refuse what needs no further look; done before all else, for each name that is not offered costs a search."""
        if why := self._usage.count_make(holder, self._services.clock.now_s()):
            return Failure("limit", "hub", why)
        return _STILL_CLOSING if request.token in self._directory.by_token else None

    def _plan(self, request: Incoming, holder: Holder) -> SessionPlan | Failure:
        make: Make = request.message
        offers, usage, number = self._offers, self._usage.of(holder), self._directory.next_number
        names = offers.listing.names
        admission = planner.admit(make, holder, self._config, offers.registry, names, usage, number)
        if isinstance(admission, Failure):
            return admission
        if failure := offers.refusal(make.name, admission.recipe.settings, admission.hides_folders):
            return failure
        self._services.unread.release()
        replays = ""
        if self._replays is not None:
            replays = name_beginning(make.name, secrets.token_hex(8))
        facts, name = self._services.env_facts.find(make), request.token.hex()[:8]
        planned = planner.plan(admission, _machine(self._config.cpus), facts, self._config, name, replays)
        if isinstance(planned, SessionPlan) and (why := descriptor_guard.shortage(planned.processes)):
            return Failure("limit", "hub", why)
        return planned

    def _build(self, planned: SessionPlan, request: Incoming, holder: Holder) -> SessionRuntime:
        restarts = Restarts(planned.make.faults.restarts_max, planned.make.num_envs, random.uniform)
        make, factories = held(planned.make)
        try:
            runtime = SessionRuntime(
                self._directory.next_number,
                request.token,
                make,
                planned.recipe,
                self._services,
                self._side_socket.open,
                holder.name,
                self._usage.budget(holder),
                factories,
            )
        except OSError:
            if factories >= 0:
                os.close(factories)
            raise
        count, machine, rules = planned.count, planned.machine, planned.rules
        runtime.state = SessionMachine(runtime, make, planned.recipe, count, INFO_BYTES, machine, restarts, rules)
        if self._replays is not None:
            faults, is_vector = make.faults, planned.recipe.settings.vector
            bytes_max = self._config.trace_bytes_max
            runtime.replays = ReplayKeeper(self._replays, runtime.interpreter, faults, is_vector, bytes_max)
        return runtime


def _machine(cpus_max: int | None) -> Machine:
    workers_max = int(SHARE * min(descriptor_guard.workers_left(), processes_left()))
    affinity = tuple(sorted(os.sched_getaffinity(0)))
    return Machine(affinity, usable_cpus(cpus_max), has_quota(), workers_max, memory_available_bytes())


class HubRequests:
    """Carries out the requests to one hub. It owns the observations that its clients have not read."""

    def __init__(
        self,
        protocol: HubProtocol,
        access: Access,
        directory: Directory,
        starter: SessionStarter,
        connections: ConnectionSupervisor,
        offers: Offers,
        status: Status,
        observations_bytes_max: int,
    ) -> None:
        """Keep copies of observations that a client has not read, up to this many bytes."""
        self._protocol, self._access, self._directory = protocol, access, directory
        self._starter, self._connections, self._offers, self._status = starter, connections, offers, status
        self._observations = UnreadObservations(observations_bytes_max)

    def handle(self, request: Incoming, holder: Holder) -> None:
        """Carry out a request of this client; a bug in that is logged, and answered as a failure."""
        try:
            self._handle(request, holder)
        except Exception as error:
            log.exception("internal_error", once_per=("error",), op=request.op.name)
            self._protocol.forget(request.token)  # of a session that was never made
            self.fail(request, Failure("internal", "hub", f"a bug in the hub, which logged it: {error!r}"))

    def fail(self, request: Incoming, failure: Failure) -> None:
        """Answer with a failure, which is logged if it concerns a session or an env."""
        if failure.scope in ("env", "session"):
            # A token of no session is any that the client chooses, and would have a line each.
            session = {"session": request.token.hex()[:8]} if request.token in self._directory.by_token else {}
            # Event: A request failed; where an env raised, with the `env`, the class of the exception and its `replay`.
            log.warning("request_failed", once_per=("session", "code"), **session, **logged(failure))
        self._protocol.fail(request, failure)

    def _handle(self, request: Incoming, holder: Holder) -> None:
        answer, status = self._protocol.answer, self._status
        match request.op:
            case Op.MAKE | Op.ATTACH:
                self._begin(request, holder)
            case Op.HEARTBEAT:
                answer(request, status.progress(request.token))
            case Op.HELLO:
                answer(request, status.welcome(holder))
            case Op.LIST:
                if (failure := self._offers.answer(request)) is not None:
                    self.fail(request, failure)
            case Op.STATS:
                capacity = messages.as_map(status.capacity(holder))
                counters = {**status.health(holder), **status.counters(), "capacity": capacity}
                answer(request, messages.Table([counters]))
            case Op.HEALTH:
                answer(request, messages.Table([status.health(holder)]))
            case Op.SESSIONS:
                answer(request, messages.Table(status.sessions(holder)))
            case Op.OBSERVE:
                self._observe(request, holder)
            case _:  # the protocol admits it only where there is a session
                raise KeyError(request.op.name)

    def _begin(self, request: Incoming, holder: Holder) -> None:
        begin = self._starter.make if request.op is Op.MAKE else self._starter.attach
        if (failure := begin(request, holder)) is not None:
            self._refuse(request, holder, failure)
            self._protocol.forget(request.token)
        elif request.op is Op.MAKE:
            self._connections.check_soon()

    def _observe(self, request: Incoming, holder: Holder) -> None:
        runtime = self._directory.find(request, holder)
        if runtime is None or runtime.state.made is None or not runtime.arena_bytes:
            self._refuse(request, holder, Failure("session_lost", "session", "this hub has no such session to observe"))
            return
        client: object = request.peer if holder.quotas is None else holder.name
        if why := self._observations.refusal(client, runtime.observed_bytes):
            self.fail(request, Failure("limit", "hub", why))
            return
        observed, arrays = runtime.observe(request.message.described)
        self._observations.add(client, arrays)
        self._protocol.answer(request, observed, arrays)

    def _refuse(self, request: Incoming, holder: Holder, failure: Failure) -> None:
        """Refuse a request to make, take over or observe a session; one that is unknown may have been before."""
        session = b"" if request.op is Op.MAKE else request.message.session
        missing = failure.code == "session_lost" and self._directory.named(session, holder) is None
        unknown = bool(session) and missing
        if unknown:
            self._directory.note_unknown(request.peer, session, holder, failure.message)
            self._protocol.fail(request, failure)
            return
        self.fail(request, failure)
        if request.op is not Op.OBSERVE:
            why = shortened(failure.message, 200)
            log.warning(
                "request_refused", **self._access.who(holder, request.peer), op=request.op.name, why=why, audit=True
            )
