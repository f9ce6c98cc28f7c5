"""A vector env of Stable-Baselines3 whose envs live in a hub, and replay buffers without invalid transitions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Text
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from typing_extensions import Unpack

from envhub_client.envs.arguments import check_start_method
from envhub_client.envs.snapshots import Snapshot
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks.adapter import INVALID, attributes, batched, is_composed, pickle_all, refuse_decided
from envhub_client.make import EnvLike, make_vec
from envhub_client.option_keywords import MakeKeywords

# What a factory of ``make_vec_env`` refers to.
PACKAGES = ("stable_baselines3", "sb3_contrib")


class HubVecEnv(VecEnv):
    """A ``VecEnv``: usable alone, and as ``vec_env_cls`` of ``make_vec_env`` and ``make_atari_env``.

    Results are those of ``SubprocVecEnv``, with rewards that are always float64. An episode that the end of a worker
    cut short ends with ``TimeLimit.truncated``, and its info has ``env_failure``, an ``envhub.EnvFailure``. ``Monitor``
    has seen no end of such an episode, so that it does not count in SB3's statistics; the env is reset before the step
    returns.

    Attributes:
        envs: the ``HubVectorEnv`` behind it.
        reset_infos: each env's info of its last reset.
    """

    def __init__(
        self, env: EnvLike, num_envs: int = 1, start_method: str | None = None, **options: Unpack[MakeKeywords]
    ) -> None:
        """Make the envs.

        Args:
            env: a list of factories, as SB3 passes, or anything else that ``envhub.make_vec`` takes.
            num_envs: how many; not needed with a list.
            start_method: as of ``SubprocVecEnv``; it is checked and changes nothing.
            **options: keywords of ``envhub.make_vec``, such as ``hub``, ``num_workers`` and the fault options.

        Raises:
            TypeError: for ``autoreset_mode`` and ``info_mode``, which SB3 decides.
            ValueError: there is no such ``start_method``, or the envs have a ``reward_space`` with axes: SB3 learns
                from one number.
            Exception: as for ``envhub.make_vec``.
        """
        refuse_decided(options, "Stable-Baselines3", "autoreset_mode", "info_mode")
        check_start_method(start_method)
        with pickle_all(env, *PACKAGES):
            # As ``SubprocVecEnv``, which asks no env but the first one for its spaces.
            chosen: dict[str, Any] = {"observation_mode": "first", **options, "info_mode": "by_env"}
            self.envs: HubVectorEnv = make_vec(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **chosen)
        try:
            self.envs.refuse_reward_axes("Stable-Baselines3")
            super().__init__(self.envs.num_envs, self.envs.single_observation_space, self.envs.single_action_space)
        except BaseException:
            self.envs.close(terminate=True)
            raise
        self._restore: Callable[[], tuple[Any, dict[Any, Any]]] | None = None  # in place of the next reset
        self._has_action_parts = is_composed(self.action_space)
        parts = (
            self.observation_space.values() if isinstance(self.observation_space, Dict) else [self.observation_space]
        )
        self._has_texts = any(isinstance(part, Text) for part in parts)
        # As ``DummyVecEnv`` does: ``VecVideoRecorder`` asks other classes than SB3's own for its ``render_fps``.
        self.metadata = {name: value for name, value in self.envs.metadata.items() if name != "autoreset_mode"}

    def reset(self) -> VecEnvObs:
        """Reset every env with the seeds and options that were set; they hold for one reset."""
        options = [each or None for each in self._options] if any(self._options) else None
        seeds = self._seeds if any(seed is not None for seed in self._seeds) else None
        self.envs.drop_pending()  # a step that Ctrl-C kept from being waited for
        restore, self._restore = self._restore, None
        observations, infos = self.envs.reset(seed=seeds, options=options) if restore is None else restore()
        self.reset_infos = [infos.get(row, {}) for row in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return self._stacked(observations)

    def reset_to(
        self, snapshot: Snapshot | str, source: int | Sequence[int] | None = None, reseed: int | None = None
    ) -> None:
        """Have the next ``reset``, such as that of ``learn``, restore all envs as ``HubVectorEnv.restore`` does.

        SB3's wrappers around this object, such as ``VecFrameStack``, are reset then: they are in no snapshot.
        """
        self._restore = functools.partial(self.envs.restore, snapshot, range(self.num_envs), source, reseed)

    def step_async(self, actions: np.ndarray) -> None:
        self.envs.drop_pending()  # as in ``reset``
        if self._has_action_parts:
            actions = batched(self.action_space, actions)
        self.envs.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        try:
            observations, rewards, terminations, truncations, by_env = self.envs.step_wait()
        except BaseException:
            self.envs.drop_pending()  # it is not to be waited for again, even after Ctrl-C
            raise
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for row, info in by_env.items():
            infos[row] = {**info, **infos[row]}
        dones = terminations | truncations
        if dones.any():
            for row in np.flatnonzero(dones).tolist():
                truncated = bool(truncations[row] and not terminations[row])
                infos[row] = self._end(row, by_env.get(row, {}), truncated)
            failed = np.array([INVALID in info for info in infos])
            if failed.any():
                observations = self._reset_failed(failed, observations)
        return self._stacked(observations), rewards, dones, infos

    def _stacked(self, observations: Any) -> VecEnvObs:
        """The observations with texts in arrays, which Gymnasium batches as tuples."""
        if not self._has_texts:
            return observations
        if isinstance(observations, dict):
            return {key: np.stack(part) if isinstance(part, tuple) else part for key, part in observations.items()}
        return np.stack(observations)

    def _end(self, row: int, info: dict[str, Any], truncated: bool) -> dict[str, Any]:
        terminal, final = info.pop("final_obs"), info.pop("final_info")
        if INVALID in info:
            final, info = info, {}
        self.reset_infos[row] = info
        return {**final, "TimeLimit.truncated": truncated, "terminal_observation": terminal}

    def _reset_failed(self, failed: np.ndarray, observations: Any) -> Any:
        """Reset the envs that were made again: SB3 takes the observations of this step for those of a reset."""
        observations, infos = self.envs.reset(options={"reset_mask": failed})
        for row in np.flatnonzero(failed).tolist():
            self.reset_infos[row] = infos.get(row, {})
        return observations

    def close(self) -> None:
        self.envs.close()

    def _rows(self, indices: VecEnvIndices) -> list[int]:
        return [range(self.num_envs)[index] for index in self._get_indices(indices)]

    def _per_env(self, indices: VecEnvIndices, ask: Callable[[list[int]], Sequence[Any]]) -> list[Any]:
        """Results of ``ask`` for the envs of ``indices``, in which one may come twice."""
        rows = self._rows(indices)
        if not rows:
            return []
        unique = sorted(set(rows))
        by_row = dict(zip(unique, ask(unique), strict=True))
        return [by_row[row] for row in rows]

    def has_attr(self, attr_name: str) -> bool:
        return all(self.envs.has_attr(attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return self._per_env(indices, functools.partial(attributes, self.envs, attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        if rows := sorted(set(self._rows(indices))):
            self.envs.set_attr(attr_name, [value] * len(rows), rows)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        return self._per_env(
            indices, lambda rows: self.envs.call_some(rows, method_name, *method_args, **method_kwargs)
        )

    def env_is_wrapped(self, wrapper_class: type, indices: VecEnvIndices = None) -> list[bool]:
        return self._per_env(indices, functools.partial(self.envs.is_wrapped, wrapper_class))

    def get_images(self) -> Sequence[np.ndarray | None]:
        if self.render_mode != "rgb_array":
            warnings.warn(f"get_images needs the render mode rgb_array, and it is {self.render_mode}", stacklevel=2)
            return [None] * self.num_envs
        return list(self.envs.render())


class _Whole:
    """A replay buffer without the steps with which episodes were cut short.

    SB3 draws an env by itself, so each env has a step everywhere in the buffer: a step that is left out is replaced by
    that of another env. A step with which all episodes were cut short is left out as a whole.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.optimize_memory_usage:  # type: ignore[attr-defined]
            raise ValueError(f"a {type(self).__name__} leaves out steps, and takes no optimize_memory_usage=True")

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        failed = np.array([INVALID in info for info in infos])
        if failed.all():
            return
        if failed.any():
            rows = np.where(failed, np.flatnonzero(~failed)[0], np.arange(len(failed)))
            obs, next_obs = _rows_of(obs, rows), _rows_of(next_obs, rows)
            action, reward, done, infos = action[rows], reward[rows], done[rows], [infos[row] for row in rows]
        super().add(obs, next_obs, action, reward, done, infos)  # type: ignore[misc]


class WholeReplayBuffer(_Whole, ReplayBuffer):
    """``DQN(..., replay_buffer_class=WholeReplayBuffer)`` learns from no step with which an episode was cut short."""


class WholeDictReplayBuffer(_Whole, DictReplayBuffer):
    """A ``WholeReplayBuffer`` for observations that are dicts."""


class WholeHerReplayBuffer(HerReplayBuffer):
    """A ``HerReplayBuffer`` that draws no step with which an episode was cut short.

    They stay in it, as the ends of their episodes, whose other steps are drawn as any.
    """

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        row = self.pos
        super().add(obs, next_obs, action, reward, done, infos)
        self.ep_length[row, [INVALID in info for info in infos]] = 0  # what marks a step as not to be drawn


def _rows_of(observations: Any, rows: np.ndarray) -> Any:
    if isinstance(observations, dict):
        return {key: part[rows] for key, part in observations.items()}
    return observations[rows]
