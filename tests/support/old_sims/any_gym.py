"""Envs for every gym and Gymnasium, and the same envs run directly.

``python any_gym.py`` reads runs from its standard input, each a line of JSON with an env's name and arguments, a seed
and actions. Runs on Python 3.8 and later. What an env gave is told in
JSON: the one interpreter cannot read the other's pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

try:
    import gymnasium as gym
except ImportError:
    import gym  # type: ignore[import-not-found, no-redef]

spaces: Any = gym.spaces
FOUR_VALUES = gym.__name__ == "gym" and tuple(map(int, gym.__version__.split(".")[:2])) < (0, 26)
LENGTH = 4  # of an episode of the envs here


def space_of(kind: str) -> Any:
    """The space of this kind, new each time: a space has a random generator of its own."""
    box = spaces.Box(-1, 1, (2, 3), np.float32)
    return {
        "Box": lambda: box,
        "Box-float64": lambda: spaces.Box(np.array([-1.0, -np.inf]), np.array([np.inf, 2.0]), dtype=np.float64),
        "Box-image": lambda: spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "Discrete": lambda: spaces.Discrete(7),
        "Discrete-start": lambda: spaces.Discrete(7, start=-3),
        "MultiDiscrete": lambda: spaces.MultiDiscrete([3, 4, 5]),
        "MultiBinary": lambda: spaces.MultiBinary(5),
        "MultiBinary-2d": lambda: spaces.MultiBinary([2, 3]),
        "Dict": lambda: spaces.Dict(
            {"b": spaces.Discrete(3), "a": spaces.Dict({"x": box, "w": spaces.MultiBinary(2)})}
        ),
        "Tuple": lambda: spaces.Tuple((spaces.Discrete(3), box)),
        "Tuple-of-tuple": lambda: spaces.Tuple((spaces.Tuple((spaces.Discrete(3), box)), spaces.Discrete(2))),
        "Dict-of-tuple": lambda: spaces.Dict({"t": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"x": box})))}),
        "Text": lambda: spaces.Text(6, min_length=1, charset="abcdef"),
        "Sequence": lambda: spaces.Sequence(spaces.Box(0, 1, (2,), np.float32)),
        "Graph": lambda: spaces.Graph(spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(4)),
        "OneOf": lambda: spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32)]),
        "Tuple-of-text": lambda: spaces.Tuple((spaces.Text(4, charset="xyz"), spaces.Discrete(3))),
        "Tuple-of-list": lambda: spaces.Tuple([spaces.Discrete(3), spaces.Tuple([box])]),
    }[kind]()


# The kinds that each version has, with the first version that has them.
KINDS = {
    "gym 0.21": [
        *("Box", "Box-float64", "Box-image", "Discrete", "MultiDiscrete", "MultiBinary", "MultiBinary-2d"),
        *("Dict", "Tuple", "Tuple-of-tuple", "Tuple-of-list", "Dict-of-tuple"),
    ],
    "gym 0.26": ["Discrete-start", "Text", "Sequence", "Graph", "Tuple-of-text"],
    "gymnasium 1.0": ["OneOf"],
}


def plain(space: Any, value: Any) -> Any:
    """The value as JSON, without loss: two values have the same if they are the same to the last bit."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: plain(sub, value[key]) for key, sub in sorted(space.spaces.items())}
    if kind == "Tuple":
        return [plain(sub, part) for sub, part in zip(space.spaces, value)]
    if kind == "Discrete":
        return int(value)
    if kind == "Text":
        return str(value)
    if kind == "Sequence":
        return [plain(space.feature_space, part) for part in value]
    if kind == "OneOf":
        return [int(value[0]), plain(space.spaces[int(value[0])], value[1])]
    if kind == "Graph":
        arrays = value.nodes, value.edges, value.edge_links
        return [None if one is None else [list(one.shape), np.asarray(one).tobytes().hex()] for one in arrays]
    array = np.asarray(value)
    assert array.dtype == space.dtype and array.shape == space.shape, (array.dtype, array.shape, space)
    return array.tobytes().hex()


def from_plain(space: Any, told: Any) -> Any:
    """The action that ``plain`` told."""
    kind = type(space).__name__
    if kind == "Dict":
        return {key: from_plain(sub, told[key]) for key, sub in space.spaces.items()}
    if kind == "Tuple":
        return tuple(from_plain(sub, part) for sub, part in zip(space.spaces, told))
    if kind == "Discrete":
        return np.int64(told)
    return np.frombuffer(bytes.fromhex(told), space.dtype).reshape(space.shape)


