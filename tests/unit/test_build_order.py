from __future__ import annotations

from dataclasses import fields, replace

import pytest
from envhub_server.catalog.registry import EnvSettings, Recipe
from envhub_server.ipc import control
from envhub_server.ipc.control import FirstBuilt
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.session.building import (
    chosen_count,
    count_in_advance,
    count_workers,
    crowded_text,
    first_workers,
    lacking,
    separate,
)
from envhub_server.session.launcher import Launcher, Machine, WorkerCount, WorkerRules, interpreter_of
from recorder import Recorder
from sessions import NO_RULES, RECIPE, restarts

from envhub.protocol.messages import Faults, Hosting, Make, ProgramEnvironment, Recycle

OF_A_SESSION = WorkerRules(session="0badcafe")


def launcher(make: Make, rules: WorkerRules, recipe: Recipe, workers: int, decided: bool) -> Launcher:
    made = Launcher(make, recipe, rules, Machine((4, 5), 2), restarts(), Recorder())
    made.slots.resize(workers)
    made.count = WorkerCount(workers, "as the test wants it") if decided else None
    return made


def build(
    make: Make, recipe: Recipe, rules: WorkerRules, worker: int, workers: int, decided: bool = True
) -> control.Build:
    starts = launcher(make, rules, recipe, workers, decided)
    return starts.order(starts.slots[worker])


def build_rest(make: Make, rules: WorkerRules, worker: int, workers: int) -> control.BuildRest:
    starts = launcher(make, rules, RECIPE, workers, decided=True)
    return starts.order_rest(starts.slots[worker])


def test_worker_finds_its_place_in_its_variables() -> None:
    assert build(Make(12, row_offset=20), RECIPE, OF_A_SESSION, 1, 4).variables == {
        "ENVHUB_SESSION": "0badcafe",
        "ENVHUB_WORKER_INDEX": "1",
        "ENVHUB_NUM_WORKERS": "4",
        "ENVHUB_ENV_INDICES": "21,25,29",
    }


def test_what_is_not_decided_yet_is_empty() -> None:
    found = build(Make(12), RECIPE, OF_A_SESSION, 1, 4, decided=False).variables
    assert (found["ENVHUB_NUM_WORKERS"], found["ENVHUB_ENV_INDICES"]) == ("", "")
    assert found["ENVHUB_WORKER_INDEX"] == "1"


def test_envs_in_the_programs_own_process_leave_its_variables_alone() -> None:
    assert build(Make(1), RECIPE, NO_RULES, 0, 1).variables == {}


def test_devices_are_dealt_in_turn() -> None:
    rules = WorkerRules(session="0badcafe", hosting=Hosting(gpus=[3, 5]))
    dealt = [build(Make(4), RECIPE, rules, worker, 4).variables for worker in range(4)]
    for name in ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID"):
        assert [each[name] for each in dealt] == ["3", "5", "3", "5"]


def test_worker_is_told_the_arguments_of_its_own_envs() -> None:
    make = Make(4, "CartPole-v1", kwargs_each=[b"0", b"1", b"2", b"3"])
    assert build(make, RECIPE, NO_RULES, 1, 2).kwargs_each == [b"1", b"3"]
    assert build_rest(make, NO_RULES, 0, 2).kwargs_each == [b"0", b"2"]
    assert build(Make(4, kwargs=b"all"), RECIPE, NO_RULES, 1, 2).kwargs_each == []


def test_worker_is_told_all_that_the_client_asked_for() -> None:
    make = Make(
        2,
        kwargs=b"kwargs",
        factories=b"factories",
        python="3.11",
        autoreset_mode="SameStep",
        observation_mode="different",
        runner=b"runner",
        wrappers=["wrappers:Own"],
        wrapper_kwargs=[b"wrapper"],
        columns=True,
        snapshots="safe",
    )
    told = build(make, RECIPE, NO_RULES, 0, 1)
    own = {"name", "kwargs_each", "row_offset"}
    shared = {field.name for field in fields(Make)} & {field.name for field in fields(told)} - own
    assert len(shared) == 10
    for name in shared:
        assert getattr(told, name) == getattr(make, name) != getattr(Make(2), name), name
    faults = Faults(on_exception="truncate", on_invalid="raise")
    strict = build(Make(2, faults=faults), RECIPE, NO_RULES, 0, 1)
    assert (strict.on_exception, strict.on_invalid) == ("truncate", "raise")


