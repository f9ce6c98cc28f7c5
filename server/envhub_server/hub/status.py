"""The envs that a hub offers, and its reports about itself and its sessions, for clients and operators."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import envhub
from envhub.errors import without_folders
from envhub.protocol import messages, prelude
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Capacity, Failure, HeartbeatReply, Welcome
from envhub.values import compression
from envhub_server.catalog.listing import LOOK_S, Listing
from envhub_server.catalog.registry import EnvSettings
from envhub_server.config import HubConfig, usable_cpus
from envhub_server.hub import planner
from envhub_server.hub.directory import NAME_BYTES, ClientUsage, Directory
from envhub_server.hub.gateway import Gateway
from envhub_server.hub.planner import hides_folders
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.loop import Clock, Loop
from envhub_server.network import descriptor_guard
from envhub_server.network.access import Access
from envhub_server.network.connections import Holder
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor


class Offers:
    """Offers of one hub. It owns the LIST requests that wait for the names."""

    def __init__(
        self,
        config: HubConfig,
        supervisor: Supervisor,
        protocol: HubProtocol,
        loop: Loop,
        on_listed: Callable[[], None],
    ) -> None:
        """Call ``on_listed`` once, when it is known which envs are ready."""
        self.registry = config.registry()  # what can be made
        self.listing = Listing(supervisor, self.registry)  # the names of the envs, and which of them are ready
        self._protocol, self._loop, self._on_listed = protocol, loop, on_listed
        self._is_listed = False  # True once it is known which envs are ready
        self._waiting: list[Incoming] = []  # LIST requests

    # --- names --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.listing.start()
        self._plan_look()

    def answer(self, request: Incoming) -> Failure | None:
        """Answer LIST, now or once the names are known; or return why it cannot be answered."""
        if self.listing.names is not None:
            self._protocol.answer(request, messages.EnvNames(self.listing.names))
            return None
        try:
            if not self.listing.asking:
                self.start()
        except OSError as error:
            return Failure("limit", "hub", f"a worker cannot be started: {error.strerror}")
        self._waiting.append(request)
        return None

    def report(self) -> None:
        """Call ``on_listed`` if it is due, and answer the requests that wait, if the names are known."""
        if self.listing.done and not self._is_listed:
            self._is_listed = True
            self._on_listed()
        if not self.listing.asking:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._protocol.answer(request, messages.EnvNames(self.listing.names or []))

    def _look(self) -> None:
        self.listing.look(self._loop.clock.now_s())
        self._plan_look()

    def _plan_look(self) -> None:
        at_s = self._loop.clock.now_s() + LOOK_S if self.listing.running else math.inf
        self._loop.schedule.set(self._look, at_s)

    # --- readiness ----------------------------------------------------------------------------------------------------

    def refusal(self, name: str, settings: EnvSettings, hides_folders: bool) -> Failure | None:
        """Refuse an env that is not ready, and try it again; None if it is ready, or may be by now."""
        if name in self.listing.unready:
            self._try_again(settings.interpreter)
        if why := self.listing.undrawn.get(settings.interpreter, ""):
            self._try_again(settings.interpreter)
            why = without_folders(why) if hides_folders else why
        if why:
            return Failure("env_unready", "hub", f"{name!r} is not ready: {why}")
        return None

    def _try_again(self, key: InterpreterKey) -> None:
        self.listing.try_again(key)
        self._plan_look()


class Status:
    """Reports of one hub. It owns the time at which the hub began; all else it reads from the other objects."""

    def __init__(
        self,
        config: HubConfig,
        protocol: HubProtocol,
        access: Access,
        directory: Directory,
        usage: ClientUsage,
        gateway: Gateway,
        offers: Offers,
        supervisor: Supervisor,
        clock: Clock,
    ) -> None:
        self._config, self._protocol, self._access, self._directory = config, protocol, access, directory
        self._usage = usage
        self._gateway, self._offers, self._supervisor, self._clock = gateway, offers, supervisor, clock
        self._began_s = time.monotonic()

    def welcome(self, holder: Holder) -> Welcome:
        config = self._config
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
        return planner.capacity(holder, self._config, self._usage.of(holder), usable_cpus(self._config.cpus))

    def health(self, holder: Holder) -> dict[str, Any]:
        """Health of the hub, and the envs that it cannot make now, with the reasons."""
        unready = {**self._offers.listing.unready, **self._offers.listing.starting}
        return {
            "status": "draining" if self._protocol.draining else "ok",
            "hub": f"{self._protocol.hub_id:016x}",
            "uptime_s": time.monotonic() - self._began_s,
            "sessions": len(self._directory.sessions),
            "loop_lag_s": self._clock.lag_s(),
            "unready": without_folders(unready) if hides_folders(self._config, holder) else unready,
        }

    def counters(self) -> dict[str, Any]:
        sessions, protocol, access = self._directory.sessions, self._protocol, self._access
        restarts = sum(each.state.restarts for each in sessions)
        return {
            "envs": sum(each.state.make.num_envs for each in sessions),
            "workers": sum(len(each.pids) for each in sessions),
            "restarts": restarts + self._directory.restarts_before,
            "steps": sum(each.steps for each in sessions) + self._directory.steps_before,
            "lanes": dict(Counter(each.state.ownership.lane.value for each in sessions)),
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
        }

    def sessions(self, holder: Holder) -> list[dict[str, Any]]:
        seen = [each for each in self._directory.sessions if holder.owns(each.owner)]
        return [description(each, each.token in self._protocol.leases) for each in seen]

    def progress(self, token: bytes) -> HeartbeatReply:
        """Progress of a request, for its client; the log has that of a request that makes envs, too."""
        runtime = self._directory.by_token.get(token)
        if runtime is None or not runtime.state.making:
            return HeartbeatReply("running")
        progress = runtime.state.progress
        starting = self._supervisor.starting(runtime.interpreter)
        at_work = f"importing {progress.importing}" if progress.importing else starting
        doing = {"doing": at_work} if at_work else {}
        made: dict[str, Any] = {"phase": progress.phase, "built": progress.built, "num_envs": progress.num_envs}
        # Event: The number of envs that a session has built, and what its workers do if that takes long.
        runtime.log.info("session_making", **made, **doing)
        hides = runtime.state.launcher.rules.hide_folders
        return replace(progress, starting=without_folders(starting) if hides else starting)


def description(runtime: SessionRuntime, leased: bool) -> dict[str, Any]:
    return {
        "session": runtime.token[:NAME_BYTES].hex(),  # to tell sessions apart; the whole token is a key to it
        "env": runtime.state.make.name or "factories",
        "num_envs": runtime.state.make.num_envs,
        "workers": runtime.pids,
        "sizing": "" if runtime.state.sizing.count is None else runtime.state.sizing.count.reason,
        "restarts": runtime.state.restarts,
        "recycled": runtime.state.recycled,
        "steps": runtime.steps,
        "phase": runtime.state.phase.value,
        "lane": runtime.state.ownership.lane.value,
        "leased": leased,
    }