class Sim(gym.Env):  # type: ignore[type-arg]
    """An env of whichever version is installed; a subclass says what it does."""

    metadata = {"render.modes": ["rgb_array"], "render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.count = 0

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.start(seed)
        return [seed]

    def start(self, seed: int | None) -> None:
        pass

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.start(seed)
        self.count = 0
        return self.observe() if FOUR_VALUES else (self.observe(), {})

    def step(self, action: Any) -> Any:
        self.count += 1
        info = self.act(action)
        ends = self.count >= LENGTH
        if FOUR_VALUES:
            return self.observe(), self.count / 3, ends, info
        return self.observe(), self.count / 3, ends, False, info

    def render(self, mode: str = "rgb_array") -> Any:
        return np.full((4, 6, 3), self.count, np.uint8)

    def observe(self) -> Any:
        raise NotImplementedError

    def act(self, action: Any) -> dict[str, Any]:
        return {}


class Kinds(Sim):
    """Observations and actions of one kind of space; the info tells the action that arrived."""

    def __init__(self, kind: str = "Box", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = space_of(kind)
        self.action_space = space_of(kind if kind in KINDS["gym 0.21"] else "Discrete")

    def start(self, seed: int | None) -> None:
        self.observation_space.seed(seed)

    def observe(self) -> Any:
        return self.observation_space.sample()

    def act(self, action: Any) -> dict[str, Any]:
        told = json.dumps(plain(self.action_space, action))
        return {"action": int(hashlib.sha256(told.encode()).hexdigest()[:8], 16)}


class Unruly(Sim):
    """Observes its count and its process, or what its seed gives; an action says what to do."""

    DEEDS = ("nothing", "raise", "crash", "hang", "exit", "print", "fork", "signals", "threads")

    def __init__(self, seeded: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seeded = seeded
        self.observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.action_space = spaces.Discrete(len(self.DEEDS))

    def start(self, seed: int | None) -> None:
        self.observation_space.seed(seed)

    def observe(self) -> Any:
        number = self.observation_space.sample()[1] if self.seeded else os.getpid()
        return np.array([self.count, number], np.float64)

    def act(self, action: Any) -> dict[str, Any]:
        deed = self.DEEDS[int(action)]
        if deed == "raise":
            raise ValueError("boom", 3)
        if deed == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if deed == "hang":
            time.sleep(1000)
        if deed == "exit":
            os._exit(3)
        if deed == "print":
            os.write(1, b"\xff\x00junk\n" * 1000)
            sys.stdout.write("and more")
        if deed == "fork" and not os.fork():
            os._exit(0)
        if deed == "signals":
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGPIPE):
                signal.signal(number, signal.SIG_IGN)
        if deed == "threads":
            for _ in range(3):
                threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        return {}

    def place(self) -> list[Any]:
        """Its interpreter, its folder, and the variables of its process."""
        return [sys.prefix, os.getcwd(), dict(os.environ)]

    def add(self, one: int, other: int = 1) -> int:
        return one + other


def kinds(**kwargs: Any) -> Any:
    return Kinds(**kwargs)


def unruly(**kwargs: Any) -> Any:
    return Unruly(**kwargs)


def run(env: Any, seed: int, actions: list[Any]) -> list[Any]:
    """What the env gives for these actions, reset in the step after the end of an episode, as a vector env does it."""

    def reset(seed: int | None) -> Any:
        if not FOUR_VALUES:
            return env.reset(seed=seed)[0]
        if seed is not None:
            env.seed(seed)
        return env.reset()

    records = [[plain(env.observation_space, reset(seed))]]
    ended = False
    for told in actions:
        if ended:
            records.append([plain(env.observation_space, reset(None)), float(0).hex(), False, False, None])
            ended = False
            continue
        observation, reward, terminated, *more, info = env.step(from_plain(env.action_space, told))
        truncated = more[0] if more else bool(info.get("TimeLimit.truncated", False))
        terminated = bool(terminated) and (bool(more) or not truncated)
        ended = bool(terminated or truncated)
        told_reward = float(reward).hex()
        record = [plain(env.observation_space, observation), told_reward, terminated, bool(truncated)]
        records.append([*record, info.get("action")])
    return records


def main() -> None:
    told, sys.stdout = sys.stdout, sys.stderr  # where an env or a package may print
    for line in sys.stdin:
        name, kwargs, seed, actions = json.loads(line)
        env = kinds(**kwargs) if name == "kinds" else gym.make(name, **kwargs)
        told.write(json.dumps(run(env, seed, actions)) + "\n")


if __name__ == "__main__":
    main()
