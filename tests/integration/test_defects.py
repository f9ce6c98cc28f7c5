"""The defects of ``gymnasium.vector.AsyncVectorEnv`` 1.4 that EnvHub does better on: each fails there and passes here.

Every test runs on both; on upstream it is expected to fail, and where it passes after all, that is an error, too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import sims
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hubs import HERE, lives, stopped, wait_until

import envhub

Vectorizer = Callable[..., Any]
UPSTREAM = gym.vector.AsyncVectorEnv

pytestmark = pytest.mark.filterwarnings("ignore")  # both warn of every error of an env, and upstream of its own


# What the defect looks like where the test fails; elsewhere a wrong value.
SEEN_AS = {
    "test_5_exception_of_several_arguments_is_told": TypeError,
    "test_5_exception_that_cannot_be_pickled_is_told": TimeoutError,
    "test_6_wrong_attribute_ends_no_worker": AttributeError,
    "test_7_killed_worker_is_named_and_close_just_closes": (OSError, EOFError),
    "test_10_observation_that_does_not_fit_its_space_is_an_error": pytest.fail.Exception,
}


@pytest.fixture(
    params=[
        pytest.param(UPSTREAM, id="upstream", marks=pytest.mark.long),
        pytest.param(envhub.AsyncVectorEnv, id="envhub"),
    ]
)
def vectorizer(request: pytest.FixtureRequest) -> Vectorizer:
    """Upstream's class, on which the test must fail, and EnvHub's."""
    if request.param is UPSTREAM:
        seen_as = SEEN_AS.get(request.node.originalname, AssertionError)
        request.applymarker(pytest.mark.xfail(raises=seen_as, strict=True))
    chosen: Vectorizer = request.param
    return chosen


@contextlib.contextmanager
def made(vectorizer: Vectorizer, factories: list[Callable[[], Any]], **options: Any) -> Iterator[Any]:
    """The vector env, ended at once afterwards whatever became of it."""
    envs = vectorizer(factories, **options)
    try:
        yield envs
    finally:
        with contextlib.suppress(Exception):
            envs.close(terminate=True)


def words(space: gym.Space[Any]) -> gym.Env[Any, Any]:
    return sims.Anything(space, spaces.Discrete(2), [])


@pytest.mark.parametrize("space", [spaces.Text(8), spaces.OneOf([spaces.Discrete(99), spaces.Text(5)])], ids=str)
def test_1_text_and_one_of_change_from_step_to_step(vectorizer: Vectorizer, space: gym.Space[Any]) -> None:
    with made(vectorizer, [lambda: words(space)] * 2) as envs:
        seen = [repr(envs.reset(seed=1)[0]), *(repr(envs.step([0, 0])[0]) for _ in range(4))]
        assert len(set(seen)) == 5


def test_2_reset_clears_what_the_end_of_an_episode_owes(vectorizer: Vectorizer) -> None:
    with made(vectorizer, [lambda: sims.Counter(2)], shared_memory=False) as envs:
        envs.reset()
        envs.step([0])
        assert envs.step([0])[2].all()
        envs.reset()
        assert envs.step([5])[1].tolist() == [5]  # a step, and no second reset


def test_3_timed_out_wait_shifts_no_result(vectorizer: Vectorizer) -> None:
    with made(vectorizer, [sims.Naughty]) as envs:
        envs.reset()
        with stopped(*envs.call("pid")):
            envs.step_async([6])
            with pytest.raises(multiprocessing.TimeoutError):
                envs.step_wait(timeout=0.01)
        with contextlib.suppress(gym.error.NoAsyncCallError):
            envs.step_wait()
        assert envs.step([9])[1].tolist() == [9]


def test_4_wrong_number_of_actions_moves_no_env(vectorizer: Vectorizer) -> None:
    with made(vectorizer, [sims.Counter] * 3) as envs:
        envs.reset()
        with pytest.raises(ValueError):
            envs.step([1, 2])
        observations, rewards, *_ = envs.step([3, 4, 5])
        assert observations[:, 0].tolist() == [1, 1, 1] and rewards.tolist() == [3, 4, 5]


def test_5_exception_of_several_arguments_is_told(vectorizer: Vectorizer) -> None:
    with made(vectorizer, [sims.Naughty]) as envs:
        envs.reset()
        with pytest.raises((sims.TwoPartError, envhub.EnvRaised), match="two is worse"):
            envs.step([2])


SEALED = """
from {module} import AsyncVectorEnv
import sims

