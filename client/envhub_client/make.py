"""``envhub.make_vec`` and ``envhub.make``: from what a user names to a session on a hub."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.vector import AutoresetMode
from typing_extensions import Unpack

from envhub.errors import AddressError, RequestRefused, brief, only_linux
from envhub.protocol.messages import Make
from envhub.protocol.prelude import RECONNECT_S
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.values import codec
from envhub_client.connection.known_hubs import Hubs, stands_for_several
from envhub_client.envs.arguments import Origin
from envhub_client.envs.single_env import HubEnv
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.federation.opener import PartsOpener
from envhub_client.federation.session import FederatedSession
from envhub_client.frames import hiding_frames
from envhub_client.keywords import WrapperLike, check, fields_of, hint_of, named_wrappers, refused_keyword, whole_number
from envhub_client.option_keywords import EnvKeywords, SessionKeywords
from envhub_client.record_options import RecordOptions
from envhub_client.session.factories import Factory, checked_factories, make_of_factories
from envhub_client.session.options import (
    Compression,
    FaultOptions,
    HostingOptions,
    HubLossPolicy,
    InfoMode,
    LaneName,
    ModeName,
    ObservationMode,
    SessionOptions,
)
from envhub_client.session.session import Session, VectorSession

EnvLike = str | EnvSpec | Factory | Sequence[Factory]


@hiding_frames
def make_vec(  # noqa: PLR0913  each is what one user wants, and none of them is positional
    env: EnvLike,
    num_envs: int = 1,
    *,
    hub: str | Sequence[str] | None = None,
    split: Sequence[int] | None = None,
    hub_index: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    autoreset_mode: ModeName | AutoresetMode = AutoresetMode.NEXT_STEP,
    observation_mode: ObservationMode = "same",
    info_mode: InfoMode = "batched",
    copy: bool = True,
    lane: LaneName | None = None,
    spin_us: int | None = None,
    pin: bool = False,
    vector: bool = False,
    compression: Compression | None = "auto",
    reconnect_timeout: float = RECONNECT_S,
    on_hub_loss: HubLossPolicy = "raise",
    record: str | Path | RecordOptions | None = None,
    wrappers: Sequence[WrapperLike] = (),
    env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    **kwargs: Unpack[EnvKeywords],
) -> HubVectorEnv:
    """A vector env of ``num_envs`` envs in a hub.

    Args:
        env: a Gymnasium id (``"CartPole-v1"``, ``"module:Id-v0"``), an ``EnvSpec``, whose wrappers then run in the
            workers, a factory or a list of one factory per env, or ``"module:factory"``, which only the workers import.
            A hub other than a private one runs factories only where its operator allows that.
        num_envs: how many; with a list of factories its length, if given at all.
        hub: a running hub's address, or the name under which ``envhub login`` keeps it. Without it ``ENVHUB_ADDRESS``
            (not for factories); without that a private hub, which starts and ends with this program. A list of them,
            ``ray://FLEET`` or ``dns://NAME:PORT`` divides the envs among several hubs.
        split: how many envs each of several hubs gets, in their order. Without it the envs are on as few hubs as have a
            free CPU for each env.
        hub_index: the number of the hub that gets all envs, of several in their order and modulo how many they are.
            Where it is out of reach or drains, the next hub gets them; with ``"redistribute"`` also after its loss the
            hub with most free CPUs.
        num_workers: processes that host the envs. Without it, or with ``"auto"``, every env gets a process, unless its
            package is known to keep nothing per process, or ``shared_process=True`` says that it does not. Such envs
            share a process per CPU, or fewer. ``envs.sizing`` says how many there are, and why. A number is divided
            among several hubs, at least one each. For a debugger use ``gymnasium.vector.SyncVectorEnv``.
        autoreset_mode: the mode, as in Gymnasium.
        observation_mode: ``"same"``, ``"different"`` or ``(batched space, single space)``, as in Gymnasium. With
            ``"first"`` envs may differ in the bounds of their observations and actions: the spaces are the first env's
            then. With ``"any"`` envs also differ in shapes and keys, and an observation need not fit its space.
            Observations are a tuple with each env's own then; so are actions where they have different leaves.
        info_mode: the form of infos: ``"batched"``, an array of all envs for each key, as in Gymnasium, or
            ``"by_env"``, the dict that each env gave, by the number of the env. Wrappers of vector envs, such as
            ``RecordEpisodeStatistics``, need ``"batched"``.
        copy: True if returned observations are the caller's own. If not, two buffers alternate, and what a step
            returned holds until the second next step or reset.
        lane: ``"auto"`` steps in the workers' own memory on the hub's machine; ``"wire"`` by messages only. Without it
            ``ENVHUB_LANE``; without that ``"auto"``.
        spin_us: the microseconds that a waiting process spins before it parks, 0 to 1000. By default what suits the
            hub's machine.
        pin: True if each worker keeps to one CPU.
        vector: True if ``env`` is a vector env, which steps all of its envs in one call: an id with a
            ``vector_entry_point``, or a function that takes ``num_envs``. One worker holds the batch, or each of
            ``num_workers`` a part.
        compression: the compression of observations: ``"auto"`` where they come from another machine or encrypted, and
            where it is worth its time; ``"zstd"`` or ``"lz4"`` at any address and cost; or None. ``envs.compression``
            is the one in use.
        reconnect_timeout: the seconds for which a hub that is out of reach is tried, before it is taken for lost.
        on_hub_loss: ``"raise"`` ``HubLost``, or ``"recreate"``: continue in a new session on the hub that comes back
            at the same address, or on a new private hub. The step under way then returns every env truncated; of
            several hubs the lost one's. With ``"redistribute"`` any hub that has room makes them again.
        record: a folder of this machine to which episodes are written as a Minari data set, or ``RecordOptions`` with
            one (``pip install "envhub-rl[record]"``). ``envs.recorded`` says what is written, and what was dropped.
        wrappers: the wrappers of each env of this id, innermost first, which run in the workers: classes that extend
            ``gymnasium.Wrapper``, or names in ``gymnasium.wrappers``, or ``"ActionChunk"``, with arguments as
            ``("FrameStackObservation", {"stack_size": 4})`` or ``functools.partial(TimeLimit, max_episode_steps=50)``.
        env_kwargs: arguments for the env or the factory, for those whose names are taken by this function; or a list of
            one dict per env, for envs that differ.
        on_crash: the policy when an env's process ends, such as ``"truncate"``; see ``envhub.FaultOptions``.
        on_timeout: the policy when an env does not finish in time.
        on_exception: the policy when an env's ``step`` raises.
        on_invalid: the policy when an observation or a reward is not finite; ``"pass"`` as in Gymnasium.
        restart_wait: how long a step waits for an env that is being restarted, before it is truncated again.
        restarts_max: how often the envs of one process are restarted within a minute.
        init_timeout: the time for making an env, and for its first step, in which much is compiled.
        reset_timeout: the time for a reset.
        step_timeout: the time for a step, also where that resets the env.
        call_timeout: the time for a call.
        close_timeout: the time for an env to close.
        gpus: numbers of devices, dealt to the workers in turn; see ``envhub.HostingOptions``.
        memory_max: bytes of memory that each worker may have, with what it started, without files and shared memory.
        spares: the number of workers that each hub makes ahead, with their envs, for envs that take long.
        recycle: when another worker takes over from one, for envs that leak: after ``{"episodes": 100}``.
        shared_process: True if several of the envs may share a process, which steps cheap envs faster.
        one_per_process: True if each env has a process of its own in any case.
        snapshots: True if snapshots may be taken of the envs: ``envs.snapshot`` and ``envs.restore``.
        python: the interpreter of the workers, for a simulator that needs another.
        rendering: the way to draw frames without a screen, ``"egl"`` or ``"osmesa"``.
        worker_setup: a function that each worker calls once, before it makes its envs, or its name.
        label: your own name for what the envs are for, which the hub's operator sees.
        **kwargs: further arguments for the env, such as ``render_mode``.

    Raises:
        HubUnreachable: no hub answered, or none can run here.
        RequestRefused: the hub does not make this, or one side cannot compress so.
        RuntimeError: the envs' spaces differ.
        UnsupportedSpace: a space has no form on the network, or cannot be recorded.
        ModuleNotFoundError: with ``record``, Minari, or PyAV for films, is not installed.
        Exception: what an env's constructor raised, as its own class or as ``EnvRaised``.
    """
    num_envs = whole_number("num_envs", num_envs, 1)
    hubs = _guarded(hub)
    if isinstance(env, str) and "://" in env:  # which may have a key in it
        raise AddressError("env is an address, where an env's id or a factory is wanted; name a hub by hub=")
    check(isinstance(vector, bool), "vector", "True or False", vector, TypeError)
    fault_options, others = fields_of(FaultOptions, kwargs)
    hosting_options, arguments = fields_of(HostingOptions, others)
    stepping = num_workers, autoreset_mode, observation_mode, copy, lane, spin_us, pin, compression
    keeping = fault_options, reconnect_timeout, on_hub_loss, hosting_options, record, info_mode, split, hub_index
    options = SessionOptions(*stepping, *keeping)  # type: ignore[arg-type]  # they accept the mode's value, too
    each: Sequence[dict[str, Any]] = ()
    if env_kwargs is not None and not isinstance(env_kwargs, dict):
        is_list = isinstance(env_kwargs, (list, tuple)) and all(isinstance(one, dict) for one in env_kwargs)
        check(is_list, "env_kwargs", "a dict, or a list with one for each env", env_kwargs, TypeError)
        each, env_kwargs = [{**arguments, **one} for one in env_kwargs], None
        if num_envs not in (1, len(each)) or not each:
            raise ValueError(f"num_envs={num_envs} and env_kwargs of {len(each)} envs")
        num_envs = len(each)
    arguments = {**arguments, **(env_kwargs or {})}
    wrapping = named_wrappers(wrappers)
    if vector and options.hosting.snapshots:
        raise ValueError("snapshots are of envs with a process each, and vector=True steps all of them in one")
    if vector and each:
        raise ValueError("a vector env takes the same arguments for all of its envs, and env_kwargs are a list")
    if not isinstance(env, (str, EnvSpec)):
        if wrappers:
            raise TypeError("wrappers are for envs by id: wrap in the factory, such as lambda: Wrapper(gym.make(...))")
        if vector and not callable(env):
            raise TypeError(f"vector=True takes an id, or one function that takes num_envs, got {brief(env)}")
        factories = _factories(env, num_envs, each or [arguments])
        origin = Origin(factories[:1] if callable(env) and len(each) < 2 else factories)
        return _vector_env(hubs, partial(_of_factories, factories, vector), len(factories), options, origin)
    hubs = hubs or addresses.address_of_environment()
    try:
        return _by_name(env, num_envs, hubs, options, arguments, each, vector, wrapping)
    except TypeError as error:
        # Only the env knows which arguments it takes, so what is no keyword of ours is its own until it refuses it.
        name = refused_keyword(error, kwargs)
        question = hint_of(name, _KEYWORDS)
        if not question:
            raise
        raise TypeError(f"neither make_vec nor the env takes {name!r}{question} The env: {error}") from error


def _factories(env: Factory | Sequence[Factory], num_envs: int, each: Sequence[dict[str, Any]]) -> list[Factory]:
    """A factory for each env, with its arguments; the same one for all that have the same ones."""
    if callable(env):
        return [_partial(env, one) for one in each] if len(each) > 1 else [_partial(env, each[0])] * num_envs
    factories = checked_factories(env)
    if len(each) not in (1, len(factories)):
        raise ValueError(f"{len(factories)} factories and env_kwargs of {len(each)} envs")
    if num_envs not in (1, len(factories)):
        raise ValueError(f"num_envs={num_envs} and {len(factories)} factories")
    each = [*each] * (len(factories) if len(each) == 1 else 1)
    return [_partial(factory, one) for factory, one in zip(factories, each, strict=True)]


def _partial(factory: Factory, arguments: dict[str, Any]) -> Factory:
    if not arguments:
        return factory
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # it has no signature, as some of C: it will tell
        return partial(factory, **arguments)
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        named = {each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY}
        if strange := [name for name in arguments if name not in named]:
            questions = [hint_of(name, _KEYWORDS) for name in strange]
            raise TypeError(
                f"neither make_vec nor the factory takes {', '.join(map(repr, strange))}"
                f"{next(filter(None, questions), '')}"
            )
    return partial(factory, **arguments)


def _by_name(
    env: str | EnvSpec,
    num_envs: int,
    hubs: Hubs | None,
    options: SessionOptions,
    arguments: dict[str, Any],
    each: Sequence[dict[str, Any]],
    vector: bool,
    wrapping: tuple[list[str], list[dict[str, Any]]],
) -> HubVectorEnv:
    name, given = env.id if isinstance(env, EnvSpec) else env, each or [arguments]
    if isinstance(env, EnvSpec) and hubs is None and not vector and not wrapping[0]:
        # The whole spec travels: what it says need not be registered, here or there.
        factories = [partial(gymnasium.make, env, **one) for one in given]
        factories = factories if each else factories * num_envs
        origin = Origin(name, given, env, {**_spec_arguments(env), **arguments})
        return _vector_env(None, partial(_of_factories, factories, False), num_envs, options, origin)
    entries, wrapper_kwargs = wrapping
    if isinstance(env, EnvSpec):
        of_spec, arguments = env.additional_wrappers, {**_spec_arguments(env), **arguments}
        entries = [*(wrapper.entry_point for wrapper in of_spec), *entries]
        wrapper_kwargs = [*map(_wrapper_arguments, of_spec), *wrapper_kwargs]
        each = [{**_spec_arguments(env), **one} for one in each]
    unknown = codec.as_pickle if hubs is None and options.hosting.python is None else codec.refuse
    make = Make(
        num_envs,
        name,
        codec.encode(arguments, unknown),
        wrappers=entries,
        wrapper_kwargs=[codec.encode(one, unknown) for one in wrapper_kwargs],
        kwargs_each=[codec.encode(one, unknown) for one in each],
        vector=vector,
    )
    spec = env if isinstance(env, EnvSpec) else gymnasium.registry.get(env)
    return _vector_env(hubs, partial(_of_rows, make), num_envs, options, Origin(name, given, spec, arguments))


def _spec_arguments(spec: EnvSpec) -> dict[str, Any]:
    arguments = dict(spec.kwargs)
    for vector_only in ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers"):
        arguments.pop(vector_only, None)
    if spec.max_episode_steps is not None:
        arguments["max_episode_steps"] = spec.max_episode_steps
    if spec.disable_env_checker:
        arguments["disable_env_checker"] = True
    return arguments


def _wrapper_arguments(wrapper: WrapperSpec) -> dict[str, Any]:
    if wrapper.kwargs is None:
        raise RequestRefused(
            f"the spec does not say how {wrapper.name} was made: it extends no gymnasium.utils.RecordConstructorArgs"
        )
    return dict(wrapper.kwargs)


def _of_factories(factories: Sequence[Factory], vector: bool, rows: range) -> Make:
    return replace(make_of_factories(factories[rows.start : rows.stop]), vector=vector, row_offset=rows.start)


def _of_rows(make: Make, rows: range) -> Make:
    each = make.kwargs_each[rows.start : rows.stop]
    return replace(make, num_envs=len(rows), kwargs_each=each, row_offset=rows.start)


def _guarded(hub: str | Sequence[str] | None) -> Hubs | None:
    if not isinstance(hub, (list, tuple)):
        guarded: Hubs | None = addresses.guarded(hub)
        return guarded
    if not hub:
        raise AddressError("hub=[] names no hub")
    if not all(isinstance(each, (str, Secret)) for each in hub):
        raise TypeError("hub must be an address or a list of addresses, each a text")
    return tuple(addresses.guarded(each) for each in hub)


def _vector_env(
    hubs: Hubs | None, make: Callable[[range], Make], num_envs: int, options: SessionOptions, origin: Origin
) -> HubVectorEnv:
    if not isinstance(options.record, RecordOptions):
        return HubVectorEnv(_session(hubs, make, num_envs, options), origin)
    if sys.platform == "linux":
        from envhub_client.recording.observer import check_packages, record

        check_packages(bool(options.record.film))
        envs = HubVectorEnv(_session(hubs, make, num_envs, options), origin)
        record(envs, options.record, origin)
        return envs
    else:  # noqa: RET505  # for mypy, which leaves out what is for another system
        raise ValueError(only_linux("record="))


def _session(hubs: Hubs | None, make: Callable[[range], Make], num_envs: int, options: SessionOptions) -> VectorSession:
    name = HubVectorEnv.__name__
    for_several = options.split is not None or options.hub_index is not None or options.on_hub_loss == "redistribute"
    if isinstance(hubs, tuple) and len(hubs) == 1 and not for_several:
        (hubs,) = hubs
    several = isinstance(hubs, tuple) or (hubs is not None and stands_for_several(hubs))
    if for_several and not several:
        raise ValueError("split, hub_index and on_hub_loss='redistribute' are for several hubs, as in hub=[...]")
    if several or options.on_hub_loss == "recreate":
        make = cache(make)  # factories as they are now, also when all are made again
        return FederatedSession(name, PartsOpener(hubs, make, options, not several), num_envs)
    return Session(name, hubs, make(range(num_envs)), options)  # type: ignore[arg-type]  # it is one


_KEYWORDS = (
    *(name for name in inspect.signature(make_vec).parameters if name != "kwargs"),
    *EnvKeywords.__annotations__,
)


@hiding_frames
def make(
    env: EnvLike,
    *,
    hub: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    **kwargs: Unpack[SessionKeywords],
) -> HubEnv:
    """One env in a hub, as a ``gymnasium.Env``; arguments as for ``make_vec``, without lists.

    Raises:
        TypeError: for what only several envs have, such as ``num_envs``.
        Exception: as for ``make_vec``.
    """
    for name in ("num_envs", "autoreset_mode", "info_mode"):
        if name in kwargs:
            raise TypeError(f"make takes no {name!r}, for it makes one env, which its caller resets; see make_vec")
    if not isinstance(env_kwargs, (dict, type(None))):
        raise TypeError(f"make takes the arguments of one env, a dict, as env_kwargs, got {brief(env_kwargs, 100)}")
    # Its caller resets it, as any single env.
    envs = make_vec(env, 1, hub=hub, autoreset_mode=AutoresetMode.DISABLED, env_kwargs=env_kwargs, **kwargs)
    return HubEnv(envs)


def make_remote(env_id: str, url: str | None = None, hub: str | None = None, **kwargs: Any) -> HubEnv:
    """One env of the hub at ``url``, or at ``hub``, which says the same; otherwise as ``make``."""
    return make(env_id, hub=_drop_secret(url or hub), **kwargs)


def make_vec_remote(
    num_envs: int, env_id: str, url: str | None = None, hub: str | None = None, **kwargs: Any
) -> HubVectorEnv:
    """``num_envs`` envs of the hub at ``url``, or at ``hub``; otherwise as ``make_vec``."""
    return make_vec(env_id, num_envs, hub=_drop_secret(url or hub), **kwargs)


def _drop_secret(url: str | None) -> str | None:
    """The url, which Gymnasium keeps in the spec."""
    if isinstance(addresses.guarded(url), Secret):
        raise AddressError("a spec would keep the key in this url: run `envhub login`, and give the hub's name as url")
    return url
