"""How many workers suit envs of which this or that is known."""

from __future__ import annotations

import pytest
from envhub_server.ipc.control import FirstBuilt
from envhub_server.session.building import (
    WorkerCount,
    chosen_count,
    count_in_advance,
    crowded_text,
    first_workers,
    lacking,
    of_first_envs,
)
from envhub_server.session.launcher import Machine

MIB = 1 << 20
TWO, SIXTEEN = Machine((0, 1), 2), Machine(tuple(range(16)), 16)


def test_given_number_of_workers_is_used() -> None:
    assert chosen_count(16, 4, "num_workers=4") == WorkerCount(4, "told by num_workers=4", chosen=True)
    assert chosen_count(2, 4, "the hub's --workers 4").workers == 2


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


def test_first_envs_share_a_process_where_somebody_says_so() -> None:
    assert of_first_envs(64, [FirstBuilt(False, MIB)] * 2, TWO, shares=True) == WorkerCount(
        2, "one per CPU: shared_process"
    )


def test_worker_without_memory_of_its_own_is_one_for_each_byte_at_most() -> None:
    few = Machine((0,), 1, memory_bytes=8)
    assert of_first_envs(16, [FirstBuilt(False, 0)], few).workers == 4
    assert of_first_envs(16, [FirstBuilt(False, 2)], few).workers == 2


def test_no_more_envs_than_cpus_are_a_process_each() -> None:
    found = count_in_advance("Ant-v5", 16, alone=False, cpus=16)
    assert found == WorkerCount(16, "a process per env: there are no more envs than CPUs")
    assert count_in_advance("Ant-v5", 17, alone=False, cpus=16) is None  # which is for the first envs to say


def test_env_of_which_a_process_cannot_have_two_gets_one_each() -> None:
    found = count_in_advance("Ant-v5", 64, alone=True, cpus=2)
    assert found is not None and (found.workers, found.chosen, found.alone) == (64, True, True)
    assert "there is room for 20" in lacking(64, found, Machine((0, 1), 2, workers_max=20))
    assert "there are to be 4, told by num_workers=4" in lacking(64, chosen_count(64, 4, "num_workers=4"), TWO)
    assert lacking(64, found, TWO) == ""


@pytest.mark.parametrize(
    ("cpus", "num_envs", "workers"),
    [
        # The driver keeps a CPU for itself, until the workers have enough to do.
        *((2, 1, 1), (2, 4, 1), (2, 8, 1), (2, 16, 2), (2, 64, 2), (1, 64, 1)),
        *((4, 16, 3), (4, 64, 4), (16, 4, 2), (16, 16, 4), (16, 64, 8), (16, 1000, 16)),
    ],
)
def test_cheap_envs_have_fewer_workers_the_more_the_driver_costs(cpus: int, num_envs: int, workers: int) -> None:
    for name in ("CartPole-v1", "ALE/Taxi-v3", "FrozenLake"):
        assert first_workers(name, num_envs, cpus) == workers
    assert first_workers("CartPoles-v1", num_envs, cpus) == first_workers("", num_envs, cpus) == min(num_envs, cpus)
    cheap, machine = FirstBuilt(True, 0, cheap=True), Machine(tuple(range(cpus)), cpus)
    assert of_first_envs(num_envs, [cheap] * workers, machine).workers == workers
    at_least = min(num_envs, cpus)  # that number has begun, because no id has said what envs these are
    assert of_first_envs(num_envs, [cheap] * at_least, machine).workers == at_least


def test_cheap_envs_are_not_cheap_beside_others() -> None:
    first = [FirstBuilt(True, 0, cheap=True), FirstBuilt(True, 0)]
    assert of_first_envs(64, first, TWO).reason.startswith("one per CPU")


def test_envs_that_share_processes_for_want_of_room_are_told_of() -> None:
    few = of_first_envs(64, [FirstBuilt(False, 0)], Machine((0, 1), 2, workers_max=20))
    assert (few.workers, few.crowded) == (20, True) and "64 envs in 20 processes" in crowded_text(64, 20)
