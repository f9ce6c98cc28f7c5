"""The batches of a session's lane, as a vector env returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from envhub_client.deadline import Deadline
from envhub_client.envs.observations import Infos, Observations, UnreadableRow
from envhub_client.session.options import InfoMode
from envhub_client.session.vector_session import VectorSession


class Rewards:
    """The rewards of one vector env."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()  # empty until an env has given one with axes
        self.refused_for = ""  # the name of what takes no rewards with axes

    def check(self, shape: Sequence[int]) -> None:
        if shape and self.refused_for:
            raise ValueError(
                f"rewards of shape {tuple(shape)}, and for {self.refused_for} a reward is one number: wrap the envs so "
                "that it is, such as by a weighted sum"
            )

    def of(self, rewards: np.ndarray, infos: Infos | None, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """The rewards of all envs or of ``env_ids``: as they are, or ``(envs, *shape)`` where an env gave axes.

        An env that was reset or truncated by the hub has zeros.
        """
        with_axes = [] if infos is None else infos.take_rewards()
        if not with_axes and not self.shape:
            return rewards
        shape = self.shape or with_axes[0][1].shape[1:]
        self.check(shape)
        places = None if env_ids is None else {row: place for place, row in enumerate(env_ids)}
        filled = np.zeros((len(rewards), *shape))
        for rows, values in with_axes:
            if values.dtype != np.float64:
                raise UnreadableRow(rows[0], f"a reward of {values.dtype}")
            if values.shape[1:] != shape:
                text = f"envs {rows} have rewards of shape {values.shape[1:]}, others of {shape}"
                raise ValueError(f"{text}: envs that step together have rewards of one shape")
            filled[rows if places is None else [places[row] for row in rows]] = values
        self.shape = shape
        return filled


StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]
PartReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any], np.ndarray]


class BatchReader:
    """Waits for the results of what was begun on a lane, and lays them out."""

    def __init__(self, session: VectorSession) -> None:
        description = session.description
        self._lane = session.lane
        self.observations = Observations(
            description.observation_spaces[0],
            description.num_envs,
            session.values.allow_pickle,
            description.autoreset_mode is AutoresetMode.SAME_STEP,
            session.hub_of,
        )
        self.rewards = Rewards()

    def reset(
        self, envs: VectorEnv[Any, Any, Any], timeout: float | None, info_mode: InfoMode
    ) -> tuple[Any, dict[Any, Any]]:
        """The observations of the reset that was begun, and its infos, which ``envs`` batch if they are batched."""
        deadline = None if timeout is None else Deadline(timeout)
        batch = self._lane.wait(timeout)
        try:
            infos = self.observations.take(batch)
        except UnreadableRow as error:
            return self.reset(envs, self._time_after(error, deadline), info_mode)
        laid_out: dict[Any, Any] = infos.by_env() if info_mode == "by_env" else infos.batched(envs)
        return self.observations.batch(batch.observations), laid_out

    def step(self, envs: VectorEnv[Any, Any, Any], timeout: float | None, info_mode: InfoMode) -> StepReturn:
        deadline = None if timeout is None else Deadline(timeout)
        arrays, rewards, terminations, truncations, rows, groups, _ = batch = self._lane.wait(timeout)
        assert rewards is not None and terminations is not None and truncations is not None
        has_infos = rows or groups or self.observations.has_object_leaves  # mostly no env has any
        try:
            infos = self.observations.take(batch) if has_infos else None
            if infos is not None or self.rewards.shape:
                rewards = self.rewards.of(rewards, infos)
        except UnreadableRow as error:
            return self.step(envs, self._time_after(error, deadline), info_mode)
        laid_out: dict[Any, Any] = {}
        if infos is not None:
            laid_out = infos.by_env() if info_mode == "by_env" else infos.batched(envs)
        observations = arrays[0] if self.observations.flat else self.observations.batch(arrays)
        return observations, rewards, terminations, truncations, laid_out

    def rows(self, min_envs: int, timeout: float | None, info_mode: InfoMode) -> PartReturn:
        """The results of the envs that are done, once these are ``min_envs``."""
        deadline = None if timeout is None else Deadline(timeout)
        batch = self._lane.wait_rows(min_envs, timeout)
        arrays, rewards, terminations, truncations, _, _, env_ids = batch
        assert rewards is not None and terminations is not None and truncations is not None and env_ids is not None
        try:
            infos = self.observations.take(batch)
            rewards = self.rewards.of(rewards, infos, env_ids.tolist())
        except UnreadableRow as error:
            return self.rows(min_envs, self._time_after(error, deadline), info_mode)
        laid_out = infos.by_env() if info_mode == "by_env" else infos.batched_of(env_ids)
        observations = self.observations.batch(arrays, env_ids.tolist())
        return observations, rewards, terminations, truncations, laid_out, env_ids

    def _time_after(self, error: UnreadableRow, deadline: Deadline | None) -> float | None:
        """The seconds to wait again, now without the hub that sent this row."""
        self._lane.breach(error.row, str(error))
        return None if deadline is None else deadline.left_s()
