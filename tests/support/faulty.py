"""An env that fails in whatever way its action says."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

KILL, SEGFAULT, EXIT, SLEEP, HOLD_GIL, RAISE, END = range(1, 8)


class Faulty(gym.Env[np.ndarray, int]):
    """Observes its steps since the reset, a number drawn at the reset, and its process."""

    observation_space = spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = spaces.Discrete(10)

    def __init__(
        self, marks: str = "", build_s: float = 0.0, fail_from: int = 10**9, wider_from: int = 10**9, held_by: str = ""
    ) -> None:
        """Leave a file in ``marks`` for each time one is made; from some on, making fails or has another space.

        While there is a file ``held_by``, none is made.
        """
        self.steps, self.drawn = 0, 0.0
        while held_by and Path(held_by).exists():
            time.sleep(0.01)
        if marks:
            made = len(list(Path(marks).iterdir()))
            (Path(marks) / f"{made}-{os.getpid()}-{time.monotonic_ns()}").touch()
            if made >= fail_from:
                raise RuntimeError("the simulator's licence has expired")
            if made >= wider_from:
                self.observation_space = spaces.Box(-1e9, 1e9, (4,), np.float64)
        time.sleep(build_s)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        for act in (options or {}).get("act", ()):
            self.act(act)
        self.steps, self.drawn = 0, float(self.np_random.integers(10**6))
        return self.seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.act(int(action))
        return self.seen(), 1.0, action == END, False, {"steps": self.steps}

    def seen(self) -> np.ndarray:
        return np.array([self.steps, self.drawn, os.getpid()], np.float64)

    def act(self, action: int) -> None:
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == SEGFAULT:
            ctypes.string_at(0)
        if action == EXIT:
            os._exit(7)
        if action == SLEEP:
            time.sleep(3600)
        if action == HOLD_GIL:
            re.match("(a+)+$", "a" * 64 + "b")  # for years, in C
        if action == RAISE:
            raise KeyError("no such joint")

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Wordy(Faulty):
    """Says more of each step than has room beside it."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return (*super().step(action)[:4], {"story": "x" * 5000})


class Spoken(Faulty):
    """Takes words for actions: "end" ends the episode, a digit is an action of ``Faulty``."""

    action_space = spaces.Text(10)  # type: ignore[assignment]

    def step(self, action: str) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        seen, reward, _, truncated, info = super().step(0 if action == "end" else int(action))
        return seen, reward, action == "end", truncated, info


class FaultyParts(Faulty):
    """Observes a text besides, which has no fixed size."""

    observation_space = spaces.Dict({"steps": Faulty.observation_space, "said": spaces.Text(20)})  # type: ignore[assignment]

    def __init__(self, repeats: int = 1, **kwargs: Any) -> None:
        """Say it so many times."""
        super().__init__(**kwargs)
        self._repeats = repeats

    def seen(self) -> Any:
        return {"steps": super().seen(), "said": f"step {self.steps}" * self._repeats}


class Unfinished(FaultyParts):
    """Shows a last part that is wrong, when it is told to."""

    observation_space = spaces.Dict({**FaultyParts.observation_space.spaces, "well": spaces.Discrete(2)})  # type: ignore[attr-defined]

    def seen(self) -> Any:
        return {**super().seen(), "well": 1}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest = super().step(0)
        return ({**observation, "well": "no"} if action == RAISE else observation), *rest  # type: ignore[return-value]


def disconnected() -> gym.Env[Any, Any]:
    raise ConnectionError("no arm is connected")


faulty, wordy, spoken, faulty_parts, unfinished = Faulty, Wordy, Spoken, FaultyParts, Unfinished
