"""Native vector envs: a worker steps all of its envs in one call, with the results of direct use."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import sims
import vector_sims
from combinations import each_value
from conformance.kit.hub_checks import examine
from conformance.kit.verdict import FAILED, NOT_SHOWN
from faulty import EXIT, RAISE, SLEEP
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import DictInfoToList
from hubs import kill_worker, serve
from same import assert_same
from same_run import assert_same_run, assert_step

import envhub

MODES = [mode.value for mode in AutoresetMode]
EXAMPLES = Path(__file__).parents[2] / "client/examples"
LANES = [{"lane": "auto"}, {"lane": "wire"}]
make_vector = functools.partial(gymnasium.make_vec, vectorization_mode="vector_entry_point")


@pytest.mark.parametrize("how", LANES, ids=str)
def test_vector_env_of_gymnasium_gives_what_it_gives_directly(how: dict[str, Any]) -> None:
    with closing(envhub.make_vec("CartPole-v1", 8, vector=True, **how)) as envs:
        direct = make_vector("CartPole-v1", num_envs=8)
        assert assert_same_run(envs, direct, 200) > 20
        assert_same_run(envs, direct, 3, seed=8, options={"low": 0.1, "high": 0.2})
        assert_same_run(envs, direct, 3, seed=None)
        assert envs.get_attr("gravity") == (9.8,) * 8 and envs.spec.kwargs["vectorization_mode"] == "vector_entry_point"


@pytest.mark.parametrize(("how", "mode"), each_value(LANES, MODES), ids=str)
def test_infos_seeds_options_and_masks_are_those_of_direct_use(how: dict[str, Any], mode: str) -> None:
    direct = vector_sims.chatty(6, AutoresetMode(mode))
    with closing(envhub.make_vec(vector_sims.chatty, 6, vector=True, autoreset_mode=mode, **how)) as envs:
        assert assert_same_run(envs, direct, 40, seed=[3, 8, 5, 2**40, 0, 1], options={"lift": 1}) > 20
        mask = np.array([True, False, True, False, False, True])
        for seed in (None, 4):
            wanted = direct.reset(seed=seed, options={"reset_mask": mask})
            assert_step(envs.reset(seed=seed, options={"reset_mask": mask}), wanted, 6, "masked reset")
            actions = envs.action_space.sample()
            assert_step(envs.step(actions), direct.step(actions), 6, "step after it")


def test_workers_each_hold_a_share() -> None:
    direct = vector_sims.chatty(7)
    factory = functools.partial(shares_of_chatty, 3)
    with closing(envhub.make_vec(factory, 7, vector=True, num_workers=3)) as envs:
        assert envs.sizing.num_workers == 3 and len(set(envs.call("pid"))) == 3
        direct.set_attr("number", [0] * 7)
        assert_same_run(envs, direct, 30)


class Silent(vector_sims.Chatty):
    def pid(self) -> int:
        import os

        return os.getpid()


def shares_of_chatty(workers: int, num_envs: int) -> VectorEnv[Any, Any, Any]:
    return gymnasium.vector.SyncVectorEnv([lambda: Silent(0)] * num_envs)


# --- autoreset modes that are not the env's own ---------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "wanted"), [("NextStep", "SameStep"), ("NextStep", "Disabled"), ("Disabled", "SameStep")]
)
def test_mode_is_made_of_another_by_masks(own: str, wanted: str) -> None:
    def factory(num_envs: int) -> Any:
        return vector_sims.chatty(num_envs, AutoresetMode(own))

    with closing(envhub.make_vec(factory, 5, vector=True, autoreset_mode=wanted)) as envs:
        assert assert_same_run(envs, vector_sims.chatty(5, AutoresetMode(wanted)), 40) > 20


@pytest.mark.parametrize(
    ("own", "wanted"),
    [("SameStep", "NextStep"), ("SameStep", "Disabled"), ("Disabled", "NextStep"), (None, "NextStep")],
)
def test_mode_that_cannot_be_made_is_refused_and_those_that_can_are_named(own: str | None, wanted: str) -> None:
    def factory(num_envs: int) -> Any:
        return vector_sims.told(num_envs, None if own is None else AutoresetMode(own))

    told = (
        "does not say in metadata"
        if own is None
        else f"autoreset_mode='{wanted}' is not possible: pass autoreset_mode='"
    )
    with pytest.raises(ValueError, match=told):
        envhub.make_vec(factory, 2, vector=True, autoreset_mode=wanted)


def test_one_env_of_a_vector_env_is_a_single_env_too() -> None:
    direct = make_vector("CartPole-v1", num_envs=1)
    with closing(envhub.make("CartPole-v1", vector=True)) as env:
        for seed in (5, None):
            observation, _ = env.reset(seed=seed)
            assert seed is None or observation.tolist() == direct.reset(seed=seed)[0][0].tolist()
            ended = False
            while not ended:
                _, _, ended, _, _ = env.step(0)
    with closing(envhub.make_vec("CartPole-v1", 1, vector=True, autoreset_mode="SameStep")) as envs:
        envs.reset(seed=5)
        ends = [envs.step([0])[4] for _ in range(30)]
        assert any("final_obs" in infos for infos in ends)


def test_step_of_an_env_that_has_ended_is_the_callers_error_where_nothing_resets_it() -> None:
    with closing(envhub.make_vec(vector_sims.chatty, 3, vector=True, autoreset_mode="Disabled")) as envs:
        envs.reset(seed=1)
        done = np.zeros(3, bool)
        while not done.any():
            _, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
            done = terminations | truncations
        with pytest.raises(ValueError, match=r"the episodes of envs .* have ended: reset them"):
            envs.step(envs.action_space.sample())
        envs.reset(options={"reset_mask": done})
        envs.step(envs.action_space.sample())


# --- seeds and masks that an env does not take ----------------------------------------------------------------------


def test_env_of_one_seed_gets_the_programs_and_each_share_its_own() -> None:
    with closing(envhub.make_vec(vector_sims.told, 5, vector=True)) as envs:
        observations, infos = envs.reset(seed=40, options={"a": 1})
        assert observations[:, 0].tolist() == [40] * 5 and infos["options"].tolist() == ["{'a': 1}"] * 5
        assert envs.reset()[0][:, 0].tolist() == [-1] * 5
        with pytest.raises(ValueError, match="takes one seed for all of its envs"):
            envs.reset(seed=[1, 7, 3, 4, 5])
        with pytest.raises(ValueError, match="resets all of its 5 envs or none: it has no reset_mask"):
            envs.reset(options={"reset_mask": np.array([True, False, False, False, False])})
        with pytest.raises(envhub.RequestRefused, match="options for all of its envs"):
            envs.reset(options=[{"a": 1}] * 5)
        assert envs.reset(seed=41)[0][:, 0].tolist() == [41] * 5
        assert envs.step(np.zeros(5, np.int64))[4]["batch"].tolist() == [5] * 5
    with closing(envhub.make_vec(vector_sims.told, 5, vector=True, num_workers=2)) as envs:
        assert envs.reset(seed=40)[0][:, 0].tolist() == [40, 43, 40, 43, 40]


# --- what is refused ------------------------------------------------------------------------------------------------


def test_vector_env_without_vector_is_refused_and_so_is_a_single_env_with_it() -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: envhub.make_vec(lambda: vector_sims.chatty(2), 2), "a vector env: pass vector=True"),
        (lambda: envhub.make_vec(vector_sims.chatty, 2), "num_envs makes a vector env: pass vector=True"),
        (lambda: envhub.make_vec(lambda num_envs: sims.Counter(), 2, vector=True), "a single env, which vector"),
        (lambda: envhub.make_vec("MountainCar-v0", 2, vector=True), "has no vector_entry_point: it is a single"),
        (lambda: envhub.make_vec(lambda num_envs: vector_sims.chatty(3), 2, vector=True), "of 3 envs where"),
        (lambda: envhub.make_vec([vector_sims.chatty] * 2, 2, vector=True), "one function that takes num_envs"),
    ]
    for make, told in refused:
        with pytest.raises(TypeError, match=told):
            make()


def test_what_a_vector_env_does_not_take_is_refused() -> None:
    spec = gymnasium.spec("CartPole-v1")
    with pytest.raises(envhub.RequestRefused, match="takes no observation_mode='different'"):
        envhub.make_vec("CartPole-v1", 2, vector=True, observation_mode="different")
    with pytest.raises(ValueError, match="the same arguments for all"):
        envhub.make_vec("CartPole-v1", vector=True, env_kwargs=[{}, {}])
    with closing(envhub.make_vec(spec, 2, vector=True)) as envs:
        envs.reset(seed=1)
        with pytest.raises(TypeError, match="actions of numbers in arrays only"):
            envs.step(["a", "b"])


# --- parts of a batch and calls -------------------------------------------------------------------------------------


def part(actions: tuple[np.ndarray, ...], *rows: int) -> tuple[np.ndarray, ...]:
    """The actions of these rows."""
    return tuple(column[list(rows)] for column in actions)


@pytest.mark.parametrize("how", LANES, ids=str)
def test_part_of_a_workers_envs_is_not_sent_without_the_others(how: dict[str, Any]) -> None:
    direct = vector_sims.chatty(4)
    with closing(envhub.make_vec(vector_sims.chatty, 4, vector=True, **how)) as envs:
        envs.reset(seed=[1, 2, 3, 4])
        direct.reset(seed=[1, 2, 3, 4])
        for _ in range(12):
            actions = direct.action_space.sample()
            with pytest.raises(ValueError, match=r"send all or none of \[0, 1, 2, 3\]; no env has moved"):
                envs.send(part(actions, 3, 0), [3, 0])
            envs.send(part(actions, 3, 0, 2, 1), [3, 0, 2, 1])
            with pytest.raises(ValueError, match="are under way; receive them first"):
                envs.send(actions)
            *found, env_ids = envs.recv()
            assert env_ids.tolist() == [0, 1, 2, 3]
            assert_step(found, direct.step(actions), 4, "share")
        assert_step(envs.step(actions), direct.step(actions), 4, "a step of all")


def test_calls_reach_the_envs_and_a_method_of_the_vector_env_is_called_once() -> None:
    with closing(envhub.make_vec(vector_sims.chatty, 3, vector=True)) as envs:
        assert envs.call("double", 4) == (8, 9, 10) and envs.get_attr("number") == (0, 1, 2)
        envs.set_attr("number", [5, 6, 7])
        assert envs.call("double", 1) == (7, 8, 9) and envs.get_attr("number", env_ids=[1]) == (6,)
        with pytest.raises(ValueError, match="not of some of its envs only"):
            envs.call_some([0], "double", 1)
        with pytest.raises(AttributeError, match="no_such"):
            envs.get_attr("no_such")
    with closing(envhub.make_vec("CartPole-v1", 2, vector=True, render_mode="rgb_array")) as envs:
        direct = make_vector("CartPole-v1", num_envs=2, render_mode="rgb_array")
        direct.reset(seed=1)
        envs.reset(seed=1)
        frames = envs.render()
        assert len(frames) == 2
        for found, wanted in zip(frames, direct.render(), strict=True):
            assert_same(found, np.asarray(wanted), "frame")
        envs.set_attr("gravity", 1.6)
        assert envs.get_attr("gravity") == (1.6, 1.6)


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["auto", pytest.param("wire", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("how", "cause"),
    [("kill", "crash"), (EXIT, "crash"), pytest.param(SLEEP, "timeout", marks=pytest.mark.long), (RAISE, "exception")],
)
def test_end_of_a_batch_truncates_its_rows_and_it_goes_on(how: Any, cause: str, lane: str) -> None:
    options = {"num_workers": 2, "lane": lane, "on_exception": "truncate"}
    if how == SLEEP:
        options["step_timeout"] = 3.0
    with closing(envhub.make_vec(vector_sims.failing, 4, vector=True, **options)) as envs:
        envs.reset(seed=1)
        nothing = np.zeros(4, np.int64)
        before = envs.step(nothing)[0]
        actions = nothing
        if how == "kill":
            kill_worker(int(before[1, 2]))
        else:
            actions = np.array([0, 0, 0, how])
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        assert truncations.tolist() == [False, True, False, True] and not terminations.any()
        assert rewards.tolist() == [1, 0, 1, 0] and infos["_env_failure"].tolist() == truncations.tolist()
        assert observations[[1, 3]].tolist() == before[[1, 3]].tolist()
        assert {infos["env_failure"][row].cause for row in (1, 3)} == {cause}
        observations, rewards, _, truncations, _ = envs.step(nothing)
        assert observations[:, 0].tolist() == [3, 0, 3, 0] and rewards.tolist() == [1, 0, 1, 0]
        assert not truncations.any() and observations[1, 1] != before[1, 1]  # another seed
        assert envs.step(nothing)[0][:, 0].tolist() == [4, 1, 4, 1]
        assert envs.reset(seed=1)[0][:, 1].tolist() == before[:, 1].tolist()


def test_number_that_is_not_finite_is_the_batchs() -> None:
    with closing(envhub.make_vec(vector_sims.failing, 3, vector=True, on_invalid="truncate")) as envs:
        before, _ = envs.reset(seed=1)
        envs.call("spoil")
        observations, _, _, truncations, infos = envs.step(np.zeros(3, np.int64))
        assert truncations.all() and observations.tolist() == before.tolist()
        assert infos["env_failure"][2].cause == "nan" and "of envs [0, 1, 2] is not" in infos["env_failure"][2].message
        observations, _, _, truncations, _ = envs.step(np.zeros(3, np.int64))
        assert not truncations.any() and observations[:, 0].tolist() == [0, 0, 0]


def test_final_observation_that_is_not_finite_is_the_batchs() -> None:
    how = {"vector": True, "autoreset_mode": "SameStep", "on_invalid": "truncate"}
    with closing(envhub.make_vec(vector_sims.spoiled, 2, **how)) as envs:
        before, _ = envs.reset(seed=1)
        observations, _, terminations, truncations, infos = envs.step(np.zeros(2, np.int64))
        assert truncations.all() and not terminations.any() and observations.tolist() == before.tolist()
        assert infos["env_failure"][0].cause == "nan"
        assert "the final observation of envs [0, 1] is not" in infos["env_failure"][0].message


def test_exception_is_raised_for_the_batch_and_a_reset_goes_on() -> None:
    with closing(envhub.make_vec(vector_sims.failing, 3, vector=True)) as envs:
        envs.reset(seed=1)
        with pytest.raises(KeyError, match="no such joint") as caught:
            envs.step(np.array([0, RAISE, 0]))
        assert isinstance(caught.value.__cause__, envhub.EnvRaised)
        assert envs.reset(seed=1)[0][:, 0].tolist() == [0, 0, 0]


def test_lost_envs_are_reset_together() -> None:
    with closing(envhub.make_vec(vector_sims.failing, 2, vector=True, autoreset_mode="Disabled")) as envs:
        envs.reset(seed=1)
        envs.step(np.array([0, EXIT]))
        assert envs.step(np.array([0, 0]))[3].all()  # not reset yet
        with pytest.raises(ValueError, match=r"its first reset has to name all of envs \[0, 1\]"):
            envs.reset(options={"reset_mask": np.array([True, False])})
        observations, _ = envs.reset(options={"reset_mask": np.array([True, True])})
        assert observations[:, 0].tolist() == [0, 0] and not envs.step(np.array([0, 0]))[3].any()


@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_reset_of_some_envs_of_a_lost_worker_leaves_the_loss_to_the_next_step(lane: str) -> None:
    options = {"autoreset_mode": "Disabled", "lane": lane}
    with closing(envhub.make_vec(vector_sims.failing, 2, vector=True, **options)) as envs:
        envs.reset(seed=1)
        before = envs.step(np.array([0, 0]))[0]
        kill_worker(int(before[0, 2]))
        observations, infos = envs.reset(options={"reset_mask": np.array([True, False])})
        assert observations.tolist() == before.tolist() and not infos
        *_, truncations, infos = envs.step(np.array([0, 0]))
        assert truncations.all() and {failure.cause for failure in infos["env_failure"]} == {"crash"}
        envs.reset(options={"reset_mask": truncations})
        assert not envs.step(np.array([0, 0]))[3].any()


# --- other libraries ------------------------------------------------------------------------------------------------

SHORT = {"max_num_frames_per_episode": 60}


@pytest.mark.long
def test_ale_gives_what_it_gives_directly() -> None:
    arguments = {"noop_max": 5, **SHORT}
    with closing(envhub.make_vec("ale_py:ALE/Pong-v5", 4, vector=True, **arguments)) as envs:
        direct = make_vector("ale_py:ALE/Pong-v5", num_envs=4, **arguments)
        assert assert_same_run(envs, direct, 60) > 8
        mask = np.array([False, True, True, False])
        found, wanted = envs.reset(options={"reset_mask": mask}), direct.reset(options={"reset_mask": mask})
        assert_same(found[0], wanted[0], "masked reset")
        assert found[1]["_lives"].tolist() == mask.tolist()
        actions = np.zeros(4, np.int64)
        assert_step(envs.step(actions), direct.step(actions), 4, "after it")


@pytest.mark.long
def test_ale_in_the_same_step_mode() -> None:
    direct = make_vector("ale_py:ALE/Pong-v5", num_envs=3, autoreset_mode="SameStep", **SHORT)
    nothing = np.zeros(3, np.int64)
    with closing(envhub.make_vec("ale_py:ALE/Pong-v5", 3, vector=True, autoreset_mode="SameStep", **SHORT)) as envs:
        envs.reset(seed=3)
        direct.reset(seed=3)
        ended = 0
        for _ in range(40):
            found, wanted = envs.step(nothing), direct.step(nothing)
            done = found[2] | found[3]
            infos = dict(wanted[4])
            if final := infos.pop("final_obs", None) is not None:
                ended += int(done.sum())
                assert found[4]["_final_obs"].tolist() == done.tolist() == found[4]["_final_info"].tolist()
                for row in np.flatnonzero(done):
                    assert_same(found[4]["final_obs"][row], wanted[4]["final_obs"][row], "final")
            assert ("final_obs" in found[4]) == final
            others = {key: value for key, value in found[4].items() if "final" not in key}
            assert_step((*found[:4], others), (*wanted[:4], infos), 3, "step")
        assert ended >= 3


class OldVecEnv:
    """The interface of Stable-Baselines3: env ``n`` ends after ``n + 3`` steps, the second one by time."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (2,), np.float32), gymnasium.spaces.Discrete(3)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.random, self.counts = np.random.RandomState(0), np.zeros(num_envs, int)

    def seed(self, seed: int | None) -> None:
        self.random.seed(seed)

    def reset(self) -> np.ndarray:
        self.counts[:] = 0
        return self.random.uniform(size=(self.num_envs, 2)).astype(np.float32)

    def step(self, actions: np.ndarray) -> Any:
        self.counts += 1
        dones = self.counts % (np.arange(self.num_envs) + 3) == 0
        seen, first = (self.random.uniform(size=(self.num_envs, 2)).astype(np.float32) for _ in range(2))
        infos: list[dict[str, Any]] = [{"action": int(action)} for action in actions]
        for env in np.flatnonzero(dones):
            infos[env].update({"terminal_observation": seen[env].copy(), "TimeLimit.truncated": bool(env == 1)})
        return np.where(dones[:, None], first, seen), actions.astype(np.float32) / 3, dones, infos

    def step_async(self, actions: np.ndarray) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("how", LANES, ids=str)
