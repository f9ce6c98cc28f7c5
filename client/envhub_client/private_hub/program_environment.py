"""View that envs have of their program: path, folder, variables, arguments, flags, log levels, registered envs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import random
import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from envhub.errors import HubUnreachable
from envhub.protocol.messages import World
from envhub.transport.address import environment
from envhub.values import pickling
from envhub.values.gym_api import pickled
from envhub.values.pickling import Unsendable, is_importable, why_unpicklable
from envhub_client.private_hub.interpreter_flags import interpreter_flags
from envhub_client.private_hub.message_levels import message_levels


def program_environment() -> World:
    """Describe the program to the workers of its private hub."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError as error:
        raise HubUnreachable("this program's working directory is gone, and workers would start there") from error
    sys_path = [os.path.abspath(place) for place in sys.path if isinstance(place, str)]
    # Each entry of the registry by itself: one may not load in a worker.
    registrations = pickle.dumps([*filter(None, map(_pickled, list(gymnasium.registry.values())))])
    # The key of ``multiprocessing``, if the program uses that: proxies in factories need it in the workers.
    process = sys.modules.get("multiprocessing.process")
    authkey = b"" if process is None else bytes(process.current_process().authkey)
    return World(
        sys_path,
        cwd,
        environment(os.environ),
        registrations,
        authkey,
        argv=own_argv(),
        flags=own_flags(),
        levels=message_levels(),
        generators=_generators(),
    )


def _generators() -> list[int]:
    """A number of the state of each of the program's generators, which stay as they are."""
    states = pickle.dumps(np.random.get_state(legacy=False)), repr(random.getstate()).encode()
    return [int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "little") for state in states]


def own_argv() -> list[str]:
    """The program's arguments, with its name; a program that embeds Python may have none."""
    return [part for part in getattr(sys, "argv", []) if isinstance(part, str)]


def own_flags() -> list[str]:
    """The options of this program's interpreter."""
    return interpreter_flags(sys.flags, sys.warnoptions, sys._xoptions)


def _pickled(spec: EnvSpec) -> bytes:
    try:
        if isinstance(spec.entry_point, str):
            entry_point = by_value_if_unimportable(spec.entry_point)
            if entry_point is not spec.entry_point:
                spec = dataclasses.replace(spec, entry_point=entry_point)
        return pickled(spec)
    except Exception as error:  # whatever a foreign object raises when it is pickled
        return _stand_in(spec, error)


def by_value_if_unimportable(entry: str) -> Any:
    """Get the object that ``module:name`` names, if a worker does not find that module; else the text itself.

    A worker's main module is another one, and some modules have their names in this program only.

    Raises:
        AttributeError: the module has no such name.
    """
    module, _, name = entry.partition(":")
    if module in sys.modules and (module == "__main__" or not is_importable(module)):
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    return entry


def _stand_in(spec: EnvSpec, error: Exception) -> bytes:
    """Make the spec that a worker has in place of a spec that cannot be sent; making its env raises the reason."""
    described, blob = _stand_ins.get(id(spec), (None, b""))
    if described is not spec:  # to look for what cannot be pickled takes long
        blob = _unsendable(spec, error)
        _stand_ins[id(spec)] = spec, blob
    return blob


_stand_ins: dict[int, tuple[EnvSpec, bytes]] = {}  # by the identity of a spec of the registry, which has few


def _unsendable(spec: EnvSpec, error: Exception) -> bytes:
    why = why_unpicklable(f"the spec of {spec.id}", spec, pickling.dumps, error)
    unsendable = Unsendable(f"the registered env {spec.id!r} cannot be sent to a worker: {why}")
    return pickled(EnvSpec(spec.id, entry_point=unsendable, vector_entry_point=unsendable))
