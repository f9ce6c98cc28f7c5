"""A worker is killed between every two statements that it executes: every request is answered, and truly."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.checker import Batch, Checker
from hubs import ServedHub, serve, wait_until

import envhub

TESTS = Path(__file__).parent.parent
ROWS, LENGTH = 4, 3
WORKERS = [1, 2]  # of one, nobody else wakes who waits
PATIENCE_S = 30.0
LANES = ["ipc", "tcp"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), "traced=chaos.line_points:TracedEnv", cwd=TESTS) as served:
        yield served


class Program:
    """A short program that makes every request once, and a model of what it must see."""

    def __init__(self, address: str, workers: int, **traced: Any) -> None:
        arguments = {"length": LENGTH, "large": True, **traced}
        self._options = {"hub": address, "num_workers": workers, "restarts_max": 100, "restart_wait": PATIENCE_S}
        self._kwargs = arguments
        self._number = 0
        self.died: Counter[str] = Counter()
        self.checker = Checker(ROWS, length=LENGTH)

    def run(self) -> None:
        envs: Any = self._tolerant(
            "make", lambda: envhub.make_vec("traced", ROWS, env_kwargs=self._kwargs, **self._options)
        )
        try:
            self._requests(envs)
        except BaseException:
            envs.close(terminate=True)
            raise
        envs.close()

    def _requests(self, envs: Any) -> None:
        envs.reset_async(seed=1)
        self.checker.reset(*envs.reset_wait(timeout=PATIENCE_S))
        for _ in range(LENGTH + 2):
            self._step(envs)
        envs.reset_async()
        self.checker.reset(*envs.reset_wait(timeout=PATIENCE_S))
        self._step(envs)
        envs.send(self._actions())
        *batch, env_ids = envs.recv(timeout=PATIENCE_S)
        assert env_ids.tolist() == list(range(ROWS))
        self.checker.step([self._number] * ROWS, Batch(*batch))
        assert self._tolerant("call", lambda: self._call(envs)) == (7,) * ROWS
        self._tolerant("set_attr", lambda: envs.set_attr("note", [1, 2, 3, 4]))
        self._step(envs)

    def _call(self, envs: Any) -> Any:
        envs.call_async("echo", 7)
        return envs.call_wait(timeout=PATIENCE_S)

    def _tolerant(self, what: str, ask: Callable[[], Any]) -> Any:
        """The answer; asked for once more where a worker died, which is killed once only."""
        try:
            return ask()
        except envhub.WorkerDied:
            self.died[what] += 1
            return ask()

    def _actions(self) -> np.ndarray:
        self._number += 1
        return np.array([[row, self._number] for row in range(ROWS)], np.int64)

    def _step(self, envs: Any) -> None:
        envs.step_async(self._actions())
        batch = Batch(*envs.step_wait(timeout=PATIENCE_S))
        self.checker.step([self._number] * ROWS, batch)


def recorded(hub: ServedHub, lane: str, workers: int, folder: Path) -> Counter[str]:
    """How often a worker executes each statement in each request, where none is killed."""
    record = folder / "record"
    program = Program(getattr(hub, lane), workers, record=str(record))
    program.run()
    assert not program.checker.tally.wrong and not program.checker.tally.truncations
    return Counter(record.read_text().splitlines())


def points(found: Counter[str]) -> list[tuple[str, int]]:
    """The first and the last time of each statement."""
    return [(point, occurrence) for point, count in found.items() for occurrence in sorted({1, count})]


def kill(hub: ServedHub, lane: str, workers: int, folder: Path, point: str, occurrence: int) -> bool:
    """Run the program with a worker killed there; whether one came there."""
    killed = folder / f"{point.replace(' ', '-')}-{occurrence}"
    program = Program(getattr(hub, lane), workers, point=point, occurrence=occurrence, killed=str(killed))
    begun_s = time.monotonic()
    try:
        program.run()
    except Exception as error:
        raise AssertionError(f"{lane}, before {point}, time {occurrence}: {error!r}\n{hub.log[-2000:]}") from error
    tally = program.checker.tally
    took_s = time.monotonic() - begun_s
    assert not tally.wrong, f"{lane}, before {point}, time {occurrence}, {took_s:.1f} s: {tally}"
    if not killed.exists():
        assert not tally.truncations and not program.died
    return killed.exists()


def sweep(hub: ServedHub, lane: str, workers: int, folder: Path) -> None:
    found = points(recorded(hub, lane, workers, folder))
    reached = sum(kill(hub, lane, workers, folder, *point) for point in found)
    print(f"{lane}, {workers} workers: {len(found)} points, a worker was killed at {reached} of them")
    # Who spins, or what comes in one message, differs from run to run.
    assert reached > 0.8 * len(found)
    assert wait_until(lambda: not hub.workers(), 10)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("workers", WORKERS)
def test_worker_killed_between_any_two_statements(hub: ServedHub, lane: str, workers: int, tmp_path: Path) -> None:
    sweep(hub, lane, workers, tmp_path)
