"""An env that forks, closes descriptors or loses its process in whatever call it is told to."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel
from envhub_server.worker.stepper import Bells, Stepper
from gymnasium import spaces

from envhub.protocol.messages import Failure

CALLS = ("init", "reset", "step", "call", "render", "set_attr", "close")


def _child(act: Callable[[], object]) -> int:
    """Fork, have the child do that and come back from here, and return its exit status to the parent."""
    pid = os.fork()
    if not pid:
        act()
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _raise() -> None:
    raise RuntimeError("the child's own")


def _fork_in_c() -> int:
    pid = ctypes.CDLL(None).fork()  # of which Python's interpreter does not know
    if not pid:
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork_twice() -> int:
    """As a daemon is started."""
    return _child(lambda: os._exit(_child(lambda: os._exit(5))))


def _subprocess() -> int:
    return subprocess.run([sys.executable, "-c", "exit(6)"], preexec_fn=lambda: None).returncode


def _multiprocessing() -> int:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=lambda: found.put(os.getpid()))
    child.start()
    child.join()
    assert found.get() == child.pid
    return child.exitcode or 0


def _close_every_socket() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def _close_every_descriptor() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _replace_every_descriptor() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != nothing:
            os.dup2(nothing, int(name))


def _die_before_the_bell() -> None:
    _ring_as(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _never_ring() -> None:
    _ring_as(lambda: None)


def _ring_as(ring: Callable[[], None]) -> None:
    """Do this in place of ringing, also where another worker is to ring."""
    Stepper._ring_at_end = lambda self: ring()  # type: ignore[method-assign]
    Bells.ring = lambda self, driver: ring()  # type: ignore[method-assign]


def _say(message: Any) -> None:
    """Say it to the hub, as a process does that was forked and takes itself for the worker."""
    for channel in [found for found in gc.get_objects() if type(found) is Channel and found.fileno() >= 0]:
        channel.send(message)


def _fail_another_step() -> None:
    for row in range(4):
        _say(control.RowFailed(Failure("env_raised", "env", "of another step", env_index=row), 10**6))
        _say(control.RowInfo(row, b"of another step", 10**6))


ACTS: dict[str, Callable[[], Any]] = {
    "return": lambda: _child(lambda: None),
    "raise": lambda: _child(_raise),
    "exec": lambda: _child(lambda: os.execvp("no-such-program", ["no-such-program"])),
    "sys.exit": lambda: _child(lambda: sys.exit(0)),
    "fork_in_c": _fork_in_c,
    "_exit": lambda: _child(lambda: os._exit(4)),
    "twice": _fork_twice,
    "subprocess": _subprocess,
    "multiprocessing": _multiprocessing,
    "close_100": lambda: os.closerange(3, 101),
    "close_all": _close_every_descriptor,
    "close_sockets": _close_every_socket,
    "replace_all": _replace_every_descriptor,
    "die_before_the_bell": _die_before_the_bell,
    "never_ring": _never_ring,
    "fail_another_step": _fail_another_step,
}
FORKS_THAT_COME_BACK = ("return", "raise", "exec", "sys.exit")


class Unruly(gym.Env[np.ndarray, int]):
    """Observes its steps since the reset, and its process.

    Attributes:
        found: what the last act returned.
    """

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = spaces.Discrete(4)
    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, acts: dict[str, str] | None = None) -> None:
        """Do ``acts[call]`` in each such call, once."""
        self._acts = dict(acts or {})
        self._steps = 0
        self.found: Any = None
        self._act("init")

    def _act(self, call: str) -> None:
        act = self._acts.pop(call, None)
        if act is not None:
            self.found = ACTS[act]()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        self._acts.update((options or {}).get("acts", {}))
        self._act("reset")
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._act("step")
        return self._seen(), float(action), False, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([self._steps, os.getpid()], np.float64)

    def render(self) -> np.ndarray:
        self._act("render")
        return np.full((2, 2, 3), self._steps, np.uint8)

    def close(self) -> None:
        self._act("close")

    def act(self, act: str, answer: Any = None) -> Any:
        """Do it now; returns what was found, or ``answer``."""
        self.found = ACTS[act]()
        return self.found if answer is None else answer

    def echo(self, value: Any) -> Any:
        self._act("call")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "note":
            self._act("set_attr")


def unruly(**kwargs: Any) -> gym.Env[Any, Any]:
    return Unruly(**kwargs)