def test_vector_env_behind_gymnasiums_interface_gives_what_it_gives_directly(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    behind = importlib.import_module("other_vector_env").OtherVectorEnv

    def factory(num_envs: int) -> Any:
        return behind(OldVecEnv(num_envs))

    direct = OldVecEnv(3)
    direct.seed(5)
    with closing(envhub.make_vec(factory, 3, vector=True, autoreset_mode="SameStep", **how)) as envs:
        assert_same(envs.reset(seed=5)[0], direct.reset(), "reset")
        for actions in np.random.default_rng(3).integers(0, 3, (12, 3)):
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            wanted, of_direct, dones, told = direct.step(actions)
            assert_same(observations, wanted, "observations")
            assert rewards.tolist() == of_direct.tolist() and infos["action"].tolist() == actions.tolist()
            assert (terminations | truncations).tolist() == dones.tolist()
            for env in np.flatnonzero(dones):
                assert truncations[env] == (env == 1)
                assert_same(infos["final_obs"][env], told[env]["terminal_observation"], "final_obs")


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (OldVecEnv, "which is no vector env: it has no single_observation_space"),
        (lambda num_envs: object(), "which is no vector env"),  # such as one of gym3
        (lambda: object(), "takes no num_envs"),  # such as functions of JAX
    ],
)
def test_user_of_another_interface_reads_how_to_put_it_behind_gymnasiums(factory: Any, told: str) -> None:
    with pytest.raises(TypeError, match=rf"{told}.* client/docs/vector_envs.md#other-interfaces shows how"):
        envhub.make_vec(factory, 2, vector=True)
    assert "other_vector_env.py" in (EXAMPLES.parent / "docs/vector_envs.md").read_text()


