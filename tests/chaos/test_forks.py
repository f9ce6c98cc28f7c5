"""Envs fork in every call, and what becomes of the children is never taken for an answer of the worker."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.checker import Batch, Checker
from hubs import serve, wait_until

import envhub

TESTS = Path(__file__).parent.parent
ROWS, WORKERS, LENGTH = 4, 2, 7
LANES = ["ipc", "tcp"]
TIMEOUTS = dict.fromkeys(("step_timeout", "reset_timeout", "call_timeout"), 60.0)


def request(envs: Any, checker: Checker, kind: str, number: int) -> None:
    """Make one request, and see that its answer is its own."""
    actions = np.array([[row, number] for row in range(ROWS)], np.int64)
    if kind == "reset":
        checker.reset(*envs.reset())
    elif kind == "step":
        checker.step([number] * ROWS, Batch(*envs.step(actions)))
    elif kind == "parts":
        envs.send(actions)
        checker.step([number] * ROWS, Batch(*envs.recv()[:5]))
    elif kind == "echo":
        assert envs.call("echo", number) == (number,) * ROWS
    elif kind == "render":
        assert [frame.shape for frame in envs.render()] == [(2, 2, 3)] * ROWS
    else:
        notes = [number, number + 1, number + 2, number + 3]
        envs.set_attr("note", notes)
        assert envs.get_attr("note") == tuple(notes)


def fork(folder: Path, lane: str, requests: int, sessions: int, seed: int) -> None:
    chance, forks, checker = random.Random(seed), Counter[str](), Checker(ROWS, length=LENGTH)
    with serve(folder, "forking=chaos.forking_env:ForkingEnv", cwd=TESTS) as hub:
        for _ in range(sessions):
            arguments = {"one_in": 8, "length": LENGTH}
            options: dict[str, Any] = {"env_kwargs": arguments, "num_workers": WORKERS, "on_crash": "raise", **TIMEOUTS}
            with closing(envhub.make_vec("forking", ROWS, hub=getattr(hub, lane), **options)) as envs:
                checker.session()
                request(envs, checker, "reset", 0)
                for number in range(1, requests + 1):
                    kinds = ("step", "step", "parts", "reset", "echo", "render", "set_attr")
                    request(envs, checker, chance.choice(kinds), number)
                for found in envs.get_attr("forks"):
                    forks.update(found)
        assert wait_until(lambda: not hub.workers(), 10)
    tally = checker.tally
    print(f"{lane}: {sessions * requests} requests, {tally.acknowledged} steps, {forks.total()} forks: {dict(forks)}")
    assert not tally.wrong and not tally.truncations, tally
    assert forks.total() > sessions * requests / 10


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lane", LANES)
def test_messages_of_children_of_envs_are_never_read_in_a_long_run(tmp_path: Path, lane: str) -> None:
    fork(tmp_path, lane, requests=1000, sessions=10, seed=2)
