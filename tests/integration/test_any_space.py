"""Any space, any info, any action: through a hub as through ``SyncVectorEnv``, in every mode, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from combinations import each_value
from gymnasium import spaces as gym_spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate
from hubs import LANES, lane_address
from hypothesis import HealthCheck, Phase, assume, given, settings
from same import assert_same
from strategies import any_space, runs_of_infos

import envhub
from envhub.values import spaces

NUM_ENVS = 3
# Without shrinking, which would make some hundred sessions.
EXAMPLES = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], database=None)


def run(envs: Any, mode: AutoresetMode, actions: list[Any]) -> Iterator[Any]:
    yield envs.observation_space, envs.action_space
    yield envs.reset(seed=7)
    for batch in actions:
        results = envs.step(batch)
        yield results
        done = results[2] | results[3]
        if mode is AutoresetMode.DISABLED and done.any():
            yield envs.reset(options={"reset_mask": done})
    envs.close()


def batches(space: Any, count: int) -> list[Any]:
    batched = gym.vector.utils.batch_space(space, NUM_ENVS)
    batched.seed(5)
    found = [batched.sample() for _ in range(count)]
    # Every other one as a list of elements, where that is a batch, too.
    return [list(one) if number % 2 and isinstance(one, np.ndarray) else one for number, one in enumerate(found)]


def check(address: str | None, mode: AutoresetMode, arguments: dict[str, Any]) -> None:
    actions = batches(arguments["action_space"], 6)
    sync = SyncVectorEnv([functools.partial(sims.Anything, **arguments)] * NUM_ENVS, autoreset_mode=mode)
    try:
        wanted = list(run(sync, mode, actions))
    except Exception:
        assume(False)  # infos that Gymnasium itself cannot batch
    if address is None:
        envs = envhub.make_vec([functools.partial(sims.Anything, **arguments)] * NUM_ENVS, autoreset_mode=mode)
    else:
        described = {key: spaces.describe(arguments[key]) for key in ("observation_space", "action_space")}
        envs = envhub.make_vec(
            "anything", NUM_ENVS, hub=address, autoreset_mode=mode, num_workers=2, env_kwargs={**arguments, **described}
        )
    try:
        for number, (found, expected) in enumerate(zip(run(envs, mode, actions), wanted, strict=True)):
            assert_same(found, expected, f"record {number}")
    finally:
        envs.close()


SCALAR = gym_spaces.Box(0, 9, (), np.int64)


class Labelled(gym.Env[Any, Any]):
    """The value of each key says which key it is; envs differ in the order of their keys."""

    def __init__(self, *keys: str) -> None:
        self.observation_space = gym_spaces.Dict([(key, SCALAR) for key in keys])
        self.action_space = gym_spaces.Dict([(key, gym_spaces.Discrete(9)) for key in keys])

    def observe(self) -> Any:
        return {key: np.array("abx".index(key)) for key in self.observation_space}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observe(), 10.0 * action["a"] + action["b"], False, False, {}


@pytest.mark.parametrize("mode", ["same", "different"])
def test_keys_of_the_envs_may_have_another_order(mode: Any) -> None:
    factories = [lambda: Labelled("a", "b"), lambda: Labelled("b", "a")]
    actions = {"a": np.array([1, 2]), "b": np.array([3, 4])}
    envs, wanted = (kind(factories, observation_mode=mode) for kind in (envhub.AsyncVectorEnv, SyncVectorEnv))
    assert_same(envs.reset(), wanted.reset(), "reset")
    assert_same(envs.step(actions), wanted.step(actions), "step")
    assert envs.step(actions)[1].tolist() == [13, 24]
    envs.close()


def test_other_keys_are_not_taken_for_the_wanted_ones() -> None:
    single = gym_spaces.Dict({"a": SCALAR, "x": SCALAR})
    with pytest.raises(RuntimeError, match="common shape and dtype"):
        envhub.AsyncVectorEnv(
            [lambda: Labelled("a", "b")] * 2, observation_mode=(gym.vector.utils.batch_space(single, 2), single)
        )
    with pytest.raises(RuntimeError, match="common shape and dtype"):
        envhub.AsyncVectorEnv([lambda: Labelled("a", "b"), lambda: Labelled("a", "x")], observation_mode="different")


ODD = gym_spaces.Box(-1, 1, (1,)), gym_spaces.Dict(own=gym_spaces.Box(-1, 1, (2,))), gym_spaces.Text(4)


@pytest.mark.parametrize("act_alike", [True, False])
def test_envs_of_any_spaces_return_what_each_would_alone(address: str | None, act_alike: bool) -> None:
    acted = [gym_spaces.Discrete(3 + row) if act_alike else gym_spaces.Box(-1, 1, (row + 1,)) for row in range(3)]
    each = [{"observation_space": s, "action_space": a, "infos": [{}]} for s, a in zip(ODD, acted, strict=True)]
    alone = [SyncVectorEnv([functools.partial(sims.Anything, **arguments)]) for arguments in each]
    if address is None:
        factories = [functools.partial(sims.Anything, **arguments) for arguments in each]
        envs = envhub.make_vec(factories, observation_mode="any")
    else:
        wire = [{key: spaces.describe(v) if key != "infos" else v for key, v in one.items()} for one in each]
        envs = envhub.make_vec("anything", hub=address, observation_mode="any", env_kwargs=wire)
    with closing(envs):
        assert envs.single_observation_space == spaces.Anything()
        assert envs.single_action_space == (acted[0] if act_alike else spaces.Anything())
        assert envs.get_attr("action_space") == tuple(acted)

        def by_env(results: list[Any]) -> tuple[Any, ...]:
            return tuple(next(iterate(one.observation_space, seen)) for one, seen in zip(alone, results, strict=True))

        envs.info_mode = "by_env"
        wanted = by_env([one.reset(seed=4 + row)[0] for row, one in enumerate(alone)])
        assert_same(envs.reset(seed=4)[0], wanted, "reset")
        actions = np.arange(3) if act_alike else [np.full(row + 1, row, np.float32) for row in range(3)]
        for step in range(6):  # in which episodes end
            observations, rewards, *_, infos = envs.step(actions)
            found = [one.step([action]) for one, action in zip(alone, actions, strict=True)]
            assert_same(observations, by_env([results[0] for results in found]), f"step {step}")
            assert_same(rewards, np.concatenate([results[1] for results in found]), f"step {step}")
            for row, info in infos.items():
                assert_same(info.get("heard", actions[row]), actions[row], f"step {step}")
        if act_alike:
            envs.send(np.array([2, 1]), [1, 0])
            seen = [one.step([1 + row])[0] for row, one in enumerate(alone)]
            assert_same(envs.recv()[0], by_env(seen)[:2], "part")
        else:
            with pytest.raises(envhub.SpaceMismatch, match="numbers in arrays only"):
                envs.send(actions[:2], [0, 1])


NESTED_ALIKE = [
    (gym_spaces.Tuple([gym_spaces.Discrete(3)]), gym_spaces.Dict(own=gym_spaces.Discrete(3)), (1,), {"own": 1}),
    (gym_spaces.Text(4), gym_spaces.Text(9), "ab", "abcdefgh"),
]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("acted", NESTED_ALIKE)
def test_action_spaces_of_the_same_leaves_and_another_structure_are_anything(acted: Any, num_workers: int) -> None:
    *own, first, second = acted
    factories = [functools.partial(sims.Anything, SCALAR, space, [{}]) for space in own]
    with closing(
        envhub.make_vec(factories, observation_mode="any", info_mode="by_env", num_workers=num_workers)
    ) as envs:
        assert envs.single_action_space == spaces.Anything()
        envs.reset()
        heard = envs.step([first, second])[-1]
        assert_same([heard[row]["heard"] for row in range(2)], [first, second], "heard")


def test_observations_that_do_not_fit_their_space_are_taken_where_any_are() -> None:
    with closing(envhub.make_vec(sims.wrong_shape, 2, observation_mode="any", num_workers=1)) as envs:
        assert [seen.shape for seen in envs.reset()[0]] == [(2,)] * 2


def test_observations_that_were_given_out_are_the_callers_own() -> None:
    space = gym_spaces.Graph(gym_spaces.Box(0, 1, (2,)), None, seed=1)
    envs = envhub.AsyncVectorEnv([lambda: sims.Anything(space, gym_spaces.Discrete(2), [{}])] * 2)
    observations, _ = envs.reset(seed=1)
    kept = observations[1].nodes.copy()
    observations[1].nodes[:] = 99
    again, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert np.array_equal(again[1].nodes, kept)
    envs.close()


class Named(gym.Env[Any, Any]):
    """A number, and the same as text; raises where it is told to."""

    observation_space = gym_spaces.Dict({"n": gym_spaces.Discrete(100), "name": gym_spaces.Text(3)})
    action_space = gym_spaces.Discrete(2)
    count = 0

    def observe(self) -> Any:
        return {"n": self.count, "name": str(self.count)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise ValueError("told to")
        self.count += 1
        return self.observe(), 0.0, False, False, {"x": 1}


def test_other_rows_than_the_raising_one_hold_their_last_observations() -> None:
    envs = envhub.make_vec([Named] * 3, num_workers=2)
    envs.reset(options={"reset_mask": np.array([False, True, False])})  # the others have not observed anything
    envs.reset()
    envs.step([0, 0, 0])
    with pytest.raises(ValueError, match="told to"):
        envs.step([0, 1, 0])
    observations, infos = envs.reset(options={"reset_mask": np.array([True, False, False])})
    assert observations["n"].tolist() == [0, 1, 2] and observations["name"] == ("0", "1", "2")
    assert infos == {}
    envs.close()


@pytest.mark.parametrize("examples", [3, pytest.param(300, marks=pytest.mark.chaos)])
@pytest.mark.parametrize(("lane", "mode"), each_value(LANES, list(AutoresetMode)))
def test_any_space_and_info_arrive_as_from_sync_vector_env(
    request: pytest.FixtureRequest, lane: str, mode: AutoresetMode, examples: int
) -> None:
    @settings(EXAMPLES, max_examples=examples)
    @given(any_space, any_space, runs_of_infos())
    def holds(observation_space: Any, action_space: Any, found: list[dict[str, Any]]) -> None:
        observation_space.seed(1)
        arguments = {"observation_space": observation_space, "action_space": action_space, "infos": found}
        check(lane_address(request, lane), mode, arguments)

    holds()


@pytest.mark.parametrize(
    ("address", "mode", "shape"), each_value(LANES, list(AutoresetMode), [(0,), (2, 0)]), indirect=["address"]
)
def test_observations_may_have_no_elements(address: str | None, mode: AutoresetMode, shape: tuple[int, ...]) -> None:
    empty = gym_spaces.Box(-1, 1, shape, np.float32)
    for space in (empty, gym_spaces.Tuple([empty])):
        check(address, mode, {"observation_space": space, "action_space": gym_spaces.Discrete(2), "infos": [{"a": 1}]})


def test_space_of_ones_own_works_within_a_program() -> None:
    wanted = SyncVectorEnv([sims.own_space] * NUM_ENVS)
    for envs in (
        envhub.make_vec(sims.own_space, NUM_ENVS),
        envhub.AsyncVectorEnv([sims.own_space] * NUM_ENVS, shared_memory=False),
    ):
        assert type(envs.single_action_space) is sims.OwnSpace
        assert envs.observation_space == wanted.observation_space
        assert_same(envs.reset(seed=3), wanted.reset(seed=3), "reset")
        for _ in range(5):
            actions = wanted.action_space.sample()
            assert_same(envs.step(actions), wanted.step(actions), "step")
        envs.close()


def test_space_of_ones_own_in_shared_memory_is_refused_as_upstream_refuses_it() -> None:
    for vectorizer in (gym.vector.AsyncVectorEnv, envhub.AsyncVectorEnv):
        with pytest.raises(ValueError, match="shared_memory=True"):
            vectorizer([sims.own_space] * 2)


def test_rows_left_out_of_a_reset_keep_their_text(address: str | None) -> None:
    arguments = {"observation_space": gym_spaces.Dict({"word": gym_spaces.Text(5)}), "action_space": gym_spaces.Text(2)}
    described = {key: spaces.describe(space) for key, space in arguments.items()}
    envs = (
        envhub.make_vec("anything", 3, hub=address, env_kwargs={**described, "infos": []})
        if address
        else (envhub.make_vec(lambda: sims.Anything(**arguments, infos=[]), 3))
    )
    first, _ = envs.reset(seed=1)
    again, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert [left == right for left, right in zip(first["word"], again["word"], strict=True)] == [True, False, True]
    with pytest.raises(envhub.SpaceMismatch, match="no env has moved"):
        envs.step(("a", "b"))
    assert envs.step(("a", "b", "c"))[4]["heard"].tolist() == ["a", "b", "c"]
    envs.close()
