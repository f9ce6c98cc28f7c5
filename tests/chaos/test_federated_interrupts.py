"""Ctrl-C at the lines that make and close a vector env over two hubs, and that find a hub lost."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from chaos.interrupts import Interrupt, Place, Places
from hubs import wait_until
from several_hubs import SeveralHubs, fixtures

import envhub

ROWS = 3
SAMPLE = 12  # places of a call, in the short version

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # an interrupt in a destructor
    "ignore:.*while waiting for a pending call",
)


running, hubs = fixtures(2, "counter=sims:counter")


def made(hubs: SeveralHubs, **options: Any) -> envhub.HubVectorEnv:
    """One row on the shared lane of a hub, and two on the wire lane of another."""
    return envhub.make_vec("counter", ROWS, hub=hubs.addresses("ipc", "tcp"), split=[1, 2], num_workers=2, **options)


def chosen(request: pytest.FixtureRequest, places: Places) -> list[Place]:
    every = [*places.found]
    if request.node.callspec.params["sweep"] == "all":
        return every
    return random.Random(request.config.getoption("--seed")).sample(every, min(SAMPLE, len(every)))


SWEEPS = pytest.mark.parametrize("sweep", ["sample", pytest.param("all", marks=pytest.mark.chaos)])


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
