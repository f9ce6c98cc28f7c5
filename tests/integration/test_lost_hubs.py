"""The loss of one of several hubs: its rows are truncated and made again, and the rows of the others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hubs import wait_until
from several_hubs import SeveralHubs, several_hubs

import envhub

ENVS = ("counter=sims:counter",)
WAIT_S = 0.5  # restart_wait
LOOK_S = 0.05
ROWS = 4
AGAIN_S = 20.0  # for envs that are made again, on a slow machine


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[SeveralHubs]:
    with several_hubs(tmp_path, 2, *ENVS) as running:
        yield running


def made(hubs: SeveralHubs, *lanes: str, **options: Any) -> envhub.HubVectorEnv:
    """Two rows on each of two hubs, whose loss does not end the vector env."""
    options = {"split": [2, 2], "on_hub_loss": "recreate", "restart_wait": WAIT_S, **options}
    return envhub.make_vec("counter", ROWS, hub=hubs.addresses(*lanes), **options)


class Steps:
    """Steps of a vector env of counters, by which rows that stepped are told from rows that were truncated.

    Attributes:
        truncations: the number of truncated steps of each row.
        slowest_s: the seconds that the slowest step took.
    """

    def __init__(self, envs: envhub.HubVectorEnv) -> None:
        self.envs = envs
        self.counts = envs.reset()[0][:, 0]
        self.truncations = np.zeros(ROWS, int)
        self.slowest_s = 0.0

    def step(self) -> Any:
        """Step once. A row counts on, or is truncated by the loss of its hub, or begins an episode after that."""
        begun_s = time.monotonic()
        outcome = self.envs.step(np.ones(ROWS, int))
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        observations, rewards, _, truncations, infos = outcome
        counts = observations[:, 0]
        begins = (self.truncations > 0) & (counts == 0)
        assert (truncations | begins | (counts == self.counts + 1)).all(), (self.counts, outcome)
        assert (counts == self.counts)[truncations].all() and not rewards[truncations].any()
        lost = [failure is not None and failure.cause == "hub_lost" for failure in infos.get("env_failure", [None] * 4)]
        assert lost == truncations.tolist()
        self.counts = counts
        self.truncations += truncations
        return outcome

    def until_lost(self) -> None:
        """Step until a row was truncated."""
        assert wait_until(lambda: self.step()[3].any(), AGAIN_S)

    def until_all_step(self) -> float:
        """Step until no row is truncated; returns the seconds that this took."""
        begun_s = time.monotonic()
        while self.step()[3].any():
            assert time.monotonic() < begun_s + AGAIN_S
            time.sleep(LOOK_S)
        return time.monotonic() - begun_s


@pytest.mark.parametrize("lane", ["tcp", pytest.param("ipc", marks=pytest.mark.long)])
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long)])
def test_rows_of_a_killed_hub_are_truncated_and_go_on_when_it_is_back(hubs: SeveralHubs, lane: str, lost: int) -> None:
    with closing(made(hubs, lane)) as envs:
        steps = Steps(envs)
        steps.step()
        hubs.kill(lost)
        steps.until_lost()
        hubs.start(lost)
        steps.until_all_step()
        others = slice(2, 4) if lost == 0 else slice(0, 2)
        assert not steps.truncations[others].any() and steps.truncations.any()
        assert steps.counts[others].min() > steps.counts.min()  # which began again
    hubs.await_no_sessions()
