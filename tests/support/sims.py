"""Environments for the tests; a hub finds them as ``name=sims:factory``, a private hub by import."""

from __future__ import annotations

import copy
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from envhub.values import spaces as wire


class Counter(gym.Env[np.ndarray, int]):
    """Observes how often it was stepped; ends after ``length`` steps. Subclasses misbehave."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space = spaces.Discrete(1000)
    reboots = 0

    def __init__(self, length: int = 10**6, render_mode: str | None = None) -> None:
        self.length = length
        self.render_mode = render_mode
        self.count = 0
        self.last_action: Any = None
        self.note = "unset"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.last_action = action
        self.act(int(action))
        return self.observation(), float(action), self.count >= self.length, False, {}

    def act(self, action: int) -> None:
        """What a subclass does with an action."""

    def observation(self) -> np.ndarray:
        return np.array([self.count, os.getpid()], np.float64)

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full((4, 6, 3), self.count, np.uint8)

    def text(self, length: int) -> str:
        """So many characters."""
        return "x" * length

    def pid(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def draws(self) -> list[float]:
        return [random.random(), np.random.random()]

    def leave_a_process_behind(self) -> int:
        shell = subprocess.run(["sh", "-c", "sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, check=True)
        return int(shell.stdout)

    def add(self, left: int, right: int = 0) -> int:
        return left + right

    def opaque(self) -> Any:
        return self.add

    def reboot(self) -> int:
        self.reboots += 1
        return self.reboots

    def say(self, text: str) -> None:
        print(text, flush=True)


class Draws(Counter):
    """Observes a number of ``numpy.random``, which it seeds in each reset, as many old envs do."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        np.random.seed(seed)
        return super().reset(seed=seed, options=options)

    def observation(self) -> np.ndarray:
        return np.array([np.random.random()])


class OnePerProcess(Counter):
    """Of these a process can have one, as of many simulators: making a second one raises, or ends the process."""

    made = False

    def __init__(self, fails: str = "raises") -> None:
        super().__init__()
        if OnePerProcess.made and fails == "raises":
            raise RuntimeError("only one per process")
        if OnePerProcess.made:
            os._exit(3)
        OnePerProcess.made = True


class Hoarder(Counter):
    """Keeps as many MiB of memory as its action says, or has a process keep them: a child, or a daemon."""

    def __init__(self, length: int = 10**6, by_child: bool = False, by_daemon: bool = False) -> None:
        super().__init__(length)
        self.kept: list[Any] = []
        self.by_child = by_child
        self.by_daemon = by_daemon

    def act(self, action: int) -> None:
        hoard = f"kept = bytearray({action} << 20); kept[::4096] = b'1' * len(kept[::4096])"
        if self.by_daemon and action:
            # Its parent ends, and it has a session of its own and an empty environment.
            daemon = ["setsid", "-f", "env", "-i", sys.executable, "-c", f"{hoard}; import time; time.sleep(60)"]
            subprocess.run(daemon, check=True)
        elif self.by_child and action:
            code = f"{hoard}; input()"
            self.kept.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE))
        else:
            self.kept.append(np.ones(action << 20, np.uint8))


class Leaky(Counter):
    """Keeps so many MiB of memory for each episode."""

    def __init__(self, length: int = 5, mib: int = 1) -> None:
        super().__init__(length)
        self.mib = mib
        self.kept: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.kept.append(np.ones(self.mib << 20, np.uint8))
        return super().reset(seed=seed)[0], {"episodes": len(self.kept)}


class SlowToMake(Counter):
    """Notes in a file that it is made; the making of the n-th ends when the file ``permits`` has n bytes."""

    def __init__(self, notes: str, permits: str) -> None:
        super().__init__()
        with open(notes, "a+") as file:
            file.write(f"{os.getpid()}\n")
            file.seek(0)
            number = 1 + file.read().splitlines().index(str(os.getpid()))
        while os.path.getsize(permits) < number:
            time.sleep(0.01)


class Waits(Counter):
    """Waits 10 ms a step."""

    def act(self, action: int) -> None:
        time.sleep(0.01)


