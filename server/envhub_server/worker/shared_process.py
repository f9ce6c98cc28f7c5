"""Processes that envs share: which envs may, and their state; and imports that workers share."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import sysconfig
from typing import Any, Collection, Sequence

import numpy as np

from envhub_server.ipc.control import SHARED
from envhub_server.ipc.process_marks import listed_children

# The random generators that libraries make when they are imported, by their modules.
GENERATORS = (("torch", "default_generator"), ("sympy.core.random", "rng"), ("sympy.core.random", "_assumptions_rng"))
_UNSEEDED: list[Any] = []  # generators of imported modules without a chosen seed, which differ between workers
_SEEDS: dict[int, int] = {}  # by which ``reseed`` has seeded generators, by their ids
_WORDS = 624  # which NumPy's generator and Python's make at once
_FOLLOWED = 1000  # so often they are made to learn whether a generator was only drawn from, in 5 ms


def reseed(numbers: Sequence[int] = (), *position: int, unless_seeded: bool = False) -> None:
    """Seed the process's generators, since envs must not draw the same numbers."""
    # By ``numbers`` for NumPy's generator and for Python's, by default the system's, and ``position``: of the env
    # and its incarnation. With ``unless_seeded``, leave a generator that something else has seeded since then.
    first, second = (
        int(np.random.SeedSequence(number, spawn_key=position).generate_state(1)[0])
        for number in numbers or [int.from_bytes(os.urandom(8), "little")] * 2
    )
    while _UNSEEDED:
        generator = _UNSEEDED.pop()
        if isinstance(generator, random.Random):
            generator.seed()
        else:
            generator.bit_generator.state = type(generator.bit_generator)().state
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


_INSTALLED = tuple({os.path.join(place, "") for place in sysconfig.get_paths().values()})
# MuJoCo and dm_control import one of these where ``MUJOCO_GL`` says so, and it opens a device, which no fork may use.
_OPEN_A_DEVICE = (
    *("mujoco.egl", "mujoco.osmesa"),
    *("dm_control._render.pyopengl.egl_renderer", "dm_control._render.pyopengl.osmesa_renderer"),
)


class ImportWatch:
    """Watches what the code of envs does when it is imported."""

    def __init__(self, variables: Collection[str]) -> None:
        """Watch from now on; the ``variables`` of the environment differ between workers."""
        self._before, self._descriptors = len(sys.modules), os.listdir("/proc/self/fd")
        _Variables.own, _Variables.read = frozenset(variables), False
        os.environ.__class__ = _Variables
        _system_seeded.clear()
        random.Random.seed = _seed_and_remember  # type: ignore[assignment]

    @property
    def imported(self) -> bool:
        return len(sys.modules) > self._before

    def shareable(self) -> bool:
        """Watch no longer; return whether other workers can be forked from a process that has imported the same."""
        # Not if a fork would lack something of it, as threads, or the workers would have in common what they must not.
        os.environ.__class__ = os._Environ
        random.Random.seed = _seed  # type: ignore[method-assign]
        return (
            self.imported
            and not _Variables.read
            and len(os.listdir("/proc/self/task")) == 1
            and os.listdir("/proc/self/fd") == self._descriptors
            and not listed_children(os.getpid())
            and not any(name in sys.modules for name in _OPEN_A_DEVICE)
            and not _has_generators()
        )

    def files(self) -> list[str]:
        """The files of the modules that were imported, except those of installed packages."""
        files = (getattr(module, "__file__", None) for module in [*sys.modules.values()][self._before :])
        return [file for file in files if isinstance(file, str) and not file.startswith(_INSTALLED)]


class _Variables(os._Environ):  # type: ignore[type-arg]  # Python 3.8
    """The variables of the environment, while envs' code is imported."""

    own: Collection[str] = ()  # those that differ between workers
    read = False  # whether one of these was read

    def __getitem__(self, name: Any) -> Any:
        type(self).read |= name in self.own
        return super().__getitem__(name)

    def items(self) -> Any:
        # Who looks at all of them, as tqdm for those with its prefix, asks for none.
        read, items = self.read, dict(super().items()).items()
        type(self).read = read
        return items


def _has_generators() -> bool:
    """True if there are random generators of imported modules of which it is not known whether a seed was chosen."""
    reseeded = [getattr(sys.modules.get(module), name, None) for module, name in GENERATORS]
    kinds = np.random.Generator, np.random.RandomState, random.Random
    # Those that the zygote had are frozen, and not among these objects.
    made = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    # The system's entropy has 128 bits.
    _UNSEEDED[:] = [each for each in made if _entropy(each) >= 1 << 64 or _system_seeded.get(id(each))]
    seeded = {*map(id, reseeded), *_system_seeded}
    return any(not (_entropy(each) or isinstance(each, random.SystemRandom) or id(each) in seeded) for each in made)


_seed = random.Random.seed
# Python's generators that were seeded while an ``ImportWatch`` watched, by id: True without a chosen seed.
_system_seeded: dict[int, bool] = {}


def _seed_and_remember(generator: random.Random, number: Any = None, version: int = 2) -> None:
    _seed(generator, number, version)
    _system_seeded[id(generator)] = number is None


def _entropy(generator: Any) -> int:
    """The number from which a generator of NumPy was made, as those of Gymnasium's spaces; 0 if that is not known."""
    entropy = getattr(getattr(getattr(generator, "bit_generator", None), "seed_seq", None), "entropy", None)
    return entropy + 1 if isinstance(entropy, int) else 0


def _numbers() -> Any:
    """The state of NumPy's generator; of another one than its own, which a program may have set, its text."""
    numbers: Any = np.random.get_state(legacy=False)
    if numbers["bit_generator"] != "MT19937":
        return repr(numbers)
    return numbers["state"]["key"].tobytes(), numbers["state"]["pos"], numbers["has_gauss"], numbers["gauss"]


def shared_state() -> dict[str, int]:
    values = _numbers(), random.getstate(), frozenset(os.environ.items()), os.readlink("/proc/self/cwd")
    return dict(zip(SHARED, map(hash, values)))


def changed_since(before: dict[str, int]) -> list[str]:
    now = shared_state()
    return [each for each in SHARED if now[each] != before[each]]


# Top-level packages of envs and wrappers. Any other env may draw from the random numbers of its process, be a simulator
# of which a process can have one, stand behind a socket, on a GPU, or be a robot.
FIT = frozenset(
    [
        *("gymnasium", "gym", "ale_py", "stable_baselines3", "supersuit"),
        *("minigrid", "gymnasium_robotics", "mo_gymnasium", "highway_env", "procgen", "crafter"),
        *("nle", "minihack", "bsuite", "dm_control", "envhub", "envhub_server"),
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
