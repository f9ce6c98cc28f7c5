"""Beginnings of sessions: a client makes one, or takes one over."""

from __future__ import annotations

import os
import random
import secrets

from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Make
from envhub_server.catalog.replay_folder import name_beginning
from envhub_server.config import HubConfig, has_quota, memory_available_bytes, processes_left, usable_cpus
from envhub_server.hub import planner
from envhub_server.hub.client_usage import ClientUsage
from envhub_server.hub.directory import Directory
from envhub_server.hub.offers import Offers
from envhub_server.hub.planner import SessionPlan
from envhub_server.hub.resources import Services
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.hub.session_features import SessionFeatures
from envhub_server.ipc.factories_memory import held
from envhub_server.memory.session_memory import INFO_BYTES
from envhub_server.network import descriptor_guard
from envhub_server.network.rights import Holder
from envhub_server.network.side_socket import SideSocket
from envhub_server.session.machine import SessionMachine
from envhub_server.session.restarts import Restarts
from envhub_server.session.worker_count import SHARE, Machine

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
        features: SessionFeatures,
        side_socket: SideSocket,
    ) -> None:
        self._config, self._services, self._directory = config, services, directory
        self._usage, self._offers, self._features, self._side_socket = usage, offers, features, side_socket

    def make(self, request: Incoming, holder: Holder) -> Failure | None:
        """Make a session for this client and start its workers, or refuse that."""
        if failure := self._refusal(request, holder):
            return failure
        planned = self._plan(request, holder)
        if isinstance(planned, Failure):
            return planned
        try:
            runtime = self._build(planned, request, holder)
        except OSError as error:
            return Failure("limit", "hub", f"a session cannot be made: {error.strerror}")
        self._features.add(runtime)
        self._directory.add(runtime, request, holder)
        runtime.start(request._replace(message=runtime.state.make))
        return None

    def attach(self, request: Incoming, holder: Holder) -> Failure | None:
        """Give a session to this client, or refuse that."""
        return self._refusal(request, holder) or self._directory.attach(request, holder, self._usage.budget(holder))

    def _refusal(self, request: Incoming, holder: Holder) -> Failure | None:
        """Refuse what needs no further look; done before all else, for each name that is not offered costs a search."""
        if why := self._usage.count_make(holder, self._services.clock.now_s()):
            return Failure("limit", "hub", why)
        return _STILL_CLOSING if request.token in self._directory.by_token else None

    def _plan(self, request: Incoming, holder: Holder) -> SessionPlan | Failure:
        make: Make = request.message
        usage, number = self._usage.of(holder), self._directory.next_number
        admission = planner.admit(make, holder, self._offers.offer, usage, number)
        if isinstance(admission, Failure):
            return admission
        if failure := self._offers.refusal(make.name, admission.settings, admission.hides_folders):
            return failure
        self._services.unread.release()
        replays = ""
        if self._features.keeps_replays:
            replays = name_beginning(make.name, secrets.token_hex(8))
        facts, name = self._services.env_facts.find(make), request.token.hex()[:8]
        planned = planner.plan(admission, _machine(self._config.cpus), facts, self._config, name, replays)
        if isinstance(planned, SessionPlan) and (why := descriptor_guard.shortage(planned.processes)):
            return Failure("limit", "hub", why)
        return planned

    def _build(self, planned: SessionPlan, request: Incoming, holder: Holder) -> SessionRuntime:
        """Build a session that has handled nothing yet.

        Raises:
            OSError: there is no memory or descriptor left.
        """
        restarts = Restarts(planned.make.faults.restarts_max, planned.make.num_envs, random.Random())
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
        return runtime


def _machine(cpus_max: int | None) -> Machine:
    """Measure what the machine has left for one more session."""
    workers_max = int(SHARE * min(descriptor_guard.workers_left(), processes_left()))
    affinity = tuple(sorted(os.sched_getaffinity(0)))
    return Machine(affinity, usable_cpus(cpus_max), has_quota(), workers_max, memory_available_bytes())
