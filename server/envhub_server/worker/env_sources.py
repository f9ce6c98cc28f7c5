"""Where a worker's envs come from: factories, registrations, and the world of the program they belong to."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from collections import defaultdict
from typing import Any, Callable

from envhub.values import codec
from envhub.values.gym_api import api, pickled
from envhub_server.ipc import process_marks
from envhub_server.worker.env_runner import EnvRunner
from envhub_server.worker.gym_compat import made

_known: set[bytes] = set()  # the pickled entries of this process's registry, and the pickled list of them


def factories(build: Any) -> Any:
    """The factories of the session's envs by row, in a world made fit for them."""
    if build.sys_path:
        _enter_world(build)
    for module in build.modules:
        importlib.import_module(module)
    if build.registrations:
        _register(build.registrations)
    if build.factories:
        return pickle.loads(build.factories)  # noqa: S301  only ever sent to workers, never read by the hub
    make = _named_factory(build)
    return defaultdict(lambda: make)  # which rows are this worker's may change once the first env is made


def _named_factory(build: Any) -> Callable[[], Any]:
    def make() -> Any:
        kwargs: dict[str, Any] = codec.decode(build.kwargs, build.allow_pickle) if build.kwargs else {}
        env = _load(build.entry)(**kwargs) if build.entry else made(build.name, kwargs)
        for entry, arguments in zip(build.wrappers, build.wrapper_kwargs):
            wrapper = _load(entry)
            if not (isinstance(wrapper, type) and issubclass(wrapper, api.Wrapper)):
                raise TypeError(f"{entry} is no wrapper")
            env = wrapper(env, **codec.decode(arguments, build.allow_pickle))
        return env

    return make


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
    own = {process_marks.VARIABLE: os.environ[process_marks.VARIABLE]}
    wanted = {**build.environ, **own}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:  # mostly it has that already: a zygote starts in its program's environment
            os.environ[name] = value
    os.chdir(build.cwd)
    if build.authkey:
        importlib.import_module("multiprocessing.process").current_process().authkey = build.authkey


def runner_class(pickled: bytes) -> Any:
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
