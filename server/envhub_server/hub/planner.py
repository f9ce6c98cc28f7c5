"""Plans of sessions: what is made for a client that asks for envs, or why it is refused. Pure.

``admit`` compares the request with what the hub offers and with what its clients have; ``plan`` decides on the workers,
by what the machine has left. The caller measures between the two, so that a refused request costs no measurement.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace

from envhub.errors import brief
from envhub.protocol.messages import Capacity, Failure, Faults, Hosting, Make, Recycle
from envhub.values import codec
from envhub_server.catalog.registry import Recipe, Registry, program_recipe
from envhub_server.config import HubConfig
from envhub_server.ipc.factories_memory import why_malformed
from envhub_server.network.connections import OWN_USER, Holder
from envhub_server.session.building import chosen_count, count_in_advance, first_workers, lacking, separate
from envhub_server.session.launcher import Machine, WorkerCount, WorkerRules

# Wrappers of Gymnasium that any client may name. Of its others, RecordVideo writes to any path in its arguments,
# HumanRendering opens a window, and ArrayConversion and those made of it take modules.
WRAPPER_NAMES = (
    *("AddRenderObservation", "AddWhiteNoise", "AtariPreprocessing", "Autoreset", "ClipAction", "ClipReward"),
    *("DelayObservation", "DiscretizeAction", "DiscretizeObservation", "DtypeObservation", "FilterObservation"),
    *("FlattenObservation", "FrameStackObservation", "GrayscaleObservation", "MaxAndSkipObservation"),
    *("NormalizeObservation", "NormalizeReward", "ObstructView", "OrderEnforcing", "PassiveEnvChecker"),
    *("RecordEpisodeStatistics", "RenderCollection", "RepeatAction", "RescaleAction", "RescaleObservation"),
    *("ReshapeObservation", "ResizeObservation", "StickyAction", "TimeAwareObservation", "TimeLimit"),
    *("TransformAction", "TransformObservation", "TransformReward"),
)
WRAPPERS = re.compile(rf"envhub\.action_chunk:ActionChunk|gymnasium\.wrappers\.\w+:({'|'.join(WRAPPER_NAMES)})")
# A client that may not deploy passes numbers, truth values and short strings that name no file and no module.
STRING_CHARS_MAX = 64
PLAIN_STRING = re.compile(rf"[A-Za-z0-9][A-Za-z0-9 _-]{{0,{STRING_CHARS_MAX - 1}}}|")


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
    why = (
        holder.quota_problem("sessions", usage.sessions, 1)
        or holder.quota_problem("envs", usage.envs, make.num_envs)
        or holder.quota_problem("workers", usage.processes, min(make.num_workers or 1, make.num_envs) + spares)
    )
    if why:
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


# --- the check of a request -------------------------------------------------------------------------------------------


def admitted(
    make: Make, config: HubConfig, registry: Registry, envs: int, deploys: bool, names: Sequence[str] | None = None
) -> Recipe | Failure:
    """The recipe of the env, or the failure that refuses it; who ``deploys`` may pass any arguments, and code."""
    if make.num_envs > config.envs_per_session_max:
        text = f"num_envs={make.num_envs} is more than envs_per_session_max={config.envs_per_session_max}"
        return Failure("limit", "hub", text)
    if envs + make.num_envs > config.max_envs:
        text = f"{make.num_envs} more envs would exceed the hub's max_envs={config.max_envs}; {envs} are in use"
        return Failure("limit", "hub", text)
    if config.close_timeout_max < make.faults.close_s != Faults().close_s:  # by default it is as much as there is
        text = f"close_timeout={make.faults.close_s:g} is more than close_timeout_max={config.close_timeout_max:g} s"
        text += " of this hub, for as long as a session that closes keeps its workers"
        return Failure("limit", "hub", text)
    if len(make.wrappers) != len(make.wrapper_kwargs):
        text = f"{len(make.wrappers)} wrappers and arguments for {len(make.wrapper_kwargs)}"
        return Failure("refused", "request", text)
    if len(make.kwargs_each) not in (0, make.num_envs):
        text = f"{make.num_envs} envs and arguments for {len(make.kwargs_each)}"
        return Failure("refused", "request", text)
    if len(make.seeds) not in (0, make.num_envs):
        return Failure("refused", "request", f"{make.num_envs} envs and seeds for {len(make.seeds)}")
    if why := why_malformed(make):
        return Failure("refused", "request", why)
    if config.private:
        return _checked(make, program_recipe(make))
    code_allowed = config.allow_factories and deploys
    if make.runner or make.program_environment is not None or (make.factories and not code_allowed):
        text = "this hub makes environments by name only; factories run in a private hub (hub=None), or where the hub"
        text += " is served with --allow-factories, for its own user and keys with the right to deploy"
        return Failure("not_permitted", "request", text)
    recipe = registry.factory_recipe(make.vector) if make.factories else registry.find(make.name)
    if not deploys and (why := _refused_arguments(make, frozenset() if recipe is None else recipe.arguments)):
        return Failure("not_permitted", "request", why)
    if foreign := [wrapper for wrapper in make.wrappers if not WRAPPERS.fullmatch(wrapper)]:
        text = (
            f"{', '.join(foreign)}: a hub on the network makes no wrappers but ActionChunk and these of Gymnasium's: "
        )
        text += ", ".join(WRAPPER_NAMES)
        return Failure("not_permitted", "request", text)
    if not code_allowed and (why := _foreign_setup(make, "" if recipe is None else recipe.settings.worker_setup)):
        return Failure("not_permitted", "request", why)
    if recipe is not None:
        why = excess(make.hosting, recipe.settings.hosting(config.hosting), config.spares_max)
        return Failure("not_permitted", "request", why) if why else _checked(make, recipe)
    near = registry.nearest(make.name, names)
    question = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; its operator decides what it offers."
    name = brief(make.name)
    text = f"this hub does not offer {name}{question} `envhub envs` and `envs()` of a client list what it offers"
    return Failure("unknown_env", "request", text)


def excess(wanted: Hosting, allowed: Hosting, spares_max: int) -> str:
    if (wanted.spares or 0) > max(spares_max, allowed.spares or 0):
        return f"spares={wanted.spares}: this hub makes at most spares_max={spares_max} of a session ahead"
    if wanted.shares_process and allowed.shares_process is False:
        return "shared_process=True: this hub's operator says that each of these envs has a process of its own"
    if foreign := sorted(set(wanted.gpus) - set(allowed.gpus)):
        dealt = ", ".join(map(str, allowed.gpus)) or "no devices"
        return f"gpus={foreign}: this hub deals {dealt} to its workers; its operator names others by --gpus"
    if allowed.memory_max and wanted.memory_max is not None and not 0 < wanted.memory_max <= allowed.memory_max:
        return (
            f"memory_max={wanted.memory_max}: this hub's operator allows up to {allowed.memory_max} bytes of a worker"
        )
    return ""


def hosting_of_session(wanted: Hosting, allowed: Hosting, session: int) -> Hosting:
    """The workers' settings in this session; each begins with the operator's next device, so that all are shared."""
    first = session % max(1, len(allowed.gpus))
    asked = {name: value for name, value in vars(wanted).items() if value is not None}
    asked["gpus"] = wanted.gpus or allowed.gpus[first:] + allowed.gpus[:first]
    both = zip(astuple(wanted.recycle), astuple(allowed.recycle), strict=True)
    asked["recycle"] = Recycle(*(min(filter(None, limits), default=0) for limits in both))
    hosting = replace(allowed, **asked)
    if hosting.spares is None and hosting.recycle != Recycle():
        return replace(hosting, spares=1)  # the next worker then takes over without a delay
    return hosting


def _foreign_setup(make: Make, of_operator: str) -> str:
    if make.worker_setup in ("", of_operator) and not make.worker_setup_code:
        return ""
    named = f"={make.worker_setup!r:.100}" if make.worker_setup else ""
    return (
        f"worker_setup{named}: what runs in the workers of this hub is its operator's choice, by worker_setup in the "
        "table of an env; where the hub is served with --allow-factories, its own user and keys with the right to "
        "deploy choose it, too"
    )


def _checked(make: Make, recipe: Recipe) -> Recipe | Failure:
    if not recipe.settings.vector:
        if not make.vector:
            return recipe
        why = f"vector=True: this hub makes {make.name!r} as single envs; its operator decides that, by vector = true"
        return Failure("refused", "request", f"{why} in its table")
    asked = {"wrappers": make.wrappers, "arguments for each env": make.kwargs_each, "worker": make.runner}
    asked[f"observation_mode={make.observation_mode!r}"] = make.observation_mode in ("different", "any")
    if refused := [what for what, given in asked.items() if given]:
        text = f"{make.name or 'the factory'!r} makes a vector env, which takes no {', '.join(refused)}"
        return Failure("refused", "request", text)
    return recipe


def _refused_arguments(make: Make, declared: Collection[str]) -> str:
    of_envs = ((blob, declared) for blob in (make.kwargs, *make.kwargs_each))
    for blob, free in (*of_envs, *((blob, ()) for blob in make.wrapper_kwargs)):
        try:
            arguments = codec.decode(blob) if blob else {}
        except codec.DecodeError as error:
            return f"the arguments cannot be read: {error}"
        for name, value in arguments.items() if isinstance(arguments, dict) else [("arguments", arguments)]:
            if name not in free and not _is_plain(value):
                return (
                    f"{name}={brief(value, 100)}: with this key an argument is a number, True, False, None, a string "
                    f"of at most {STRING_CHARS_MAX} letters, digits, spaces, dashes and underscores, or a list of "
                    "these; the right to deploy allows others, and so does the operator by --allow-arguments"
                )
    return ""


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return PLAIN_STRING.fullmatch(value) is not None
    return value is None or isinstance(value, (bool, int, float))