class Sealed(Exception):
    def __reduce__(self):
        raise TypeError("sealed")

class Sealing(sims.Counter):
    def act(self, action):
        raise Sealed("in wax")

envs = AsyncVectorEnv([Sealing])
envs.reset()
try:
    envs.step([0])
except Exception as error:
    assert "in wax" in str(error), error
envs.close()
"""


def test_5_exception_that_cannot_be_pickled_is_told(vectorizer: Vectorizer) -> None:
    module = "gymnasium.vector" if vectorizer is UPSTREAM else "envhub"
    environ = {**os.environ, "PYTHONPATH": str(HERE)}
    program = [sys.executable, "-c", SEALED.format(module=module)]
    process = subprocess.Popen(program, env=environ, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=2 if vectorizer is UPSTREAM else 20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise TimeoutError("it waits for ever") from None
    assert process.returncode == 0, errors


@pytest.mark.parametrize(("name", "error"), [("typo", AttributeError), ("reset", ValueError)])
def test_6_wrong_attribute_ends_no_worker(vectorizer: Vectorizer, name: str, error: type[Exception]) -> None:
    with made(vectorizer, [sims.Counter] * 2) as envs:
        envs.reset()
        with pytest.raises(error):
            envs.get_attr(name)
        assert envs.step([1, 2])[1].tolist() == [1, 2]


def test_7_killed_worker_is_named_and_close_just_closes(vectorizer: Vectorizer) -> None:
    with made(vectorizer, [sims.Counter] * 2) as envs:
        envs.reset()
        worker = psutil.Process(envs.call("pid")[0])  # of both envs, where there are two CPUs
        worker.kill()
        assert wait_until(lambda: not lives(worker))
        infos = envs.step([0, 0])[4]
        assert "worker 0" in infos["env_failure"][0].message
        envs.close()


def test_8_mask_stays_in_the_options_for_the_wrapper_outside(vectorizer: Vectorizer) -> None:
    with made(vectorizer, [sims.Counter] * 2, autoreset_mode=AutoresetMode.DISABLED) as envs:
        counted = RecordEpisodeStatistics(envs)
        counted.reset()
        for _ in range(2):
            counted.step(np.array([1, 1]))
        counted.reset(options={"reset_mask": np.array([True, False])})
        assert counted.episode_lengths.tolist() == [0, 2]


class Reusing(sims.Counter):
    """Writes every observation into the same array."""

    def __init__(self) -> None:
        super().__init__(length=2)
        self.buffer = np.zeros(2)

    def observation(self) -> np.ndarray:
        self.buffer[:] = self.count
        return self.buffer


def test_9_final_observation_is_not_overwritten_by_the_reset(vectorizer: Vectorizer) -> None:
    with made(vectorizer, [Reusing], autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        envs.reset()
        envs.step([0])
        *_, infos = envs.step([0])
        assert infos["final_obs"][0].tolist() == [2, 2]


class Truncating(sims.Counter):
    """Observes fractions where its space has whole numbers."""

    observation_space = spaces.Box(0, 10, (3,), np.int64)  # type: ignore[assignment]

    def observation(self) -> np.ndarray:
        return np.array([1.7, 2.7, 3.7])


class Overflowing(Truncating):
    """Observes numbers that the type of its space has not."""

    observation_space = spaces.Box(0, 255, (3,), np.uint8)  # type: ignore[assignment]

    def observation(self) -> np.ndarray:
        return np.array([300, -1, 0])


class Spreading(Truncating):
    """Observes one number where its space has three."""

    def observation(self) -> np.ndarray:
        return np.array([7])


@pytest.mark.parametrize("env", [Truncating, Overflowing, Spreading])
def test_10_observation_that_does_not_fit_its_space_is_an_error(vectorizer: Vectorizer, env: Any) -> None:
    with made(vectorizer, [env]) as envs, pytest.raises((TypeError, ValueError)):
        envs.reset()
