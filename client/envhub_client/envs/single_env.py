"""A single env in a hub as a ``gymnasium.Env``."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
import numpy as np

from envhub.errors import RequestRefused
from envhub_client.envs.snapshots import Snapshot
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frames import hiding_frames

_ONLY = (0,)  # named, so that a ``reset_mask`` in the options is the env's own


class HubEnv(gymnasium.Env[Any, Any]):
    """One env in a hub; ``envhub.make`` makes it. It owns a vector env of one, without autoreset."""

    def __init__(self, envs: HubVectorEnv) -> None:
        envs.info_mode = "by_env"
        self._envs = envs
        self.observation_space = envs.single_observation_space
        self.action_space = envs.single_action_space
        self.metadata = {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}
        self.render_mode = envs.render_mode
        self.spec = envs.env_spec

    def __getattr__(self, name: str) -> Any:
        how = "get_wrapper_attr and set_wrapper_attr reach what the env in the hub has"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; {how}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the env in the hub, but for those that this object has of its own."""
        if name[0] == "_" or name in gymnasium.Env.__annotations__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            self.set_wrapper_attr(name, value)

    def refuse_reward_axes(self, who: str) -> None:
        """Refuse rewards with axes, as ``HubVectorEnv.refuse_reward_axes`` does."""
        self._envs.refuse_reward_axes(who)

    @hiding_frames
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env; as ``gymnasium.Env.reset``. Errors as for ``HubVectorEnv.reset``."""
        observations, infos = self._envs.reset(seed=seed, options=options, env_ids=_ONLY)
        return self._only(self.observation_space, observations), infos.get(0, {})

    @hiding_frames
    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the env; as ``gymnasium.Env.step``. Errors as for ``HubVectorEnv.step``."""
        actions = self._batch(self.action_space, action)
        observations, rewards, terminations, truncations, infos = self._envs.step(actions)
        reward = float(rewards[0]) if rewards.ndim == 1 else rewards[0]
        flags = bool(terminations[0]), bool(truncations[0])
        return self._only(self.observation_space, observations), reward, *flags, infos.get(0, {})

    @hiding_frames
    def snapshot(self, name: str | None = None) -> Snapshot:
        """A snapshot of the env; as ``HubVectorEnv.snapshot``. Wrappers around this object are not in it."""
        return self._envs.snapshot(name=name)

    @hiding_frames
    def restore(self, snapshot: Snapshot | str, reseed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Go on from a snapshot: what the env had observed, and its info. Errors as for ``HubVectorEnv.restore``."""
        observations, infos = self._envs.restore(snapshot, reseed=reseed)
        return self._only(self.observation_space, observations), infos.get(0, {})

    @hiding_frames
    def drop(self, snapshot: Snapshot | str) -> None:
        """Forget a snapshot; as ``HubVectorEnv.drop``."""
        self._envs.drop(snapshot)

    @hiding_frames
    def snapshots(self) -> list[Snapshot]:
        """The snapshots of the session; as ``HubVectorEnv.snapshots``."""
        return self._envs.snapshots()

    @hiding_frames
    def render(self) -> Any:
        """The env's rendered frame, or whatever its ``render`` returns."""
        return self._envs.render()[0]

    def close(self) -> None:
        """End the session."""
        self._envs.close()

    @hiding_frames
    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of this object, else of the env in the hub: a value, or a function that calls its method."""
        if hasattr(self, name):
            return getattr(self, name)
        if not self._envs.attr_is_callable(name)[0]:
            return self._envs.get_attr(name)[0]

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._envs.call(name, *args, **kwargs)[0]

        method.__name__ = name
        return method

    @hiding_frames
    def has_wrapper_attr(self, name: str) -> bool:
        """True if this object or the env in the hub has the attribute; no method is called for it."""
        try:
            return hasattr(self, name) or self._envs.has_attr(name)[0]
        except RequestRefused:  # a name with an underscore, of a hub on the network
            return False

    @hiding_frames
    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the env in the hub; without ``force``, only one that exists. Returns whether it was."""
        if not (force or self.has_wrapper_attr(name)):
            return False
        self._envs.set_attr(name, [value])
        return True

    @property
    def np_random(self) -> np.random.Generator:
        """A copy of the env's random generator; assigning to it sets the env's own."""
        generator: np.random.Generator = self._envs.get_attr("np_random")[0]
        return generator

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self.set_wrapper_attr("np_random", value)

    _np_random = np_random  # ``gymnasium.utils.env_checker`` looks here

    @property
    def np_random_seed(self) -> int:
        """The seed of the env's random generator, -1 where it is unknown."""
        seed: int = self._envs.get_attr("np_random_seed")[0]
        return seed

    def _only(self, space: gymnasium.Space[Any], batch: Any) -> Any:
        if isinstance(space, gymnasium.spaces.Dict):
            return {key: self._only(sub, batch[key]) for key, sub in space.spaces.items()}
        if isinstance(space, gymnasium.spaces.Tuple):
            return tuple(self._only(sub, part) for sub, part in zip(space.spaces, batch, strict=True))
        # ``batch[0]`` would make a scalar of an array without axes.
        return batch[0, ...] if isinstance(space, gymnasium.spaces.Box) else batch[0]

    def _batch(self, space: gymnasium.Space[Any], action: Any) -> Any:
        if isinstance(space, gymnasium.spaces.Dict):
            return {key: self._batch(sub, action[key]) for key, sub in space.spaces.items()}
        if isinstance(space, gymnasium.spaces.Tuple):
            return tuple(self._batch(sub, part) for sub, part in zip(space.spaces, action, strict=True))
        return np.asarray(action)[np.newaxis] if isinstance(action, (np.ndarray, np.generic)) else [action]