class TwoPartError(Exception):
    """An exception that cannot be made from its message alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class OneWay(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(left)


class Mute(Exception):
    """An exception that has no text to tell."""

    def __str__(self) -> str:
        raise SystemExit("no text")


class Naughty(Counter):
    """Raises on action 1, an odd exception on 2, dies on 3 and 4, exits on 5, sleeps 0.2 s on 6, for ever on 8."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.nap = (options or {}).get("nap", 0.0)
        return super().reset(seed=seed, options=options)

    def act(self, action: int) -> None:
        if action == 1:
            raise ValueError("one is not allowed")
        if action == 2:
            raise TwoPartError(7, "two is worse")
        if action == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 4:
            ctypes.string_at(0)
        if action == 5:
            os._exit(3)
        if action == 6:
            time.sleep(0.2)
        if action == 8:
            time.sleep(3600)

    @property
    def nap(self) -> float:
        """Setting it takes as long as it says."""
        return 0.0

    @nap.setter
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def read_file(self) -> None:
        open("/no/such/file").close()

    def fail_mutely(self) -> None:
        raise Mute

    def fail(self) -> None:
        raise RuntimeError("called in vain")


class Talking(Counter):
    """Says something else at every step, some of it too much for the arena; raises for action 9."""

    def act(self, action: int) -> None:
        if action == 9:
            raise ValueError(f"not allowed at {self.count}")

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        *found, _ = super().step(action)
        info: dict[str, Any] = {f"count{self.count % 40}": self.count}
        return (*found, {**info, "text": "x" * 5000} if self.count % 3 == 0 else info)


class Shown(Naughty):
    """Renders nothing before its first reset, and dies in ``render`` where it was told to."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    doomed = False

    def __init__(self) -> None:
        super().__init__(render_mode="rgb_array")
        self.ready = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.ready = True
        return super().reset(seed=seed, options=options)

    def render(self) -> np.ndarray:  # type: ignore[override]
        if not self.ready:
            raise gym.error.ResetNeeded("render before reset")
        if self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full((16, 24, 3), self.count, np.uint8)


class BadReset(Counter):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options and options.get("fail"):
            raise KeyError("no reset today")
        return super().reset(seed=seed, options=options)


class BadClose(Counter):
    def close(self) -> None:
        raise OSError("the door is stuck")


class Anything(gym.Env[Any, Any]):
    """Observes elements of any space, at random; its infos are its maker's, and say which action it heard.

    Spaces may be given in their wire form, which is how they reach a hub on the network.
    """

    def __init__(self, observation_space: Any, action_space: Any, infos: list[dict[str, Any]], length: int = 3) -> None:
        self.observation_space, self.action_space = (
            wire.build(space) if isinstance(space, dict) else copy.deepcopy(space)
            for space in (observation_space, action_space)
        )
        self.infos, self.length, self.count, self.offset = infos, length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self.offset = seed
        self.count = 0
        return self.observation_space.sample(), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        done = self.count >= self.length
        info = {**self.info(), "heard": action}
        return self.observation_space.sample(), self.count / 3, done and self.offset % 2 == 0, done, info

    def info(self) -> dict[str, Any]:
        return dict(self.infos[(self.count + self.offset) % len(self.infos)]) if self.infos else {}


class Entangled(Counter):
    """Its infos hold what nobody can carry, or copy."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        held = {"lock": threading.Lock(), "count": 1, "all": [1, OneWay(1, 2)]}
        return *super().step(action)[:4], {"held": held}


class SlowClose(Naughty):
    """Writes a file in ``close``, after so many seconds."""

    def __init__(self, seconds: float = 60.0, path: str = os.devnull) -> None:
        super().__init__()
        self.seconds, self.path = seconds, path

    def close(self) -> None:
        time.sleep(self.seconds)
        Path(self.path).write_text("whole")


class BigEndian(Counter):
    """Observes in the byte order of another machine."""

    observation_space = spaces.Box(-1, 1, (2,), np.dtype(">f4"))  # type: ignore[arg-type]

    def observation(self) -> np.ndarray:
        return np.full(2, 0.5, ">f4")


