"""Vector envs with other interfaces than Gymnasium's, as ``gymnasium.vector.VectorEnv``s.

An object's methods say which interface it has, so none of the packages is imported here but JAX, for envs of JAX.
"""

from __future__ import annotations

import inspect
import os
from importlib import import_module
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from envhub.values import spaces
from envhub.values.gym_api import FUNCTIONAL, GYM3, VEC_ENV, api, vector_interface
from envhub_server.worker.row import NEXT_STEP, SAME_STEP


def as_vector_env(made: Any, num_envs: int, make: Callable[[], Any]) -> Any:
    """The vector env itself, or an adapter with Gymnasium's interface.

    Args:
        made: the object that a factory returned.
        num_envs: the number of envs that it must have.
        make: makes another one.
    """
    kind = vector_interface(made)
    if kind == FUNCTIONAL:
        env, params = made if isinstance(made, tuple) else (made, None)
        return FunctionalEnv(env, params, num_envs)
    if kind == GYM3:
        return Gym3Env(made, make)
    return DoneEnv(made) if kind == VEC_ENV else made


class _Vector:
    """A vector env of Gymnasium, as far as a worker uses it.

    Attributes:
        made: the object with another interface. Attributes that are not set here are its.
    """

    render_mode = None
    spec = None

    def __init__(self, made: Any, num_envs: int, observation_space: Any, action_space: Any, mode: str) -> None:
        self.made, self.num_envs = made, num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.metadata = {"autoreset_mode": mode}

    def __getattr__(self, name: str) -> Any:
        if name == "made":  # of a copy under way
            raise AttributeError(name)
        return getattr(self.made, name)

    @property
    def unwrapped(self) -> Any:
        """The object with another interface."""
        return self.made

    def close(self) -> None:
        """Follow Gymnasium's interface."""
        if hasattr(self.made, "close"):
            self.made.close()


class DoneEnv(_Vector):
    """A ``VecEnv`` of baselines or Stable-Baselines3, or a vector env of gym before 0.26, such as brax's.

    Its steps have four values (or five, as in gym 0.26), and it resets each env in the step that ends its episode.
    ``seed``, or an argument of its ``reset``, seeds the next reset. An episode ends by a truncation where its info says
    ``TimeLimit.truncated`` or, as in brax, ``truncation``. Its final observation is known where the info has it as
    ``terminal_observation`` or ``final_observation``.
    """

    def __init__(self, made: Any) -> None:
        observed, acted = (_single(getattr(made, name), made) for name in ("observation_space", "action_space"))
        super().__init__(made, made.num_envs, spaces.native(observed), spaces.native(acted), SAME_STEP)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset as Gymnasium does; such an env takes no options."""
        arguments = {}
        if "seed" in inspect.signature(self.made.reset).parameters:
            arguments["seed"] = seed
        elif seed is not None and hasattr(self.made, "seed"):
            self.made.seed(seed)
        elif seed is not None:
            api.logger.warn(f"{type(self.made).__name__} takes no seed: its factory has to seed it")
        outcome = self.made.reset(**arguments)
        has_info = isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], dict)
        return _numpy(outcome[0] if has_info else outcome), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Follow Gymnasium's interface."""
        observations, rewards, *flags, infos = self.made.step(actions)
        late, kept = _ends_of(infos, self.num_envs)
        terminations, *more = (np.asarray(each).astype(bool) for each in flags)
        dones = terminations | more[0] if more else terminations
        truncations = more[0] if more else dones & late
        return _numpy(observations), np.asarray(rewards), dones & ~truncations, truncations, kept


def _single(space: Any, made: Any) -> Any:
    """The space of one env: that of a ``VecEnv`` is one, and that of a vector env of gym is a batch."""
    if hasattr(made, "step_async") and not hasattr(made, "single_observation_space") and not _is_batched(made):
        return space
    for name in ("observation_space", "action_space"):
        if getattr(made, name) is space and hasattr(made, f"single_{name}"):
            return getattr(made, f"single_{name}")
    if hasattr(space, "spaces") and isinstance(space.spaces, (tuple, list)):
        return space.spaces[0]
    if hasattr(space, "nvec"):
        one = space.nvec[0]
        return api.spaces.MultiDiscrete(one) if one.ndim else api.spaces.Discrete(int(one))
    return api.spaces.Box(space.low[0], space.high[0], space.shape[1:], space.dtype.type)


def _is_batched(made: Any) -> bool:
    return any(each.__module__ == "gym.vector.vector_env" for each in type(made).__mro__)


