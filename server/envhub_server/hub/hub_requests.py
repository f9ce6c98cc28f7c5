"""The requests to a hub itself, what it offers and reports about itself, and how it begins sessions."""

from __future__ import annotations

import math
import os
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import envhub
from envhub.errors import brief, hide_folders_in, shortened
from envhub.protocol import messages, prelude
from envhub.protocol.hub import FIRST_OPS, Incoming
from envhub.protocol.messages import SESSION_OPS, Capacity, Failure, HeartbeatReply, Make, Op, Welcome
from envhub.values import compression
from envhub_server.catalog.listing import LOOK_S, Listing
from envhub_server.config import OFFERS, HubConfig, has_quota, memory_available_bytes, processes_left, usable_cpus
from envhub_server.hub import planner
from envhub_server.hub.directory import ClientUsage, Directory
from envhub_server.hub.gateway import Gateway
from envhub_server.hub.operations import Operations
from envhub_server.hub.planner import SessionPlan, hides_folders
from envhub_server.hub.replay_keeper import ReplayKeeper, ReplayWriter
from envhub_server.hub.resources import NAME_BYTES, Services
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.hub.status import SessionTable
from envhub_server.ipc.factories_memory import held
from envhub_server.log import log
from envhub_server.memory.session_memory import INFO_BYTES, ArenaBudget, UnreadObservations
from envhub_server.network import descriptor_guard
from envhub_server.network.connections import Holder
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.replay import name_beginning
from envhub_server.session.building import SHARE
from envhub_server.session.launcher import Launcher, Machine, Restarts
from envhub_server.session.machine import SessionMachine
from envhub_server.session.supervision import logged, unready_failure

HUB_OPS = (frozenset(Op) - SESSION_OPS) | FIRST_OPS
OBSERVATIONS_SHARE = 2  # bytes of copies of observations that a client has not read, in largest messages
_NAME_IN_USE = Failure("refused", "request", "another session has the first 4 bytes of this token; choose another one")
_STILL_CLOSING = Failure("session_lost", "session", "the session of this token is still closing")


