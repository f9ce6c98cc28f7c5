"""Envs of which snapshots are taken, and histories by which their states are compared."""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, repeat
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import envhub


class History(gym.Env[np.ndarray, int]):
    """Observes a hash of all that has happened to it, and of every generator that it can draw from."""

    observation_space = spaces.Box(0, 255, (16,), np.uint8)
    action_space = spaces.Discrete(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            self._digest, self._steps = b"", self._count()
        return self._observed("reset"), {"steps": 0}

    @staticmethod
    def _count() -> Any:
        """A generator, which no pickle and no copy has."""
        steps = 0
        while True:
            steps += 1
            yield steps

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        steps = next(self._steps)
        observation = self._observed(int(action), steps)
        return (
            observation,
            float(observation[0]),
            bool(observation[1] < 20),
            bool(observation[2] < 10),
            {"steps": steps},
        )

    def _observed(self, *happened: Any) -> np.ndarray:
        drawn = int(self.np_random.integers(1 << 30)), random.random(), np.random.random()
        self._digest = hashlib.blake2b(self._digest + repr((happened, drawn)).encode(), digest_size=16).digest()
        return np.frombuffer(self._digest, np.uint8).copy()


class Unseeded(History):
    """Leaves the generators of its process as they are."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        gym.Env.reset(self, seed=seed)
        self._digest, self._steps = b"", self._count()
        return self._observed("reset"), {"steps": 0}


class Living(History):
    """Says in its infos which env it is."""

    def __init__(self) -> None:
        self._life = os.urandom(8).hex()

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**options)
        return observation, {**info, "life": self._life}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        *results, info = super().step(action)
        return (*results, {**info, "life": self._life})  # type: ignore[return-value]


class Words(History):
    """Observes texts and a graph, too, and has an info that is large now and then."""

    observation_space = spaces.Dict(
        text=spaces.Text(32, charset="0123456789abcdef"),
        graph=spaces.Graph(spaces.Box(0, 255, (2,), np.uint8), None),
        digest=History.observation_space,
    )

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**options)
        return self._told(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *flags, info = super().step(action)
        if observation[3] < 64:
            info["large"] = bytes(observation).hex() * 4000
        return (self._told(observation), *flags, info)

    @staticmethod
    def _told(digest: np.ndarray) -> dict[str, Any]:
        nodes = digest[2 : 2 + 2 * (digest[0] % 6)].reshape(-1, 2)
        return {
            "text": digest.tobytes().hex()[: digest[1] % 33],
            "graph": spaces.GraphInstance(nodes, None, None),
            "digest": digest,
        }


class Closed(gym.Env[np.ndarray, int]):
    """Has all of its state in a generator and in closures."""

    observation_space = spaces.Box(0, 1, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            random.seed(seed)
        log: list[float] = []

        def walk() -> Any:
            at = 0.5
            while 0 < at < 1:
                at += (yield np.array([max(0.0, min(1.0, at)), random.random()])) * random.gauss(0.1, 0.1)
                log.append(at)
            yield np.array([at > 0.5, len(log) / 1000])

        self._walk, self._length = walk(), lambda: len(log)
        return next(self._walk), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation = self._walk.send(2 * int(action) - 1 + float(self.np_random.normal()))
        return observation, float(self._length()), bool(observation[0] in (0.0, 1.0)), self._length() > 40, {}


class Torch(gym.Env[np.ndarray, int]):
    """Draws from torch's generator, and multiplies matrices."""

    observation_space = spaces.Box(-1, 1, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        import torch

        super().reset(seed=seed)
        if seed is not None:
            torch.manual_seed(seed)
        self._weights, self._state = torch.randn(400, 400) / 20, torch.randn(400)
        return self._state[:8].tanh().numpy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        import torch

        self._state = torch.tanh(self._weights @ self._state + torch.randn(400) / 2 + float(action))
        observation = self._state[:8].numpy()
        return observation, float(self._state.sum()), bool(observation[0] > 0.95), False, {}


def obstacles() -> gym.Env[Any, Any]:
    """MiniGrid with balls that move at random, and its mission as text."""
    import minigrid

    gym.register_envs(minigrid)
    env = gym.make("MiniGrid-Dynamic-Obstacles-6x6-v0")
    parts = dict(env.observation_space.spaces)  # type: ignore[attr-defined]
    parts["mission"] = spaces.Text(99, charset="abcdefghijklmnopqrstuvwxyz ")
    return gym.wrappers.TransformObservation(env, lambda seen: seen, spaces.Dict(parts))


class Histories:
    """The results of a vector env's rows by their histories: equal histories must have equal results."""

    def __init__(self, envs: envhub.HubVectorEnv, seed: int) -> None:
        """Reset the envs by seeds from this one on."""
        envs.info_mode = "by_env"
        self._envs, self._of_rows = envs, [hash(seed + row) for row in range(envs.num_envs)]
        self._results: dict[int, Any] = {}
        self._shown: list[Any] = [None] * envs.num_envs  # by the last result: an observation and an info
        self._lives: list[Any] = [None] * envs.num_envs  # which env each is, if it says so in its infos
        self._taken: dict[str, dict[int, tuple[int, Any, Any]]] = {}
        self._unknown, self.counts = count(), Counter[str]()
        seeds = [seed + row for row in range(envs.num_envs)]
        self._see(range(envs.num_envs), map(str, seeds), envs.reset(seed=seeds))

    def step(self, actions: Sequence[Any]) -> None:
        results = self._envs.step(np.array(actions))
        self._see(range(len(actions)), map(str, actions), results)
        ended = np.logical_or(*results[2:4])
        if ended.any() and self._envs.autoreset_mode is AutoresetMode.DISABLED:
            reset = self._envs.reset(options={"reset_mask": ended})
            self._see(np.flatnonzero(ended).tolist(), repeat("reset"), reset)

    def take(self, rows: Sequence[int]) -> envhub.Snapshot:
        snapshot = self._envs.snapshot(rows)
        self._taken[snapshot.name] = {
            row: (self._of_rows[row], self._shown[row], self._lives[row]) for row in snapshot.env_ids
        }
        self.counts["taken"] += len(rows)
        return snapshot

    def restore(self, snapshot: envhub.Snapshot, rows: Sequence[int], sources: Sequence[int]) -> None:
        observations, infos = self._envs.restore(snapshot, rows, sources)
        for row, source in zip(rows, sources, strict=True):
            self._of_rows[row], before, self._lives[row] = self._taken[snapshot.name][source]
            self._shown[row] = shown = self._shown_of(row, observations, infos)
            assert before in (None, shown), (row, source, before, shown)
        self.counts["restored"] += len(rows)

    def forget(self, rows: Iterable[int]) -> None:
        """Note that nothing is known of what has happened to the envs in these rows."""
        for row in rows:
            self._of_rows[row], self._shown[row] = hash(("unknown", next(self._unknown))), None

    def _see(self, rows: Iterable[int], happened: Iterable[str], results: Any) -> None:
        observations, *flags, infos = results
        for row, event in zip(rows, happened, strict=False):
            info = infos.get(row, {})
            if "env_failure" in info or info.get("life") != self._lives[row]:
                self.forget([row])
                self._lives[row] = info.get("life")
            history = self._of_rows[row] = hash((self._of_rows[row], event))
            self._shown[row] = self._shown_of(row, observations, infos)
            result = (self._shown[row], text_of(info), *(each[row] for each in flags))
            before = self._results.setdefault(history, result)
            assert before == result, (row, event, before, result)
            self.counts["compared"] += before is not result

    def _shown_of(self, row: int, observations: Any, infos: dict[int, dict[str, Any]]) -> tuple[str, str]:
        own = _of_row(observations, row)
        info = {key: each for key, each in infos.get(row, {}).items() if key not in ("final_obs", "final_info")}
        return text_of(own), text_of(info)


def _of_row(batch: Any, row: int) -> Any:
    return {key: _of_row(each, row) for key, each in batch.items()} if isinstance(batch, dict) else batch[row]


def text_of(value: Any) -> str:
    """A text that two values share only if they are equal to the bit; without the time that an episode took."""
    if isinstance(value, dict):
        return str({key: text_of(each) for key, each in value.items() if key != "t"})
    if isinstance(value, (tuple, list)):
        return str([*map(text_of, value)])
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype}{value.shape}{hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    return repr(value)


def wander(
    envs: envhub.HubVectorEnv,
    rounds: int,
    seed: int,
    actions: Sequence[Any],
    snapshots_max: int = 4,
    of_a_hub: int | None = None,
) -> Counter[str]:
    """Step, take, restore, branch into 1, 4 or 16, and drop at random; returns counts of rows.

    They are of rows that were taken and restored, and of results that were compared with an equal history's. Where
    there are several hubs, each has so many envs, which are branched among themselves.

    Raises:
        AssertionError: two rows of one history had other results.
    """
    rng = np.random.default_rng(seed)
    histories, num_envs = Histories(envs, seed), envs.num_envs
    taken: list[envhub.Snapshot] = []
    for _ in range(rounds):
        what = rng.choice(["step", "take", "restore", "branch", "drop"], p=[0.43, 0.15, 0.18, 0.18, 0.06])
        if what == "take" and len(taken) < snapshots_max:
            rows = np.flatnonzero(rng.random(num_envs) < 0.6)
            taken.append(histories.take(rows.tolist() or [*range(num_envs)]))
        elif what == "restore" and taken:
            snapshot = taken[rng.integers(len(taken))]
            histories.restore(snapshot, snapshot.env_ids, snapshot.env_ids)
        elif what == "branch" and taken:
            snapshot = taken[rng.integers(len(taken))]
            source = int(rng.choice(snapshot.env_ids))
            hub = range(num_envs) if of_a_hub is None else range(source - source % of_a_hub, num_envs)[:of_a_hub]
            rows = rng.choice(hub, min(len(hub), int(rng.choice([1, 4, 16]))), replace=False)
            histories.restore(snapshot, sorted(rows.tolist()), [source] * len(rows))
        elif what == "drop" and taken:
            envs.drop(taken.pop(rng.integers(len(taken))))
        else:
            for _ in range(int(rng.integers(1, 6))):
                # Few actions, and often those of the other rows, so that histories meet again.
                chosen = rng.integers(2, size=num_envs) if rng.random() < 0.5 else [rng.integers(2)] * num_envs
                histories.step([actions[each] for each in chosen])
    return histories.counts
