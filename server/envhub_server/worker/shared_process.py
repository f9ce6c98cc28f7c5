"""A process that several envs share: which envs may, its state, and libraries that a zygote imports for all workers."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import random
import sys
from typing import Any, Mapping, Sequence

import numpy as np

from envhub_server.ipc.control import SHARED
from envhub_server.ipc.packages import shared

# The random generators that shared libraries make when they are imported, by their modules.
GENERATORS = (("torch", "default_generator"), ("sympy.core.random", "rng"), ("sympy.core.random", "_assumptions_rng"))
_SEEDS: dict[int, int] = {}  # by which ``reseed`` has seeded generators, by their ids
_WORDS = 624  # which NumPy's generator and Python's make at once
_FOLLOWED = 1000  # so often they are made to learn whether a generator was only drawn from, in 5 ms
# The dynamic loader reads it when a process starts, and only then; OpenCV changes it when it is imported.
READ_BY_THE_LOADER = "LD_LIBRARY_PATH"
# Where the zygote looks for libraries: not in the folder of envs' own modules, which is added later.
_PLACES = [place for place in sys.path if place]


def load(library: str) -> None:
    path = sys.path[:]
    sys.path[:] = _PLACES
    try:
        importlib.import_module(library)
    except ModuleNotFoundError:
        pass  # it was removed since
    except BaseException as error:  # a library may raise anything
        print(f"envhub: {library} cannot be imported for all workers at once: {error!r}", file=sys.stderr, flush=True)
    finally:
        sys.path[:] = path


def reseed(numbers: Sequence[int] = (), *place: int, unless_seeded: bool = False) -> None:
    """Seed the process's generators, since envs must not draw the same numbers."""
    # By ``numbers`` for NumPy's generator and for Python's, by default the system's, and by the ``place``: of the env
    # and its incarnation. With ``unless_seeded``, leave a generator that something else has seeded since then.
    first, second = (
        int(np.random.SeedSequence(number, spawn_key=place).generate_state(1)[0])
        for number in numbers or [int.from_bytes(os.urandom(8), "little")] * 2
    )
    loaded = [(getattr(sys.modules.get(module), name, None), first) for module, name in GENERATORS]
    for generator, seed in [(np.random, first), (random, second), *loaded]:
        if generator is None or (unless_seeded and _is_seeded(generator, _SEEDS.get(id(generator)))):
            continue
        # An array of more bits takes NumPy's 0.4 ms more, and 350 KB.
        getattr(generator, "manual_seed", generator.seed)(seed)
        _SEEDS[id(generator)] = seed


def _is_seeded(generator: Any, seed: int | None) -> bool:
    """True if something else has seeded this generator since ``reseed`` did by ``seed``; None if it did not."""
    if hasattr(generator, "initial_seed"):
        present = generator.initial_seed()
        return bool(present < 1 << 32 if seed is None else present != seed)  # PyTorch begins with the system's 64 bits
    if generator is not np.random:
        states: list[Any] = [each.getstate()[1][:-1] for each in (generator, random.Random(seed))]
    elif np.random.get_state(legacy=False)["bit_generator"] == "MT19937":
        states = [each.get_state(legacy=False)["state"]["key"] for each in (generator, np.random.RandomState(seed))]
    else:
        return True
    twisters: list[Any] = [np.random.MT19937(0), np.random.MT19937(0)]  # Python's algorithm, too
    for twister, state in zip(twisters, states):
        twister.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 0}}
    present, then = twisters[0].random_raw(_WORDS), twisters[1]
    return not any((then.random_raw(_WORDS) == present).all() for _ in range(_FOLLOWED))


