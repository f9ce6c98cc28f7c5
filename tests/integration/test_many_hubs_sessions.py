"""A vector env over several hubs keeps the contract of one over a single hub, from its making to its end."""

from __future__ import annotations

import functools
import gc
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
import vector_sims
from fleets import addresses, served_hubs
from gymnasium import spaces as gym_spaces
from gymnasium.vector import SyncVectorEnv
from hubs import ServedHub, stopped, wait_until
from pages import ROOT, blocks
from same import assert_same
from witness import about_each, data_set

import envhub
from envhub.values import spaces

OFFERED = ["CartPole-v1", *(f"{name}=sims:{name}" for name in ("counter", "naughty", "anything"))]
OFFERED += ["parts=recorded_sims:parts"]
ZEROS = np.zeros(5, np.int64)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    with served_hubs(tmp_path_factory, 2, OFFERED, "--allow-factories") as hubs:
        yield hubs


def made(hubs: Sequence[ServedHub], env: Any, lanes: str = "wire", **options: Any) -> envhub.HubVectorEnv:
    options = {"num_workers": 2, "split": [2, 3], **options}
    return envhub.make_vec(env, 5, hub=addresses(hubs, lanes, 2), **options)


@pytest.fixture(params=["wire", pytest.param("shared", marks=pytest.mark.long)])
def lanes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sessions(hubs: Sequence[ServedHub]) -> int:
    count = 0
    for hub in hubs:
        with envhub.connect(hub.tcp) as client:
            count += len(client.sessions())
    return count


# --- making -----------------------------------------------------------------------------------------------------------


def test_envs_are_on_as_few_hubs_as_have_room_without_a_split(two: list[ServedHub]) -> None:
    hub = addresses(two, "wire", 2)
    with closing(envhub.make_vec("counter", 1, hub=hub)) as envs:
        envs.reset()
        assert sessions(two) == 1 and envs.address in hub


def test_wrappers_and_arguments_reach_the_envs_of_each_hub(two: list[ServedHub]) -> None:
    wrappers = [("FrameStackObservation", {"stack_size": 3})]
    lengths = [{"max_episode_steps": row + 2} for row in range(5)]
    factories = [
        lambda one=one: gym.wrappers.FrameStackObservation(gym.make("CartPole-v1", **one), 3) for one in lengths
    ]
    wanted = SyncVectorEnv(factories)
    with closing(made(two, "CartPole-v1", wrappers=wrappers, env_kwargs=lengths)) as envs:
        assert_same(envs.reset(seed=1), wanted.reset(seed=1), "reset")
        for step in range(7):
            assert_same(tuple(envs.step(ZEROS)), tuple(wanted.step(ZEROS)), f"step {step}")
        assert envs.is_wrapped(gym.wrappers.TimeLimit) == (True,) * 5


def test_vector_env_is_one_on_each_hub(two: list[ServedHub]) -> None:
    with closing(made(two, vector_sims.told, vector=True)) as envs:
        observations, infos = envs.reset(seed=4)
        assert observations[:, 0].tolist() == [4, 4, 6, 6, 6]  # the seed that each hub's vector env was given
        assert len(infos["options"]) == 5
        assert envs.step(ZEROS)[-1]["batch"].tolist() == [2, 2, 3, 3, 3]
        envs.send([0, 0], [0, 1])  # the share of the first hub
        assert envs.recv(timeout=20)[-1].tolist() == [0, 1]
        with pytest.raises(ValueError, match=r"send all or none of \[2, 3, 4\]; no env has moved"):
            envs.send([0, 0], [2, 3])
        envs.send([0, 0, 0], [2, 3, 4])
        assert envs.recv(timeout=20)[-1].tolist() == [2, 3, 4]


class Bounded(sims.Counter):
    """Observes numbers up to a bound of its own."""

    def __init__(self, bound: float) -> None:
        super().__init__(length=3)
        self.observation_space = gym.spaces.Box(-bound, bound, (2,), np.float64)

    def observation(self) -> np.ndarray:
        return np.array([self.count, 0], np.float64)


@pytest.mark.long
@pytest.mark.parametrize("split", [[2, 3], pytest.param([1, 4], marks=pytest.mark.long)])
def test_spaces_of_other_bounds_are_batched_if_the_mode_says_so(two: list[ServedHub], split: list[int]) -> None:
    single = gym.spaces.Box(-99, 99, (2,), np.float64)
    mode: Any
    for bounds in ([10, 11, 12, 13, 14], [10, 11, 11, 11, 11]):
        factories = [functools.partial(Bounded, bound) for bound in bounds]
        for mode in ("different", (gym.vector.utils.batch_space(single, 5), single)):
            wanted = SyncVectorEnv(factories, observation_mode=mode)
            with closing(made(two, factories, split=split, observation_mode=mode)) as envs:
                assert envs.observation_space == wanted.observation_space
                assert envs.single_observation_space == wanted.single_observation_space
                assert_same(envs.reset(seed=1), wanted.reset(seed=1), "reset")
                assert_same(tuple(envs.step(ZEROS)), tuple(wanted.step(ZEROS)), "step")
        with closing(made(two, factories, split=split, observation_mode="first")) as envs:
            assert envs.single_observation_space == gym.spaces.Box(-10, 10, (2,), np.float64)
        with pytest.raises((RuntimeError, envhub.RequestRefused), match=r"not equivalent|spaces differ"):
            made(two, factories, split=split)
    assert sessions(two) == 0


