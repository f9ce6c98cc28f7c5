"""A remote traceback shows the env's frames, and those of the library as a line."""

from __future__ import annotations

import re
import sys
from typing import Any

import gymnasium as gym
import pytest
from envhub_server.worker.context import describe_failure
from envhub_server.worker.row import EnvRunner
from gymnasium.wrappers import OrderEnforcing, TransformReward

FOLDED = re.compile(r"\[\d+ frames? of EnvHub and Gymnasium; ENVHUB_FULL_TRACEBACKS=1 shows them\]\n")


class Broken(gym.Env[int, int]):
    observation_space = action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> Any:
        try:
            raise KeyError("joint")
        except KeyError as error:
            raise ValueError("no such joint") from error


def report(raising: Any) -> str:
    with pytest.raises(Exception) as caught:
        raising()
    text: str = describe_failure(caught.value, "env_raised", 0, 0).traceback
    return text


def test_frames_between_the_step_and_the_env_are_one_line() -> None:
    text = report(lambda: EnvRunner(TransformReward(Broken(), float)).step(0))
    assert len(FOLDED.findall(text)) == 1 and "KeyError: 'joint'" in text
    assert text.count('raise KeyError("joint")') == 1 and text.count('raise ValueError("no such joint")') == 1
    assert "row.py" not in text and "core.py" not in text


def test_frames_of_the_library_between_two_wrappers_are_a_line_of_their_own() -> None:
    env = TransformReward(Reaching(TransformReward(Reaching(Plain()), float)), float)
    text = report(lambda: EnvRunner(env).step(0))
    assert len(FOLDED.findall(text)) == 2 and text.count(", in step\n") == 3


class Plain(Broken):
    def step(self, action: int) -> Any:
        raise ValueError("no such joint")


class Reaching(gym.Wrapper[int, int, int, int]):
    def step(self, action: int) -> Any:
        return self.env.step(action)


def test_last_frame_is_shown_also_where_it_is_the_librarys() -> None:
    text = report(lambda: EnvRunner(OrderEnforcing(Broken())).step(0))
    assert "in step\n" in text and "ResetNeeded" in text.splitlines()[-1]
    assert len(FOLDED.findall(text)) == 1 and "common.py" in text and "row.py" not in text


def test_all_frames_are_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_FULL_TRACEBACKS", "1")
    text = report(lambda: EnvRunner(OrderEnforcing(Broken())).step(0))
    assert "row.py" in text and not FOLDED.search(text)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions came with Python 3.11")
def test_frames_in_a_group_of_exceptions_are_folded_too() -> None:
    def raising() -> None:
        try:
            EnvRunner(Plain()).step(0)
        except ValueError as error:
            raise ExceptionGroup("arms", [error]) from None  # noqa: F821

    text = report(raising)
    assert "row.py" not in text and len(FOLDED.findall(text)) == 1 and "no such joint" in text
