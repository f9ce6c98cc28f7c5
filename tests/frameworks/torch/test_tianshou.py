"""``envhub.tianshou`` beside ``SubprocVectorEnv``, and what tianshou collects and trains with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import framework_envs
import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from hubs import serve, signalled_in_a_wait, stopped, worker_pids
from same import assert_same
from telling_env import Telling
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import BaseVectorEnv, ContinuousToDiscrete, DummyVectorEnv, SubprocVectorEnv

import envhub
from envhub.tianshou import HubVectorEnv, ValidReplayBuffer

torch.set_num_threads(1)

NUM_ENVS, STEPS = 4, 400
HERE = Path(__file__).parent
FACTORIES: dict[str, Callable[[], gymnasium.Env[Any, Any]]] = {
    "cartpole": framework_envs.cartpole,
    "kinds": framework_envs.Kinds,
}


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    named = [f"{name}=framework_envs:{factory.__name__}" for name, factory in FACTORIES.items()]
    with serve(tmp_path_factory.mktemp("hub"), *named, "CartPole-v1", cwd=HERE) as hub:
        yield hub.tcp


def results_of(step: Any) -> Any:
    observations, rewards, *others = step
    # Rewards that are integers are floats over a hub.
    return observations, rewards.astype(np.float64) if rewards.dtype == np.int64 else rewards, *others


def history(envs: BaseVectorEnv, steps: int) -> Iterator[Any]:
    """Everything that steps of all envs and of some return, with the resets that a collector makes."""
    rng = np.random.default_rng(5)
    yield len(envs), envs.env_num, envs.is_async, envs.observation_space, envs.metadata
    yield envs.seed(7)
    spaces = envs.action_space
    yield envs.reset()
    yield envs.reset(seed=3, options={"low": -0.04, "high": 0.04})
    yield envs.reset([2, 0])
    for step in range(steps):
        some = step % 4 == 3
        ids = rng.permutation(NUM_ENVS)[: rng.integers(1, NUM_ENVS + 1)] if some else np.arange(NUM_ENVS)
        actions = np.array([spaces[index].sample() for index in ids])
        _, _, terminations, truncations, _ = found = results_of(envs.step(actions, ids))
        yield found
        if (ended := terminations | truncations).any():
            yield envs.reset(ids[ended])
    yield envs.reset(1), results_of(envs.step([spaces[1].sample()], 1)), envs.reset(seed=8)
    yield results_of(envs.step([space.sample() for space in spaces]))


@functools.cache
def history_of_subproc_vector_env(name: str) -> list[Any]:
    """Taken once, since each of its processes imports torch."""
    with contextlib.closing(SubprocVectorEnv([FACTORIES[name]] * NUM_ENVS)) as envs:
        return copy.deepcopy([*history(envs, STEPS)])


@pytest.mark.parametrize(("kind", "lane"), [(Tuple, "auto"), (Dict, "wire")])
def test_composed_actions_are_taken_as_by_dummy_vector_env(kind: type[gymnasium.Space[Any]], lane: str) -> None:
    parts = [Discrete(5), Box(-1, 1, (2,), np.float64)]
    space = Tuple(parts) if kind is Tuple else Dict(number=parts[0], vector=parts[1])
    factories = [functools.partial(framework_envs.Composed, space)] * 3
    with (
        contextlib.closing(HubVectorEnv(factories, lane=lane)) as ours,
        contextlib.closing(DummyVectorEnv(factories)) as theirs,
    ):
        assert_same(ours.reset(), theirs.reset(), "reset")
        for step in range(20):
            ids = [0, 1, 2] if step % 2 else [2, 0]  # so that episodes end at several times
            actions = [space.sample() for _ in ids]
            _, _, terminations, _, _ = found = results_of(ours.step(actions, ids))
            assert_same(found, results_of(theirs.step(actions, ids)), str(step))
            if terminations.any():
                ended = np.array(ids)[terminations]
                assert_same(ours.reset(ended), theirs.reset(ended), f"reset at {step}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["private hub", "tcp"])
@pytest.mark.parametrize("name", FACTORIES)
def test_results_are_those_of_subproc_vector_env(name: str, way: str, tcp: str) -> None:
    factories = [FACTORIES[name]] * NUM_ENVS
    makes: dict[str, Callable[[], HubVectorEnv]] = {
        "private hub": lambda: HubVectorEnv(factories),
        "tcp": lambda: HubVectorEnv(name, NUM_ENVS, hub=tcp),
    }
    with contextlib.closing(makes[way]()) as ours:
        for number, (found, wanted) in enumerate(
            zip(history(ours, STEPS), history_of_subproc_vector_env(name), strict=True)
        ):
            assert_same(found, wanted, f"{name} {way} {number}")


def test_infos_of_every_kind_are_those_of_subproc_vector_env() -> None:
    factories = [functools.partial(Telling, place) for place in range(NUM_ENVS)]
    with contextlib.closing(SubprocVectorEnv(factories)) as theirs, contextlib.closing(HubVectorEnv(factories)) as ours:
        for number, (found, wanted) in enumerate(zip(history(ours, 60), history(theirs, 60), strict=True)):
            assert_same(found, wanted, str(number))


# --- attributes -------------------------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[BaseVectorEnv, Any], Any]] = {
    "value": lambda envs, ids: envs.get_env_attr("value", ids),
    "property": lambda envs, ids: envs.get_env_attr("computed", ids),
    "missing": lambda envs, ids: envs.get_env_attr("missing", ids),
    "space": lambda envs, ids: envs.get_env_attr("action_space", ids),
    "set": lambda envs, ids: (envs.set_env_attr("note", [1, 2], ids), envs.get_env_attr("note")),
    "reserved": lambda envs, _: [envs.metadata, envs.reward_range, envs.spec, envs.observation_space],
    "samples": lambda envs, ids: (envs.seed([4, 3, 2, 1]), [space.sample() for space in envs.action_space]),
    "rendered": lambda envs, _: envs.render(),
}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[BaseVectorEnv, BaseVectorEnv]]:
    with contextlib.ExitStack() as stack:
        made = [kind([framework_envs.Kinds] * NUM_ENVS) for kind in (HubVectorEnv, SubprocVectorEnv)]
        for envs in made:
            stack.callback(envs.close)
            envs.reset()
        yield made[0], made[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ids", [None, -1, [3, 0], [1, 1], []], ids=str)
@pytest.mark.parametrize("asked", [asked for asked in ASKED if asked != "rendered"])
def test_attributes_are_those_of_subproc_vector_env(
    both: tuple[BaseVectorEnv, BaseVectorEnv], asked: str, ids: Any
) -> None:
    found, wanted = (ASKED[asked](envs, ids) for envs in both)
    assert_same(found, wanted, asked)


def test_env_that_seeds_itself_is_seeded_so() -> None:
    with (
        contextlib.closing(HubVectorEnv([framework_envs.Seeded] * 3)) as ours,
        contextlib.closing(SubprocVectorEnv([framework_envs.Seeded] * 3)) as s,
    ):
        assert ours.seed(5) == s.seed(5) == [[5], [6], [7]]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_arguments_that_are_not_the_users() -> None:
    factories = [framework_envs.Kinds] * 2
    with pytest.raises(TypeError, match="autoreset_mode is not to be given: tianshou"):
        HubVectorEnv(factories, autoreset_mode="Disabled")
    with pytest.raises(ValueError, match="num_envs=1 and 2 factories"):
        HubVectorEnv(factories, 1)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda envs: envs.step(None), ValueError),
        (lambda envs: envs.step([0, 0, 0]), AssertionError),
        (lambda envs: envs.step([0], 7), IndexError),
        (lambda envs: envs.step([0, 0], [1, 1]), ValueError),
        (lambda envs: envs.reset(7), IndexError),
        (lambda envs: envs.reset(1, unknown=1), TypeError),
        (lambda envs: envs.seed([1, 2]), ValueError),
        (lambda envs: envs.get_env_attr("value", 7), IndexError),
        (lambda envs: envs.get_env_attr("raising"), ZeroDivisionError),
    ],
)
def test_errors_leave_the_envs_as_they_are(ask: Callable[[Any], Any], error: type[Exception]) -> None:
    class Raising(framework_envs.Kinds):
        raising = property(lambda self: 1 // 0)

    with contextlib.closing(HubVectorEnv([Raising] * NUM_ENVS)) as envs:
        envs.reset()
        with pytest.raises(error):
            ask(envs)
        envs.step([1] * NUM_ENVS)
        observations, *_ = envs.step([1], [2])
        assert observations[0]["count"] == 2


@pytest.mark.parametrize(("row", "lane"), [(None, "wire"), (1, "auto")])
def test_program_goes_on_after_ctrl_c_in_a_step(row: int | None, lane: str) -> None:
    before = worker_pids()
    with contextlib.closing(HubVectorEnv([framework_envs.Sleeps] * 3, num_workers=3, lane=lane)) as envs:
        envs.reset()
        workers = worker_pids() - before
        count = 3 if row is None else 1
        for goes_on in (envs.reset, functools.partial(envs.get_env_attr, "steps"), lambda: None):
            # After it, the step still takes its time.
            with stopped(*workers), pytest.raises(KeyboardInterrupt), signalled_in_a_wait(signal.SIGINT):
                envs.step(np.full(count, 300, np.float32), row)
            assert envs.ready_id == [0, 1, 2]
            goes_on()
            assert len(envs.step(np.zeros(count, np.float32), row)[0]) == count


@pytest.mark.parametrize(("ids", "lane"), [(None, "wire"), ([0, 1], "auto")])
def test_env_that_raises_ends_the_step_and_a_reset_goes_on(ids: list[int] | None, lane: str) -> None:
    kinds = [framework_envs.Kinds, framework_envs.Raises, framework_envs.Kinds]
    with contextlib.closing(HubVectorEnv(kinds, num_workers=3, lane=lane)) as envs:
        for _ in range(2):
            envs.reset()
            with pytest.raises(RuntimeError, match="a step that raises"):
                for _ in range(3):
                    envs.step([0] * (3 if ids is None else 2), ids)
        envs.reset()


def test_closed_envs_refuse_everything() -> None:
    envs = HubVectorEnv("CartPole-v1", 2)
    envs.close()
    for ask in (envs.close, envs.reset, envs.render, envs.seed, lambda: envs.step([0, 0]), lambda: envs.metadata):
        with pytest.raises(AssertionError, match="cannot be called after close"):
            ask()


# --- collectors -------------------------------------------------------------------------------------------------------


class Random(Policy):
    def forward(self, batch: Any, state: Any = None, **_: Any) -> Any:
        return Batch(act=np.random.randint(2, size=len(batch)))


def random_policy(envs: BaseVectorEnv) -> Policy:
    return Random(envs.action_space[0])


@pytest.mark.filterwarnings("ignore")
def test_collector_collects_what_it_collects_with_subproc_vector_env(tcp: str) -> None:
    factories = [framework_envs.cartpole] * NUM_ENVS
    makes = [
        lambda: SubprocVectorEnv(factories),
        lambda: HubVectorEnv(factories),
        lambda: HubVectorEnv("cartpole", NUM_ENVS, hub=tcp),
    ]
    collected = []
    for make in makes:
        with contextlib.closing(make()) as envs:
            envs.seed(9)
            collector = Collector(random_policy(envs), envs, VectorReplayBuffer(4000, NUM_ENVS))
            collector.reset()
            first = collector.collect(n_step=400, random=True)
            second = collector.collect(n_episode=7, random=True)
            buffer = collector.buffer
            collected.append([first.returns, second.returns, second.lens, buffer.obs, buffer.act, buffer.obs_next])
    for found in collected[1:]:
        assert_same(found, collected[0], "collected")


# --- what a crash cuts short ------------------------------------------------------------------------------------------


def cut_steps(buffer: Any) -> np.ndarray:
    return np.flatnonzero(buffer.info.get("invalid_transition", np.zeros(buffer.maxsize, bool)))


def test_step_that_cut_an_episode_short_is_marked_and_not_drawn() -> None:
    with contextlib.closing(HubVectorEnv([framework_envs.Counts] * 2, num_workers=2, restarts_max=10_000)) as envs:
        buffer = ValidReplayBuffer(2000, 2)
        collector = Collector(random_policy(envs), envs, buffer)
        collector.reset()
        stats = collector.collect(n_step=300, random=True)
        assert set(stats.returns) == {10, 4}
        # In the buffer each is an episode that was truncated, and its last step is marked.
        assert not buffer.hasnull()
        cut = cut_steps(buffer)
        assert len(cut) == (stats.returns == 4).sum() >= 4 and buffer.truncated[cut].all() and not buffer.rew[cut].any()
        assert (buffer.obs[cut] == buffer.obs_next[cut]).all()
        assert buffer.truncated.sum() == len(cut)
        assert {*envs.failures} == {0, 1} and envs.failures[0].signal == "SIGKILL"
        # It is not drawn to learn from.
        drawn = buffer.sample_indices(3000)
        assert not np.isin(drawn, cut).any() and len(drawn) == 3000
        assert np.isin(cut, buffer.sample_indices(0)).all()
        plain = VectorReplayBuffer.sample_indices(buffer, 3000)
        assert np.isin(plain, cut).any()


def test_keywords_of_asynchronous_steps_name_what_is_left() -> None:
    for options in ({"wait_num": 3}, {"timeout": 0.1}):
        with pytest.raises(TypeError, match=r"a step waits for all of its envs. .* send and recv of envhub.make_vec"):
            HubVectorEnv([framework_envs.Kinds] * 2, **options)


# --- what runs where --------------------------------------------------------------------------------------------------


def imports_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_workers_do_not_import_torch() -> None:
    before = worker_pids()
    factories = [lambda: ContinuousToDiscrete(framework_envs.pendulum(), 5)] * 2
    with contextlib.closing(HubVectorEnv(factories)) as envs:
        envs.reset()
        own = worker_pids() - before
        assert own and not any(map(imports_torch, own)) and imports_torch(psutil.Process().pid)
        assert envs.action_space[0] == gymnasium.spaces.MultiDiscrete([5])
        envs.step(np.array([[1], [2]]))


def test_env_that_is_named_twice_is_reset_once() -> None:
    with contextlib.closing(HubVectorEnv([framework_envs.Sleeps] * 2)) as envs:
        assert envs.reset([1, 1, 0])[0].tolist() == [[1, 0]] * 3
        assert envs.reset([1, 1])[0].tolist() == [[2, 0]] * 2
        assert envs.reset([0])[0].tolist() == [[2, 0]]
        for _ in range(4):
            ended = envs.step(np.zeros(2))[2]
        assert ended.all() and envs.reset([1, 0, 1])[0].tolist() == [[3, 0]] * 3
        with pytest.raises(ValueError, match="the number of an env"):
            envs.reset([])


# --- envs that differ -------------------------------------------------------------------------------------------------


def of_other_shapes(acts: bool = False, count: int = NUM_ENVS) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    shapes = [(row + 1,) if acts else None for row in range(count)]
    return [functools.partial(framework_envs.Differs, row, shape) for row, shape in enumerate(shapes)]


def test_envs_of_other_shapes_and_keys_are_taken_as_by_subproc_vector_env() -> None:
    factories = of_other_shapes()
    with contextlib.closing(HubVectorEnv(factories)) as ours, contextlib.closing(SubprocVectorEnv(factories)) as theirs:
        for number, (found, wanted) in enumerate(zip(history(ours, 60), history(theirs, 60), strict=True)):
            assert_same(found, wanted, f"record {number}")
        assert ours.get_env_attr("row") == [0, 1, 2, 3]
        ours.set_env_attr("row", 9, id=2)
        assert ours.get_env_attr("row") == [0, 1, 9, 3]
        assert_same(ours.render(), theirs.render(), "frames")


def test_actions_of_other_shapes_step_all_envs_together() -> None:
    factories = of_other_shapes(acts=True)
    actions = np.empty(NUM_ENVS, object)
    actions[:] = [np.full(row + 1, 0.5, np.float32) for row in range(NUM_ENVS)]
    with contextlib.closing(HubVectorEnv(factories)) as ours, contextlib.closing(DummyVectorEnv(factories)) as theirs:
        assert ours.action_space == theirs.action_space
        assert_same(ours.reset(seed=2), theirs.reset(seed=2), "reset")
        for step in range(6):
            found, wanted = ours.step(actions), theirs.step(actions)
            assert_same(found, wanted, f"step {step}")
            if (ended := np.flatnonzero(found[2])).size:
                assert_same(ours.reset(ended), theirs.reset(ended), f"reset {step}")
        with pytest.raises(envhub.SpaceMismatch, match="a part of a batch takes actions of numbers in arrays only"):
            ours.step(actions[:2], [0, 1])
