"""The examples with PyTorch learn, over private and served hubs, and while what they depend on is killed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hubs import kill_worker, serve, worker_pid, worker_pids

import envhub

EXAMPLES = Path(__file__).parents[3] / "client" / "examples"
sys.path.append(str(EXAMPLES))

import lerobot_style  # noqa: E402
import torch_ppo  # noqa: E402


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
def test_torch_ppo_learns() -> None:
    assert run("torch_ppo.py", "--seed", "1") >= 475


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

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(envs, name)

        def step(self, actions: Any) -> Any:
            if len(ends) == 3:
                kill_worker(worker_pid(others))
            result = envs.step(actions)
            resets = ends[-1][1] if ends else np.zeros(2, bool)
            invalid = result[4].get("_invalid_transition", np.zeros(2, bool))
            ends.append((resets | invalid, result[2] | result[3]))
            return result

    torch_ppo.learn(Watched(), 2 * torch_ppo.LENGTH, 1)
    envs.close()
    left_out = sum(int(row.sum()) for row, _ in ends)
    assert left_out >= 2 and counted == [2 * torch_ppo.LENGTH - left_out] * torch_ppo.EPOCHS