class HubRequests:
    """Carries out the requests to one hub: its own, and those that make a session or take one over.

    It owns what is offered, the LIST requests that wait for the names, the observations that its clients have not read,
    and the time at which the hub began. It owns no session: the directory does.
    """

    def __init__(
        self,
        config: HubConfig,
        services: Services,
        directory: Directory,
        gateway: Gateway,
        on_listed: Callable[[], None],
    ) -> None:
        """Call ``on_listed`` once, when it is known which envs are ready."""
        self.config, self._services, self._protocol = config, services, services.protocol
        self._access, self._directory = directory.access, directory
        self._budget = ArenaBudget(config.arena_bytes_max)  # of all clients
        self.usage = ClientUsage(self._budget, directory)
        self._gateway, self._replays, self._on_listed = gateway, services.replays, on_listed
        self._registry = config.registry()  # what can be made
        # The names of the envs, and which of them are ready.
        self.listing = Listing(services.supervisor, self._registry)
        self._is_listed = False  # True once it is known which envs are ready
        self._waiting: list[Incoming] = []  # LIST requests that wait for the names
        self.observations = UnreadObservations(OBSERVATIONS_SHARE * config.message_bytes_max)
        self._began_s = time.monotonic()
        self.table = SessionTable(directory, services.loop, services.slow)
        self.operations = Operations(directory, self.table, self.usage, self.observations, services.loop, self._hides)

    def use(self, config: HubConfig) -> None:
        """Go on with another configuration; sessions that exist keep what they were made with."""
        before, self.config = self.config, config
        self._budget.bytes_max = config.arena_bytes_max
        self._protocol.lease_s, self._protocol.sessions_max = config.lease, config.sessions_max
        if self._replays is not None:
            self._replays.bytes_max = config.replays_bytes_max
        if any(getattr(before, name) != getattr(config, name) for name in OFFERS):
            # LIST is answered once new workers have found the names.
            self._registry, first = config.registry(), self.listing.next_number
            self.listing = Listing(self._services.supervisor, self._registry, first)
            try:
                self.start_listing()
            except OSError as error:  # the next LIST tries again
                log.warning("env_names_unknown", why=str(error))

    def _hides(self, holder: Holder) -> bool:
        return hides_folders(self.config, holder)

    @property
    def _kept(self) -> ReplayWriter | None:
        """The writer of the replays of the next session; None if it is to have none."""
        return self._replays if self.config.replays_bytes_max and self.config.trace_bytes_max else None

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
        if (runtime := self._directory.by_token.get(request.token)) is not None:
            runtime.fail_request(request, failure)
            return
        if failure.scope in ("env", "session"):
            # Without the token, which is any that the client chooses, and would have a line each.
            log.warning("request_failed", once_per=("session", "code"), **logged(failure))
        self._protocol.fail(request, failure)

    def _handle(self, request: Incoming, holder: Holder) -> None:
        answer = self._protocol.answer
        match request.op:
            case Op.MAKE | Op.ATTACH:
                self._begin(request, holder)
            case Op.HEARTBEAT:
                answer(request, self.progress(request.token))
            case Op.HELLO:
                answer(request, self.welcome(holder))
            case Op.LIST:
                if (failure := self._answer_list(request)) is not None:
                    self.fail(request, failure)
            case Op.STATS:
                capacity = messages.as_map(self.capacity(holder))
                counters = {**self.health(holder), **self.counters(), "capacity": capacity}
                answer(request, messages.Table([counters]))
            case Op.HEALTH:
                answer(request, messages.Table([self.health(holder)]))
            case Op.STATUS:
                answer(request, messages.Table(self.table.answer(request.message, holder)))
            case Op.OPERATE:
                self.operations.handle(request, holder)
            case Op.OBSERVE:
                self._observe(request, holder)
            case _:  # the protocol admits it only where there is a session
                raise KeyError(request.op.name)

    def _begin(self, request: Incoming, holder: Holder) -> None:
        begin = self._make if request.op is Op.MAKE else self._attach
        if (failure := begin(request, holder)) is not None:
            self._refuse(request, holder, failure)
            self._protocol.forget(request.token)
        elif request.op is Op.MAKE:
            self._gateway.check_soon()

    def _observe(self, request: Incoming, holder: Holder) -> None:
        runtime = self._directory.find(request, holder)
        if runtime is None or runtime.state.made is None or not runtime.arena_bytes:
            self._refuse(request, holder, Failure("session_lost", "session", "this hub has no such session to observe"))
            return
        client: object = request.peer if holder.quotas is None else holder.name
        if why := self.observations.refusal(client, runtime.observed_bytes):
            self.fail(request, Failure("limit", "hub", why))
            return
        observed, arrays = runtime.observe(request.message.described)
        self.observations.add(client, arrays)
        self._protocol.answer(request, observed, arrays)

    def _refuse(self, request: Incoming, holder: Holder, failure: Failure) -> None:
        """Refuse a request to make, take over or observe a session; one that is unknown may have been before."""
        session = b"" if request.op is Op.MAKE else request.message.session
        if session and failure.code == "session_lost" and self._directory.named(session, holder) is None:
            self._directory.log_unknown(request.peer, session, holder, failure.message)
            self._protocol.fail(request, failure)
            return
        self.fail(request, failure)
        if request.op is not Op.OBSERVE:
            why = shortened(failure.message, 200)
            log.warning(
                "request_refused", **self._access.who(holder, request.peer), op=request.op.name, why=why, audit=True
            )

    # --- names --------------------------------------------------------------------------------------------------------

    def start_listing(self) -> None:
        self.listing.start()
        self._plan_look()

    def _answer_list(self, request: Incoming) -> Failure | None:
        """Answer LIST, now or once the names are known; or return why it cannot be answered."""
        if self.listing.names is not None:
            self._protocol.answer(request, messages.EnvNames(self.listing.names))
            return None
        try:
            if not self.listing.asked:
                self.start_listing()
        except OSError as error:
            return Failure("limit", "hub", f"a worker cannot be started: {error.strerror}")
        self._waiting.append(request)
        return None

    def report_names(self) -> None:
        if self.listing.done and not self._is_listed:
            self._is_listed = True
            self._on_listed()
        if not self.listing.asked:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._protocol.answer(request, messages.EnvNames(self.listing.names or []))

    def _look(self) -> None:
        self.listing.look(self._services.loop.clock.now_s())
        self._plan_look()

    def _plan_look(self) -> None:
        at_s = self._services.loop.clock.now_s() + LOOK_S if self.listing.running else math.inf
        self._services.loop.schedule.set(self._look, at_s)

    def _unready(self, make: Make, key: InterpreterKey, hides_folders: bool) -> Failure | None:
        """Refuse an env that is not ready, and try it again; None if it is ready, or may be again."""
        why = self.listing.undrawn.get(key, "")
        if why or make.name in self.listing.unready:
            self.listing.try_again(key)
            self._plan_look()
        return unready_failure(make, why, hides_folders) if why else None

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _make(self, request: Incoming, holder: Holder) -> Failure | None:
        if failure := self._early_refusal(request, holder):
            return failure
        planned = self._plan(request, holder)
        if isinstance(planned, Failure):
            return planned
        try:
            runtime = self._build(planned, request, holder)
        except OSError as error:
            return Failure("limit", "hub", f"a session cannot be made: {error.strerror}")
        self._directory.add(runtime, request, holder)
        self.table.plan_look()
        runtime.under_way = request._replace(message=runtime.state.make)
        runtime.report(SessionMachine.on_made)
        return None

    def _attach(self, request: Incoming, holder: Holder) -> Failure | None:
        return self._early_refusal(request, holder) or self._directory.attach(
            request, holder, self.usage.budget(holder)
        )

    def _early_refusal(self, request: Incoming, holder: Holder) -> Failure | None:
        """Refuse what needs no further look; done before all else, for each name that is not offered costs a search."""
        # An ATTACH counts because it gives the session another token, and each token has lines of its own in the log.
        if why := self.usage.count("makes", holder, self._services.loop.clock.now_s()):
            return Failure("limit", "hub", why)
        method = request.message.compression
        if method and method not in (methods := compression.available()):
            text = f"this hub cannot compress by {brief(method)}; it has {methods or 'nothing to'}"
            return Failure("refused", "request", text)
        if request.token in self._directory.by_token:
            return _STILL_CLOSING
        if request.op is Op.MAKE and self._directory.called(request.token[:NAME_BYTES].hex()) is not None:
            return _NAME_IN_USE
        return None

    def _plan(self, request: Incoming, holder: Holder) -> SessionPlan | Failure:
        make: Make = request.message
        usage, number = self.usage.of(holder), self._directory.next_number
        admission = planner.admit(make, holder, self.config, self._registry, self.listing.names, usage, number)
        if isinstance(admission, Failure):
            return admission
        if failure := self._unready(make, admission.recipe.settings.interpreter, admission.hides_folders):
            return failure
        self._services.unread.release()
        name, replays = request.token[:NAME_BYTES].hex(), ""
        if self._kept is not None:
            replays = name_beginning(make.name, name + secrets.token_hex(4))
        shares_imports = self._services.forked_imports.suits(make)
        planned = planner.plan(admission, _machine(self.config.cpus), shares_imports, self.config, name, replays)
        if isinstance(planned, SessionPlan) and (why := descriptor_guard.shortage(planned.processes)):
            return Failure("limit", "hub", why)
        return planned

    def _build(self, planned: SessionPlan, request: Incoming, holder: Holder) -> SessionRuntime:
        restarts = Restarts(planned.make.faults.restarts_max, planned.make.num_envs, random.uniform)
        make, factories = held(planned.make)
        try:
            number, budget = self._directory.next_number, self.usage.budget(holder)
            services, recipe = self._services, planned.recipe
            runtime = SessionRuntime(number, request.token, make, recipe, services, holder.name, budget)
        except OSError:
            if factories >= 0:
                os.close(factories)
            raise
        runtime.factories = factories
        runtime.imports_key = planner.imports_key(make, planned.recipe)
        runtime.zygote = self._services.supervisor.zygotes.find(runtime.imports_key)
        rules = replace(planned.rules, has_zygote=runtime.zygote is not None)
        launcher = Launcher(make, planned.recipe, rules, planned.machine, restarts, runtime)
        runtime.state = SessionMachine(launcher, planned.count, INFO_BYTES)
        if (replays := self._kept) is not None:
            is_vector, bytes_max = planned.recipe.settings.vector, self.config.trace_bytes_max
            runtime.replays = ReplayKeeper(replays, runtime.interpreter, is_vector, bytes_max)
        return runtime

    # --- reports ----

    def welcome(self, holder: Holder) -> Welcome:
        config = self.config
        return Welcome(
            hub=envhub.__version__,
            version=str(prelude.VERSION),
            private=config.private,
            limits={"envs_per_session_max": config.envs_per_session_max, "message_bytes_max": config.message_bytes_max},
            host=socket.gethostname(),
            pid=os.getpid(),
            compressions=compression.available(),
            capacity=self.capacity(holder),
            name=config.name_of_hub,
        )

    def capacity(self, holder: Holder) -> Capacity:
        capacity = planner.capacity(holder, self.config, self.usage.of(holder), usable_cpus(self.config.cpus))
        if self._protocol.draining is not None:  # so that a fleet makes nothing here
            return Capacity(capacity.cpus, 0, 0, 0)
        return capacity

    def health(self, holder: Holder) -> dict[str, Any]:
        unready = {**self.listing.unready, **self.listing.starting}
        draining = self._protocol.draining
        return {
            "status": "draining" if draining else "ok",
            **({"why": draining.message} if draining else {}),
            "hub": f"{self._protocol.hub_id:016x}",
            "uptime_s": time.monotonic() - self._began_s,
            "sessions": len(self._directory.sessions),
            "loop_lag_s": self._services.loop.clock.lag_s(),
            "unready": hide_folders_in(unready) if self._hides(holder) else unready,
        }

    def counters(self) -> dict[str, Any]:
        sessions, protocol, access = self._directory.sessions, self._protocol, self._access
        restarts = sum(each.state.restarts for each in sessions)
        return {
            "envs": sum(each.state.make.num_envs for each in sessions),
            "workers": sum(len(each.pids) for each in sessions),
            "restarts": restarts + self._directory.restarts_before,
            "steps": sum(each.steps for each in sessions) + self._directory.steps_before,
            "steps_per_s": round(sum(each.life.steps_per_s or 0.0 for each in sessions), 1),
            "lanes": dict(Counter(each.state.lane.value for each in sessions)),
            "arena_bytes": sum(each.arena_bytes for each in sessions),
            "requests": self._gateway.requests,
            "replayed": protocol.replayed,
            "refused": protocol.refused,
            "malformed": protocol.malformed,
            "failures": dict(protocol.failures),
            "connections": len(access.connections),
            "connections_ended": access.connections_ended,
            "handshakes_refused": access.handshakes_refused,
            "handshakes_unfinished": access.handshakes_unfinished,
            "descriptors": descriptor_guard.in_use(),
            "descriptors_max": descriptor_guard.limit(),
            "replays_bytes": 0 if self._replays is None else self._replays.nbytes,
            "replays_bytes_max": self.config.replays_bytes_max,
        }

    def progress(self, token: bytes) -> HeartbeatReply:
        """Progress of a request, for its client; the log has that of a request that makes envs, too."""
        runtime = self._directory.by_token.get(token)
        if runtime is None or not runtime.state.making:
            return HeartbeatReply("running")
        progress = runtime.state.progress
        starting = self._services.supervisor.starting(runtime.interpreter)
        at_work = f"importing {progress.importing}" if progress.importing else starting
        doing = {"doing": at_work} if at_work else {}
        made: dict[str, Any] = {"phase": progress.phase, "built": progress.built, "num_envs": progress.num_envs}
        # Event: The number of envs that a session has built, and what its workers do if that takes long.
        runtime.log.info("session_making", **made, **doing)
        hides = runtime.state.launcher.rules.hide_folders
        return replace(progress, starting=hide_folders_in(starting) if hides else starting)


def _machine(cpus_max: int | None) -> Machine:
    workers_max = int(SHARE * min(descriptor_guard.workers_left(), processes_left()))
    affinity = tuple(sorted(os.sched_getaffinity(0)))
    return Machine(affinity, usable_cpus(cpus_max), has_quota(), workers_max, memory_available_bytes())