def test_worker_is_told_what_the_hub_says_of_the_env_and_of_its_workers() -> None:
    recipe = Recipe("walk", modules=("sims", "more"), entry="sims:make", settings=EnvSettings(vector=True))
    hosting = Hosting(recycle=Recycle(episodes=7))
    rules = WorkerRules(1 << 30, True, "0badcafe", hosting, "replay", shares_imports=True)
    told = build(Make(4, pin=True), recipe, rules, 1, 2)
    assert (told.worker, told.rows, told.cpu, told.batch_workers, told.first_only) == (1, [1, 3], 5, 2, False)
    assert (told.name, told.modules, told.entry) == ("walk", ["sims", "more"], "sims:make")
    assert (told.memory_bytes_max, told.hide_folders, told.replays, told.episodes_max) == (1 << 30, True, "replay", 7)
    assert told.says_imported and told.variables == build_rest(Make(4), rules, 1, 2).variables != {}


def test_worker_makes_only_its_first_env_until_the_number_of_workers_is_decided() -> None:
    assert build(Make(4), RECIPE, NO_RULES, 0, 2, decided=False).first_only
    vector = replace(RECIPE, settings=EnvSettings(vector=True))
    assert build(Make(4), vector, NO_RULES, 0, 2, decided=False).batch_workers == 1


def test_worker_of_a_private_hub_adopts_the_programs_environment_and_else_one_thread_per_library() -> None:
    program_environment = ProgramEnvironment(
        ["/sims"], "/here", {"HOME": "/home", "OMP_NUM_THREADS": "8"}, b"registry", b"authkey"
    )
    told = build(Make(1, program_environment=program_environment), RECIPE, NO_RULES, 0, 1)
    assert told.allow_pickle
    assert (told.sys_path, told.cwd, told.registrations, told.authkey) == (["/sims"], "/here", b"registry", b"authkey")
    assert told.environ["HOME"] == "/home" and told.environ["OMP_NUM_THREADS"] == "8"
    assert told.environ["MKL_NUM_THREADS"] == "1"


def test_worker_with_an_interpreter_of_its_own_adopts_only_the_programs_random_generators() -> None:
    own = replace(RECIPE, settings=EnvSettings(python="3.8"))
    program_environment = ProgramEnvironment(
        ["/sims"], "/here", {"HOME": "/home"}, b"registry", b"authkey", generators=[3, 4]
    )
    told = build(Make(1, program_environment=program_environment), own, NO_RULES, 0, 1)
    assert (told.generators, told.sys_path, told.cwd, told.environ) == ([3, 4], [], "", {})


def test_interpreter_of_a_session_has_the_options_of_its_program() -> None:
    own = InterpreterKey()
    assert interpreter_of(own, None) == own
    assert interpreter_of(own, ProgramEnvironment([], "", {}, flags=["-O"])).flags == ("-O",)


# --- how many workers -------------------------------------------------------------------------------------------------


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
    found = count_workers(64, [FirstBuilt(True, 0), FirstBuilt(False, private_bytes)], machine)
    assert found.workers == workers
    assert ("to be had allow" in found.reason) is (workers < 64)


def test_first_envs_share_a_process_where_somebody_says_so() -> None:
    assert count_workers(64, [FirstBuilt(False, MIB)] * 2, TWO, may_share=True) == WorkerCount(
        2, "one per CPU: shared_process"
    )


def test_worker_without_memory_of_its_own_is_one_for_each_byte_at_most() -> None:
    few = Machine((0,), 1, memory_bytes=8)
    assert count_workers(16, [FirstBuilt(False, 0)], few).workers == 4
    assert count_workers(16, [FirstBuilt(False, 2)], few).workers == 2


def test_no_more_envs_than_cpus_are_a_process_each() -> None:
    found = count_in_advance("Ant-v5", 16, cpus=16)
    assert found == WorkerCount(16, "a process per env: there are no more envs than CPUs")
    assert count_in_advance("Ant-v5", 17, cpus=16) is None  # which is for the first envs to say


def test_env_of_which_a_process_cannot_have_two_gets_one_each() -> None:
    found = separate(64, "one_per_process")
    assert (found.workers, found.chosen) == (64, True)
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
    assert count_workers(num_envs, [cheap] * workers, machine).workers == workers
    at_least = min(num_envs, cpus)  # that number has begun, because no id has said what envs these are
    assert count_workers(num_envs, [cheap] * at_least, machine).workers == at_least


def test_cheap_envs_are_not_cheap_beside_others() -> None:
    first = [FirstBuilt(True, 0, cheap=True), FirstBuilt(True, 0)]
    assert count_workers(64, first, TWO).reason.startswith("one per CPU")


def test_envs_that_share_processes_for_want_of_room_are_told_of() -> None:
    few = count_workers(64, [FirstBuilt(False, 0)], Machine((0, 1), 2, workers_max=20))
    assert (few.workers, few.crowded) == (20, True) and "64 envs in 20 processes" in crowded_text(64, 20)