def test_program_of_the_page_runs(two: list[ServedHub], capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("python several", [ROOT / "client/docs/fleets.md"])
    for name, hub in zip(("tcp://simbox:5555", "tcp://simbox2:5555"), two, strict=True):
        assert name in program
        program = program.replace(name, hub.tcp)
    exec(program, {})  # noqa: S102  a page of ours
    assert capsys.readouterr().out.startswith(f"{two[0].tcp}, {two[1].tcp} wire ")
    assert sessions(two) == 0


@pytest.mark.long
def test_recording_of_two_hubs_equals_that_of_one(two: list[ServedHub], tmp_path: Path) -> None:
    folders = []
    for name, hub, options in (("one", two[0].tcp, {}), ("two", addresses(two, "wire", 2), {"split": [2, 3]})):
        with closing(
            envhub.make_vec("parts", 5, hub=hub, num_workers=2, record=tmp_path / name, **options)  # type: ignore[arg-type]
        ) as envs:
            envs.action_space.seed(1)
            envs.reset(seed=5)
            for _ in range(25):
                envs.step(envs.action_space.sample())
            with pytest.raises(ValueError, match="recorded"):
                envs.send(envs.action_space.sample())
        assert envs.recorded.dropped == 0 and envs.recorded.episodes
        found = data_set(tmp_path / name)
        numbers = [each["env_id"] for each in about_each(found)]  # the envs' episodes are written as they come
        assert {*numbers} == {*range(5)}
        folders.append([found[place] for place in sorted(range(len(numbers)), key=numbers.__getitem__)])
    assert len(folders[0]) == len(folders[1])
    for number, (left, right) in enumerate(zip(*folders, strict=True)):
        for part in ("observations", "actions", "rewards", "terminations", "truncations", "infos"):
            assert_same(getattr(right, part), getattr(left, part), f"{part} of episode {number}")


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


# --- parts of a batch -------------------------------------------------------------------------------------------------


def test_results_that_the_keep_alive_thread_has_taken_in_are_received(two: list[ServedHub]) -> None:
    with closing(made(two, "counter")) as envs:
        envs.reset()
        connections = [part.connection for part in envs._session.lane.parts]  # type: ignore[attr-defined]
        with stopped(*{*envs.call("pid")}):
            envs.send([0] * 5)
            with pytest.raises(envhub.HubTimeout):
                envs.recv(timeout=0.1)  # from here on each hub is asked

        def all_came() -> bool:
            for each in connections:
                each.keep_alive()
            return all(each.protocol.received and not each.protocol.receives for each in connections)

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


def test_workers_know_their_envs_indices_in_the_whole_batch(two: list[ServedHub]) -> None:
    with closing(made(two, "counter", num_workers=3)) as envs:
        indices = envs.call("environment", "ENVHUB_ENV_INDICES")
        assert sorted({int(each) for text in indices for each in text.split(",")}) == [*range(5)]
        assert all(str(row) in text.split(",") for row, text in enumerate(indices))
        assert envs.num_workers == 3 and all(f"{hub.tcp}: " in envs.sizing.reason for hub in two)


def test_calls_go_to_each_hub_and_come_back_in_the_callers_order(two: list[ServedHub]) -> None:
    with closing(made(two, "counter")) as envs:
        envs.reset()
        envs.set_attr("note", [f"note {row}" for row in range(5)])
        assert envs.get_attr("note") == tuple(f"note {row}" for row in range(5))
        envs.set_attr("note", ["d", "a", "c"], env_ids=[4, 0, 2])
        assert envs.get_attr("note", env_ids=[2, 4, 0]) == ("c", "d", "a")
        envs.set_attr("note", "x", env_ids=[3])
        assert envs.get_attr("note") == ("a", "note 1", "c", "x", "d")
        assert envs.call_some([4, 1], "add", 1, right=2) == (3, 3)
        assert envs.has_attr("note", [3, 0]) == (True, True) and envs.has_attr("nothing") == (False,) * 5
        with pytest.raises(AttributeError, match="nothing"):
            envs.call("nothing")
        with pytest.raises(envhub.errors.RequestRefused, match="underscore"):
            envs.get_attr("_secret")
        assert envs.call("text", 200_000)[3] == "x" * 200_000


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [pytest.param("wire", marks=pytest.mark.long), "shared"])
def test_hubs_have_no_session_after_the_end(two: list[ServedHub], lanes: str) -> None:
    envs = made(two, "naughty", lanes)
    assert sessions(two) == 2
    envs.close()
    envs.close()
    assert envs.closed and sessions(two) == 0
    for use in ("reset", "recv", "observe", "render"):
        with pytest.raises(envhub.SessionClosed):
            getattr(envs, use)()
    with closing(made(two, "naughty", lanes)) as envs:  # after an error, with a request pending
        envs.reset()
        with pytest.raises(ValueError, match="not allowed"):
            envs.step([0, 1, 1, 0, 0])
        envs.reset()
        envs.step_async(ZEROS)
    assert sessions(two) == 0
    envs = made(two, "naughty", lanes)  # while some envs are under way
    envs.reset()
    envs.send([0, 0], [0, 4])
    envs.close(terminate=True)
    assert sessions(two) == 0
    envs = made(two, "naughty", lanes)
    envs.reset()
    del envs
    gc.collect()
    assert wait_until(lambda: sessions(two) == 0, 10)


def test_vector_env_over_several_hubs_is_neither_pickled_nor_used_by_a_forked_child(two: list[ServedHub]) -> None:
    with closing(made(two, "counter")) as envs:
        envs.reset()
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(envs)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                envs.step(ZEROS)
                told = "stepped"
            except BaseException as error:
                told = type(error).__name__
            os.write(writing, told.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 100) == b"Forked"
        os.close(reading)
        os.close(writing)
        assert envs.step(ZEROS)[0][:, 0].tolist() == [1] * 5
