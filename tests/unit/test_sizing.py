"""How many workers suit envs of which a step was measured."""

from __future__ import annotations

import pytest
from envhub_server.sizing import Sizing
from hypothesis import given
from hypothesis import strategies as st

FOUR = Sizing((0, 1, 2, 3), 4)


@pytest.mark.parametrize(
    ("num_envs", "step_us", "workers"),
    [
        (1, 10, 1),
        (4, 10, 2),  # each more worker costs more than the env that it takes from another
        (16, 10, 3),  # one CPU is left to who drives them
        (64, 10, 3),
        (16, 100, 3),
        (16, 1000, 4),  # long enough for who drives them to share a CPU
        (2, 1000, 2),
        (5, 1000, 3),  # a fourth would only spare a worker one of two envs
    ],
)
def test_workers_suit_cheap_medium_and_heavy_envs(num_envs: int, step_us: float, workers: int) -> None:
    assert FOUR.workers(num_envs, step_us / 1e6) == workers


@given(st.integers(1, 2000), st.floats(0, 100), st.integers(1, 256))
def test_workers_are_no_more_than_envs_and_cpus(num_envs: int, step_s: float, cpus: int) -> None:
    assert 1 <= Sizing((0,), cpus).workers(num_envs, step_s) <= min(num_envs, cpus)


def test_unknown_envs_leave_one_cpu_to_who_drives_them() -> None:
    assert [Sizing((0,), cpus).usual for cpus in (1, 2, 4)] == [1, 1, 3]


def test_a_wait_looks_for_as_long_as_was_said() -> None:
    assert Sizing((0,), 4, spin_us=7).look_us(100) == 7
    assert Sizing((0,), 4, quota=True, spin_us=7).look_us(1) == 7


def test_pinned_workers_take_the_cpus_in_turn() -> None:
    assert [Sizing((2, 5), 2).cpu(worker) for worker in range(3)] == [2, 5, 2]
