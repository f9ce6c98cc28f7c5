"""How much hub and client do for a step: Python calls, which are as many on every machine."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gymnasium
import numpy as np
import pytest
from fleets import addresses, served_hubs
from hubs import serve

import envhub

CALLS_MAX = 40  # three leave a large reply to the thread that compresses it; one hands a request from the gateway on
CLIENT_CALLS_MAX = {"wire": 32, "shared": 30}  # three let one thread at a time into step and its halves
# Of a reset, an attribute that is read or set, and frames. Each looks twice where its results come later.
VERB_CALLS_MAX = {"reset": 48, "get_attr": 55, "set_attr": 43, "render": 65}
# Of a worker with one env, from one request to the next of its kind, with the env's own.
WORKER_CALLS_MAX = {"step": 18, "reset": 33, "reset with a seed": 80, "get": 35, "set": 48, "call": 40}
SEVERAL_CALLS_MAX = 32  # of a step over several hubs, whatever their number
EACH_HUB_CALLS_MAX = 20  # one by wire; two in shared memory, where a wait may look twice
HUBS = 3
NUM_ENVS = 16
STEPS = 100
OTHER_SESSIONS = 2  # which must not matter

# Python runs this before the hub. Functions of C do not count.
COUNT = """
import atexit, collections, json, os, sys

steps = []

def count(frame, event, argument):
    if event == "call":
        if frame.f_code.co_name == "receive_step":
            steps.append(collections.Counter())
        if steps and frame.f_code.co_name != "add_lag":  # of turns that are slow, as counting may make them
            steps[-1][frame.f_code] += 1

def write():
    sys.setprofile(None)
    fewest = min(steps[:-1], key=lambda calls: sum(calls.values()))
    found = {f"{code.co_filename}:{code.co_firstlineno} {code.co_name}": calls for code, calls in fewest.items()}
    with open(os.environ["ENVHUB_TEST_CALLS"], "w") as file:
        json.dump(found, file)

if "serve" in sys.orig_argv:
    atexit.register(write)
    sys.setprofile(count)
"""


def hub_calls(folder: Path) -> dict[str, int]:
    """The calls of each function of the hub's process, from one STEP to the next, where these are fewest."""
    (folder / "sitecustomize.py").write_text(COUNT)
    environ = {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ENVHUB_TEST_CALLS": str(folder / "calls.json"),
        "ENVHUB_SPIN_US": "0",  # how often a hub looks before it parks is a matter of time
    }
    with serve(folder, "CartPole-v1", binds=["tcp://127.0.0.1:0"], environ=environ) as hub, ExitStack() as others:
        for _ in range(OTHER_SESSIONS):
            others.enter_context(closing(envhub.make_vec("CartPole-v1", 1, hub=hub.tcp, lane="wire"))).reset()
        with closing(envhub.make_vec("CartPole-v1", NUM_ENVS, hub=hub.tcp, lane="wire", num_workers=1)) as envs:
            envs.reset(seed=0)
            actions = np.zeros(NUM_ENVS, np.int64)
            for _ in range(STEPS):
                envs.step(actions)
    return dict(json.loads((folder / "calls.json").read_text()))


@pytest.mark.long
def test_step_by_messages_takes_no_more_calls_in_the_hub_than_it_did(tmp_path: Path) -> None:
    each = hub_calls(tmp_path)
    assert 0 < sum(each.values()) <= CALLS_MAX, "\n".join(f"{number} {name}" for name, number in each.items())


def client_calls(envs: envhub.HubVectorEnv, verb: Callable[[], object] | None = None) -> Counter[CodeType]:
    """The calls of each function in this thread for the step, or the ``verb``, that made fewest of them."""
    steps: list[Counter[CodeType]] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            steps[-1][frame.f_code] += 1

    envs.reset(seed=0)
    actions = np.zeros(envs.num_envs, np.int64)
    envs.step(actions)
    before = sys.getprofile()
    for _ in range(STEPS):
        steps.append(Counter())
        sys.setprofile(count)
        try:
            envs.step(actions) if verb is None else verb()
        finally:
            sys.setprofile(before)
    # How often a client looks before the results are there is a matter of time.
    return min(steps, key=Counter.total)


