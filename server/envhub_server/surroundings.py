"""Where a worker's envs come from: factories, registrations, and the world of the program they belong to."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from typing import Any

from envhub import codec
from envhub.gym_api import api, pickled
from envhub_server import leftovers
from envhub_server.dialects import made
from envhub_server.runner import EnvRunner

# What of a ``Build`` decides what is loaded.
_LOADED_OF = ("sys_path", "environ", "cwd", "authkey", "modules", "registrations", "factories", "runner")

_known: set[bytes] = set()  # the pickled entries of this process's registry, and the pickled list of them
_loaded: Any = None  # a Build, and what ``load`` returned for it, here or in the process that this one was forked from


def load(build: Any) -> tuple[Any, Any]:
    """The factories that were pickled, by row, or None, and the class that runs each env, in a world made fit for them.

    Raises:
        BaseException: whatever a module raises that is imported for them.
    """
    global _loaded
    if _loaded is None or any(getattr(build, name) != getattr(_loaded[0], name) for name in _LOADED_OF):
        if build.sys_path:
            _enter_world(build)
        for module in build.modules:
            importlib.import_module(module)
        if build.registrations:
            _register(build.registrations)
        # Only ever sent to workers, never read by the hub.
        unpickled = pickle.loads(build.factories) if build.factories else None  # noqa: S301
        _loaded = build, (unpickled, _runner_class(build.runner))
    loaded: tuple[Any, Any] = _loaded[1]
    return loaded


def make_named(build: Any) -> Any:
    """An env that is made by name, in its wrappers."""
    kwargs: dict[str, Any] = codec.decode(build.kwargs, build.allow_pickle) if build.kwargs else {}
    env = _load(build.entry)(**kwargs) if build.entry else made(build.name, kwargs)
    for entry, arguments in zip(build.wrappers, build.wrapper_kwargs):
        wrapper = _load(entry)
        if not (isinstance(wrapper, type) and issubclass(wrapper, api.Wrapper)):
            raise TypeError(f"{entry} is no wrapper")
        env = wrapper(env, **codec.decode(arguments, build.allow_pickle))
    return env


def missing(entry: str) -> str:
    """Why the factory ``module:factory`` does not exist; empty where it does. Its module is imported.

    Raises:
        BaseException: whatever else the module raises.
    """
    module, _, name = entry.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return str(error)
        raise  # the module is there, and what it imports is not
    return "" if hasattr(found, name) else f"module {module!r} has no attribute {name!r}"


def _load(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _enter_world(build: Any) -> None:
    """Be where the program is, as far as a process can that has started already."""
    sys.path[:] = build.sys_path
    own = {leftovers.VARIABLE: os.environ[leftovers.VARIABLE]}
    wanted = {**build.environ, **own}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:  # mostly it has that already: a zygote starts in its program's environment
            os.environ[name] = value
    os.chdir(build.cwd)
    if build.authkey:
        importlib.import_module("multiprocessing.process").current_process().authkey = build.authkey


def _runner_class(pickled: bytes) -> Any:
    """The class that runs each env: the usual one, the program's, or one by the name of its module and its own."""
    chosen = pickle.loads(pickled) if pickled else EnvRunner  # noqa: S301  from the owner of this private hub
    found = _load(chosen) if isinstance(chosen, str) else chosen
    if not (isinstance(found, type) and issubclass(found, EnvRunner)):
        raise TypeError(f"worker={chosen!r} is no subclass of envhub.EnvRunner")
    return found


def remember_registry() -> None:
    """Know what is registered here by itself, as a program pickles it, so that workers need not load it again."""
    with contextlib.suppress(Exception):  # what is not known is loaded
        entries = [pickled(spec) for spec in api.registry.values()]
        _known.update([*entries, pickle.dumps(entries)])


def _register(registrations: bytes) -> None:
    if registrations in _known:  # all of them at once: most programs add none
        return
    for entry in pickle.loads(registrations):  # noqa: S301  from the owner of this private hub, read only here
        if entry in _known:
            continue
        try:
            spec = pickle.loads(entry)  # noqa: S301
        except Exception as error:  # most programs never make this one: it must not keep them from the others
            api.logger.warn(f"a registration of the program cannot be loaded in a worker: {error!r}")
            continue
        api.registry[spec.id] = spec
