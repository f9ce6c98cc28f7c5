"""``Fleet``: hubs of one name on the nodes of a Ray cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from envhub.errors import AddressError, HubUnreachable
from envhub.fleet.hub_actor import CALLS_MAX, HubActor
from envhub.fleet.names import HUBS_MAX, NAMESPACE, actor_name, check_fleet_name, fleet_of, index_of
from envhub.fleet.reports import FleetHub, HubAccess, HubState
from envhub.fleet.settings import HubSettings, read_config
from envhub.secret import hidden
from envhub.transport.keys import shown

START_TIMEOUT_S = 300.0  # a node may have to be started, and packages to be installed
ANSWER_TIMEOUT_S = 3.0  # for an actor that runs; one that Ray has yet to place does not answer
DRAIN_TIMEOUT_S = 45.0  # longer than a hub takes, see ``envhub.fleet.kept_hub``
ACTOR_TIMEOUT_S = 30.0  # for Ray to end actors
POLL_S = 0.2
LINES_SHOWN = 20  # of the log of a hub that cannot start
FAILURES_MAX = 3  # in a row, after which a hub that never listened is taken for one that cannot

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
            text = f"no fleet is up as {shown(name)} (up: {names})"
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
            read_config(tuple(envs), str(config or "")),
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
        answers = self._ask("report")
        return [FleetHub(index) if each is None else each for index, each in answers.items()]

    def access(self) -> dict[int, HubAccess]:
        """Return what clients connect with, by the numbers of the hubs that serve now."""
        return {index: each for index, each in self._ask("access").items() if each is not None}

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
            self._start(missing, self._settings(), timeout)

    def logs(self, hub: int = 0, lines: int = 100) -> list[str]:
        """Return the last lines of the log of the hub of this number, the newest last; at most 2000 are kept.

        Raises:
            HubUnreachable: there is no such hub, or it does not answer now.
        """
        if (actor := self._actor(hub)) is None:
            raise HubUnreachable(f"the fleet {self.name!r} has no hub {hub}")
        (answer,) = _answers([actor.log.remote(lines)], ANSWER_TIMEOUT_S)
        if answer is None:
            raise HubUnreachable(f"the actor of hub {hub} of {self.name!r} does not answer; `ray logs` has its log")
        return list(answer)

    def down(self) -> None:
        """Drain all hubs, and end the fleet.

        Raises:
            HubUnreachable: Ray did not end all of the actors in time.
        """
        self._end(self._indices())

    # --- actors -------------------------------------------------------------------------------------------------------

    def _indices(self) -> list[int]:
        indices = (index_of(name, self.name) for name in _actor_names())
        return sorted(index for index in indices if index is not None)

    def _actor(self, index: int) -> Any:
        """Return the actor of this hub; None if there is none."""
        try:
            return ray.get_actor(actor_name(self.name, index), NAMESPACE)
        except ValueError:
            return None

    def _actors(self, indices: Iterable[int]) -> dict[int, Any]:
        """Return the actors of these hubs, without those that have ended."""
        actors = ((index, self._actor(index)) for index in indices)
        return {index: actor for index, actor in actors if actor is not None}

    def _ask(self, question: str) -> dict[int, Any]:
        """Call a method of the actor of each hub, and return the results by number; None where none comes in time."""
        actors = self._actors(self._indices())
        answers = _answers([getattr(actor, question).remote() for actor in actors.values()], ANSWER_TIMEOUT_S)
        return dict(zip(actors, answers, strict=True))

    def _start(self, indices: Iterable[int], settings: HubSettings, timeout_s: float) -> None:
        """Start hubs, and wait until they serve; raises as ``up``, after they have ended."""
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
            self._await(actors, timeout_s)
        except BaseException:
            self._end([*actors])  # and none that another program has started under these names
            raise

    def _await(self, actors: Mapping[int, Any], timeout_s: float) -> None:
        """Wait until the hubs of these numbers serve; raises as ``up``."""
        deadline_s = time.monotonic() + timeout_s
        while late := self._late(actors):
            for hub in late:
                if hub.failures >= FAILURES_MAX:
                    raise HubUnreachable(self._why_broken(hub))
                self._check_lives(hub.index, actors[hub.index])
            if time.monotonic() > deadline_s:
                raise HubUnreachable(
                    f"{len(late)} hubs of {self.name!r} do not serve after {timeout_s:g} s: hub {late[0].index} is "
                    f"{late[0].state}; `ray status` shows what the nodes have left"
                )
            time.sleep(POLL_S)

    def _late(self, indices: Iterable[int]) -> list[FleetHub]:
        """Return the reports of the hubs of these numbers that do not serve."""
        hubs = {hub.index: hub for hub in self.ls()}
        reports = (hubs.get(index, FleetHub(index)) for index in indices)
        return [each for each in reports if each.state != HubState.SERVING.value]

    def _check_lives(self, index: int, actor: Any) -> None:
        """Raise if Ray has given the actor of this hub up, as where ``runtime_env`` cannot be set up.

        Raises:
            HubUnreachable: it has.
        """
        if index not in self._indices():
            try:
                ray.get(actor.report.remote(), timeout=ANSWER_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                return
            except ray.exceptions.RayError as error:
                raise HubUnreachable(f"Ray cannot start hub {index} of {self.name!r}: {error}") from error

    def _why_broken(self, hub: FleetHub) -> str:
        """Say why a hub cannot start, with the end of its log."""
        text = f"hub {hub.index} of {self.name!r} cannot start: {hub.why}; its log ends with:"
        return "\n".join([text, *self.logs(hub.index, LINES_SHOWN)])

    def _settings(self) -> HubSettings:
        """Return the settings of the hubs, from the first of them that answers."""
        answers = self._ask("settings").values()
        settings: HubSettings | None = next((each for each in answers if each is not None), None)
        if settings is None:
            raise HubUnreachable(f"no hub of {self.name!r} answers now; try again when `envhub fleet ls` shows one")
        return settings

    def _end(self, indices: Sequence[int]) -> None:
        """Drain these hubs and end their actors; raises as ``down``."""
        actors = self._actors(indices)
        reports = _answers([actor.report.remote() for actor in actors.values()], ANSWER_TIMEOUT_S)
        placed = [actor for actor, report in zip(actors.values(), reports, strict=True) if report is not None]
        _answers([actor.drain.remote() for actor in placed], DRAIN_TIMEOUT_S)
        for actor in actors.values():
            ray.kill(actor)
        deadline_s = time.monotonic() + ACTOR_TIMEOUT_S
        while left := actors.keys() & {*self._indices()}:
            if time.monotonic() > deadline_s:
                raise HubUnreachable(f"Ray has not ended the actors of the hubs {sorted(left)} of {self.name!r}")
            time.sleep(POLL_S)


def connect(address: str = "auto") -> None:
    """Connect this program to a Ray cluster that exists: by default to that of RAY_ADDRESS, else of this machine.

    Raises:
        HubUnreachable: there is none.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise HubUnreachable(f"no Ray cluster is reached ({hidden(address)}): {hidden(str(error))}") from error


def fleets() -> list[str]:
    """Return the names of the fleets on this Ray cluster.

    Raises:
        HubUnreachable: the program is not connected to Ray.
    """
    return sorted({fleet for name in _actor_names() if (fleet := fleet_of(name)) is not None})


def _actor_names() -> list[str]:
    if not ray.is_initialized():  # Ray would start a cluster of its own
        raise HubUnreachable('this program is not connected to Ray: call ray.init(address="auto") first')
    return [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]


def _answers(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return the results of calls of actors, in their order; None for those that do not come in time."""
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
    return [_answer(ref) if ref in done else None for ref in refs]


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except (ray.exceptions.RayActorError, ray.exceptions.RuntimeEnvSetupError):  # the actor has ended, or never began
        return None


def _check_count(hubs: int) -> None:
    if not 1 <= hubs <= HUBS_MAX:
        raise ValueError(f"a fleet has 1 to {HUBS_MAX} hubs, got {hubs}")
