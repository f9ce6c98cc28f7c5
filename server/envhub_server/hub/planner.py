"""Plans of sessions: what is made for a client that asks for envs, or why it is refused. Pure.

``admit`` compares the request with what the hub offers and with what its clients have; ``plan`` decides on the workers,
by what the machine has left. The caller measures between the two, so that a refused request costs no measurement.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envhub.protocol.messages import Capacity, Failure, Hosting, Make, Recycle
from envhub_server.catalog.admission import admitted, hosting_of_session
from envhub_server.catalog.registry import Recipe, Registry
from envhub_server.config import HubConfig
from envhub_server.network.connections import OWN_USER, Holder
from envhub_server.session.building import chosen_count, count_in_advance, first_workers, lacking, separate
from envhub_server.session.launcher import Machine, WorkerCount, WorkerRules


@dataclass(frozen=True)
class Usage:
    """Amounts in use when a session is to be made."""

    hub_sessions: int = 0  # of all clients
    hub_envs: int = 0
    busy_workers: int = 0  # of all clients
    sessions: int = 0  # of the client that asks
    envs: int = 0
    processes: int = 0


@dataclass(frozen=True)
class Admission:
    """A request to make a session that the hub does not refuse."""

    make: Make
    recipe: Recipe
    hosting: Hosting  # what its workers get besides envs
    hides_folders: bool  # True if failures name no folder of this machine
    workers_max: float  # the most workers, besides spares, that the quotas of its client leave; infinity without quotas


@dataclass(frozen=True)
class SessionPlan:
    """A session to make."""

    make: Make
    recipe: Recipe
    count: WorkerCount | None  # number of its workers; None where the first envs decide
    machine: Machine  # what it may have of the machine
    rules: WorkerRules
    processes: int  # the most processes that it has to begin with


def hides_folders(config: HubConfig, holder: Holder) -> bool:
    """True if this client is told of no folder of the hub's machine."""
    return holder is not OWN_USER and not config.verbose_errors


def admit(
    make: Make,
    holder: Holder,
    config: HubConfig,
    registry: Registry,
    names: Sequence[str] | None,
    usage: Usage,
    number: int,
) -> Admission | Failure:
    """Admit a client's request to make the session of this number, or refuse it."""
    # ``names`` are those of the registry, as far as they are registered; None before that is known.
    recipe = admitted(make, config, registry, usage.hub_envs, holder.deploys, names)
    if isinstance(recipe, Failure):
        return recipe
    hosting = hosting_of_session(make.hosting, recipe.settings.hosting(config.hosting), number)
    spares = hosting.spares or 0
    if why := _quota_problem(make, holder, spares, usage):
        return Failure("limit", "hub", why)
    workers_max = math.inf if holder.quotas is None else holder.quotas.workers_max - usage.processes - spares
    return Admission(make, recipe, hosting, hides_folders(config, holder), workers_max)


def capacity(holder: Holder, config: HubConfig, usage: Usage, cpus: int) -> Capacity:
    """The resources that this client could have besides what is in use, of a hub that may use these CPUs."""
    envs, sessions = config.max_envs - usage.hub_envs, config.sessions_max - usage.hub_sessions
    if (quotas := holder.quotas) is not None:
        envs = min(envs, quotas.envs_max - usage.envs)
        sessions = min(sessions, quotas.sessions_max - usage.sessions)
    return Capacity(cpus, max(0, cpus - usage.busy_workers), max(0, envs), max(0, sessions))


def _quota_problem(make: Make, holder: Holder, spares: int, usage: Usage) -> str:
    quotas = holder.quotas
    if quotas is None:
        return ""
    workers = min(make.num_workers or 1, make.num_envs) + spares
    return (
        holder.quota_problem("sessions", usage.sessions, 1, quotas.sessions_max)
        or holder.quota_problem("envs", usage.envs, make.num_envs, quotas.envs_max)
        or holder.quota_problem("workers", usage.processes, workers, quotas.workers_max)
    )


def imports_key(make: Make, recipe: Recipe) -> str:
    """The same for sessions of a program whose first workers import the same; empty if that is not known."""
    program = make.program_environment
    if program is None or recipe.settings.python or ((make.factories or make.runner) and not make.factories_digest):
        return ""
    adopted = program.sys_path, program.cwd, program.environ, program.argv, program.flags, program.levels
    own = make.name, make.factories_digest, make.runner, recipe.entry, recipe.modules, make.pin, program.authkey
    return hashlib.sha256(repr((own, adopted)).encode()).hexdigest()


def plan(
    admission: Admission, machine: Machine, shares_imports: bool, config: HubConfig, session: str, replays: str
) -> SessionPlan | Failure:
    """Plan the workers of the session of this name, or refuse it."""
    # ``machine`` is what the hub has left of it, and ``replays`` the prefix of the names of its replays; empty where
    # none are kept.
    make, hosting = admission.make, admission.hosting
    close_s = min(make.faults.close_s, config.close_timeout_max)
    make = replace(make, faults=replace(make.faults, close_s=close_s))
    # A session may always have a worker for each CPU, so a quota lowers their number, too.
    cpus, most = (int(min(count, admission.workers_max)) for count in (machine.cpus, machine.workers_max))
    machine = replace(machine, cpus=cpus, workers_max=most)
    count = _count(admission, machine, config.workers if isinstance(config.workers, int) else None)
    needs_own = hosting.shares_process is False and not admission.recipe.settings.vector
    if needs_own and count is not None and (why := lacking(make.num_envs, count, machine)):
        return Failure("refused", "request", why)
    workers = first_workers(make.name, make.num_envs, machine.cpus) if count is None else count.workers
    rules = WorkerRules(
        config.worker_memory,
        admission.hides_folders,
        session,
        hosting,
        replays,
        shares_imports,
        info_bytes_max=config.info_bytes_max,
        slow_ms=config.slow_ms,
        snapshots_max=int(min(config.snapshots_max, admission.workers_max)),
    )
    return SessionPlan(make, admission.recipe, count, machine, rules, workers + (admission.hosting.spares or 0))


def _count(admission: Admission, machine: Machine, hub_workers: int | None) -> WorkerCount | None:
    make, hosting, room = admission.make, admission.hosting, max(1, machine.workers_max)
    if make.num_workers:
        return chosen_count(make.num_envs, make.num_workers, f"num_workers={make.num_workers}")
    if admission.recipe.settings.vector:
        return WorkerCount(1, "a vector env, which one worker steps in one call", chosen=True)
    if hosting.shares_process is False:
        return separate(make.num_envs, "one_per_process")
    if hub_workers:
        return chosen_count(make.num_envs, min(hub_workers, room), f"the hub's --workers {hub_workers}")
    if hosting.recycle != Recycle():
        why = "a process per env, which is recycled by itself"
        return chosen_count(make.num_envs, min(make.num_envs, room), why)
    return count_in_advance(make.name, make.num_envs, machine.cpus)
