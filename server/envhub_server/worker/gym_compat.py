"""Envs of older Gymnasium and of gym, with the interface of Gymnasium 1.4.

The differences, from the release notes of both: gym before 0.26 has ``seed`` and steps of four values, whose ``info``
says ``TimeLimit.truncated``; gym and Gymnasium before 1.0 have no ``set_wrapper_attr``.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import partial
from typing import Any, Callable

import numpy as np

from envhub.values import spaces
from envhub.values.gym_api import api
from envhub_server.worker.other_interfaces import Converted


def make(name: str, kwargs: dict[str, Any]) -> Any:
    """A new env of this id from the registry, adapted."""
    if api.__name__ == "gymnasium" or _version(api) >= (0, 26):
        return adapt(api.make(name, **kwargs))
    render_mode = kwargs.pop("render_mode", None)  # new in 0.26; before, ``render`` took the mode
    env = adapt(api.make(name, **kwargs))
    env.render_mode = render_mode
    return env


def vector_factory(name: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What makes the vector env that is registered for this id, as a ``vector_entry_point`` does.

    Raises:
        TypeError: there is none.
    """
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
    """The env itself, or an adapter around it if it has an older interface."""
    if isinstance(env, FiveValues):
        return env
    gym = sys.modules.get("gym")
    if gym is not None and isinstance(env, gym.Env):
        return FourValues(env) if _version(gym) < (0, 26) and not isinstance(env, Converted) else FiveValues(env)
    # Of its class: wrappers of Gymnasium 0.29 warn of attributes that their env has not.
    if hasattr(type(env), "set_wrapper_attr") or not isinstance(env, api.Env):
        return env
    return FiveValues(env)


def innermost(env: Any) -> Any:
    """The env without its wrappers, and without what this module put around it."""
    own = env.env if isinstance(env, FiveValues) else env
    return getattr(own, "unwrapped", own)


def is_wrapped(env: Any, name: str) -> bool:
    """Whether a wrapper of the env is of the class of this name, ``module:Class``; nothing is imported for it."""
    gym = sys.modules.get("gym")
    env = getattr(env, "vector_env", env)  # where it is one of a vector env's
    wrappers: Any = FiveValues, api.Wrapper, getattr(api.vector, "VectorWrapper", api.Wrapper)
    wrappers = wrappers if gym is None else (*wrappers, gym.Wrapper)
    while isinstance(env, wrappers):
        if any(f"{each.__module__}:{each.__qualname__}" == name for each in type(env).__mro__):
            return True
        env = env.env
    return False


def _version(package: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", package.__version__)[:2])


class FiveValues:
    """An env of gym 0.26 or of Gymnasium before 1.0."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = spaces.native(env.observation_space)
        self.action_space = spaces.native(env.action_space)
        self.metadata = env.metadata
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = env.spec
        self._seed = -1

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As in Gymnasium."""
        self._seed = self._seed if seed is None else seed
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """As in Gymnasium."""
        return self.env.step(action)

    @property
    def unwrapped(self) -> Any:
        """As in Gymnasium."""
        return self.env.unwrapped

    def get_wrapper_attr(self, name: str) -> Any:
        """As in Gymnasium: the attribute of the nearest wrapper that has it, or of the env."""
        if name == "np_random_seed":  # the env does not store it
            return self._seed
        if name in ("render_mode", "spec", "observation_space", "action_space", "metadata"):
            return getattr(self, name)
        return getattr(self._layer_with(name), name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """As in Gymnasium: on the nearest wrapper that has it, else on the outermost."""
        setattr(self._layer_with(name), name, value)

    def _layer_with(self, name: str) -> Any:
        layer = self.env
        while name not in vars(layer) and not hasattr(type(layer), name):
            if "env" not in vars(layer):
                return self.env
            layer = layer.env
        return layer

    def close(self) -> None:
        """As in Gymnasium."""
        self.env.close()


class FourValues(FiveValues):
    """An env of gym before 0.26."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        known = {"render.modes": "render_modes", "video.frames_per_second": "render_fps"}
        self.metadata = {known.get(key, key): value for key, value in env.metadata.items()}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As in Gymnasium; such an env takes no options."""
        if seed is not None:
            self.env.seed(seed)
            self._seed = seed
        return self.env.reset(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As in Gymnasium."""
        observation, reward, done, info = self.env.step(action)
        info = dict(info)
        truncated = bool(info.pop("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, bool(done) and truncated, info

    def get_wrapper_attr(self, name: str) -> Any:
        """As in Gymnasium; ``render`` returns the frame that ``render_mode="rgb_array"`` would."""
        if name == "render":
            return lambda: self.env.render(mode="rgb_array")
        found = super().get_wrapper_attr(name)
        if name == "np_random" and isinstance(found, np.random.RandomState):
            return np.random.Generator(found._bit_generator)
        return found
