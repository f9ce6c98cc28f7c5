"""``Fleet``: hubs of one name on the nodes of a Ray cluster.

Run as a program, it prints what clients connect to a fleet with, keys too. A program that is not connected to Ray reads
that from a pipe, so that its own call of ``ray.init``, if there is to be one, can still say how.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from envhub.errors import AddressError, EnvHubError, HubUnreachable, hidden
from envhub.fleet.hub_actor import FleetHub, HubAccess, HubActor, HubSettings, actor_name, hub_of
from envhub.transport.address import check_fleet_name, quoted

NAMESPACE = "envhub"  # of Ray, so that programs in any namespace have the same fleets
HUBS_MAX = 4096
CALLS_MAX = 16  # of an actor, that are answered at one time
START_TIMEOUT_S = 300.0  # a node may have to be started, and packages to be installed
ANSWER_TIMEOUT_S = 3.0  # for an actor that runs; one that Ray has yet to place does not answer
DRAIN_TIMEOUT_S = 45.0  # longer than a hub takes, see ``envhub.fleet.hub_actor``
ACTOR_TIMEOUT_S = 30.0  # for Ray to end actors
POLL_S = 0.2
PLACING_S = 5.0  # for Ray to place hubs, until it is told that they wait

log = logging.getLogger("envhub")

__all__ = ["Fleet", "FleetHub"]


class Fleet:
    """The fleet of this name on the Ray cluster to which the program is connected.

    A hub of it is an actor of Ray, which keeps an ``envhub serve`` process and starts it again when it ends. Ray starts
    the actor again when that ends, on another node if need be. Fleets outlive the programs that start them.

    Raises:
        AddressError: no fleet has this name.
        HubUnreachable: the program is not connected to Ray.
    """

    def __init__(self, name: str) -> None:
        check_fleet_name(name)
        self.name = name
        if not self._indices():
            names = ", ".join(fleets()) or "none yet"
            text = f"no fleet is up as {quoted(name)} (up: {names})"
            raise AddressError(f"{text}; Fleet.up or `envhub fleet up` starts one")

    @classmethod
    def up(
        cls,
        name: str,
        envs: Sequence[str] = (),
        *,
        hubs: int = 1,
        cpus_per_hub: float = 1,
        config: str | Path | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        resources: Mapping[str, float] | None = None,
        timeout: float = START_TIMEOUT_S,
    ) -> Fleet:
        """Start a fleet, and wait until all of its hubs serve; without that, none is left.

        Args:
            name: of the fleet. Clients connect with ``hub="ray://NAME"``.
            envs: what each hub offers, as ``envhub serve`` takes it. Without any, here and in ``config``, every
                registered id.
            hubs: number of hubs, which Ray spreads over the nodes.
            cpus_per_hub: number of CPUs that Ray reserves for each hub, and that the hub plans its workers with.
            config: a configuration file of ``envhub serve``, which is read here. Paths in it are those of the nodes.
            runtime_env: of Ray, for the hubs and their envs, such as ``{"pip": ["ale-py"]}``.
            resources: further resources that Ray reserves for each hub, such as ``{"GPU": 1}``.
            timeout: seconds for all hubs to serve.

        Raises:
            AddressError: no fleet can have this name, or one has it already.
            HubUnreachable: the program is not connected to Ray, or a hub does not serve; the message says which, why.
            ValueError: a value is not allowed, or ``config`` cannot be used.
        """
        check_fleet_name(name)
        _check_count(hubs)
        settings = HubSettings(
            tuple(envs),
            _text_of(config, tuple(envs)),
            cpus_per_hub,
            *(dict(given or {}) for given in (runtime_env, resources)),
        )
        fleet = cls.__new__(cls)
        fleet.name = name
        if fleet._indices():
            raise AddressError(f"a fleet is up as {name!r} already; end it by Fleet({name!r}).down(), or scale it")
        fleet._start(range(hubs), settings, timeout)
        return fleet

    def ls(self) -> list[FleetHub]:
        """Report on each hub, in the order of their numbers."""
        indices = self._indices()
        answers = self._ask("report", indices)
        return [answers.get(index, FleetHub(index)) for index in indices]

    def access(self) -> dict[int, HubAccess]:
        """Return what clients connect with, by the numbers of the hubs that serve now."""
        return {index: each for index, each in self._ask("access", self._indices()).items() if each is not None}

    def scale(self, hubs: int, timeout: float = START_TIMEOUT_S) -> None:
        """Change the number of hubs: start some and wait until they serve, or drain those of the highest numbers.

        Raises:
            HubUnreachable: a new hub does not serve in time, and none of the new ones is left; or no hub can say with
                which settings to start it.
            ValueError: the number is not allowed. ``down`` ends all hubs.
        """
        _check_count(hubs)
        indices = self._indices()
        self._end([index for index in indices if index >= hubs])
        if missing := [index for index in range(hubs) if index not in indices]:
            settings = next(iter(self._ask("settings", indices).values()), None)
            if settings is None:
                raise HubUnreachable(f"no hub of {self.name!r} answers now; try again when `envhub fleet ls` shows one")
            self._start(missing, settings, timeout)

    def down(self) -> None:
        """Drain all hubs, and end the fleet."""
        self._end(self._indices())

    def _indices(self) -> list[int]:
        return sorted(index for fleet, index in _hubs() if fleet == self.name)

    def _actors(self, indices: Iterable[int]) -> dict[int, Any]:
        actors = {}
        for index in indices:
            with contextlib.suppress(ValueError):
                actors[index] = ray.get_actor(actor_name(self.name, index), NAMESPACE)
        return actors

    def _ask(self, question: str, indices: Iterable[int], timeout_s: float = ANSWER_TIMEOUT_S) -> dict[int, Any]:
        """Call a method of the actors of these hubs; returns the results that come in time, by number."""
        calls = {getattr(actor, question).remote(): index for index, actor in self._actors(indices).items()}
        late = ray.wait([*calls], num_returns=len(calls), timeout=timeout_s)[1] if calls else []
        answers = {}
        for call in calls.keys() - {*late}:
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.RuntimeEnvSetupError):  # it has ended
                answers[calls[call]] = ray.get(call)
        return dict(sorted(answers.items()))

    def _start(self, indices: Iterable[int], settings: HubSettings, timeout_s: float) -> None:
        resources = {**settings.resources}
        options = {
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": 0,  # so that a call fails at once, and does not wait, while Ray starts an actor again
            "max_concurrency": CALLS_MAX,
            "scheduling_strategy": "SPREAD",
            "num_cpus": settings.cpus,
            "num_gpus": resources.pop("GPU", None),
            "resources": resources,
            "runtime_env": dict(settings.runtime_env),
        }
        actors: dict[int, Any] = {}
        try:
            for index in indices:
                made = ray.remote(HubActor).options(name=actor_name(self.name, index), **options)
                actors[index] = made.remote(self.name, index, settings)
            self._await(actors, settings.cpus, timeout_s)
        except BaseException:
            self._end([*actors])  # and none that another program has started under these names
            raise

    def _await(self, actors: Mapping[int, Any], cpus: float, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        late = {actor.await_serving.remote(): index for index, actor in actors.items()}
        if ray.wait([*late], num_returns=len(late), timeout=min(PLACING_S, timeout_s))[1]:
            self._tell_placing(cpus)
        while late:
            done, _ = ray.wait([*late], timeout=max(0.0, deadline_s - time.monotonic()))
            if not done:
                index = min(late.values())
                state = next((hub.state for hub in self.ls() if hub.index == index), "ended")
                raise HubUnreachable(
                    f"{len(late)} hubs of {self.name!r} do not serve after {timeout_s:g} s: hub {index} is {state}; "
                    "`ray status` shows what the nodes have left"
                )
            index = late.pop(done[0])
            try:
                why = ray.get(done[0])
            except ray.exceptions.RayError as error:  # as where ``runtime_env`` cannot be set up
                raise HubUnreachable(f"Ray cannot start hub {index} of {self.name!r}: {error}") from error
            if why:
                raise HubUnreachable(f"hub {index} of {self.name!r} cannot start: {why}")

    def _tell_placing(self, cpus: float) -> None:
        if waiting := sum(hub.state == "placing" for hub in self.ls()):
            left = ray.available_resources().get("CPU", 0)
            text = "%d hubs of %r wait for CPUs: each wants %g, and the nodes of Ray have %g left together"
            log.warning(text, waiting, self.name, cpus, left)

    def _end(self, indices: Sequence[int]) -> None:
        placed = self._ask("report", indices)
        self._ask("drain", placed, DRAIN_TIMEOUT_S)
        actors = self._actors(indices)
        for actor in actors.values():
            ray.kill(actor)
        deadline_s = time.monotonic() + ACTOR_TIMEOUT_S
        while left := actors.keys() & {*self._indices()}:
            if time.monotonic() > deadline_s:
                raise HubUnreachable(f"Ray has not ended the actors of the hubs {sorted(left)} of {self.name!r}")
            time.sleep(POLL_S)


def connect(address: str = "auto") -> None:
    """Connect this program to a Ray cluster that exists: by default to that of RAY_ADDRESS, else of this machine."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ray.exceptions.RayError) as error:  # of ``RayError`` one without a token
        why, advice = hidden(str(error)).partition(". ")[0], "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its token"
        raise HubUnreachable(
            f"no Ray cluster is reached ({hidden(address)}): {why}; if the cluster wants a token, {advice}"
        ) from error


