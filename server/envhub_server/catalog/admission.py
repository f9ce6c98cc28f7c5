"""The check of a client's request to make a session."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import astuple, replace

from envhub.errors import brief
from envhub.protocol.messages import Failure, Faults, Hosting, Make, Recycle
from envhub.values import codec
from envhub_server.catalog.registry import Recipe, Registry, program_recipe
from envhub_server.config import HubConfig
from envhub_server.ipc.factories_memory import why_malformed

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
