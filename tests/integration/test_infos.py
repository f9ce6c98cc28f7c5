"""Infos that are no dict: what Gymnasium can batch works here, too, and anything else is the env's error."""

from __future__ import annotations

import collections
import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from same import assert_same

import envhub


class Informing(sims.Counter):
    """Ends after two steps; its infos of steps and resets are its maker's."""

    def __init__(self, of_step: Any, of_reset: Any) -> None:
        super().__init__(length=2)
        self.of_step, self.of_reset = of_step, of_reset

    def reset(self, **arguments: Any) -> tuple[np.ndarray, Any]:
        return super().reset(**arguments)[0], self.of_reset

    def step(self, action: Any) -> tuple[Any, ...]:
        return *super().step(action)[:4], self.of_step

    def observation(self) -> np.ndarray:
        return np.array([self.count, 0], np.float64)


class Own(dict[str, Any]):
    """A dict of a program's own."""


NO_MAPS = [[("a", 1)], (("a", 1),), [], None, "text", 3]
MAPS = [types.MappingProxyType({"a": 1}), collections.UserDict(a=1), Own(a=1), collections.OrderedDict(a=1)]


@contextlib.contextmanager
def made(of_step: Any, of_reset: Any, **options: Any) -> Iterator[Any]:
    with contextlib.closing(envhub.make_vec([lambda: Informing(of_step, of_reset)] * 2, **options)) as envs:
        yield envs


@pytest.mark.parametrize("lane", ["auto", pytest.param("wire", marks=pytest.mark.long)])
@pytest.mark.parametrize("info", NO_MAPS, ids=repr)
def test_info_that_is_no_map_is_the_envs_error(info: Any, lane: str) -> None:
    sync = SyncVectorEnv([lambda: Informing(info, {})] * 2)
    sync.reset()
    with pytest.raises(AttributeError, match="has no attribute 'items'"):
        sync.step([0, 0])
    with made(info, {}, lane=lane) as envs:
        envs.reset()
        for _ in range(2):
            with pytest.raises(AttributeError, match="has no attribute 'items'") as caught:
                envs.step([0, 0])
            assert isinstance(caught.value.__cause__, envhub.EnvRaised) and caught.value.__cause__.env_index == 0
            assert envs.reset()[0][:, 0].tolist() == [0, 0]
    with made({}, info, lane=lane) as envs:
        with pytest.raises(AttributeError, match="has no attribute 'items'"):
            envs.reset()
        assert envs.call("add", 1, 2) == (3, 3)


def test_info_that_is_no_map_can_be_a_truncation() -> None:
    with made([("a", 1)], {}, on_exception="truncate") as envs:
        envs.reset()
        *_, truncations, infos = envs.step([0, 0])
        assert truncations.all() and "'items'" in infos["env_failure"][0].message


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("info", MAPS, ids=lambda info: type(info).__name__)
def test_map_of_any_kind_is_an_info(info: Any, mode: AutoresetMode) -> None:
    compare(info, info, mode)


class Deep(Informing):
    """Its infos are dicts in dicts, deeper than can be copied, pickled or encoded."""

    def step(self, action: Any) -> tuple[Any, ...]:
        info: dict[str, Any] = {}
        for _ in range(500):
            info = {"d": info}
        return *super().step(action)[:4], info


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.value)
def test_info_that_is_too_deep_to_be_copied_ends_no_step(mode: AutoresetMode) -> None:
    with contextlib.closing(envhub.make_vec([lambda: Deep({}, {})] * 2, autoreset_mode=mode)) as envs:
        envs.reset()
        envs.step([0, 0])
        *_, terminations, _, infos = envs.step([0, 0])
        assert terminations.all()
        ended = infos["final_info"] if mode is AutoresetMode.SAME_STEP else infos
        assert "d" in ended["d"]


@pytest.mark.parametrize("info", [*NO_MAPS, {}], ids=repr)
def test_final_info_is_whatever_the_env_gave(info: Any) -> None:
    class Ending(Informing):
        def step(self, action: Any) -> tuple[Any, ...]:
            *found, given = super().step(action)
            return *found, given if found[2] else {"a": 2}

    compare(info, {"a": 1}, AutoresetMode.SAME_STEP, Ending)


def compare(of_step: Any, of_reset: Any, mode: AutoresetMode, env: Any = Informing) -> None:
    """Two episodes are the same as in ``SyncVectorEnv``."""
    results = []
    for kind in (envhub.AsyncVectorEnv, SyncVectorEnv):
        envs: gym.vector.VectorEnv[Any, Any, Any] = kind([lambda: env(of_step, of_reset)] * 2, autoreset_mode=mode)
        with contextlib.closing(envs):
            found: list[Any] = [envs.reset(seed=1)]
            for _ in range(2):
                found.append(envs.step([0, 1]))
        results.append(found)
    for number, (left, right) in enumerate(zip(*results, strict=True)):
        assert_same(left, right, f"record {number}")


# --- infos of many forms ----------------------------------------------------------------------------------------------


class Detector(sims.Counter):
    """Ends after 70 steps; each step of each process has an info of another form."""

    def __init__(self) -> None:
        super().__init__(length=70)

    def step(self, action: Any) -> tuple[Any, ...]:
        found = super().step(action)
        return *found[:4], {f"of_{os.getpid()}_{self.count}": self.count}


@pytest.mark.long
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_worker_that_takes_over_has_infos_of_forms_of_its_own(lane: str) -> None:
    """A process has more forms than go in columns, and four take over from one another."""
    options: dict[str, Any] = {"lane": lane, "recycle": {"episodes": 1}}
    with contextlib.closing(envhub.make_vec(Detector, 1, num_workers=1, **options)) as envs:
        envs.reset()
        processes: set[str] = set()
        while len(processes) < 4:
            *_, infos = envs.step([1])
            for key, (value,) in ((key, value) for key, value in infos.items() if key.startswith("of_")):
                processes.add(key.split("_")[1])
                assert key.endswith(f"_{value}")


@pytest.mark.parametrize(
    ("values", "error", "told"),
    [
        ((1, 2**70), OverflowError, "too large to convert"),
        ((2**70, 1), OverflowError, "too large to convert"),
        ((np.zeros(2), np.zeros(3)), ValueError, "could not broadcast"),
    ],
)
def test_info_that_cannot_be_batched_is_named_with_its_env(values: Any, error: type[Exception], told: str) -> None:
    space = gym.spaces.Discrete(2)
    factories = [lambda value=value: sims.Anything(space, space, [{}, {"fine": 1, "odd": value}]) for value in values]
    with contextlib.closing(envhub.make_vec(factories)) as envs:
        envs.reset()
        with pytest.raises(error, match=rf"infos\['odd'\] of env \d is not batched with the others: .*{told}"):
            envs.step([0, 0])
            envs.step([0, 0])
        envs.reset()
