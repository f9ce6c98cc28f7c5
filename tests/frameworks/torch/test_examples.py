"""The examples with PyTorch learn, over private and served hubs, and while what they depend on is killed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from envhub_client.private_hub.process import private_hub
from hubs import kill_worker, lives, serve, wait_until, worker_pid, worker_pids

import envhub

EXAMPLES = Path(__file__).parents[3] / "client" / "examples"
sys.path.append(str(EXAMPLES))

import lerobot_style  # noqa: E402
import torch_ppo  # noqa: E402

STEPS = 150_000


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(example: str, *arguments: str) -> float:
    """Run an example as a user does; returns the mean return that it prints."""
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"mean return (-?[\d.]+).* of 50 episodes", printed)
    assert found is not None, printed
    return float(found[1])


def test_examples_are_short() -> None:
    for name in ("torch_ppo.py", "lerobot_style.py", "rllib_ppo.py", "gym_reach.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 100, name


def test_torch_ppo_runs_over_tcp(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        assert 8 <= run("torch_ppo.py", "--hub", hub.tcp, "--steps", "4096") <= 500


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "over_tcp", [pytest.param(False, id="private hub", marks=pytest.mark.chaos), pytest.param(True, id="tcp")]
)
def test_lerobot_style_learns(over_tcp: bool, tmp_path: Path) -> None:
    with serve(tmp_path, "gym_reach:gym_reach/Reach-v0", cwd=EXAMPLES) as hub:
        assert run("lerobot_style.py", *(["--hub", hub.tcp] if over_tcp else [])) > 0.8


class Still(lerobot_style.Policy):
    """Never move: an episode succeeds in its first step, with a return of 0.99, or lasts 50 steps and returns -0.5."""

    def forward(self, observation: dict[str, Any]) -> torch.Tensor:
        return torch.zeros(len(observation["agent_pos"]), 2)


def test_an_evaluation_leaves_out_what_a_crash_cut_short() -> None:
    others = worker_pids()  # of sessions that nobody has closed
    envs = envhub.make_vec(lerobot_style.TASK, 4, num_workers=4, autoreset_mode="SameStep")
    step, killed = envs.step, []

    def step_and_kill(actions: Any) -> Any:
        if not killed:
            killed.append(worker_pid(others))
            kill_worker(killed[0])
        return step(actions)

    envs.step = step_and_kill  # type: ignore[method-assign]
    mean_return, success = lerobot_style.evaluate(envs, Still(32), 8, 1)
    envs.close()
    assert killed and mean_return == pytest.approx(0.99 * success - 0.5 * (1 - success))


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_torch_ppo_learns(seed: int) -> None:
    assert run("torch_ppo.py", "--seed", str(seed)) >= 475


class Recorded:
    """A vector env whose rewards and ends are kept."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self.rewards: list[np.ndarray] = []
        self.ends: list[np.ndarray] = []

    def step(self, actions: Any) -> Any:
        result = self._envs.step(actions)
        self.rewards.append(result[1].copy())
        self.ends.append(result[2] | result[3])
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envs, name)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_torch_ppo_is_the_same_wherever_the_envs_are(tmp_path: Path) -> None:
    def learned(vector_env: Any) -> tuple[np.ndarray, np.ndarray, list[torch.Tensor]]:
        envs = Recorded(vector_env)
        policy = torch_ppo.learn(envs, STEPS, 1)
        vector_env.close()
        return np.array(envs.rewards), np.array(envs.ends), [each.detach() for each in policy.parameters()]

    count = torch_ppo.NUM_ENVS
    factories = [lambda: gymnasium.make("CartPole-v1")] * count
    with serve(tmp_path, "CartPole-v1") as hub:
        rewards, ends, weights = learned(gymnasium.vector.SyncVectorEnv(factories))
        assert len(rewards) * count >= STEPS and ends.sum() > 500
        for vector_env in (
            envhub.make_vec("CartPole-v1", count),
            envhub.make_vec("CartPole-v1", count, hub=hub.tcp, lane="wire"),
        ):
            found = learned(vector_env)
            np.testing.assert_array_equal(found[0], rewards)
            np.testing.assert_array_equal(found[1], ends)
            assert all(map(torch.equal, found[2], weights))


class Killed:
    """A vector env in the course of whose steps workers, and once the hub, are killed."""

    def __init__(self, envs: Any, steps: int, others: Collection[int] = ()) -> None:
        self._envs, self._others = envs, others
        self._at, self._steps = 0, steps
        self.kills: list[str] = []

    def step(self, actions: Any) -> Any:
        self._at += 1
        if self._at * 8 >= self._steps * (len(self.kills) + 1) and len(self.kills) < 7:
            if len(self.kills) == 3:
                hub = psutil.Process(private_hub().pid)
                hub.kill()
                assert wait_until(lambda: not lives(hub))
                self.kills.append("hub")
            else:
                kill_worker(worker_pid(self._others))
                self.kills.append("worker")
        return self._envs.step(actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envs, name)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_torch_ppo_learns_while_six_workers_and_a_hub_are_killed() -> None:
    others = worker_pids()  # of sessions that nobody has closed
    vector_env = envhub.make_vec(
        "CartPole-v1", torch_ppo.NUM_ENVS, num_workers=2, on_hub_loss="recreate", restarts_max=100
    )
    envs = Killed(vector_env, STEPS // torch_ppo.NUM_ENVS, others)
    policy = torch_ppo.learn(envs, STEPS, 1)
    assert sorted(envs.kills) == ["hub"] + ["worker"] * 6
    assert torch_ppo.mean_return(vector_env, policy, 50, 10**6) >= 475
    vector_env.close()


def test_rows_that_report_a_crash_have_no_part_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the crash of a worker adds to a batch is left out: the same rows learn the same without it."""
    others = worker_pids()  # of sessions that nobody has closed
    envs = envhub.make_vec("CartPole-v1", 2, num_workers=2)
    counted: list[int] = []
    split = torch.Tensor.split

    def counting(rows: torch.Tensor, size: int) -> Any:
        counted.append(len(rows))
        return split(rows, size)

    monkeypatch.setattr(torch.Tensor, "split", counting)
    ends = []

    class Watched(Killed):
        def step(self, actions: Any) -> Any:
            if len(ends) == 3:
                kill_worker(worker_pid(others))
            result = self._envs.step(actions)
            resets = ends[-1][1] if ends else np.zeros(2, bool)
            invalid = result[4].get("_invalid_transition", np.zeros(2, bool))
            ends.append((resets | invalid, result[2] | result[3]))
            return result

    torch_ppo.learn(Watched(envs, 1), 2 * torch_ppo.LENGTH, 1)
    envs.close()
    left_out = sum(int(row.sum()) for row, _ in ends)
    assert left_out >= 2 and counted == [2 * torch_ppo.LENGTH - left_out] * torch_ppo.EPOCHS
