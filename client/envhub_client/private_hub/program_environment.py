"""View that envs have of their program: path, folder, variables, arguments, flags, log levels, registered envs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import random
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec

from envhub.errors import HubUnreachable
from envhub.protocol.messages import ProgramEnvironment
from envhub.transport.address import environment
from envhub.values import codec
from envhub.values.gym_api import pickled
from envhub.values.pickling import Unsendable, is_importable, why_unpicklable

# Options by the fields of ``sys.flags``. Left out are those that would break a worker, which needs ``site`` to find
# NumPy (-S) and has no terminal (-i, -q), and those that only print what the interpreter does (-v, -d).
_OPTIONS = {"optimize": "-O", "bytes_warning": "-b", "dont_write_bytecode": "-B"}
_OF_ITS_START = {"ignore_environment": "-E", "no_user_site": "-s", "safe_path": "-P"}  # all of them are in -I


def start_flags(flags: Any) -> list[str]:
    if flags.isolated:
        return ["-I"]
    return [option for name, option in _OF_ITS_START.items() if getattr(flags, name, 0)]


def interpreter_flags(flags: Any, warnoptions: Sequence[str], xoptions: Mapping[str, str | bool]) -> list[str]:
    repeated = [option for name, option in _OPTIONS.items() for _ in range(getattr(flags, name))]
    extended = [name if value is True else f"{name}={value}" for name, value in xoptions.items()]
    pairs = [part for option in extended for part in ("-X", option)]
    return [*start_flags(flags), *repeated, *pairs, *(part for text in warnoptions for part in ("-W", text))]


DEFAULT_LEVEL = 30  # of Python's root logger and of Gymnasium's


def message_levels() -> bytes:
    """The levels and filters as an encoded map, which a worker adopts (ProgramEnvironment)."""
    logging = sys.modules.get("logging")
    gymnasium = int(getattr(logger, "min_level", DEFAULT_LEVEL))
    return codec.encode(
        {
            "logging": {} if logging is None else _set_levels(logging.root),
            "disabled": 0 if logging is None else int(logging.root.manager.disable),
            "gymnasium": None if gymnasium == DEFAULT_LEVEL else gymnasium,
            "warnings": [_filter(*parts) for parts in warnings.filters],
        }
    )


def _set_levels(root: Any) -> dict[str, int]:
    loggers = [*root.manager.loggerDict.items()]  # in which there are placeholders without a level, too
    levels = {name: getattr(each, "level", 0) for name, each in loggers}
    levels[""] = 0 if root.level == DEFAULT_LEVEL else root.level
    return {name: level for name, level in levels.items() if level}


def _filter(action: str, message: Any, category: Any, module: Any, line: int) -> list[Any]:
    categories = category if isinstance(category, tuple) else (category,)
    return [
        action,
        _text(message),
        [f"{each.__module__}:{each.__qualname__}" for each in categories],
        _text(module),
        line,
    ]


def _text(matched: Any) -> Any:
    return [matched.pattern, matched.flags] if isinstance(matched, re.Pattern) else matched


def program_environment() -> ProgramEnvironment:
    try:
        cwd = os.getcwd()
    except FileNotFoundError as error:
        raise HubUnreachable("this program's working directory is gone, and workers would start there") from error
    sys_path = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    # Each entry of the registry by itself: one may not load in a worker.
    registrations = pickle.dumps([*filter(None, map(_pickled, list(gymnasium.registry.values())))])
    states = pickle.dumps(np.random.get_state(legacy=False)), repr(random.getstate()).encode()
    # The key of ``multiprocessing``, if the program uses that: proxies in factories need it in the workers.
    process = sys.modules.get("multiprocessing.process")
    authkey = b"" if process is None else bytes(process.current_process().authkey)
    return ProgramEnvironment(
        sys_path,
        cwd,
        environment(os.environ),
        registrations,
        authkey,
        argv=[part for part in getattr(sys, "argv", []) if isinstance(part, str)],  # embedded, it may have none
        flags=own_flags(),
        levels=message_levels(),
        generators=[int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "little") for state in states],
    )


def own_flags() -> list[str]:
    return interpreter_flags(sys.flags, sys.warnoptions, sys._xoptions)


def _pickled(spec: EnvSpec) -> bytes:
    try:
        if isinstance(spec.entry_point, str):
            entry_point = pickled_by_value_if_unimportable(spec.entry_point)
            if entry_point is not spec.entry_point:
                spec = dataclasses.replace(spec, entry_point=entry_point)
        return pickled(spec)
    except Exception as error:  # whatever a foreign object raises when it is pickled
        return _error_instead(spec, error)


def pickled_by_value_if_unimportable(entry: str) -> Any:
    """Get the object that ``module:name`` names, if a worker does not find that module; else the text itself."""
    module, _, name = entry.partition(":")
    if module in sys.modules and (module == "__main__" or not is_importable(module)):
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    return entry


def _error_instead(spec: EnvSpec, error: Exception) -> bytes:
    """Make the spec that a worker has in place of a spec that cannot be sent; making its env raises the reason."""
    described, blob = _errors_instead.get(id(spec), (None, b""))
    if described is not spec:  # to look for what cannot be pickled takes long
        why = why_unpicklable(f"the spec of {spec.id}", spec, error)
        unsendable = Unsendable(f"the registered env {spec.id!r} cannot be sent to a worker: {why}")
        blob = pickled(EnvSpec(spec.id, entry_point=unsendable, vector_entry_point=unsendable))
        _errors_instead[id(spec)] = spec, blob
    return blob


_errors_instead: dict[int, tuple[EnvSpec, bytes]] = {}  # by the identity of a spec of the registry, which has few
