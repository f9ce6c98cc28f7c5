"""Stepping over several hubs gives what ``SyncVectorEnv`` gives, bit for bit, however the envs are divided."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import gymnasium as gym
import large_sims
import numpy as np
import pytest
import sims
import vector_sims
from combinations import every_pair
from fleets import addresses, served_hubs
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hubs import ServedHub
from same import assert_same

import envhub

NUM_ENVS, STEPS = 5, 40
OFFERED = [
    "CartPole-v1",
    "Blackjack-v1",
    *(f"{name}=sims:{name}" for name in ("counter", "nested", "graphs", "anything")),
    "chatty=vector_sims:Chatty",
    "lives=large_sims:Lives",
    "ratings=large_sims:Ratings",
]
BOTH = "shared+wire"
CARTPOLES = functools.partial(gym.make, "CartPole-v1")


class Kind(NamedTuple):
    """An env, the arguments of each of them, and how it is made without these hubs."""

    name: str
    make: Callable[..., gym.Env[Any, Any]]
    each: Sequence[dict[str, Any]] = ({},) * NUM_ENVS

    def reference(self, mode: AutoresetMode) -> gym.vector.VectorEnv[Any, Any, Any]:
        factories = [functools.partial(self.make, **one) for one in self.each]
        if self.name == "ratings":  # no vector env of Gymnasium has rewards with axes
            return envhub.make_vec(factories, num_workers=1, autoreset_mode=mode)
        return SyncVectorEnv(factories, autoreset_mode=mode)


KINDS = {
    "cartpole": Kind("CartPole-v1", CARTPOLES),
    "blackjack": Kind("Blackjack-v1", functools.partial(gym.make, "Blackjack-v1")),
    "nested": Kind("nested", sims.Nested),  # Dict and Tuple, infos of other keys at other times
    "graphs": Kind("graphs", sims.graphs),  # observations of no fixed size, actions out of band
    "infos": Kind("chatty", vector_sims.Chatty, [{"number": row} for row in range(NUM_ENVS)]),  # by each env's number
    "large": Kind("lives", large_sims.Lives, [{"sizes": (100, 9_000, 70_000, row + 1)} for row in range(NUM_ENVS)]),
    "texts": Kind("lives", large_sims.Lives, ({"kind": "text", "sizes": (3, 9_000, 100)},) * NUM_ENVS),
    "rewards": Kind("ratings", large_sims.Ratings, [{"infos": each} for each in ("", "numbers", "text", "", "text")]),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    with served_hubs(tmp_path_factory, 2, OFFERED) as hubs:
        yield hubs


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    with served_hubs(tmp_path_factory, 5, OFFERED) as hubs:
        yield hubs


def made(
    kind: Kind, hubs: Sequence[ServedHub], split: Sequence[int], lanes: str = "wire", **options: Any
) -> envhub.HubVectorEnv:
    each = kind.each if any(kind.each) else None
    envs = envhub.make_vec(
        kind.name,
        1 if each else NUM_ENVS,
        hub=addresses(hubs, lanes, len(split)),
        split=split if len(split) > 1 else None,
        num_workers=len(split),
        env_kwargs=each,
        **options,
    )
    assert envs.lane == lanes or 0 in split
    return envs


def run(envs: gym.vector.VectorEnv[Any, Any, Any], mode: AutoresetMode) -> Iterator[Any]:
    """Everything that the envs return for a fixed run with resets of all envs and of some."""
    actions, rng = gym.vector.utils.batch_space(envs.single_action_space, NUM_ENVS), np.random.default_rng(5)
    actions.seed(11)
    yield envs.reset(seed=42, options={"lift": 3})
    for number in range(STEPS):
        record = envs.step(actions.sample())
        yield record
        mask = record[2] | record[3] if mode is AutoresetMode.DISABLED else rng.random(NUM_ENVS) < 0.2
        if mask.any() and (mode is AutoresetMode.DISABLED or number % 7 == 0):
            yield envs.reset(seed=[*range(number, number + NUM_ENVS)], options={"reset_mask": mask})
        if number == STEPS // 2:
            yield envs.reset()


@functools.cache
def reference(name: str, mode: AutoresetMode) -> list[Any]:
    with closing(KINDS[name].reference(mode)) as envs:
        return list(run(envs, mode))


def check(name: str, mode: AutoresetMode, hubs: Sequence[ServedHub], split: Sequence[int], lanes: str) -> None:
    with closing(made(KINDS[name], hubs, split, lanes, autoreset_mode=mode)) as envs:
        assert envs.metadata["autoreset_mode"] is mode
        for number, (found, wanted) in enumerate(zip(run(envs, mode), reference(name, mode), strict=True)):
            assert_same(tuple(found), tuple(wanted), f"{name} record {number}")


NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


@pytest.mark.parametrize(
    ("name", "mode", "split", "lanes"),
    every_pair(
        ["cartpole", "infos", "graphs"],
        list(AutoresetMode),
        [[2, 0, 3], [2, 3], [1, 1, 3], [3, 1, 1], [1] * 5],
        ["wire", "shared", BOTH],
    ),
)
def test_any_number_of_hubs_returns_what_sync_vector_env_returns(
    five: list[ServedHub], name: str, mode: AutoresetMode, split: list[int], lanes: str
) -> None:
    check(name, mode, five, split, lanes)


# --- the ways of handing over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["infos", pytest.param("graphs", marks=pytest.mark.long)])
def test_reset_that_leaves_a_hub_out_has_its_last_observations(two: list[ServedHub], name: str) -> None:
    kind = KINDS[name]
    with closing(made(kind, two, [2, 3], BOTH)) as envs, closing(kind.reference(NEXT)) as wanted:
        envs.action_space.seed(3)
        assert_same(envs.reset(seed=1), wanted.reset(seed=1), "reset")
        for rows in ([0], [1], [3, 4], [2], [0, 4], [*range(5)]):
            actions = envs.action_space.sample()
            assert_same(tuple(envs.step(actions)), tuple(wanted.step(actions)), f"step before {rows}")
            mask = np.isin(range(NUM_ENVS), rows)
            own = wanted.reset(seed=9, options={"reset_mask": mask})
            assert_same(envs.reset(seed=9, env_ids=rows), own, f"reset of {rows}")


@pytest.mark.parametrize("lanes", [*(pytest.param(each, marks=pytest.mark.long) for each in ("wire", "shared")), BOTH])
def test_parts_of_a_batch_step_each_env_as_it_steps_alone(two: list[ServedHub], lanes: str) -> None:
    rng = np.random.default_rng(5)
    alone = [SyncVectorEnv([CARTPOLES]) for _ in range(NUM_ENVS)]
    with closing(made(KINDS["cartpole"], two, [2, 3], lanes)) as envs:
        envs.async_reset(seed=3)
        observations, *_, env_ids = envs.recv()
        assert env_ids.tolist() == [*range(NUM_ENVS)]
        for env, one in enumerate(alone):
            assert_same(one.reset(seed=3 + env)[0][0], observations[env], f"reset of {env}")
        actions: dict[int, int] = {}
        free = set(range(NUM_ENVS))
        for turn in range(80):
            chosen = rng.permutation(sorted(free))[: rng.integers(1, len(free) + 1)] if turn < 70 else np.array([])
            if len(chosen):
                batch = rng.integers(0, 2, len(chosen))
                envs.send(batch, chosen)
                actions.update(zip(chosen.tolist(), batch.tolist(), strict=True))
                free -= {*chosen.tolist()}
            if not actions:
                break
            *found, _, env_ids = envs.recv(min_envs=int(rng.integers(1, 4)), timeout=60)
            assert env_ids.tolist() == sorted(env_ids.tolist())
            for place, env in enumerate(env_ids.tolist()):
                wanted = alone[env].step([actions.pop(env)])
                for left, right in zip(found, wanted[:4], strict=True):
                    assert (left[place] == right[0]).all()
            free |= {*env_ids.tolist()}
        assert not actions
        assert_same(envs.step([0] * NUM_ENVS)[0], np.concatenate([one.step([0])[0] for one in alone]), "step")


@pytest.mark.long
@pytest.mark.parametrize("lanes", ["wire", "shared"])
def test_rows_that_are_made_again_are_bit_equal_after_a_reset(
    tmp_path_factory: pytest.TempPathFactory, two: list[ServedHub], lanes: str
) -> None:
    kind = KINDS["nested"]
    with served_hubs(tmp_path_factory, 1, OFFERED) as (lost,):
        envs = made(kind, [two[0], lost], [3, 2], lanes, on_hub_loss="redistribute", reconnect_timeout=20)
        with closing(envs), closing(kind.reference(NEXT)) as wanted:
            envs.action_space.seed(3)
            assert_same(envs.reset(seed=1), wanted.reset(seed=1), "reset")
            lost.stop(signal.SIGKILL)
            for step in range(3):
                actions = envs.action_space.sample()
                (observations, *_), expected = envs.step(actions), wanted.step(actions)[0]
                assert_same(observations["pose"][:3], expected["pose"][:3], f"step {step}")
            assert_same(envs.reset(seed=5), wanted.reset(seed=5), "reset")
            for step in range(STEPS):
                actions = envs.action_space.sample()
                assert_same(tuple(envs.step(actions)), tuple(wanted.step(actions)), f"step {step} after the loss")
