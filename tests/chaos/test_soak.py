"""No wake-up is ever lost: millions of steps on the shared lane, each of which would wait for ever if one were."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import sims

import envhub

STALLED_S = 20.0  # a step takes a millisecond


def soak(steps: int, spin_us: int | None) -> None:
    num_envs, factory = 4, partial(sims.Counter, steps + 1)  # in one episode
    with closing(envhub.make_vec([factory] * num_envs, num_workers=2, spin_us=spin_us)) as envs:
        assert envs.lane == "shared"
        envs.reset()
        batches = [np.arange(num_envs) + number for number in range(50)]
        for number in range(steps):
            envs.step_async(batches[number % 50])
            observations, rewards, *_ = envs.step_wait(timeout=STALLED_S)
            assert observations[:, 0].tolist() == [number + 1] * num_envs
            assert rewards.tolist() == batches[number % 50].tolist()


LONG, CHAOS = pytest.mark.long, (pytest.mark.chaos, pytest.mark.timeout(7200))


@pytest.mark.parametrize(
    ("spin_us", "steps"),
    [
        (None, 2000),
        *(pytest.param(spin_us, 2000, marks=LONG) for spin_us in (0, 30)),
        *(pytest.param(*each, marks=CHAOS) for each in ((None, 10**7), (0, 10**6), (30, 10**6))),
    ],
)
def test_no_step_of_many_stalls(spin_us: int | None, steps: int) -> None:
    started_s = time.monotonic()
    soak(steps, spin_us)
    print(f"{steps} steps with spin_us={spin_us}, {steps / (time.monotonic() - started_s):,.0f} steps/s")
