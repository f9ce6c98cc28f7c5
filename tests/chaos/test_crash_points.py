"""Whichever process of a hub is killed, and wherever in the protocol: no trainer hangs, and none is told a lie."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.trainer import Trainer
from hubs import ServedHub, serve, wait_until

TESTS = Path(__file__).parent.parent
INJECTED = TESTS / "chaos/injected"  # what reads the variable
VARIABLE = "ENVHUB_CRASH_AT"
STEPS, ROWS, WORKERS, LENGTH = 24, 4, 2, 3
PATIENCE_S = 40.0
LANES: dict[str, dict[str, Any]] = {"ipc": {"on_hub_loss": "recreate"}, "tcp": {}}
POINTS_MAX = 1000


@contextlib.contextmanager
def kept_up(folder: Path, crash_at: str) -> Iterator[list[ServedHub]]:
    """A hub that is started again, at the same addresses, whenever it has ended; the last one is the one that runs."""
    closing = threading.Event()
    with contextlib.ExitStack() as stack:

        def start(binds: list[str] | None = None) -> ServedHub:
            paths = [str(INJECTED), os.environ.get("PYTHONPATH", "")]
            environ = {VARIABLE: crash_at, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            offered = "chain=chaos.chain_env:ChainEnv", "--worker-env", VARIABLE
            crashed = Path(crash_at.split(":")[2])
            for lives in (crashed.exists(), True):
                with contextlib.suppress(*([] if lives else [RuntimeError])):  # its point came before it listened
                    return stack.enter_context(serve(folder, *offered, binds=binds, cwd=TESTS, environ=environ))
            raise AssertionError

        def keep() -> None:
            while not closing.wait(0.02):
                if hubs[-1].process.poll() is not None:
                    hubs.append(start(hubs[-1].addresses))

        hubs = [start()]
        keeper = threading.Thread(target=keep)
        keeper.start()
        try:
            yield hubs
        finally:
            closing.set()
            keeper.join()


def crash(folder: Path, role: str, number: int, lane: str) -> str:
    """Train with one process killed at its ``number``-th point; returns the point, or nothing if there are fewer."""
    folder.mkdir()
    file = folder / "crashed"
    with kept_up(folder, f"{role}:{number}:{file}") as hubs:
        address, how = getattr(hubs[0], lane), {"patience_s": PATIENCE_S, **LANES[lane]}
        trainer = Trainer(number, address, STEPS, ROWS, WORKERS, LENGTH, **how)
        trainer.run()
        told = f"{role} {number}, {lane}: {trainer.tally}, {trainer.endings}\n{hubs[-1].log[-3000:]}"
        assert not trainer.tally.wrong, told
        assert trainer.tally.acknowledged >= STEPS, told
        assert wait_until(lambda: not hubs[-1].workers(), 10), told
    point = file.read_text() if file.exists() else ""
    # Its point may come before it listens, and another is started, or only when it is told to stop.
    first = bool(point) and role == "hub" and len(hubs) == 1
    assert hubs[-1].process.returncode in ((0, -signal.SIGKILL) if first else (0,)), told
    return point


@pytest.mark.long
@pytest.mark.parametrize(
    ("role", "number", "lane"),
    [
        ("worker", 3, "ipc"),
        ("worker", 13, "tcp"),
        ("worker", 22, "ipc"),
        ("worker", 23, "tcp"),
        ("worker", 31, "ipc"),
        ("zygote", 2, "ipc"),
        ("hub", 30, "tcp"),
    ],
)
def test_kill_at_one_point_of_the_protocol(tmp_path: Path, role: str, number: int, lane: str) -> None:
    assert crash(tmp_path / "hub", role, number, lane)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("role", ["worker", "hub", "zygote"])
def test_kill_at_every_point_of_the_protocol(tmp_path: Path, role: str, lane: str) -> None:
    points = []
    for number in itertools.count(1):
        point = crash(tmp_path / str(number), role, number, lane)
        if not point:
            break
        points.append(point)
        assert number < POINTS_MAX, "there is no end to the points"
    print(f"{role}, {lane}: {len(points)} points, from {points[0]!r} to {points[-1]!r}")