def shareable(variables: Mapping[str, str]) -> list[str] | None:
    """The libraries in this process that a zygote can import for other workers of the same envs."""
    # None if workers of these envs must share none, because that could make a difference: the envs have changed one of
    # these variables, with which they began, and which a library may read; or this process has threads, and a zygote
    # that has threads cannot fork; or a library would be found elsewhere, by a zygote or by this process. Where there
    # are no zygotes, there is nothing to share.
    libraries = shared(sys.modules)
    if not libraries:
        return []
    threads = len(os.listdir("/proc/self/task"))
    same = all(_is_found_in(path, name.partition(".")[0]) for path in (_PLACES, sys.path) for name in libraries)
    return libraries if same and threads == 1 and _read(os.environ) == _read(variables) else None


def _is_found_in(path: list[str], package: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(package, path)
    return spec is not None and spec.origin == getattr(sys.modules[package], "__file__", None)


def _read(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a library may read, without EnvHub's own, which differ between workers."""
    items = variables.items()
    return {name: value for name, value in items if name != READ_BY_THE_LOADER and not name.startswith("ENVHUB_")}


class SharedState:
    """A snapshot of the state, compared on demand."""

    def __init__(self) -> None:
        self._before = _state()

    def changed(self) -> list[str]:
        now = _state()
        return [each for each in SHARED if now[each] != self._before[each]]


def _numbers() -> Any:
    """The state of NumPy's generator; of another one than its own, which a program may have set, its text."""
    numbers: Any = np.random.get_state(legacy=False)
    if numbers["bit_generator"] != "MT19937":
        return repr(numbers)
    return numbers["state"]["key"].tobytes(), numbers["state"]["pos"], numbers["has_gauss"], numbers["gauss"]


def _state() -> dict[str, int]:
    values = _numbers(), random.getstate(), frozenset(os.environ.items()), os.readlink("/proc/self/cwd")
    return dict(zip(SHARED, map(hash, values)))


# Top-level packages of envs and wrappers. Any other env may draw from the random numbers of its process, be a simulator
# of which a process can have one, stand behind a socket, on a GPU, or be a robot.
FIT = frozenset(
    [
        *("gymnasium", "gym", "ale_py", "stable_baselines3", "supersuit"),
        *("minigrid", "gymnasium_robotics", "mo_gymnasium", "highway_env", "procgen", "crafter"),
        *("nle", "minihack", "bsuite", "dm_control", "envhub_server"),
    ]
)
# Packages of parts of these envs.
_HARMLESS = frozenset(
    [
        *("builtins", "numpy", "collections", "pathlib", "types", "typing", "enum", "logging", "os", "io", "_thread"),
        *("mujoco", "Box2D", "pygame", "cv2", "PIL", "scipy", "jax", "jaxlib"),
    ]
)
# Modules of envs of which a step takes some 20 microseconds.
CHEAP = tuple(
    f"{package}.envs.{family}" for package in ("gymnasium", "gym") for family in ("classic_control", "toy_text")
)
LAYERS_MAX = 100


def may_share_process(env: Any, runner: Any) -> bool:
    """True if the env, its wrappers, the objects that they hold, and its runner's class are of known packages."""
    # A wrapper may hold a function of the program, and an env its task. An env with ``render_mode="human"`` does not
    # count: it waits for the screen.
    if getattr(env, "render_mode", None) == "human":
        return False
    layers: list[Any] = [runner]
    parts: list[Any] = []
    while env is not None and len(layers) < LAYERS_MAX:
        held = getattr(env, "__dict__", {})
        layers.append(type(env))
        parts += map(_made_by, held.values())
        env = held.get("env")
    return all(_package(each) in FIT for each in layers) and all(_package(each) in FIT | _HARMLESS for each in parts)


def is_cheap(env: Any) -> bool:
    """True if a step of the env takes less than the wake-up of a worker, and a CPU of the driver is worth more."""
    return type(getattr(env, "unwrapped", env)).__module__.startswith(CHEAP)


def _made_by(value: Any) -> Any:
    """The object whose package counts for a value: a function itself, or the function of a partial."""
    if isinstance(value, functools.partial):
        return _made_by(value.func)
    return value if callable(value) else type(value)


def _package(kind: Any) -> str:
    module = getattr(kind, "__module__", None) or type(kind).__module__
    return str(module).partition(".")[0]