def _ends_of(infos: Any, num_envs: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Mask of the truncated envs, as far as the infos say it, and the infos as Gymnasium has them."""
    if isinstance(infos, Mapping):  # of arrays
        arrays = {key: np.asarray(value) for key, value in infos.items() if not isinstance(value, Mapping)}
        late = np.asarray(arrays.get("TimeLimit.truncated", arrays.get("truncation", np.zeros(num_envs)))).astype(bool)
        return late, {key: value for key, value in arrays.items() if value.shape[:1] == (num_envs,)}
    late = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
    batched: dict[str, Any] = {}
    for env, info in enumerate(infos):
        for key, value in info.items():
            name = "final_obs" if key in ("terminal_observation", "final_observation") else key
            column, mask = batched.setdefault(name, np.full(num_envs, None)), f"_{name}"
            column[env] = value
            batched.setdefault(mask, np.zeros(num_envs, bool))[env] = True
    return late, batched


class Gym3Env(_Vector):
    """An env of gym3, which acts, and observes a reward, an observation and whether an episode has just begun.

    It resets each env in the step that ends its episode, tells no terminations from truncations, which all count as
    terminations, and keeps no final observation. It cannot be reset: it is made again.
    """

    def __init__(self, made: Any, make: Callable[[], Any]) -> None:
        super().__init__(made, made.num, _of_gym3(made.ob_space), _of_gym3(made.ac_space), SAME_STEP)
        self._make, self._is_new = make, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset as Gymnasium does; such an env takes no options."""
        if seed is not None:
            api.logger.warn("an env of gym3 takes no seed when it is reset: its factory has to seed it")
        if not self._is_new:
            self.close()
            self.made = self._make()
        self._is_new = False
        return _numpy(self.made.observe()[1]), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Follow Gymnasium's interface."""
        self.made.act(actions)
        rewards, observations, first = self.made.observe()
        terminations = np.array(first, bool)
        _, infos = _ends_of(self.made.get_info(), self.num_envs)
        return _numpy(observations), np.array(rewards), terminations, np.zeros(self.num_envs, bool), infos


def _of_gym3(kind: Any) -> Any:
    """The space of a type of gym3: a tensor of numbers, or a dict of types."""
    if hasattr(kind, "eltype"):
        name, shape = kind.eltype.dtype_name, tuple(kind.shape)
        dtype = np.dtype(name)
        if not hasattr(kind.eltype, "n"):
            return api.spaces.Box(-np.inf, np.inf, shape, dtype.type)
        most = int(kind.eltype.n)
        return api.spaces.Box(0, most - 1, shape, dtype.type) if shape else api.spaces.Discrete(most)
    return api.spaces.Dict([(key, _of_gym3(part)) for key, part in kind.items()])


class FunctionalEnv(_Vector):
    """An env of JAX whose functions take and return its state, as those of gymnax and craftax do.

    Each env has a key of its own, from its seed: ``jax.random.PRNGKey(seed)``. A reset takes the second of
    ``jax.random.split(key)``, a step the second of ``jax.random.split(key, 3)``, and a reset in place of a step the
    third; the first is the next key.
    """

    def __init__(self, env: Any, params: Any, num_envs: int) -> None:
        self._jax = jax = import_module("jax")
        params = env.default_params if params is None else params
        single = spaces.native(env.observation_space(params)), spaces.native(env.action_space(params))
        super().__init__(env, num_envs, *single, NEXT_STEP)

        def reset(key: Any) -> Any:
            key, own = jax.random.split(key)
            return (key, *env.reset_env(own, params))

        def step(key: Any, state: Any, action: Any, ended: Any) -> Any:
            key, for_step, for_reset = jax.random.split(key, 3)
            observation, after, reward, terminated, info = env.step_env(for_step, state, action, params)
            truncated = env.is_truncated(after, params) if hasattr(env, "is_truncated") else False
            first = env.reset_env(for_reset, params)
            last = observation, after
            chosen = jax.tree_util.tree_map(lambda one, other: jax.numpy.where(ended, one, other), first, last)
            flags = jax.numpy.logical_and(terminated, ~ended), jax.numpy.logical_and(truncated, ~ended)
            return (key, *chosen, jax.numpy.where(ended, 0, reward), *flags, info)

        self._reset_all, self._step_all = jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step))
        self._keys: Any = None
        self._state: Any = None
        self._observations: Any = None
        self._ended = np.zeros(num_envs, bool)

    def reset(
        self, *, seed: Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset as Gymnasium does; such an env takes no options but the mask of the envs that are reset."""
        numpy, seeds = self._jax.numpy, [None] * self.num_envs if seed is None else seed
        mask = np.asarray((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        drawn = [int.from_bytes(os.urandom(4), "little") if one is None else one for one in seeds]
        keys = numpy.stack([self._jax.random.PRNGKey(one) for one in drawn])
        if self._keys is not None:  # whose sequence goes on where no seed is given
            seeded = np.array([one is not None for one in seeds])
            keys = numpy.where(seeded[:, None], keys, self._keys)
        reset_state = self._reset_all(keys)
        if self._keys is not None:
            reset_state = self._where(mask, reset_state, (self._keys, self._observations, self._state))
        self._keys, self._observations, self._state = reset_state
        self._ended = self._ended & ~mask
        return _numpy(self._observations), {}

    def _where(self, mask: np.ndarray, one: Any, other: Any) -> Any:
        def chosen(this: Any, that: Any) -> Any:
            return self._jax.numpy.where(mask.reshape((-1,) + (1,) * (this.ndim - 1)), this, that)

        return self._jax.tree_util.tree_map(chosen, one, other)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Follow Gymnasium's interface."""
        ended = self._ended
        stepped = self._step_all(self._keys, self._state, actions, ended)
        self._keys, self._observations, self._state, rewards, terminations, truncations, infos = stepped
        terminations, truncations = np.asarray(terminations), np.asarray(truncations)
        self._ended = terminations | truncations
        columns = {str(key): np.asarray(value) for key, value in infos.items()}
        columns.update({f"_{key}": ~ended for key in [*columns]})
        return _numpy(self._observations), np.asarray(rewards, np.float64), terminations, truncations, columns

    def close(self) -> None:
        """Do nothing: an env of functions holds nothing."""


def _numpy(observations: Any) -> Any:
    """A batch of observations as NumPy arrays, nested alike."""
    if isinstance(observations, Mapping):
        return {key: _numpy(part) for key, part in observations.items()}
    if hasattr(observations, "_asdict"):
        return _numpy(observations._asdict())
    if isinstance(observations, (tuple, list)):
        return tuple(map(_numpy, observations))
    return np.array(observations)