def check_calls(calls: Counter[CodeType], most: int) -> None:
    listed = "\n".join(f"{number} {code.co_filename} {code.co_name}" for code, number in calls.items())
    assert 0 < calls.total() <= most, listed


@pytest.mark.parametrize("lane", ["wire", "shared"])
def test_step_takes_no_more_calls_in_the_client_than_it_did(lane: str) -> None:
    factories = [lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS
    wanted = "wire" if lane == "wire" else "auto"
    with closing(envhub.make_vec(factories, lane=wanted, num_workers=1, spin_us=0)) as envs:
        check_calls(client_calls(envs), CLIENT_CALLS_MAX[lane])


def test_other_verbs_take_no_more_calls_in_the_client_than_they_did() -> None:
    factories = [lambda: gymnasium.make("CartPole-v1", render_mode="rgb_array")] * 2
    with closing(envhub.make_vec(factories, num_workers=1, spin_us=0)) as envs:
        verbs = {"reset": envs.reset, "render": envs.render, "get_attr": lambda: envs.get_attr("gravity")}
        verbs["set_attr"] = lambda: envs.set_attr("gravity", 9.8)
        for name, verb in verbs.items():
            check_calls(client_calls(envs, verb), VERB_CALLS_MAX[name])


class Counted(gymnasium.Env[Any, Any]):
    """Counts the Python calls of its process from one request to the next, and keeps the fewest of each kind."""

    observation_space = gymnasium.spaces.Box(0, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.fewest: dict[str, int] = {}
        self._kind, self._calls = "", 0

    def _count(self, kind: str) -> None:
        sys.setprofile(None)
        if kind == self._kind:
            self.fewest[kind] = min(self.fewest.get(kind, self._calls), self._calls)
        self._kind, self._calls = kind, 0
        sys.setprofile(self._add)

    def _add(self, frame: FrameType, event: str, argument: Any) -> None:
        self._calls += event == "call"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._count("reset" if seed is None else "reset with a seed")
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self._count("step")
        return np.zeros(4, np.float32), 0.0, False, False, {}

    def act(self) -> None:
        self._count("call")

    @property
    def speed(self) -> float:
        self._count("get")
        return 0.5

    @speed.setter
    def speed(self, speed: float) -> None:
        self._count("set")


def test_requests_take_no_more_calls_in_a_worker_than_they_did() -> None:
    with closing(envhub.make_vec([Counted], spin_us=0)) as envs:
        verbs: list[Callable[[int], object]] = [lambda turn: envs.reset(), lambda turn: envs.step([0])]
        verbs += [lambda turn: envs.get_attr("speed"), lambda turn: envs.set_attr("speed", 0.5)]
        verbs += [lambda turn: envs.call("act"), lambda turn: envs.reset(seed=turn, options={"level": 3})]
        for verb in verbs:
            for turn in range(2 * STEPS):  # of its first steps all are checked
                verb(turn)
        (fewest,) = envs.get_attr("fewest")
    assert fewest.keys() == WORKER_CALLS_MAX.keys()
    assert all(calls <= WORKER_CALLS_MAX[kind] for kind, calls in fewest.items()), fewest


@pytest.mark.long
@pytest.mark.parametrize("lane", ["wire", "shared"])
def test_step_takes_no_more_calls_in_the_client_for_each_further_hub(
    lane: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with served_hubs(tmp_path_factory, HUBS, ["CartPole-v1"]) as served:
        for count in range(1, HUBS + 1):
            hubs, split = addresses(served, lane, count), [2] * count if count > 1 else None
            with closing(envhub.make_vec("CartPole-v1", 2 * count, hub=hubs, split=split, num_workers=count)) as envs:
                assert envs.lane == lane
                several = SEVERAL_CALLS_MAX + count * EACH_HUB_CALLS_MAX
                check_calls(client_calls(envs), several if split else CLIENT_CALLS_MAX[lane])
