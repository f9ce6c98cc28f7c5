from __future__ import annotations

from envhub_server.session.build_order import NO_RULES, Place, WorkerRules, build, build_rest, variables
from sessions import RECIPE

from envhub.protocol.messages import Hosting, Make

OF_A_SESSION = WorkerRules(session="0badcafe")


def test_worker_finds_its_place_in_its_variables() -> None:
    assert variables(OF_A_SESSION, Place(1, 4, [1, 5, 9])) == {
        "ENVHUB_SESSION": "0badcafe",
        "ENVHUB_WORKER_INDEX": "1",
        "ENVHUB_NUM_WORKERS": "4",
        "ENVHUB_ENV_INDICES": "1,5,9",
    }


def test_what_is_not_decided_yet_is_empty() -> None:
    found = variables(OF_A_SESSION, Place(1, None, [1, 5, 9]))
    assert (found["ENVHUB_NUM_WORKERS"], found["ENVHUB_ENV_INDICES"]) == ("", "")
    assert found["ENVHUB_WORKER_INDEX"] == "1"


def test_envs_in_the_programs_own_process_leave_its_variables_alone() -> None:
    assert variables(NO_RULES, Place(0, 1, [0])) == {}


def test_devices_are_dealt_in_turn() -> None:
    rules = WorkerRules(session="0badcafe", hosting=Hosting(gpus=[3, 5]))
    dealt = [variables(rules, Place(worker, 4, [worker])) for worker in range(4)]
    for name in ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID"):
        assert [each[name] for each in dealt] == ["3", "5", "3", "5"]


def test_worker_is_told_the_arguments_of_its_own_envs() -> None:
    make = Make(4, "CartPole-v1", kwargs_each=[b"0", b"1", b"2", b"3"])
    assert build(make, RECIPE, NO_RULES, Place(1, 2, [1, 3])).kwargs_each == [b"1", b"3"]
    assert build_rest(make, NO_RULES, Place(0, 2, [0, 2])).kwargs_each == [b"0", b"2"]
    assert build(Make(4, kwargs=b"all"), RECIPE, NO_RULES, Place(1, 2, [1, 3])).kwargs_each == []
