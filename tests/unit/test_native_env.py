from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from envhub_server.ipc import control
from envhub_server.worker.gym_compat import vector_factory
from envhub_server.worker.native_env import SharedCall, made_by, takes, why_not_batch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class Env(VectorEnv[Any, Any, Any]):
    single_observation_space = single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int, mode: object = AutoresetMode.NEXT_STEP) -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode, "render_fps": 3}
        self.seeds: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return np.zeros(self.num_envs), {}


def order(workers: int = 1, mode: str = "NextStep") -> control.Build:
    return control.Build(0, [], "", b"", b"", "", [], mode, allow_pickle=False, batch_workers=workers)


def native(rows: Any, workers: int) -> Any:
    return made_by(Env, rows, order(workers))


@pytest.mark.parametrize(
    ("rows", "workers", "given", "wanted"),
    [
        (range(4), 1, [7, 8, 9, 10], 7),
        (range(4), 1, [None] * 4, None),
        (range(0, 7, 3), 3, [7, 10, 13], 7),
        (range(1, 7, 3), 3, [8, 11], 10),
        (range(2, 7, 3), 3, [9, 12], 12),
    ],
)
def test_env_of_one_seed_gets_the_one_that_the_seeds_follow_from(
    rows: Any, workers: int, given: Any, wanted: Any
) -> None:
    env = native(rows, workers)
    env.reset(given, 7 if workers > 1 else 4, None, rebuilt=False)
    assert env.made.seeds == [wanted]


def test_seeds_that_follow_from_none_are_refused_but_for_envs_built_again() -> None:
    env = native(range(2), 1)
    for seeds in ([1, 1], [1, None], [None, 1]):
        with pytest.raises(ValueError, match="takes one seed for all of its envs"):
            env.reset(seeds, 2, None, rebuilt=False)
    env.reset([5, 77], 2, None, rebuilt=True)
    assert env.made.seeds == [5]


def test_early_reset_that_fails_is_the_failure_of_each_env_and_is_not_tried_again() -> None:
    tries = iter([RuntimeError("the first try"), None])

    def reset_early() -> None:
        if (error := next(tries)) is not None:
            raise error

    shared = SharedCall(native(range(2), 1), True, reset_early)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the first try"):
            shared.reset_early()
    assert next(tries) is None


def test_metadata_are_without_the_mode_that_is_the_envs_own() -> None:
    env = native(range(2), 1)
    assert env.metadata == {"render_fps": 3} and env.autoreset_mode == "NextStep" and not env.takes_masks


@pytest.mark.parametrize(
    ("own", "masks", "possible"),
    [
        ("NextStep", False, {"NextStep"}),
        ("NextStep", True, {"NextStep", "SameStep", "Disabled"}),
        ("SameStep", True, {"SameStep"}),
        ("Disabled", True, {"SameStep", "Disabled"}),
        ("Else", True, set()),
    ],
)
def test_modes_that_can_be_made_of_the_envs_own(own: str, masks: bool, possible: set[str]) -> None:
    env = native(range(2), 1)
    env.autoreset_mode, env.takes_masks = own, masks
    assert {mode for mode in ("NextStep", "SameStep", "Disabled") if not env.resets_as(mode)} == possible


def test_env_is_made_in_the_sessions_mode_where_it_takes_one() -> None:
    made: list[Any] = []

    def factory(num_envs: int, autoreset_mode: Any = AutoresetMode.NEXT_STEP) -> Any:
        made.append(autoreset_mode)
        if autoreset_mode is AutoresetMode.DISABLED:
            raise ValueError("as ALE does")
        return Env(num_envs, autoreset_mode)

    assert made_by(factory, range(2), order(mode="SameStep")).autoreset_mode == "SameStep"
    with pytest.raises(ValueError, match="is not possible: pass autoreset_mode='NextStep'"):
        made_by(factory, range(2), order(mode="Disabled"))
    assert made == [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP]


class Single:
    def step(self, action: Any) -> None: ...


class Pool(Env):
    config = {"batch_size": 1}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (Env(2), ""),
        (Env(3), "a vector env of 3 envs where num_envs=2"),
        (Single(), "a single env, which vector=True is not for"),
        (type("Old", (Single,), {"num_envs": 2})(), "which is no vector env: it has no single_observation_space"),
        (type("Old", (Single,), {"num_envs": 2})(), "client/docs/vector_envs.md#other-interfaces shows"),
        (None, "None, which is no vector env: it has no num_envs"),
        (Pool(2), "with batch_size=1; EnvHub steps all"),
    ],
)
def test_what_is_no_vector_env_of_so_many_is_described(made: Any, told: str) -> None:
    found = why_not_batch(made, 2)
    assert told in found and bool(told) == bool(found) and ("a single env" in found) is ("a single env" in told)


def test_function_takes_an_argument_by_name_or_any() -> None:
    assert takes(lambda seed: None, "seed") and not takes(lambda **others: None, "seed")
    assert takes(lambda **others: None, "seed", by_name=False) and not takes(
        lambda num_envs: None, "seed", by_name=False
    )


def test_version_without_these_vector_envs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium, "__version__", "0.29.1")  # which has make_vec, and calls this mode "custom"
    with pytest.raises(TypeError, match=r"needs Gymnasium 1.0 or later, and here is gymnasium 0.29.1"):
        vector_factory("CartPole-v1", {})
