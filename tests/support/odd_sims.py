"""Envs that want much of a hub; it finds them as ``name=odd_sims:Name``."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import sims
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel
from gymnasium import spaces, wrappers

from envhub.arena.memory import CALL_INCREMENT
from envhub.values.leaf import Leaf

MIB = 1 << 20
PLACE = ("ENVHUB_SESSION", "ENVHUB_WORKER_INDEX", "ENVHUB_NUM_WORKERS", "ENVHUB_ENV_INDICES")
DEVICE = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID")


def fill_bell(bell: int) -> None:
    """Write as much as goes into an eventfd, and let the next write to it block."""
    flags = fcntl.fcntl(bell, fcntl.F_GETFL)
    fcntl.fcntl(bell, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(bell, 8)
    with contextlib.suppress(OSError):
        os.write(bell, (2**64 - 2).to_bytes(8, "little"))
    fcntl.fcntl(bell, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)


class Wide(sims.Counter):
    """Observes as many numbers as it is told."""

    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1e6, 1e6, (mebibytes * MIB // 8,), np.float64)

    def observation(self) -> np.ndarray:
        return np.full(self.observation_space.shape, self.count, np.float64)


class Hungry(sims.Counter):
    """Allocates without end on action 1; its address space ends 256 MiB beyond what it has."""

    def act(self, action: int) -> None:
        if action:
            most = psutil.Process().memory_info().vms + 256 * MIB
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            kept: list[Any] = []
            try:
                while True:
                    kept.append(bytearray(MIB))
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Missing(sims.Counter):
    """Opens a file that is not there on action 1, and ends by a signal on action 2."""

    def act(self, action: int) -> None:
        if action == 1:
            os.stat("/no/such/folder/of/the/hub")
        if action == 2:
            os.abort()


class Sleeper(sims.Counter):
    """Sleeps in a step for as many tenths of a second as its action says."""

    def act(self, action: int) -> None:
        time.sleep(action / 10)


class Late(sims.Counter):
    """Its ``level`` can be set once it was stepped."""

    _level = 0

    @property
    def level(self) -> int:
        return self._level

    @level.setter
    def level(self, value: int) -> None:
        if not self.count:
            raise RuntimeError("not stepped yet")
        self._level = value


class Signalling(sims.Counter):
    """Sends a signal to the process whose number is stored in ``program``."""

    @property
    def program(self) -> int:
        return 0

    @program.setter
    def program(self, pid: int) -> None:
        os.kill(pid, signal.SIGUSR1)


class Stubborn(Sleeper):
    """Heeds no SIGTERM, and never ends its ``close``."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def close(self) -> None:
        time.sleep(600)


class Liar(sims.Counter):
    """Has its worker announce another observation leaf than the one that it writes."""

    def __init__(self, announced: list[Any]) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float64)
        read = Leaf.from_wire
        as_it_is = Leaf.wire
        Leaf.wire = lambda leaf: announced if leaf.dtype == "<f8" else as_it_is(leaf)  # type: ignore[method-assign]
        Leaf.from_wire = lambda found: Leaf("<f8", (2,)) if found == announced else read(found)  # type: ignore[method-assign, assignment]

    def observation(self) -> np.ndarray:
        return np.full(2, 1.5 + self.count)  # taken for pointers, these lead nowhere


