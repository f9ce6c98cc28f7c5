"""How many workers suit envs of which this or that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from envhub_server.catalog.step_costs import StepCost
from envhub_server.ipc.control import FirstBuilt
from envhub_server.session.worker_count import (
    DRIVER_S,
    ROW_S,
    SHARED_CPU_S,
    WORKER_S,
    Machine,
    WorkerCount,
    _worth_a_look,
    batch_s,
    better_count,
    better_count_text,
    chosen_count,
    count_in_advance,
    crowded_text,
    lacking,
    of_first_envs,
    soonest,
)
from hypothesis import given
from hypothesis import strategies as st

MIB = 1 << 20
TWO, SIXTEEN = Machine((0, 1), 2), Machine(tuple(range(16)), 16)
CARTPOLE, ATARI, BUSY = StepCost(15e-6, 0.0), StepCost(600e-6, 0.0), StepCost(1e-3, 0.0)
WAIT_2_MS, WAIT_10_MS = StepCost(60e-6, 2e-3), StepCost(60e-6, 10e-3)
COSTS = st.builds(StepCost, st.floats(0, 10), st.floats(0, 10))


def test_given_number_of_workers_is_used() -> None:
    assert chosen_count(16, 4, "num_workers=4") == WorkerCount(4, "told by num_workers=4", chosen=True)
    assert chosen_count(2, 4, "the hub's --workers 4").workers == 2


@pytest.mark.parametrize(
    ("machine", "num_envs", "cost", "workers"),
    [
        # Envs that wait: a process per env.
        (TWO, 4, WAIT_2_MS, 4),
        (TWO, 16, WAIT_10_MS, 16),
        (TWO, 64, WAIT_10_MS, 64),
        (SIXTEEN, 16, WAIT_2_MS, 16),
        # Envs that compute: one per CPU.
        (TWO, 16, BUSY, 2),
        (TWO, 64, ATARI, 2),
        (SIXTEEN, 64, BUSY, 16),
        (SIXTEEN, 16, ATARI, 16),
        # Cheap envs: as few as the driver has the least to do for, where there are CPUs enough.
        (TWO, 64, CARTPOLE, 2),
        (TWO, 16, CARTPOLE, 2),
        (TWO, 4, CARTPOLE, 1),
        (TWO, 4, StepCost(60e-6, 0.0), 2),
        (TWO, 2, StepCost(80e-6, 0.0), 1),
        (TWO, 4, StepCost(150e-6, 0.0), 2),
        (TWO, 8, StepCost(48e-6, 0.0), 2),
        (SIXTEEN, 2, StepCost(1e-6, 0.0), 1),
        # One env.
        (TWO, 1, BUSY, 1),
        (SIXTEEN, 1, WAIT_10_MS, 1),
    ],
)
def test_what_steps_took_before_decides(machine: Machine, num_envs: int, cost: StepCost, workers: int) -> None:
    found = count_in_advance(num_envs, replace(cost, fit=True), machine)
    assert found is not None
    assert found == count_in_advance(num_envs, cost, machine, shares=True)
    assert found.workers == workers
    assert found.reason == f"a step of this env took {cost} before" and not found.chosen


def test_cheap_envs_get_fewer_workers_than_a_large_machine_has_cpus() -> None:
    assert 1 < soonest(64, CARTPOLE, 64) < 64


def test_cost_has_milliseconds_in_its_text() -> None:
    assert str(WAIT_10_MS) == "0.06 ms of CPU and 10 ms of waiting"


def test_no_more_envs_than_cpus_are_a_process_each() -> None:
    found = count_in_advance(16, None, SIXTEEN)
    assert found == WorkerCount(16, "a process per env: there are no more envs than CPUs")
    assert count_in_advance(17, None, SIXTEEN) is None  # which is for the first envs to say


def test_known_env_gets_no_more_workers_than_there_are_descriptors_for() -> None:
    found = count_in_advance(64, replace(WAIT_10_MS, fit=True), Machine((0, 1), 2, workers_max=20))
    assert found is not None and found.workers == 20
    assert "64 are more than the memory, descriptors and processes that are to be had allow" in found.reason


@pytest.mark.parametrize(
    ("memory_bytes", "private_bytes", "workers_max", "workers"),
    [
        (1 << 40, 8 * MIB, 1 << 20, 64),
        (1024 * MIB, 64 * MIB, 1 << 20, 8),  # half of the memory
        (1024 * MIB, 0, 1 << 20, 64),  # the kernel does not say how much a worker takes
        (1 << 40, 8 * MIB, 40, 40),
        (16 * MIB, 64 * MIB, 1 << 20, 2),  # they are there already
        (1 << 40, 8 * MIB, 0, 2),
    ],
)
def test_unknown_env_gets_a_process_within_what_is_to_be_had(
    memory_bytes: int, private_bytes: int, workers_max: int, workers: int
) -> None:
    machine = Machine((0, 1), 2, workers_max=workers_max, memory_bytes=memory_bytes)
    found = of_first_envs(64, [FirstBuilt(True, 0), FirstBuilt(False, private_bytes)], machine)
    assert found.workers == workers
    assert ("to be had allow" in found.reason) is (workers < 64)


def test_family_that_computes_in_its_process_gets_one_worker_per_cpu() -> None:
    assert of_first_envs(64, [FirstBuilt(True, MIB)] * 2, TWO).workers == 2


@given(st.integers(1, 300), COSTS, st.integers(1, 128), st.integers(0, 100))
def test_best_number_is_no_more_than_envs_and_nothing_is_better(
    num_envs: int, cost: StepCost, cpus: int, workers_max: int
) -> None:
    machine = Machine((0,), cpus, workers_max=workers_max)
    best = count_in_advance(num_envs, cost, machine, shares=True)
    assert best is not None and 1 <= best.workers <= num_envs
    assert better_count(num_envs, best.workers, cost, machine) is None


def test_number_that_is_reported_as_better_is_the_one_that_the_next_session_gets() -> None:
    found = better_count(16, 1, WAIT_10_MS, TWO)
    assert found is not None and found[0] == 16 and 12 < found[1] <= 16
    assert better_count(16, 16, WAIT_10_MS, TWO) is None
    assert better_count(64, 64, CARTPOLE, TWO) is not None
    small = Machine((0, 1), 2, workers_max=8)
    found, next_one = better_count(64, 1, WAIT_10_MS, small), count_in_advance(64, WAIT_10_MS, small, shares=True)
    assert found is not None and next_one is not None and found[0] == next_one.workers == 8
    assert better_count(64, 8, WAIT_10_MS, small) is None


def test_next_session_is_promised_the_number_only_where_it_knows_the_env_again() -> None:
    texts = [better_count_text(16, 1, 16, 12.0, WAIT_10_MS, known_again) for known_again in (True, False)]
    assert ["by itself" in text for text in texts] == [True, False]
    assert texts[1].endswith("pass num_workers=16")
    fewer = better_count_text(16, 16, 2, 12.0, CARTPOLE, known_again=False)
    assert fewer.endswith("pass num_workers=2, or shared_process=True, if its envs may share a process")


@pytest.mark.parametrize("cost", [CARTPOLE, BUSY, WAIT_10_MS])
def test_what_steps_took_is_no_leave_to_share_a_process(cost: StepCost) -> None:
    found = count_in_advance(64, cost, TWO)
    assert found == WorkerCount(64, "a process per env: nobody says that its envs may share one")
    few = count_in_advance(64, cost, Machine((0, 1), 2, workers_max=20))
    assert few is not None and (few.workers, few.crowded) == (20, True)
    assert "64 envs in 20 processes" in crowded_text(64, 20)


def test_env_of_which_a_process_cannot_have_two_gets_one_each_whatever_is_said() -> None:
    alone = StepCost(0.0, 0.0, alone=True)
    found = count_in_advance(64, alone, Machine((0, 1), 2, workers_max=20))
    assert found is not None and (found.workers, found.chosen, found.alone) == (64, True, True)
    assert count_in_advance(64, alone, TWO, shares=True) == found
    assert "there is room for 20" in lacking(64, found, Machine((0, 1), 2, workers_max=20))
    assert "there are to be 4, told by num_workers=4" in lacking(64, chosen_count(64, 4, "num_workers=4"), TWO)
    assert lacking(64, found, TWO) == ""


def test_first_envs_share_a_process_where_somebody_says_so() -> None:
    assert of_first_envs(64, [FirstBuilt(False, MIB)] * 2, TWO, shares=True) == WorkerCount(
        2, "one per CPU: shared_process"
    )


def test_known_env_gets_no_more_workers_than_there_is_memory_for() -> None:
    large = StepCost(60e-6, 10e-3, env_bytes=256 * MIB)
    found = count_in_advance(64, replace(large, fit=True), Machine((0, 1), 2, memory_bytes=4096 * MIB))
    assert found is not None and found.workers == 8


def test_pinned_workers_take_the_cpus_in_turn() -> None:
    assert [Machine((2, 5), 2).cpu(worker) for worker in range(3)] == [2, 5, 2]


def test_batch_takes_what_its_largest_worker_its_cpus_and_its_driver_take() -> None:
    cost = StepCost(100e-6, 900e-6)
    alone_s = 2 * (1e-3 + ROW_S) + WORKER_S  # one after the other, waits included
    assert batch_s(3, 2, cost, 4) == pytest.approx(alone_s + 2 * DRIVER_S)
    assert batch_s(3, 2, cost, 2) == pytest.approx(alone_s + 2 * DRIVER_S + SHARED_CPU_S)
    busy = StepCost(1e-3, 0.0)
    computing_s = 8 * (1e-3 + ROW_S) + 8 * WORKER_S  # on two CPUs
    assert batch_s(8, 8, busy, 2) == pytest.approx(computing_s / 2 + 8 * DRIVER_S + SHARED_CPU_S)
    computing_s = 8 * (1e-3 + ROW_S) + 2 * WORKER_S  # by two workers, though there are more CPUs
    assert batch_s(8, 2, busy, 4) == pytest.approx(max(computing_s / 2, 4 * (1e-3 + ROW_S) + WORKER_S) + 2 * DRIVER_S)


def test_worker_without_memory_of_its_own_is_one_for_each_byte_at_most() -> None:
    few = Machine((0,), 1, memory_bytes=8)
    assert of_first_envs(16, [FirstBuilt(False, 0)], few).workers == 4
    assert of_first_envs(16, [FirstBuilt(False, 2)], few).workers == 2


@pytest.mark.parametrize(("num_envs", "cpus"), [(7, 5), (5, 7), (16, 3)])
def test_one_worker_per_cpu_is_among_the_numbers_that_are_compared(num_envs: int, cpus: int) -> None:
    found = _worth_a_look(num_envs, cpus)
    assert {1, min(num_envs, cpus), num_envs} <= found and max(found) == num_envs and min(found) == 1