class WrongShape(Counter):
    def observation(self) -> np.ndarray:
        return np.zeros(3) if self.count else np.zeros(2)


class Nested(gym.Env[Any, Any]):
    """Observations and actions nested as deep as people nest them, of every fixed-size space and many dtypes."""

    observation_space = spaces.Dict(
        {
            "pose": spaces.Box(-1, 1, (3,), np.float32),
            "half": spaces.Box(-1, 1, (2, 2), np.float16),
            "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "inner": spaces.Dict({"gear": spaces.Discrete(5, start=-2), "big": spaces.Box(-9, 9, (), np.float64)}),
            "pair": spaces.Tuple([spaces.MultiBinary(4), spaces.MultiDiscrete([3, 4], dtype=np.int32)]),
        }
    )
    action_space = spaces.Dict(
        {
            "throttle": spaces.Box(-1, 1, (2,), np.float32),
            "mode": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]),
        }
    )

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.draw(), {"start": {"options": str(options), "depth": 1}}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        assert type(action["mode"]) is tuple and action["throttle"].dtype == np.float32
        reward = float(action["throttle"].sum()) + float(action["mode"][0]) + float(action["mode"][1].sum())
        info: dict[str, Any] = {"reward_terms": np.array([reward, 1.0]), "text": f"step {self.steps}"}
        if self.steps % 3 == 0:
            info["every_third"] = {"np": np.float32(reward), "flag": True, "deep": {"count": self.steps}}
        return self.draw(), reward, bool(self.np_random.random() < 0.05), self.steps >= 25, info

    def draw(self) -> Any:
        rng = self.np_random
        return {
            "pose": rng.random(3, np.float32),
            "half": rng.random((2, 2)).astype(np.float16),
            "image": rng.integers(0, 256, (8, 8, 3), np.uint8),
            "inner": {"gear": np.int64(rng.integers(-2, 3)), "big": np.array(rng.random())},
            "pair": (rng.integers(0, 2, 4).astype(np.int8), rng.integers(0, 3, 2).astype(np.int32)),
        }


def graphs() -> gym.Env[Any, Any]:
    graph = spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(2))
    parts = {"graph": graph, "sequence": spaces.Sequence(spaces.Text(3)), "one": spaces.OneOf([graph, spaces.Text(2)])}
    return Anything(spaces.Dict(parts), spaces.Tuple([spaces.Text(2), spaces.Discrete(3)]), [{}])


def never_made() -> gym.Env[Any, Any]:
    raise ZeroDivisionError("there is no such world")


class OwnSpace(spaces.Space[str]):
    """A space of this program's own: names of colours."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return str(self.np_random.choice(["red", "green", "blue"]))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnSpace)


class NoSpace(OwnSpace):
    """Its samples are of no kind that a space of Gymnasium has."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return {"red": object()}


def no_space() -> gym.Env[Any, Any]:
    return Anything(spaces.Dict({"colour": NoSpace(), "size": spaces.Discrete(3)}), spaces.Discrete(2), [])


def own_space() -> gym.Env[Any, Any]:
    return Anything(spaces.Dict({"colour": OwnSpace(), "size": spaces.Discrete(3)}), OwnSpace(), [])


counter, nested, naughty, shown, entangled, anything = Counter, Nested, Naughty, Shown, Entangled, Anything
bad_reset, bad_close, slow_close, big_endian, wrong_shape = BadReset, BadClose, SlowClose, BigEndian, WrongShape
SIMS = "counter nested naughty shown bad_reset graphs bad_close entangled slow_close wrong_shape big_endian never_made"
OFFERED = [
    "CartPole-v1",
    "Pendulum-v1",
    "Blackjack-v1",
    "HalfCheetah-v5",
    "ALE/Pong-v5",
    *(f"{name}=sims:{name}" for name in (*SIMS.split(), "anything", "own_space")),
    "hoarder=sims:Hoarder",
    "leaky=sims:Leaky",
    "slowtomake=sims:SlowToMake",
    "faulty=faulty:faulty",
    *(f"{name}=faulty:{name}" for name in ("faulty_parts", "wordy", "spoken")),
    "needy=needy:factory",
    "brittle=brittle:Brittle",
]
