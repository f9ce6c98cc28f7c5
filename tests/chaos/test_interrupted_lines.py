"""Ctrl-C at every line of ``make_vec`` and ``close``, on both lanes; ``test_repeated_waits`` has what is between.

Whatever the line, no session, process or descriptor is left once it is closed, or was never handed out.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from chaos.chain_env import ChainEnv
from chaos.interrupts import Interrupt, Place, Places
from envhub_client.private_hub import process
from hubs import serve, wait_until, worker_processes

import envhub

TESTS = Path(__file__).parent.parent
ROWS = 3
LENGTH = 7
SAMPLE = 8  # places of a call, in the short version
LATER = (2, 5)  # times that a place is passed at which it is interrupted, too, in the long one

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # an interrupt in a destructor
    "ignore:.*while waiting for a pending call",
)


class Scene:
    """Vector envs on one lane of one hub, and a look at what that hub holds."""

    def __init__(self, make: Callable[[], envhub.HubVectorEnv], address: Callable[[], str]) -> None:
        self.make = make
        self._address = address

    def left(self) -> tuple[list[Any], list[int]]:
        """The sessions of the hub, and the workers of this program's hubs."""
        workers = [worker.pid for worker in worker_processes(os.getpid())]
        if not self._address():
            return [], workers
        with envhub.connect(self._address()) as client:
            return client.sessions(), workers


@pytest.fixture(params=["shared, private", pytest.param("shared, served", marks=pytest.mark.chaos), "wire, served"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    lane, _, where = request.param.partition(", ")
    if where == "private":

        def address() -> str:
            hub = process._hub
            return hub.address if hub is not None and hub.alive else ""

        factory = [lambda: ChainEnv(elements=8, length=LENGTH)] * ROWS
        yield Scene(lambda: envhub.make_vec(factory, num_workers=2), address)
        return
    with serve(tmp_path, "chain=chaos.chain_env:ChainEnv", cwd=TESTS) as hub:
        where_ = hub.ipc if lane == "shared" else hub.tcp
        yield Scene(
            lambda: envhub.make_vec("chain", ROWS, hub=where_, num_workers=2, elements=8, length=LENGTH), lambda: where_
        )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled_descriptors() -> int:
    """The number once it stays the same: a thread of libzmq closes those of a connection that was closed."""
    counts = [descriptors()]

    def stays() -> bool:
        counts.append(descriptors())
        return counts[-10:] == [counts[-1]] * 10

    assert wait_until(stays, 10)
    return counts[-1]


@contextmanager
def nothing_left(scene: Scene, what: str) -> Iterator[None]:
    """See that nothing is left behind of what the block makes."""
    scene.make().close()  # which may start a private hub
    gc.collect()
    before = settled_descriptors()
    yield
    gc.collect()
    for look, wanted in ((scene.left, ([], [])), (descriptors, before)):
        assert wait_until(lambda: look() == wanted, 10), f"{what}: {look()} is left, not {wanted}"  # noqa: B023


def chosen(request: pytest.FixtureRequest, places: Places) -> list[tuple[Place, int]]:
    """The interrupts to try: of every place one, and some later ones; in the short version a sample."""
    every = [(place, 1) for place in places.found]
    if request.node.callspec.params["sweep"] == "all":
        return every + [(place, time) for place in places.found for time in LATER if time <= places.found[place]]
    dice = random.Random(request.config.getoption("--seed"))
    return dice.sample(every, min(SAMPLE, len(every)))


def end_private_hub() -> None:
    """Have the next ``make_vec`` start one."""
    hub = process._hub
    if hub is not None and hub.alive:
        hub.stop()


@pytest.mark.long
@pytest.mark.parametrize("sweep", ["sample", pytest.param("all", marks=pytest.mark.chaos)])
@pytest.mark.timeout(7200)
def test_interrupted_making_leaves_nothing(scene: Scene, request: pytest.FixtureRequest, sweep: str) -> None:
    places, raised = Places(), 0
    scene.make().close()  # what is imported by then is no place
    end_private_hub()
    places.during(scene.make).close()
    for place, time in chosen(request, places):
        interrupt = Interrupt(time, place)
        with nothing_left(scene, f"make_vec interrupted at {place}, {time}"):
            if place.file.endswith("private_hub/process.py"):
                end_private_hub()
            envs = interrupt.during(scene.make)
            scene.make().close()  # goes on, with a private hub in the place of one that was ended
            if envs is not None:
                envs.close()
            del envs
        raised += interrupt.raised
    print(f"make_vec: {raised} interrupts at {len(places.found)} places")
    assert raised >= SAMPLE / 2
    with closing(scene.make()) as envs:
        assert len(envs.reset()[0]) == ROWS


@pytest.mark.long
@pytest.mark.parametrize("after", ["closed again", pytest.param("dropped", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("sweep", ["sample", pytest.param("all", marks=pytest.mark.chaos)])
@pytest.mark.timeout(7200)
def test_interrupted_close_leaves_nothing_once_it_is_repeated(
    scene: Scene, request: pytest.FixtureRequest, after: str, sweep: str
) -> None:
    places, raised = Places(), 0
    scene.make().close()
    envs = scene.make()
    envs.reset()
    places.during(envs.close)
    for number, (place, time) in enumerate(chosen(request, places)):
        with nothing_left(scene, f"close interrupted at {place}, {time}"):
            envs = scene.make()
            envs.reset()
            if number % 2:
                envs.step_async([[0, 1], [1, 1], [2, 1]])
            interrupt = Interrupt(time, place)
            interrupt.during(envs.close)
            if after == "closed again":
                envs.close()
            del envs
        raised += interrupt.raised
    print(f"close: {raised} interrupts at {len(places.found)} places")
    assert raised >= SAMPLE / 2
