"""Ctrl-C at the lines of a vector env over two hubs: all envs are stepped equally often, whatever the line."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from chaos.interrupts import Interrupt, Place, Places
from hubs import wait_until
from partial_batches import outstanding
from several_hubs import SeveralHubs, several_hubs

import envhub

ROWS = 3
SAMPLE = 12  # places of a call, in the short version
WAIT_S = 30.0

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # an interrupt in a destructor
    "ignore:.*while waiting for a pending call",
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralHubs]:
    with several_hubs(tmp_path_factory.mktemp("hubs"), 2, "counter=sims:counter") as hubs:
        yield hubs


@pytest.fixture
def hubs(running: SeveralHubs) -> Iterator[SeveralHubs]:
    yield running
    running.restore()
    running.await_no_sessions()


def made(hubs: SeveralHubs, **options: Any) -> envhub.HubVectorEnv:
    """One row on the shared lane of a hub, and two on the wire lane of another."""
    return envhub.make_vec("counter", ROWS, hub=hubs.addresses("ipc", "tcp"), split=[1, 2], num_workers=2, **options)


def by_parts(envs: envhub.HubVectorEnv) -> None:
    """Step every env by a ``send``, and receive them all."""
    envs.send(np.ones(ROWS, int))
    while outstanding(envs):
        envs.recv(1)


WORK: dict[str, Callable[[envhub.HubVectorEnv], Any]] = {
    "reset": lambda envs: envs.reset(),
    "step": lambda envs: envs.step(np.ones(ROWS, int)),
    "parts": by_parts,
    "call": lambda envs: envs.call("add", 1),
    "set_attr": lambda envs: envs.set_attr("note", [1, 2, 3]),
    "masked": lambda envs: envs.reset(options={"reset_mask": np.array([True, False, False])}),
}


def settle(envs: envhub.HubVectorEnv) -> None:
    """Wait for what an interrupt left to be waited for."""
    for wait in (envs.step_wait, envs.reset_wait, envs.call_wait):
        with suppress(envhub.NothingPending):
            wait(timeout=WAIT_S)
    with suppress(envhub.NothingPending):
        while True:
            envs.recv(1, timeout=WAIT_S)


def chosen(request: pytest.FixtureRequest, places: Places) -> list[Place]:
    every = [*places.found]
    if request.node.callspec.params["sweep"] == "all":
        return every
    return random.Random(request.config.getoption("--seed")).sample(every, min(SAMPLE, len(every)))


SWEEPS = pytest.mark.parametrize("sweep", ["sample", pytest.param("all", marks=pytest.mark.chaos)])


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WORK)
@SWEEPS
def test_all_envs_are_stepped_equally_often(
    hubs: SeveralHubs, request: pytest.FixtureRequest, name: str, sweep: str
) -> None:
    work, raised = WORK[name], 0
    with closing(made(hubs)) as envs:
        envs.reset()
        work(envs)
        places = Places()
        places.during(lambda: work(envs))
        for place in chosen(request, places):
            envs.reset()
            interrupt = Interrupt(1, place)
            interrupt.during(lambda: work(envs))
            raised += interrupt.raised
            settle(envs)
            counts = envs.get_attr("count")
            assert len(set(counts)) == 1, (str(place), counts)
            before = np.array(envs.get_attr("count"))
            assert (envs.step(np.ones(ROWS, int))[0][:, 0] == before + 1).all(), str(place)
    print(f"{name}: {raised} interrupts at {len(places.found)} places")
    assert raised >= min(SAMPLE, len(places.found)) / 2


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@SWEEPS
def test_interrupted_making_leaves_no_session(hubs: SeveralHubs, request: pytest.FixtureRequest, sweep: str) -> None:
    made(hubs).close()
    places = Places()
    places.during(lambda: made(hubs)).close()
    for place in chosen(request, places):
        envs = Interrupt(1, place).during(lambda: made(hubs))
        if envs is not None:
            envs.close()
        del envs
        hubs.await_no_sessions()


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@SWEEPS
def test_close_that_was_interrupted_ends_all_sessions_when_repeated(
    hubs: SeveralHubs, request: pytest.FixtureRequest, sweep: str
) -> None:
    envs = made(hubs)
    envs.reset()
    places = Places()
    places.during(envs.close)
    for number, place in enumerate(chosen(request, places)):
        envs = made(hubs)
        envs.reset()
        if number % 2:
            envs.step_async(np.ones(ROWS, int))
        Interrupt(1, place).during(envs.close)
        envs.close()
        hubs.await_no_sessions()


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@SWEEPS
def test_interrupts_while_a_hub_is_lost_lose_no_truncation(
    hubs: SeveralHubs, request: pytest.FixtureRequest, sweep: str
) -> None:
    def step() -> Any:
        return envs.step(np.ones(ROWS, int))

    with closing(made(hubs, on_hub_loss="recreate", restart_wait=0.0)) as envs:
        envs.reset()
        places = Places()
        hubs.kill(1)
        places.during(step)
        hubs.start(1)
        for place in chosen(request, places)[: SAMPLE // 4 if sweep == "sample" else None]:
            while envs.step(np.ones(ROWS, int))[3].any():
                threading.Event().wait(0.1)
            hubs.kill(1)
            interrupt = Interrupt(1, place)
            interrupt.during(step)
            assert not interrupt.raised or step()[3].tolist() == [False, True, True], str(place)
            hubs.start(1)
    assert wait_until(lambda: not [each for each in threading.enumerate() if each.name == "envhub-rebuild"])
