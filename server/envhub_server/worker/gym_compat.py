"""Envs of older Gymnasium and of gym, with the interface of Gymnasium 1.4.

The differences, from the release notes of both: gym before 0.26 has ``seed`` and steps of four values, whose ``info``
says ``TimeLimit.truncated``; gym and Gymnasium before 1.0 have no ``set_wrapper_attr``. Many envs are older than the
gym that is installed, so the signatures and the results of each env say which interface it has.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from functools import partial
from typing import Any, Callable, Iterator, Mapping

import numpy as np

from envhub.errors import brief
from envhub.values import spaces
from envhub.values.gym_api import api, registered, specs


def make(name: str, kwargs: dict[str, Any]) -> Any:
    module, _, bare = name.rpartition(":")
    if module:
        importlib.import_module(module)
    gym = sys.modules.get("gym")
    if gym is not None and gym is not api and bare not in registered() and bare in registered(gym):
        return adapt(gym.make(bare, **kwargs))
    if api.__name__ == "gymnasium" or _version(api) >= (0, 26):
        return adapt(api.make(name, **kwargs))
    render_mode = kwargs.pop("render_mode", None)  # new in 0.26; before, ``render`` took the mode
    env = adapt(api.make(name, **kwargs))
    env.render_mode = render_mode
    return env


def import_entry_point(name: str) -> None:
    # Nothing happens for an id that is not registered, or that a callable makes.
    module, _, bare = name.rpartition(":")
    if module:
        importlib.import_module(module)
    entry_point = getattr(specs().get(bare), "entry_point", None)
    if isinstance(entry_point, str):
        importlib.import_module(entry_point.partition(":")[0])


def call_before_first_env(call: Callable[[], None]) -> None:
    """Have this called in the next ``gym.make``, once that has imported the entry point."""
    registration: Any = importlib.import_module(f"{api.__name__}.envs.registration")
    load: Any = getattr(registration, "load_env_creator", None)  # older ones have none

    def load_and_call(name: str) -> Any:
        registration.load_env_creator = load
        loaded = load(name)
        call()
        return loaded

    if load is not None:
        registration.load_env_creator = load_and_call


def vector_factory(name: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    if _version(api) < (1, 0):  # 0.29 has ``make_vec``, but not this mode
        raise TypeError(f"vector=True needs Gymnasium 1.0 or later, and here is {api.__name__} {api.__version__}")
    module, _, bare = name.rpartition(":")
    if module:
        importlib.import_module(module)
    entry_point = api.spec(bare).vector_entry_point
    if entry_point is None:
        raise TypeError(f"{name} has no vector_entry_point: it is a single env, which vector=True is not for")
    creator = entry_point if callable(entry_point) else api.envs.registration.load_env_creator(entry_point)
    make = partial(api.make_vec, name, vectorization_mode="vector_entry_point", **kwargs)
    if "autoreset_mode" not in inspect.signature(creator).parameters:
        return lambda num_envs: make(num_envs=num_envs)

    def make_in_mode(num_envs: int, **autoreset_mode: Any) -> Any:
        return make(num_envs=num_envs, **autoreset_mode)

    make_in_mode.__signature__ = inspect.signature(creator)  # type: ignore[attr-defined]  # tells of the mode
    return make_in_mode


def adapt(env: Any) -> Any:
    # The env decides, not the installed gym: an env of Gymnasium 1.0 or later has ``set_wrapper_attr``.
    if isinstance(env, GymEnv):
        return env
    # The class is asked: wrappers of Gymnasium 0.29 warn about attributes that their env does not have.
    if hasattr(type(env), "set_wrapper_attr") and not _is_of_gym(type(env), "Env"):
        return env
    _insert_steps(env)
    return GymEnv(env)


def innermost(env: Any) -> Any:
    own = env.env if isinstance(env, GymEnv) else env
    return getattr(own, "unwrapped", own)


def is_wrapped(env: Any, name: str) -> bool:
    """True if a wrapper of the env has the class named ``module:Class``. Imports nothing."""
    gym = sys.modules.get("gym")
    env = getattr(env, "vector_env", env)  # for an env of a vector env
    wrappers: Any = GymEnv, api.Wrapper, getattr(api.vector, "VectorWrapper", api.Wrapper)
    wrappers = wrappers if gym is None else (*wrappers, gym.Wrapper)
    while isinstance(env, wrappers):
        if any(f"{each.__module__}:{each.__qualname__}" == name for each in type(env).__mro__):
            return True
        env = env.env
    return False


def _version(package: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", package.__version__)[:2])


def _is_of_gym(kind: type, name: str) -> bool:
    """True if it extends ``gym``'s class of this name; compared by name, because gym may not be installed."""
    return any(each.__name__ == name and each.__module__ == "gym.core" for each in kind.__mro__)


def _layers(env: Any) -> Iterator[Any]:
    layer = env
    while layer is not None and hasattr(type(layer), "reset"):
        yield layer
        layer = getattr(layer, "__dict__", {}).get("env")


def _insert_steps(env: Any) -> None:
    """Put ``Steps`` between an env and the wrappers of gym 0.26 around it, which accept only steps of five values."""
    layers = [*_layers(env)]
    limited = any(type(layer).__module__ == "gym.wrappers.time_limit" for layer in layers)
    if not limited or _version(sys.modules["gym"]) < (0, 26):
        return
    for wrapper, inside in zip(layers, layers[1:]):
        if _is_of_gym(type(wrapper), "Wrapper") and not _is_of_gym(type(inside), "Wrapper"):
            wrapper.env = Steps(inside)