class Many(gym.Env[Any, Any]):
    """Has so many leaves."""

    def __init__(self, observations: int = 1, actions: int = 1) -> None:
        part = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = spaces.Dict({f"{number:04}": part for number in range(observations)})
        self.action_space = spaces.Tuple([spaces.Discrete(2)] * actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {"number": 1}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {"text": "x"}


class Talker(sims.Counter):
    """Says on its worker's channel what it is told to."""

    def speak(self, kind: str, *fields: Any, descriptors: int = 0, times: int = 1) -> None:
        objects = gc.get_objects()
        (channel,) = [found for found in objects if type(found) is Channel and found.fileno() >= 0]
        for _ in range(times):
            channel.send(control.CONTROL[kind](*fields), [1] * descriptors)


class Wordy(sims.Counter):
    """Has an info of as many bytes as its action says in MiB; can send its hub a message past what a worker sends."""

    forged = 0  # MiB of an info that a step sends in the name of its worker, behind a reset and a call

    def step(self, action: Any) -> tuple[Any, ...]:
        if self.forged:
            (channel,) = [found for found in gc.get_objects() if type(found) is Channel and found.fileno() >= 0]
            channel.sent_bytes_max = 1 << 30
            channel.send(control.RowInfo(0, bytes(self.forged * MIB), 2 + CALL_INCREMENT))
        return *super().step(0)[:4], {"words": bytes(int(action) * MIB)}

    def many_words(self, mebibytes: int) -> bytes:
        return bytes(mebibytes * MIB)

    def fill_bells(self) -> int:
        """Make every write of another process to a bell of this worker's block, if one can."""
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if "eventfd" in link or link.startswith("pipe"):
                    fill_bell(int(name))
                    found += "eventfd" in link
        return found


class Babbler(sims.Counter):
    """Has infos that are too large for the arena; can send its hub small messages without an end."""

    def step(self, action: Any) -> tuple[Any, ...]:
        return *super().step(0)[:4], {"words": bytes(4096)}

    def babble(self) -> None:
        (channel,) = [found for found in gc.get_objects() if type(found) is Channel and found.fileno() >= 0]
        message = b"".join(control.pack(control.RowInfo(0, b"", 10**6)))
        whole = len(message).to_bytes(4, "little") + message  # in one write, which no other comes into

        def send() -> None:
            while True:
                os.write(channel.fileno(), whole)

        threading.Thread(target=send, daemon=True).start()


def stacked(stack_size: int) -> gym.Env[Any, Any]:
    """Observes so many frames at once."""
    return gym.wrappers.FrameStackObservation(sims.Counter(), stack_size)


class Ill(gym.Env[Any, int]):
    """From its second step on observes, or is rewarded with, what its space does not allow, as ``illness`` says."""

    action_space = spaces.Discrete(2)

    def __init__(self, illness: str) -> None:
        self.observation_space = spaces.Box(-1, 1, (2, 3), np.float32)
        self.illness, self.steps = illness, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.full((2, 3), np.nan if (options or {}).get("ill") else 0, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation = np.full((2, 3), self.steps / 100, np.float32)
        if self.steps < 2:
            return observation, 1.0, False, False, {}
        reward = float("nan") if self.illness == "reward" else 1.0
        return ILLNESSES[self.illness](observation), reward, False, False, {}


class EndsIll(Ill):
    """Its episodes are of one step; every reset but its first observes what is not finite."""

    def __init__(self) -> None:
        super().__init__("bounds")
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        return super().reset(seed=seed, options={"ill": self.resets > 1})

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, True, truncated, info


class Mutant(gym.Env[Any, int]):
    """Observes an element of its space, and then, in every other step, whatever ``mutation`` is."""

    action_space = spaces.Discrete(2)

    def __init__(self, observation_space: Any, mutation: Any) -> None:
        self.observation_space, self.mutation, self.steps = observation_space, mutation, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation = self.observation_space.sample() if self.steps % 2 else self.mutation
        return observation, 1.0, False, False, {}


class Placed(sims.Counter):
    """Knows the variables that it was made with."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.place = [os.environ.get(name) for name in PLACE]
        self.device = [os.environ.get(name) for name in DEVICE]


def minigrid() -> gym.Env[Any, Any]:
    import minigrid as package

    gym.register_envs(package)
    return gym.make("MiniGrid-Empty-5x5-v0")


def told_in_words() -> gym.Env[Any, Any]:
    """Its mission is of a space of its own, which no network carries: as text it travels."""
    env = minigrid()
    parts = dict(env.observation_space.spaces)  # type: ignore[attr-defined]
    parts["mission"] = spaces.Text(99, charset="abcdefghijklmnopqrstuvwxyz ")
    return wrappers.TransformObservation(env, lambda seen: seen, spaces.Dict(parts))


ILLNESSES: dict[str, Callable[[np.ndarray], Any]] = {
    "shape": lambda observation: observation.ravel(),
    "scalar": lambda observation: 0.5,
    "nothing": lambda observation: None,
    "dtype": lambda observation: observation.astype(complex),
    "bytes": lambda observation: b"observation",
    "ragged": lambda observation: [[1.0, 2.0], [3.0]],
    "bounds": lambda observation: observation + 7,
    "nan": lambda observation: observation * np.float32("nan"),
    "infinite": lambda observation: observation + np.float32("inf"),
    "reward": lambda observation: observation,
}
