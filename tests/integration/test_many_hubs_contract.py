"""A vector env over several hubs keeps the contract of one over a single hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from envhub_client.federation.part import HubPart
from fleets import addresses, served_hubs
from gymnasium import spaces as gym_spaces
from gymnasium.vector import SyncVectorEnv
from hubs import ServedHub, stopped, wait_until
from same import assert_same

import envhub
from envhub.values import spaces

OFFERED = ["CartPole-v1", *(f"{name}=sims:{name}" for name in ("counter", "naughty", "shown", "anything", "graphs"))]
OFFERED += ["told=vector_sims:told", "late=odd_sims:Late", "entangled=sims:entangled"]
ZEROS = np.zeros(5, np.int64)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    with served_hubs(tmp_path_factory, 2, OFFERED) as hubs:
        yield hubs


@pytest.fixture(params=["wire", pytest.param("shared", marks=pytest.mark.long)])
def lanes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(
    hubs: Sequence[ServedHub], name: str, lanes: str = "wire", split: Sequence[int] = (2, 3), **options: Any
) -> envhub.HubVectorEnv:
    options = {"num_workers": 2, **options}
    return envhub.make_vec(name, sum(split), hub=addresses(hubs, lanes, 2), split=split, **options)


def parts_of(envs: envhub.HubVectorEnv) -> list[HubPart]:
    parts: list[HubPart] = envs._session.lane.parts  # type: ignore[attr-defined]
    return parts


def sessions(hub: ServedHub) -> int:
    with envhub.connect(hub.tcp) as client:
        return len(client.sessions())


# --- infos ------------------------------------------------------------------------------------------------------------


def test_first_env_of_all_hubs_fixes_the_form_of_infos(two: list[ServedHub]) -> None:
    values: list[dict[str, Any]] = [
        {},
        {"b": np.int16(1), "in": {"x": 1}},
        {"a": 2.5, "b": np.int16(7), "in": {"y": "t"}},
        {"in": {"y": "u", "x": 2}, "b": np.int16(3)},
        {"c": np.zeros(2), "b": np.int16(4)},
    ]
    space = gym_spaces.Discrete(2)
    wanted = SyncVectorEnv([lambda one=one: sims.Anything(space, space, [one]) for one in values])
    described = dict.fromkeys(("observation_space", "action_space"), spaces.describe(space))
    each = [{**described, "infos": [one]} for one in values]
    with closing(
        envhub.make_vec("anything", hub=addresses(two, "wire", 2), split=[2, 3], num_workers=2, env_kwargs=each)
    ) as envs:
        found, expected = envs.reset(seed=1)[1], wanted.reset(seed=1)[1]
        assert_same(found, expected, "infos")
        assert [*found] == [*expected] and [*found["in"]] == [*expected["in"]]


def test_places_of_values_that_no_codec_carries_have_the_whole_batchs_numbers(two: list[ServedHub]) -> None:
    with closing(made(two, "entangled")) as envs:
        envs.reset()
        infos = envs.step(ZEROS)[-1]
        assert "lock" in infos["held"] and any("lock" in place for place in envs.represented)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_exception_of_an_env_has_its_index_in_the_whole_batch(two: list[ServedHub], lanes: str) -> None:
    with closing(made(two, "naughty", lanes)) as envs:
        envs.reset()
        with pytest.raises(ValueError, match="one is not allowed") as caught:
            envs.step([0, 0, 0, 1, 0])
        cause = caught.value.__cause__
        assert isinstance(cause, envhub.EnvRaised)
        assert (cause.env_index, cause.hub) == (3, "hub-1") and "env 3" in str(cause)
        assert cause.address in (two[1].tcp, two[1].ipc)
        with pytest.raises(RuntimeError, match="called in vain") as caught_call:
            envs.call_some([4, 1], "fail")
        assert caught_call.value.__cause__.env_index == 1  # type: ignore[union-attr]
        assert envs.reset()[0][:, 0].tolist() == [0] * 5
        assert envs.step(ZEROS)[0][:, 0].tolist() == [1] * 5


def test_masked_reset_after_an_error_shows_a_hub_that_it_does_not_ask_as_received_last(
    two: list[ServedHub], lanes: str
) -> None:
    with closing(made(two, "naughty", lanes)) as envs:
        envs.reset()
        envs.step(ZEROS)
        with pytest.raises(ValueError, match="one is not allowed"):
            envs.step([0, 0, 0, 1, 0])
        observations, _ = envs.reset(options={"reset_mask": np.array([True, False, False, False, False])})
        assert observations[:, 0].tolist() == [0, 2, 1, 1, 1]
        assert envs.observe().observations[:, 0].tolist()[:3] == [0, 2, 2]


def test_crash_in_the_second_hub_is_of_its_envs(two: list[ServedHub], lanes: str) -> None:
    with closing(made(two, "naughty", lanes, num_workers=5)) as envs:
        envs.reset()
        *_, truncations, infos = envs.step([0, 0, 0, 3, 0])
        assert truncations.tolist() == [False, False, False, True, False]
        assert infos["_env_failure"].tolist() == truncations.tolist()
        failure = infos["env_failure"][3]
        assert (failure.cause, failure.signal, failure.hub) == ("crash", "SIGKILL", "hub-1")
        assert "(env 3)" in failure.message and failure.replay
        assert envs.step(ZEROS)[0][3, 0] == 0  # it was reset, as any env whose episode has ended
    with closing(made(two, "naughty", lanes, num_workers=2, on_crash="raise")) as envs:
        envs.reset()
        with pytest.raises(envhub.WorkerDied, match=r"envs 2, 3, 4\)") as caught:
            envs.step([0, 0, 0, 3, 0])
        assert (caught.value.env_index, caught.value.hub) == (3, "hub-1")


# --- waits ------------------------------------------------------------------------------------------------------------


def test_wait_that_times_out_keeps_what_has_come(two: list[ServedHub], lanes: str) -> None:
    with closing(made(two, "counter", lanes)) as envs:
        pids = envs.call("pid")
        envs.reset()
        with stopped(pids[0]):
            envs.step_async(ZEROS)
            for _ in range(2):
                with pytest.raises(envhub.HubTimeout):
                    envs.step_wait(timeout=0.05)
        assert envs.step_wait(timeout=60)[0][:, 0].tolist() == [1] * 5
        with stopped(pids[4]):
            envs.call_async("add", 1, 2)
            with pytest.raises(envhub.HubTimeout) as caught:
                envs.call_wait(timeout=0.2)
            assert addresses(two, lanes, 2)[1] in str(caught.value) and "within 0.2 s; it can be" in str(caught.value)
        assert envs.call_wait(timeout=60) == (3,) * 5
        assert envs.get_attr("count") == (1,) * 5


def test_step_that_was_given_up_is_carried_out_by_all_hubs(two: list[ServedHub], lanes: str) -> None:
    with closing(made(two, "counter", lanes)) as envs:
        envs.reset()
        envs.step_async(ZEROS)
        envs.drop_pending()
        assert envs.get_attr("count") == (1,) * 5
        assert envs.step(ZEROS)[0][:, 0].tolist() == [2] * 5


# --- parts of a batch -------------------------------------------------------------------------------------------------


def test_results_that_the_keep_alive_thread_has_taken_in_are_received(two: list[ServedHub]) -> None:
    with closing(made(two, "counter")) as envs:
        envs.reset()
        connections = [part.connection for part in parts_of(envs)]
        with stopped(*{*envs.call("pid")}):
            envs.send([0] * 5)
            with pytest.raises(envhub.HubTimeout):
                envs.recv(timeout=0.1)  # from here on each hub is asked

        def all_came() -> bool:
            for each in connections:
                each.keep_alive()
            return all(each.protocol.answer is not None and each.protocol.pending is None for each in connections)

        assert wait_until(all_came, 20)
        assert envs.recv(timeout=5)[-1].tolist() == [*range(5)]


def test_no_hub_waits_for_another_ones_part(two: list[ServedHub], lanes: str) -> None:
    with closing(made(two, "counter", lanes)) as envs:
        envs.reset()
        pids = envs.call("pid")
        with stopped(pids[0]):
            envs.send([0] * 5)
            assert envs.recv(min_envs=3, timeout=20)[-1].tolist() == [2, 3, 4]
            for _ in range(3):
                envs.send([0] * 2, [4, 2])
                observations, *_, env_ids = envs.recv(min_envs=2, timeout=20)
                assert env_ids.tolist() == [2, 4]
            assert observations[:, 0].tolist() == [4, 4]
            with pytest.raises(envhub.HubTimeout):
                envs.recv(timeout=0.05)
            envs.send([0], [3])  # next to a RECEIVE that is pending at both hubs
            with pytest.raises(ValueError, match=r"\[0\] are under way"):
                envs.send([0, 0], [0, 2])
            with pytest.raises(envhub.SessionBusy):
                envs.step(ZEROS)
        came: list[int] = []
        while len(came) < 3:
            came += envs.recv(min_envs=1, timeout=20)[-1].tolist()
        assert sorted(came) == [0, 1, 3]
        with pytest.raises(envhub.NothingPending):
            envs.recv()
        assert envs.get_attr("count") == (1, 1, 4, 2, 4)


# --- seeds, indices, options ------------------------------------------------------------------------------------------


def test_workers_know_their_envs_indices_in_the_whole_batch(two: list[ServedHub]) -> None:
    with closing(made(two, "counter", split=(2, 3), num_workers=3)) as envs:
        indices = envs.call("environment", "ENVHUB_ENV_INDICES")
        assert sorted({int(each) for text in indices for each in text.split(",")}) == [*range(5)]
        assert all(str(row) in text.split(",") for row, text in enumerate(indices))
        assert envs.num_workers == 3 and all(f"{hub.tcp}: " in envs.sizing.reason for hub in two)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_go_to_each_hub_and_come_back_in_the_callers_order(two: list[ServedHub]) -> None:
    with closing(made(two, "counter")) as envs:
        envs.reset()
        envs.set_attr("note", [f"note {row}" for row in range(5)])
        assert envs.get_attr("note") == tuple(f"note {row}" for row in range(5))
        envs.set_attr("note", ["d", "a", "c"], env_ids=[4, 0, 2])
        assert envs.get_attr("note", env_ids=[2, 4, 0]) == ("c", "d", "a")
        envs.set_attr("note", "x", env_ids=[3])
        assert envs.get_attr("note") == ("a", "note 1", "c", "x", "d")
        envs.set_attr("note", "all")
        assert {*envs.get_attr("note")} == {"all"}
        with pytest.raises(ValueError, match="length equal"):
            envs.set_attr("note", ["a", "b"])
        assert envs.call_some([4, 1], "add", 1, right=2) == (3, 3)
        assert envs.has_attr("note", [3, 0]) == (True, True) and envs.has_attr("nothing") == (False,) * 5
        assert envs.attr_is_callable("add") == (True,) * 5 and not any(envs.attr_is_callable("note", [4]))
        assert envs.is_wrapped("gymnasium.wrappers:TimeLimit", [2]) == (False,)
        with pytest.raises(AttributeError, match="nothing"):
            envs.call("nothing")
        with pytest.raises(envhub.errors.RequestRefused, match="underscore"):
            envs.get_attr("_secret")
        assert envs.call("text", 200_000)[3] == "x" * 200_000


def test_frames_are_rendered_by_each_hub(two: list[ServedHub], lanes: str) -> None:
    with closing(made(two, "shown", lanes, num_workers=5)) as envs:
        with pytest.raises(gym.error.ResetNeeded):
            envs.render([4, 0])
        envs.reset()
        envs.step([0, 0, 0, 3, 0])
        frames = envs.render()
        assert [int(frame.max()) for frame in frames] == [1, 1, 1, 0, 1]
        assert [int(frame.max()) for frame in envs.render([4, 2])] == [1, 1]


def test_observe_has_the_observations_of_all_hubs(two: list[ServedHub]) -> None:
    with closing(made(two, "counter")) as envs:
        envs.reset(seed=1)
        observations = envs.step(ZEROS)[0]
        seen = envs.observe()
        assert_same(seen.observations, observations, "observe")
        assert seen.steps.tolist() == [2] * 5  # the reset counts
