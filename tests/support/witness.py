"""Episodes as a client sees them, to be compared with those that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import minari
import numpy as np
from hubs import kill_worker
from same import assert_same


def data_set(folder: Path, number: int = 0) -> Any:
    return minari.MinariDataset(folder / f"recording-v{number}" / "data")


def about_each(found: Any) -> list[dict[str, Any]]:
    return list(found.storage.get_episode_metadata(range(found.total_episodes)))


@dataclass
class Seen:
    """One episode of one env, whose observations and actions are arrays.

    Attributes:
        seed: that the program gave for its reset.
    """

    seed: int | None
    observations: list[Any]
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminations: list[bool] = field(default_factory=list)
    truncations: list[bool] = field(default_factory=list)
    failed: bool = False


class Witness:
    """Steps a vector env of array spaces and keeps every env's episodes, to be compared with what was recorded."""

    def __init__(self, envs: Any) -> None:
        self.envs, self.mode = envs, envs.autoreset_mode.value
        self.episodes: list[list[Seen]] = [[] for _ in range(envs.num_envs)]
        self._ended, self._new = np.zeros(envs.num_envs, bool), np.zeros(envs.num_envs, bool)

    def reset(self, seeds: Sequence[int | None] | None = None, mask: Any = None) -> None:
        options = None if mask is None else {"reset_mask": mask}
        observations, _ = self.envs.reset(seed=seeds, options=options)
        for env in np.flatnonzero(np.ones(self.envs.num_envs, bool) if mask is None else mask).tolist():
            self._begin(env, observations[env], None if seeds is None else seeds[env])

    def _begin(self, env: int, observation: Any, seed: int | None = None) -> None:
        self.episodes[env].append(Seen(seed, [observation.copy()]))
        self._ended[env] = self._new[env] = False

    def play(self, steps: int) -> None:
        for _ in range(steps):
            self.step(self.envs.action_space.sample())

    def step(self, actions: Any) -> Any:
        result = self.envs.step(actions)
        self.saw(range(self.envs.num_envs), actions, *result)
        if self.mode == "Disabled" and self._ended.any():
            self.reset(mask=self._ended.copy())
        return result

    def saw(self, numbers: Any, actions: Any, *result: Any) -> None:
        observations, rewards, terminations, truncations, infos = result
        for place, env in enumerate(numbers):
            resets = self._new[env] or (self._ended[env] and self.mode == "NextStep")
            failed = bool(infos.get("invalid_transition", self._new * False)[place])
            self._new[env] |= failed
            if resets:
                if not failed:
                    self._begin(env, observations[place])
                continue
            seen, ended = self.episodes[env][-1], bool(terminations[place] or truncations[place])
            same_step = ended and self.mode == "SameStep" and not failed
            seen.failed = failed
            seen.observations.append((infos["final_obs"] if same_step else observations)[place].copy())
            seen.actions.append(actions[place])
            seen.rewards.append(float(rewards[place]))
            seen.terminations.append(bool(terminations[place]))
            seen.truncations.append(bool(truncations[place]))
            self._ended[env] = ended and (not failed or self.mode == "Disabled")
            if same_step:
                self._begin(env, observations[place])

    def assert_recorded(self, found: Any, env_ids: Sequence[int] | None = None) -> None:
        """Every episode of these envs, and of no other, is in this data set, bit for bit; the last ones are cut."""
        metadata = about_each(found)
        chosen = range(self.envs.num_envs) if env_ids is None else env_ids
        assert {about["env_id"] for about in metadata} == {*chosen}
        for env in chosen:
            own = [seen for seen in self.episodes[env] if seen.rewards]
            mine = [number for number, about in enumerate(metadata) if about["env_id"] == env]
            assert len(own) == len(mine) > 0
            for number, seen in zip(mine, own, strict=True):
                self._assert_same(found[number], metadata[number], seen)
            assert [metadata[number].get("seed") for number in mine] == [seen.seed for seen in own]

    @staticmethod
    def _assert_same(episode: Any, about: dict[str, Any], seen: Seen) -> None:
        cut = not (seen.terminations[-1] or seen.truncations[-1])
        assert_same(episode.observations, np.array(seen.observations), "observations")
        assert_same(episode.actions, np.array(seen.actions), "actions")
        assert_same(episode.rewards, np.array(seen.rewards, np.float64), "rewards")
        assert_same(episode.terminations, np.array(seen.terminations), "terminations")
        assert_same(episode.truncations, np.array([*seen.truncations[:-1], seen.truncations[-1] or cut]), "truncations")
        ended = "cut" if cut else "terminated" if seen.terminations[-1] else "truncated"
        ended = "failed" if seen.failed else ended
        assert about["ended"] == ended


def play_until_one_crashed(envs: Any) -> None:
    """Play two envs of five steps, each on a worker of its own; env 1 crashes in its second episode, and plays on."""
    envs.reset(seed=1)
    for _ in range(8):  # the first episode ends with the fifth step, and the sixth is a reset
        envs.step([1, 2])
    kill_worker(int(envs.call("pid")[1]))
    *_, truncations, infos = envs.step([3, 4])
    assert truncations.tolist() == [False, True] and infos["env_failure"][1].cause == "crash"
    for _ in range(9):
        envs.step([5, 6])
    envs.close()
