"""tianshou's statistics, collector and buffer, without the episodes and steps that the end of a worker cut short."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tianshou.data import AsyncCollector as TianshouAsyncCollector
from tianshou.data import CollectStats, VectorReplayBuffer
from tianshou.env import VectorEnvWrapper

from envhub_client.frameworks.tianshou_steps import INVALID, Ids

DRAWS_MAX = 100


def _was_cut(infos: Any) -> bool:
    """True if the last of these infos, a ``Batch`` of an episode, is that of an episode cut short."""
    invalid = infos.get(INVALID)
    return invalid is not None and bool(invalid[-1])


@dataclass(kw_only=True)
class WholeEpisodeStats(CollectStats):
    """``Collector(..., collect_stats_class=WholeEpisodeStats)`` leaves out episodes that a worker's end cut short.

    They are in none of ``returns``, ``lens`` and ``n_collected_episodes``, unless a collection has no whole episode:
    tianshou's trainers need a result of each test. For ``collect(n_episode=...)`` a cut episode is one of them.

    Attributes:
        n_cut_episodes: how many were cut.
        cut_returns, cut_lens: of those that were left out.
    """

    n_cut_episodes: int = 0
    cut_returns: np.ndarray = field(default_factory=lambda: np.array([], dtype=float))
    cut_lens: np.ndarray = field(default_factory=lambda: np.array([], dtype=int))

    def update_at_episode_done(
        self, episode_batch: Any, episode_return: float, refresh_sequence_stats: bool = False
    ) -> None:
        """Count an episode."""
        if not _was_cut(episode_batch.info):
            super().update_at_episode_done(episode_batch, episode_return, refresh_sequence_stats)
            return
        self.n_cut_episodes += 1
        self.cut_returns = np.append(self.cut_returns, episode_return)
        self.cut_lens = np.append(self.cut_lens, len(episode_batch))

    def refresh_all_sequence_stats(self) -> None:
        """Sum up at the end of a collection."""
        if self.n_cut_episodes and not self.n_collected_episodes:
            self.returns, self.lens = self.cut_returns, self.cut_lens
            self.n_collected_episodes: int = self.n_cut_episodes
        super().refresh_all_sequence_stats()


class _Watched(VectorEnvWrapper):
    """Notes of each episode that ends whether it was cut short."""

    def __init__(self, venv: Any) -> None:
        super().__init__(venv)
        self.cut: list[bool] = []

    @property
    def waiting_id(self) -> list[int]:
        waiting: list[int] = self.venv.waiting_id
        return waiting

    def step(self, action: Any, id: Ids = None) -> Any:
        result = self.venv.step(action, id)
        self.cut.extend(INVALID in info for info in result[4][result[2] | result[3]])
        return result


class AsyncCollector(TianshouAsyncCollector):
    """tianshou's ``AsyncCollector``, with ``WholeEpisodeStats``: it takes no ``collect_stats_class`` itself."""

    def __init__(self, policy: Any, env: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(policy, _Watched(env), *args, **kwargs)

    def _collect(self, *args: Any, **kwargs: Any) -> Any:
        self.env.cut.clear()
        stats = super()._collect(*args, **kwargs)
        failed = np.array(self.env.cut, bool)
        return WholeEpisodeStats(
            n_collected_episodes=int((~failed).sum()),
            n_collected_steps=stats.n_collected_steps,
            returns=stats.returns[~failed],
            lens=stats.lens[~failed],
            n_cut_episodes=int(failed.sum()),
            cut_returns=stats.returns[failed],
            cut_lens=stats.lens[failed],
        )


class ValidReplayBuffer(VectorReplayBuffer):
    """A ``VectorReplayBuffer`` that draws no step with which an episode was cut short.

    They stay in it, as the ends of their episodes, and so in what is read as a whole, by ``sample(0)``.
    """

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
        """Indices of steps, drawn with replacement; of all steps for 0 or None."""
        indices: np.ndarray = super().sample_indices(batch_size)
        invalid = self.info.get(INVALID) if batch_size and batch_size > 0 and len(self) else None
        if invalid is None:
            return indices
        for _ in range(DRAWS_MAX):
            drawn_invalid = invalid[indices]
            if not drawn_invalid.any():
                break
            indices[drawn_invalid] = super().sample_indices(int(drawn_invalid.sum()))
        return indices