# --- served ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_operator_says_which_envs_are_vector_envs(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text('[envs."CartPole-v1"]\nvector = true\n\n[envs.single]\nenv = "CartPole-v1"\n')
    arguments = ("poles=gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv", "--vector")
    with serve(tmp_path, *arguments, "--config", str(tmp_path / "hub.toml"), binds=["tcp://127.0.0.1:0"]) as hub:
        for asked in ({}, {"vector": True}):
            with closing(envhub.make_vec("CartPole-v1", 4, hub=hub.tcp, **asked)) as envs:
                assert_same_run(envs, make_vector("CartPole-v1", num_envs=4), 20)
        with closing(envhub.make_vec("poles", 3, hub=hub.tcp)) as envs:
            assert_same_run(envs, make_vector("CartPole-v1", num_envs=3), 20)
        with pytest.raises(envhub.RequestRefused, match="makes 'single' as single envs; its operator decides that"):
            envhub.make_vec("single", 4, hub=hub.tcp, vector=True)
        with closing(envhub.make_vec("single", 4, hub=hub.tcp)) as envs:
            assert envs.reset(seed=1)[0].shape == (4, 4)


@pytest.mark.long
def test_hub_of_vector_envs_keeps_the_contract(tmp_path: Path) -> None:
    entries = ("chatty=vector_sims:chatty", "CartPole-v1", "--vector")
    with serve(tmp_path, *entries, binds=["tcp://127.0.0.1:0"]) as hub:
        verdicts = [*examine(hub.tcp, ["chatty", "CartPole-v1"])]
    assert not [verdict for verdict in verdicts if verdict.result == FAILED]
    skipped = {(verdict.case, verdict.rule) for verdict in verdicts if verdict.result == NOT_SHOWN}
    window = {(case, "SENDs run together and in their order") for case in ("chatty", "CartPole-v1")}
    assert skipped == {("CartPole-v1", "resets can be masked"), ("CartPole-v1", "same-step autoreset")} | window


def test_spare_takes_the_place_of_a_share_of_as_many_envs() -> None:
    with closing(envhub.make_vec(vector_sims.failing, 5, vector=True, num_workers=2, spares=2)) as envs:
        envs.reset(seed=1)
        nothing = np.zeros(5, np.int64)
        pids = envs.step(nothing)[0][:, 2].astype(int).tolist()
        for row, lost in ((1, [1, 3]), (0, [0, 2, 4])):
            kill_worker(pids[row])
            assert np.flatnonzero(envs.step(nothing)[3]).tolist() == lost
            assert envs.step(nothing)[0][lost, 0].tolist() == [0] * len(lost)


def test_infos_that_are_a_list_are_refused() -> None:
    def listing(num_envs: int) -> Any:
        return DictInfoToList(vector_sims.chatty(num_envs))

    refused = pytest.raises(TypeError, match="DictInfoToList has infos that are a list; vector=True takes a function")
    with closing(envhub.make_vec(listing, 3, vector=True)) as envs, refused:
        envs.reset(seed=3)