def parameters_of(method: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):  # some functions in C tell none
        return {"any": inspect.Parameter("any", inspect.Parameter.VAR_KEYWORD)}


def accepts(env: Any, method: str, name: str) -> bool:
    """True if the env's method takes an argument of this name, and so does every layer that it is passed on to."""
    is_named = False
    for layer in _layers(env):
        parameters = parameters_of(getattr(layer, method, None))
        passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        is_named = name in parameters or passes_on
        if not is_named or not (passes_on or type(layer).__module__.startswith(("gym.", "gymnasium."))):
            break
    return is_named


class Steps:
    """The ``reset`` and ``step`` of Gymnasium 1.4 for an older env; everything else is the env's own."""

    # A reset passes the seed to the env's ``reset`` or, where that takes none, to the ``seed`` of the env or of the
    # nearest layer inside that has one. The results of each step tell whether they are four values or five.

    def __init__(self, env: Any) -> None:
        self.env = env
        self._accepted = [name for name in ("seed", "options") if accepts(env, "reset", name)]
        self._warned = False

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # of a copy under way
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        given = {"seed": seed, "options": options}
        passed = {name: given[name] for name in self._accepted if given[name] is not None}
        if seed is not None and "seed" not in passed:
            self._seed_by_method(seed)
        with explaining():
            outcome = self.env.reset(**passed)
        return outcome if self._has_info(outcome) else (outcome, {})

    def _has_info(self, outcome: Any) -> bool:
        if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], dict)):
            return False
        space = self.env.observation_space
        return not (isinstance(getattr(space, "spaces", None), (tuple, list)) and space.contains(outcome))

    def _seed_by_method(self, seed: int) -> None:
        for layer in _layers(self.env):
            warns = isinstance(layer, api.Wrapper) and not hasattr(type(layer), "seed")  # of Gymnasium 0.29
            method = None if warns else getattr(layer, "seed", None)
            if callable(method) and parameters_of(method):
                method(seed)
                return
        if not self._warned:
            self._warned = True
            text = f"{brief(self.env, 100)} takes no seed: its reset has no argument `seed`, and it has no method "
            api.logger.warn(f"{text}`seed` with an argument. Its factory has to seed it")

    def step(self, action: Any) -> Any:
        with explaining():
            outcome = self.env.step(action)
        if len(outcome) == 5:
            return outcome
        if len(outcome) != 4:
            text = f"step of {brief(self.env, 100)} returned {len(outcome)} values"
            raise TypeError(f"{text}; gym has 4, and Gymnasium 5")
        observation, reward, done, info = outcome
        info = dict(info)
        truncated = bool(info.pop("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, bool(done) and truncated, info


class GymEnv(Steps):
    """An env of gym, or of Gymnasium before 1.0, or of no base class, with the interface of Gymnasium."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.native(env.observation_space)
        self.action_space = spaces.native(env.action_space)
        renamed = {"render.modes": "render_modes", "video.frames_per_second": "render_fps"}
        metadata = getattr(env, "metadata", None) or {}
        self.metadata = {renamed.get(key, key): value for key, value in metadata.items()}
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)
        self._seed = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed = self._seed if seed is None else seed
        return super().reset(seed=seed, options=options)

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def get_wrapper_attr(self, name: str) -> Any:
        # Before gym 0.26 ``render`` takes the mode; here it returns the frame that ``render_mode="rgb_array"`` would.
        if name == "np_random_seed":  # the env does not store it
            return self._seed
        if name in ("render_mode", "spec", "observation_space", "action_space", "metadata"):
            return getattr(self, name)
        owner = self._layer_with(name)
        attribute = getattr(owner, name)
        if name == "render" and accepts(owner, "render", "mode"):
            return partial(attribute, mode="rgb_array")
        if name == "np_random" and isinstance(attribute, np.random.RandomState):
            return np.random.Generator(attribute._bit_generator)
        return attribute

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        setattr(self._layer_with(name), name, value)

    def _layer_with(self, name: str) -> Any:
        layer = self.env
        while name not in getattr(layer, "__dict__", {}) and not hasattr(type(layer), name):
            if "env" not in getattr(layer, "__dict__", {}):
                return self.env
            layer = layer.env
        return layer

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


_VALUES = re.compile(r"(?:not enough|too many) values to unpack \(expected ([45])")
_NUMPY = re.compile(r"module 'numpy' has no attribute '(\w+)'")
_REMOVED_IN_1_24 = ("bool", "int", "float", "complex", "object", "str")


def pins(error: BaseException) -> str:
    """Arguments of ``pip install`` that prevent this error of an env; empty where none are known."""
    if numpy := _NUMPY.search(str(error)):
        return "numpy<1.24" if numpy[1] in _REMOVED_IN_1_24 else "numpy<2"
    if (values := _VALUES.search(str(error))) and "gym" in sys.modules:
        return "gym==0.26.2" if values[1] == "5" else "gym<0.26"
    return ""


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    try:
        yield
    except (AttributeError, ValueError) as error:
        if not (needed := pins(error)):
            raise
        kind = AttributeError if isinstance(error, AttributeError) else ValueError
        text = f"{error}: the env, or a wrapper of it, is written for another version"
        raise kind(f"{text}; run: {sys.executable} -m pip install '{needed}'") from error
