"""Envs that hubs serve to the frameworks."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text


def cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def pendulum() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1", max_episode_steps=30)


def monitored() -> gymnasium.Env[Any, Any]:
    from stable_baselines3.common.monitor import Monitor

    return Monitor(cartpole())


class Kinds(gymnasium.Env[Any, Any]):
    """Observations in a dict, infos that come and go, and attributes of every kind."""

    observation_space = Dict({"position": Box(-9, 9, (2,), np.float32), "count": Discrete(99)})
    action_space = Discrete(3)

    def __init__(self) -> None:
        self.value, self.steps = 3, 0
        self.lock = threading.Lock()

    @property
    def computed(self) -> int:
        return self.value + 1

    @property
    def raising(self) -> int:
        raise ValueError("a property that raises")

    def fails(self) -> None:
        raise RuntimeError("a method that raises")

    def action_masks(self) -> np.ndarray:
        return np.array([True, self.steps % 2 == 0, True])

    def method(self, by: int, plus: int = 0) -> int:
        return self.value * by + plus

    def _observed(self) -> dict[str, Any]:
        position = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"position": position, "count": np.int64(self.steps)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), {"options": str(options)}

    def step(self, action: Any) -> Any:
        self.steps += 1
        info = {"text": "third", "steps": self.steps} if self.steps % 3 == 0 else {}
        return self._observed(), float(action), self.steps == 7, self.steps % 5 == 0, info


class Composed(gymnasium.Env[Any, Any]):
    """Takes composed actions; episodes of three steps."""

    observation_space = Box(-99, 99, (2,), np.float32)

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        self.action_space, self.steps = action_space, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        number, vector = action.values() if isinstance(action, dict) else action
        return np.array([number, vector[0]], np.float32), float(vector[1]), self.steps == 3, False, {}


class Sleeps(gymnasium.Env[Any, Any]):
    """Its action is for how many milliseconds it sleeps; episodes of four steps, which it counts in observations."""

    observation_space = Box(0, 1e6, (2,), np.float32)
    action_space = Box(0, 1e4, (), np.float32)

    def __init__(self) -> None:
        self.episodes = self.steps = 0

    def _observed(self) -> np.ndarray:
        return np.array([self.episodes, self.steps], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episodes, self.steps = self.episodes + 1, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        time.sleep(float(action) / 1e3)
        self.steps += 1
        return self._observed(), 1.0, self.steps == 4, False, {}


class Counts(Sleeps):
    """Episodes of ten steps and return 10; every third one of a process ends that process in its fifth step."""

    action_space = Discrete(2)  # type: ignore[assignment]

    def __init__(self, dies: bool = True) -> None:
        super().__init__()
        self.dies = dies

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.dies and self.steps == 5 and self.episodes % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._observed(), 1.0, self.steps == 10, False, {}


class Raises(Kinds):
    """Raises in its third step."""

    def step(self, action: Any) -> Any:
        if self.steps == 2:
            raise RuntimeError("a step that raises")
        return super().step(action)


class Draws(Counts):
    """Its frames show how many steps it has taken."""

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self) -> None:
        super().__init__(dies=False)

    def render(self) -> Any:
        return np.full((8, 8, 3), self.steps, np.uint8)


class Seeded(Kinds):
    """Has the method that tianshou seeds older envs by."""

    def seed(self, seed: int) -> list[int]:
        return [seed]


class Differs(Draws):
    """Observes a shape of its own, or of env 1 a dict; episodes of its own length. ``acts`` says its actions' shape."""

    def __init__(self, row: int, acts: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.row = row
        box = Box(-1, 1, (row + 1,), np.float32)
        self.observation_space: Any = Dict(own=box) if row == 1 else box
        self.action_space: Any = Discrete(2 + row) if acts is None else Box(-1, 1, acts)

    def _observed(self) -> Any:
        found = self.np_random.uniform(-1, 1, self.row + 1).astype(np.float32)
        return {"own": found} if self.row == 1 else found

    def step(self, action: Any) -> Any:
        observation, _, *_ = super().step(action)
        return observation, float(np.sum(action)), self.steps == 3 + self.row, False, {"acted": np.shape(action)}


class Images(gymnasium.Env[Any, Any]):
    """Observations in dicts, an image, and infos; episodes are truncated after five steps."""

    observation_space = Dict(
        {
            "position": Box(-9, 9, (2,), np.float32),
            "image": Box(0, 255, (6, 5, 3), np.uint8),
            "inner": Dict({"count": Discrete(9)}),
        }
    )
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self) -> None:
        self.steps = 0

    def _observed(self) -> dict[str, Any]:
        return {
            "position": self.np_random.uniform(-1, 1, 2).astype(np.float32),
            "image": self.np_random.integers(0, 256, (6, 5, 3), np.uint8),
            "inner": {"count": np.int64(self.steps)},
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), {"taken": np.float32(0)}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return (
            self._observed(),
            float(action.sum()),
            self.steps == 5,
            self.steps % 5 == 0,
            {"taken": np.float32(self.steps)},
        )


class Speaks(gymnasium.Env[Any, Any]):
    """Says in which step of which episode it is, alone or beside a number; each episode has a step more."""

    action_space = Discrete(2)

    def __init__(self, alone: bool = False) -> None:
        self.observation_space: Any = Text(9) if alone else Dict(said=Text(9), place=Box(-1, 99, (1,), np.float32))
        self.alone, self.episode, self.steps = alone, 0, 0

    def _observed(self) -> Any:
        said = f"{self.episode}x{self.steps}"
        return said if self.alone else {"said": said, "place": np.array([self.steps], np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observed(), 1.0, self.steps > self.episode, False, {}


class Lengthens(gymnasium.Env[Any, Any]):
    """Shows the number of its episode, which is its length in steps but for the first, and of the step in it."""

    observation_space = Box(-1, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.episode, self.steps = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == 1 and self.steps == 1 and self.episode == 3:
            raise ArithmeticError("the third episode begins with a 1")
        observation = np.array([self.episode, self.steps], np.float32)
        return observation, 1.0, self.steps >= max(2, self.episode), False, {}


class Dies(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends its process in the fifth step of every third episode."""

    def __init__(self, env: Any = None) -> None:
        super().__init__(cartpole() if env is None else env)
        self.episode = self.taken = 0

    def reset(self, **arguments: Any) -> Any:
        self.episode, self.taken = self.episode + 1, 0
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.taken == 5 and self.episode % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