def fleets() -> list[str]:
    return sorted({fleet for fleet, _ in _hubs()})


def _hubs() -> list[tuple[str, int]]:
    if not ray.is_initialized():  # Ray would start a cluster of its own
        raise HubUnreachable('this program is not connected to Ray: call ray.init(address="auto") first')
    actors = ray.util.list_named_actors(all_namespaces=True)
    hubs = [hub_of(each["name"]) for each in actors if each["namespace"] == NAMESPACE]
    return [hub for hub in hubs if hub is not None]


def _text_of(config: str | Path | None, envs: tuple[str, ...]) -> str:
    from envhub_server.serve import read_configuration

    read = read_configuration(envs, None, Path(config) if config else None, {}).config  # its variables are the nodes'
    if read.bind or read.keys is not None:
        raise ValueError(f"{config}: the hubs of a fleet have addresses and keys of their own; leave out bind and keys")
    return Path(config).read_text() if config else ""


def _check_count(hubs: int) -> None:
    if not 1 <= hubs <= HUBS_MAX:
        raise ValueError(f"a fleet has 1 to {HUBS_MAX} hubs, got {hubs}")


if __name__ == "__main__":
    try:
        connect()
        print(json.dumps(Fleet(sys.argv[1]).access()))
    except EnvHubError as failure:
        sys.exit(f"{failure}")
