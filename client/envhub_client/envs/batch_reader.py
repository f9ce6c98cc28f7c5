"""The batches of a session's lane, as a vector env returns them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from envhub_client.envs.step_observer import StepReturn
from envhub_client.results.observations import Observations
from envhub_client.results.rewards import Rewards
from envhub_client.session.base import VectorSession

PartReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any], np.ndarray]


class BatchReader:
    """Waits for the results of what was begun on a lane, and lays them out.

    Attributes:
        observations: the envs' last ones, as far as they have no fixed size.
        rewards: their shape, and who refuses axes.
    """

    def __init__(self, session: VectorSession) -> None:
        description = session.description
        self._lane = session.lane
        self.observations = Observations(
            description.observation_spaces[0],
            description.num_envs,
            session.values.allow_pickle,
            description.autoreset_mode is AutoresetMode.SAME_STEP,
        )
        self.rewards = Rewards()

    def reset(self, envs: VectorEnv[Any, Any, Any], timeout: float | None, by_env: bool) -> tuple[Any, dict[Any, Any]]:
        """The observations and infos of the reset that was begun: laid out by ``envs``, or ``by_env`` as they are.

        Raises:
            Exception: as for ``Lane.wait``.
        """
        batch = self._lane.wait(timeout)
        found = self.observations.take(batch)
        infos: dict[Any, Any] = found.by_env() if by_env else found.batched(envs)
        return self.observations.batch(batch.observations), infos

    def step(self, envs: VectorEnv[Any, Any, Any], timeout: float | None, by_env: bool) -> StepReturn:
        """The results of the step that was begun; otherwise as ``reset``.

        Raises:
            ValueError: rewards have axes, which are refused.
        """
        arrays, rewards, terminations, truncations, rows, groups, _ = batch = self._lane.wait(timeout)
        assert rewards is not None and terminations is not None and truncations is not None
        has_infos = rows or groups or self.observations.loose  # mostly no env has any
        found = self.observations.take(batch) if has_infos else None
        if found is not None or self.rewards.shape:
            rewards = self.rewards.of(rewards, found)
        infos: dict[Any, Any] = {} if found is None else found.by_env() if by_env else found.batched(envs)
        observations = arrays[0] if self.observations.flat else self.observations.batch(arrays)
        return observations, rewards, terminations, truncations, infos

    def rows(self, min_envs: int, timeout: float | None, by_env: bool) -> PartReturn:
        """The results of the envs that are done, once these are ``min_envs``; they are under way no more.

        Raises:
            Exception: as for ``Lane.wait_rows``.
        """
        batch = self._lane.wait_rows(min_envs, timeout)
        arrays, rewards, terminations, truncations, _, _, env_ids = batch
        assert rewards is not None and terminations is not None and truncations is not None and env_ids is not None
        found = self.observations.take(batch)
        rewards = self.rewards.of(rewards, found, env_ids.tolist())
        infos = found.by_env() if by_env else found.batched_of(env_ids)
        observations = self.observations.batch(arrays, env_ids.tolist())
        self._lane.taken(env_ids)
        return observations, rewards, terminations, truncations, infos, env_ids
