"""Envs in the program's own process: the same results and errors as in workers, and no process."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import sims
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import AutoresetMode
from hubs import interrupted_after, wait_until
from same import assert_same

import envhub

NUM_ENVS = 3


class Strict(gymnasium.Env[Any, Any]):
    """Has episodes of five steps, infos, and an exception by action 2."""

    observation_space = Dict({"position": Box(-9, 9, (2,), np.float32), "name": Text(8)})
    action_space = Discrete(3)
    made = 0

    def __init__(self, made_max: int = 100) -> None:
        type(self).made += 1
        if type(self).made > made_max:
            raise OSError("no more of them")
        self.steps, self.closed = 0, False

    def _observed(self) -> dict[str, Any]:
        return {"position": self.np_random.normal(size=2).astype(np.float32).clip(-9, 9), "name": "n" * self.steps}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), {"options": str(options)}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == 2:
            raise KeyError("two")
        return self._observed(), float(self.steps), self.steps == 5, False, {"steps": self.steps}

    def twice(self, value: int) -> int:
        return value * 2

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        print("closed", flush=True)


@contextlib.contextmanager
def made(env: Any = Strict, num_envs: int = NUM_ENVS, **options: Any) -> Iterator[envhub.HubVectorEnv]:
    with contextlib.closing(envhub.make_vec([env] * num_envs, **{"num_workers": 0, **options})) as envs:
        yield envs


def history(num_workers: int, mode: AutoresetMode) -> list[Any]:
    found: list[Any] = []
    with made(num_workers=num_workers, autoreset_mode=mode, on_exception="truncate") as envs:
        found.append(envs.reset(seed=[3, None, 5], options=[{"a": 1}, None, {}])[1])
        found.append(envs.reset(seed=7))
        for number in range(12):
            *arrays, infos = envs.step(np.array([0, 1, 2 if number == 3 else 0]))
            if "env_failure" in infos:
                infos["env_failure"] = [
                    failure and (failure.cause, failure.message) for failure in infos["env_failure"]
                ]
            found.append((*arrays, infos))
            done = arrays[2] | arrays[3]
            if mode is AutoresetMode.DISABLED and done.any():
                found.append(envs.reset(seed=[5, 6, 7], options={"reset_mask": done}))
        found.append(envs.call("twice", 4))
        found.append((envs.has_attr("twice"), envs.is_wrapped(gymnasium.Wrapper), envs.call_some([2, 0], "twice", 5)))
        envs.set_attr("steps", [1, 2], [2, 1])
        found.append(envs.get_attr("steps"))
    return found


@pytest.mark.parametrize("mode", AutoresetMode)
def test_results_are_those_of_workers(mode: AutoresetMode) -> None:
    assert_same(history(0, mode), history(2, mode), "history")


def test_observations_may_have_no_elements() -> None:
    space = Box(0, 1, (0,))
    with contextlib.closing(envhub.make_vec([lambda: sims.Anything(space, space, [])] * 2, num_workers=0)) as envs:
        assert envs.reset(seed=1)[0].shape == (2, 0)
        assert envs.step(np.zeros((2, 0), np.float32))[0].shape == (2, 0)


def test_envs_are_in_this_process_which_has_no_child() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with made() as envs:
        envs.reset(seed=1)
        assert envs.call("pid") == (os.getpid(),) * NUM_ENVS
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
        assert (envs.num_workers, envs.lane) == (0, "in-process")
        assert "own process" in envs.sizing.reason


def test_exception_of_an_env_is_raised_and_the_session_goes_on() -> None:
    with made() as envs:
        envs.reset(seed=1)
        with pytest.raises(KeyError, match="two") as caught:
            envs.step(np.array([0, 2, 0]))
        assert isinstance(caught.value.__cause__, envhub.EnvRaised) and caught.value.__cause__.env_index == 1
        with pytest.raises(AttributeError):
            envs.call("missing")
        envs.reset(seed=1)
        assert envs.step(np.zeros(NUM_ENVS, int))[1].tolist() == [1.0] * NUM_ENVS


def test_parts_are_done_at_once() -> None:
    with made(functools.partial(gymnasium.make, "CartPole-v1")) as envs:
        envs.reset(seed=1)
        envs.send(np.array([1, 0]), [2, 0])
        with pytest.raises(ValueError, match="under way"):
            envs.send(np.array([1]), [2])
        *_, env_ids = envs.recv(min_envs=1)
        assert env_ids.tolist() == [0, 2]
        envs.step(np.zeros(NUM_ENVS, int))


def test_env_that_cannot_be_built_again_ends_the_session_and_not_the_program() -> None:
    Strict.made = 0
    with made(
        functools.partial(Strict, made_max=NUM_ENVS), on_exception="truncate", restart_wait=0.2, restarts_max=3
    ) as envs:
        envs.reset(seed=1)
        assert envs.step(np.array([0, 2, 0]))[3].tolist() == [False, True, False]
        with pytest.raises(envhub.RestartsExhausted, match="no more of them"):
            for _ in range(20):
                envs.step(np.zeros(NUM_ENVS, int))


def test_env_that_cannot_be_built_at_all() -> None:
    Strict.made = 0
    with pytest.raises(OSError, match="no more of them"), made(functools.partial(Strict, made_max=1)):
        pass


@pytest.mark.parametrize("on_exception", ["raise", "truncate"])
def test_interrupt_in_a_step_is_the_programs_and_reset_goes_on(on_exception: str) -> None:
    class Slow(Strict):
        def step(self, action: Any) -> Any:
            if action == 1:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
                time.sleep(20)
            return super().step(action)

    with made(Slow, on_exception=on_exception) as envs:
        envs.reset(seed=1)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.array([0, 1, 0]))
        envs.reset(seed=1)
        assert envs.step(np.zeros(NUM_ENVS, int))[1].tolist() == [1.0] * NUM_ENVS


@pytest.mark.parametrize(("begin", "wait"), [("step_async", "step_wait"), ("send", "recv")])
def test_interrupt_in_an_env_is_told_once(begin: str, wait: str) -> None:
    class Interrupted(Strict):
        def step(self, action: Any) -> Any:
            if action == 1:
                raise KeyboardInterrupt
            return super().step(action)

    with made(Interrupted) as envs:
        envs.reset(seed=1)
        getattr(envs, begin)(np.array([0, 1, 0]))
        with pytest.raises(KeyboardInterrupt):
            getattr(envs, wait)()
        with pytest.raises(envhub.EnvRaised, match="KeyboardInterrupt"):
            getattr(envs, wait)()
        if wait == "recv":
            assert envs.recv()[-1].tolist() == [0, 2]
        envs.reset(seed=1)
        assert envs.step(np.zeros(NUM_ENVS, int))[1].tolist() == [1.0] * NUM_ENVS


@pytest.mark.long
def test_interrupt_anywhere_in_a_step_leaves_envs_that_go_on() -> None:
    interrupts = 0
    with made() as envs:
        envs.reset(seed=1)
        nothing = np.zeros(NUM_ENVS, int)
        for number in range(300):
            try:
                with interrupted_after(2e-5 + number % 100 * 1e-5):
                    envs.step(nothing)
            except KeyboardInterrupt:
                interrupts += 1
            begun_s = time.monotonic()
            try:
                envs.step(nothing)
            except envhub.EnvRaised as error:  # of the step that was interrupted in an env
                assert "KeyboardInterrupt" in str(error)
                envs.reset()
            assert time.monotonic() < begun_s + 20  # it waited for no deadline
        assert envs.get_attr("spec") == (None,) * NUM_ENVS
    assert interrupts > 20 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_close_of_an_env_that_hangs_is_interrupted() -> None:
    class Stuck(Strict):
        def close(self) -> None:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(20)

    envs = envhub.make_vec([Stuck], num_workers=0)
    envs.reset()
    begun_s = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        envs.close()
    envs.close()
    assert time.monotonic() < begun_s + 10


def test_nothing_is_left() -> None:
    with made() as envs:
        envs.reset()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with made() as envs:
            envs.reset()
    envs = envhub.make_vec([Strict], num_workers=0)  # is dropped without being closed
    del envs
    gc.collect()
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_every_maker_takes_it_and_a_hub_excludes_it() -> None:
    with contextlib.closing(envhub.AsyncVectorEnv([Strict] * 2, num_workers=0)) as envs:
        envs.reset(seed=1)
        assert envs.num_workers == 0
    env = envhub.make("CartPole-v1", num_workers=0)
    env.reset(seed=1)
    env.close()
    with pytest.raises(ValueError, match=r"num_workers=0 .* own process"):
        envhub.make_vec("CartPole-v1", hub="tcp://127.0.0.1:9", num_workers=0)


def test_debugger_stops_in_an_env(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import gymnasium, numpy as np, envhub\n"
        "class Stops(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n"
        "        secret = 41 + action\n"
        "        breakpoint()\n"
        "        return np.zeros(2, np.float32), 0.0, False, False, {}\n"
        "envs = envhub.make_vec(Stops, 1, num_workers=0)\n"
        "envs.reset()\n"
        "envs.step([1])\n"
        "print('went on')\n"
    )
    ended = subprocess.run(
        [sys.executable, program], input="p secret\nc\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "(Pdb) 42" in ended.stdout and "went on" in ended.stdout


@pytest.mark.long
def test_profiler_sees_the_envs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, envhub\n"
        "envs = envhub.make_vec('CartPole-v1', 2, num_workers=0)\n"
        "envs.reset(seed=1)\n"
        "for _ in range(10):\n"
        "    envs.step(np.zeros(2, int))\n"
        "envs.close()\n"
    )
    profiled = [sys.executable, "-m", "cProfile", "-s", "cumtime", program]
    ended = subprocess.run(profiled, capture_output=True, text=True, timeout=60, check=True)
    assert "cartpole.py" in ended.stdout
