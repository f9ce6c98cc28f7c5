"""Partial batches: step some envs while others are still under way. The names are EnvPool's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import VectorEnv

from envhub.errors import SpaceMismatch
from envhub.values import spaces
from envhub.values.actions import pack
from envhub.values.leaf import Leaf
from envhub.vector_errors import NothingPending
from envhub_client.lanes.choice import PlainLane
from envhub_client.lanes.wire import Part
from envhub_client.results.observations import Observations
from envhub_client.session.recovery import LastingLane

PartReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any], np.ndarray]


class _Batch(VectorEnv[Any, Any, np.ndarray]):
    """Lays infos out for so many envs."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


class PartialBatches:
    """Steps of some envs of one vector env."""

    def __init__(
        self,
        lane: PlainLane | LastingLane,
        action_space: Space[Any],
        leaves: Sequence[Leaf],
        observations: Observations,
    ) -> None:
        self._lane = lane
        self._action_space = action_space
        self._leaves = leaves
        self._observations = observations

    def send(self, actions: Any, env_ids: Any) -> None:
        """Begin a step of these envs; see ``HubVectorEnv.send``."""
        wanted = self._env_ids(env_ids)
        packed = pack(spaces.flatten(self._action_space, actions), self._leaves, len(wanted))
        if packed.beside:
            raise SpaceMismatch("a part of a batch takes actions of numbers in arrays only; no env has moved")
        self._lane.post_rows(wanted, packed.codes, packed.arrays)

    def _env_ids(self, env_ids: Any) -> np.ndarray:
        wanted = np.arange(self._lane.num_envs) if env_ids is None else np.asarray(env_ids)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu" or not wanted.size:
            raise ValueError(f"env_ids must be a sequence of numbers of envs, got {env_ids!r}")
        if wanted.min() < 0 or wanted.max() >= self._lane.num_envs or len(np.unique(wanted)) < len(wanted):
            raise ValueError(f"env_ids must be different numbers from 0 to {self._lane.num_envs - 1}, got {env_ids!r}")
        return wanted.astype(np.int64)

    def recv(self, min_envs: int | None, timeout: float | None) -> PartReturn:
        """Wait for some of them; see ``HubVectorEnv.recv``."""
        outstanding = self._lane.outstanding
        if not outstanding:
            raise NothingPending("Calling `recv` without any prior call to `send` or `async_reset`.", "recv")
        if min_envs is not None and min_envs < 1:
            raise ValueError(f"min_envs must be at least 1, got {min_envs}")
        part: Part = self._lane.collect_rows(min(min_envs or outstanding, outstanding), timeout)
        env_ids = part.env_ids.tolist()
        infos = self._observations.take(part, env_ids)
        batched = infos.at(part.env_ids).batched(_Batch(len(env_ids)))
        observations = self._observations.batch(part.observations, env_ids)
        self._lane.taken(part.env_ids)
        return observations, part.rewards, part.terminations, part.truncations, batched, part.env_ids
