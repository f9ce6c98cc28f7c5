"""``make_env`` beside TorchRL's own wrapper of Gymnasium's vector envs, and what a dead worker leaves in its data."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import framework_envs
import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hubs import serve, wait_until, worker_processes
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv, check_env_specs
from torchrl.envs.transforms import Compose, InitTracker, RewardSum, StepCounter

import envhub
from envhub.torchrl import HubTorchEnv, make_env

torch.set_num_threads(1)

NUM_ENVS, STEPS = 4, 400
FACTORIES: dict[str, Callable[[], Any]] = {
    "CartPole-v1": functools.partial(gymnasium.make, "CartPole-v1"),
    "Pendulum-v1": functools.partial(gymnasium.make, "Pendulum-v1"),
    "images": framework_envs.Images,
    "lengthens": framework_envs.Lengthens,
}
SERVED = (
    "CartPole-v1",
    "Pendulum-v1",
    *(f"{name}=framework_envs:{name.title()}" for name in ("images", "lengthens", "dies")),
)


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a hub that serves every env of these tests."""
    with serve(tmp_path_factory.mktemp("hub"), *SERVED, cwd=Path(__file__).parent) as hub:
        yield hub.tcp


@pytest.fixture(params=["private hub", "tcp"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords of ``make_env`` for one place where the envs may be."""
    if request.param == "private hub":
        return {"num_workers": 2}
    address = request.getfixturevalue("tcp")
    return {"hub": address, "lane": "wire"}


def workers() -> set[int]:
    return {each.pid for each in worker_processes(os.getpid())}


def made(name: str, options: dict[str, Any], num_envs: int = NUM_ENVS, **more: Any) -> HubTorchEnv:
    return make_env(name if "hub" in options else FACTORIES[name], num_envs, **options, **more)


def of_torchrl(name: str, mode: AutoresetMode = AutoresetMode.DISABLED, num_envs: int = NUM_ENVS) -> EnvBase:
    return GymWrapper(SyncVectorEnv([FACTORIES[name]] * num_envs, autoreset_mode=mode))


def assert_equal(found: TensorDictBase, wanted: TensorDictBase) -> None:
    """The same keys, but for our own, dtypes and values."""
    ours = {key for key in found.keys(True, True) if "invalid_transition" not in key}
    assert ours == set(wanted.keys(True, True))
    for key in ours:
        assert found[key].dtype == wanted[key].dtype and found[key].shape == wanted[key].shape, key
        differ = (found[key] != wanted[key]).reshape(*found.shape, -1).any(-1).nonzero()
        assert not len(differ), f"{key} at (env, step) {differ[0].tolist()}"


def rolled(env: EnvBase, steps: int = STEPS) -> TensorDictBase:
    env.set_seed(3)
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTORIES)
def test_rollout_is_that_of_torchrls_own_wrapper(name: str, options: dict[str, Any]) -> None:
    with contextlib.closing(made(name, options)) as ours, contextlib.closing(of_torchrl(name)) as theirs:
        torch.manual_seed(0)
        if name == "lengthens":
            zeros = functools.partial(_with_action, ours.action_spec.zero())
            found, wanted = (env.rollout(STEPS, zeros, break_when_any_done=False) for env in (ours, theirs))
        else:
            found, wanted = rolled(ours), rolled(theirs)
        assert_equal(found, wanted)
        assert wanted["next", "done"].sum() >= NUM_ENVS and not found["next", "invalid_transition"].any()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "images"])
def test_one_env_is_a_batch_of_one_as_with_torchrls_own_wrapper(name: str, tcp: str) -> None:
    for where in ({}, {"hub": tcp, "lane": "wire"}):
        ours, theirs = made(name, where, num_envs=1), of_torchrl(name, num_envs=1)
        with contextlib.closing(ours), contextlib.closing(theirs):
            assert ours.reward_spec.shape == theirs.reward_spec.shape == (1, 1)
            assert_equal(rolled(ours), rolled(theirs))
            assert ours.rand_step(ours.reset())["next", "reward"].shape == (1, 1)


def _with_action(action: torch.Tensor, tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", action.clone())


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "all": lambda: Compose(InitTracker(), StepCounter(), RewardSum()),
    "cut by StepCounter": lambda: Compose(InitTracker(), StepCounter(max_steps=9), RewardSum()),
}


@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize("name", ["CartPole-v1"])
def test_transforms_show_what_they_show_of_torchrls_own_wrapper(
    name: str, transforms: str, options: dict[str, Any]
) -> None:
    ours = TransformedEnv(made(name, options), TRANSFORMS[transforms]())
    theirs = TransformedEnv(of_torchrl(name), TRANSFORMS[transforms]())
    with contextlib.closing(ours), contextlib.closing(theirs):
        check_env_specs(ours)
        found, wanted = rolled(ours), rolled(theirs)
        assert_equal(found, wanted)
        if transforms != "all":
            assert wanted["next", "step_count"].max() == 9


def test_any_envs_are_reset_at_any_time(options: dict[str, Any]) -> None:
    mask = torch.tensor([[True], [False], [True], [False]])
    with contextlib.closing(made("lengthens", options)) as env:
        data = env.step(_with_action(env.action_spec.zero(), env.reset()))["next"]
        data = env.reset(data.set("_reset", mask))
        assert data["observation"].tolist() == [[2, 0], [1, 1], [2, 0], [1, 1]]
        assert data["observation"].tolist() == env.reset(data.set("_reset", ~mask & mask))["observation"].tolist()


def test_reset_of_what_a_step_has_reset_is_one_reset(options: dict[str, Any]) -> None:
    with contextlib.closing(made("lengthens", options)) as env:
        env.rollout(10, functools.partial(_with_action, env.action_spec.zero()))
        for episode in (2, 3):
            assert env.reset()["observation"].tolist() == [[episode, 0]] * NUM_ENVS


def test_texts_of_an_ended_episode_are_the_last_ones_of_it() -> None:
    with contextlib.closing(make_env(framework_envs.Speaks, 2, num_workers=1)) as env:
        root, shown = env.reset(), []
        for _ in range(5):
            data, root = env.step_and_maybe_reset(env.rand_action(root))
            shown.append([list(each["said"]) for each in (data["next"], root)])
    assert shown == [
        [["1x1"] * 2, ["1x1"] * 2],
        [["1x2"] * 2, ["2x0"] * 2],
        [["2x1"] * 2, ["2x1"] * 2],
        [["2x2"] * 2, ["2x2"] * 2],
        [["2x3"] * 2, ["3x0"] * 2],
    ]


def test_step_of_ended_episodes_is_refused_as_by_torchrls_own_wrapper(options: dict[str, Any]) -> None:
    with contextlib.closing(made("lengthens", options)) as env:
        found = env.reset()
        with pytest.raises(gymnasium.error.ResetNeeded, match=r"the episodes of envs \[.*\] have ended"):
            for _ in range(STEPS):
                found = env.step_mdp(env.rand_step(found))


def collected(env: EnvBase) -> list[TensorDictBase]:
    env.set_seed(5)
    torch.manual_seed(1)
    collector = Collector(env, None, frames_per_batch=NUM_ENVS * 50, total_frames=NUM_ENVS * 200)
    found = [batch.clone() for batch in collector]
    collector.shutdown()
    return found


@pytest.mark.parametrize("name", ["CartPole-v1", "images"])
def test_collector_collects_what_it_does_from_torchrls_own_wrapper(name: str, options: dict[str, Any]) -> None:
    found, wanted = collected(made(name, options)), collected(of_torchrl(name))
    for ours, theirs in zip(found, wanted, strict=True):
        ours["collector", "traj_ids"] -= found[0]["collector", "traj_ids"].min()
        theirs["collector", "traj_ids"] -= wanted[0]["collector", "traj_ids"].min()
        assert_equal(ours, theirs)
    assert sum(int(batch["next", "done"].sum()) for batch in wanted) > NUM_ENVS


@pytest.mark.parametrize(
    ("name", "num_envs", "encoding", "device"),
    [("CartPole-v1", 1, False, None), ("CartPole-v1", 3, True, "cpu"), ("Pendulum-v1", 3, False, None),
     ("images", 1, True, None), ("images", 3, False, "cpu")],
)  # fmt: skip
def test_specs_are_kept(name: str, num_envs: int, encoding: bool, device: str | None) -> None:
    env = make_env(FACTORIES[name], num_envs, categorical_action_encoding=encoding, device=device)
    with contextlib.closing(env):
        assert env.batch_size == (num_envs,)
        check_env_specs(env)
        data = env.rollout(30, break_when_any_done=False)
        assert data.device == env.device == (torch.device(device) if device else None)
        assert data["next", "invalid_transition"].shape == data["next", "done"].shape


def test_infos_are_read_as_torchrl_reads_them(options: dict[str, Any]) -> None:
    with contextlib.closing(made("images", options)) as bare:
        env = bare.auto_register_info_dict()
        data = env.rollout(50, break_when_any_done=False)
        assert data["next", "taken"].tolist() == data["next", "inner", "count"].argmax(-1).float().tolist()
        assert (data["taken"] == data["inner", "count"].argmax(-1)).all()
        assert data["next", "done"].any()


# --- GymWrapper -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "over_tcp"), [(AutoresetMode.DISABLED, False), (AutoresetMode.SAME_STEP, True)])
def test_gym_wrapper_takes_the_vector_env_in_its_two_modes(mode: AutoresetMode, over_tcp: bool, tcp: str) -> None:
    hub = {"hub": tcp, "lane": "wire"} if over_tcp else {}
    for name in ("CartPole-v1", "Pendulum-v1"):
        ours = GymWrapper(envhub.make_vec(name, NUM_ENVS, autoreset_mode=mode, **hub))  # type: ignore[arg-type]
        with contextlib.closing(ours), contextlib.closing(of_torchrl(name, mode)) as theirs:
            check_env_specs(ours)
            assert_equal(rolled(ours), rolled(theirs))
            assert_equal(rolled(ours, 50), rolled(of_torchrl(name), 50))


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_cut_episode_is_told_from_a_real_one(tcp: str) -> None:
    for where in ({"num_workers": 2}, {"hub": tcp, "lane": "wire", "num_workers": 2}):
        env = make_env("dies" if "hub" in where else framework_envs.Dies, 2, restarts_max=1000, **where)
        with contextlib.closing(TransformedEnv(env, Compose(StepCounter(), RewardSum()))) as counted:
            data = rolled(counted, 200)
        end, cut = data["next", "done"], data["next", "invalid_transition"]
        assert cut.sum() >= 4 and (end & ~cut).sum() >= 8
        assert_cut(data, cut)
        assert (data["next", "step_count"][cut] == 5).all()
        assert (data["next", "episode_reward"][cut] == 4).all()
        whole = end & ~cut
        assert (data["next", "episode_reward"][whole] == data["next", "step_count"][whole]).all()
        assert (data["next", "episode_reward"][whole] >= 8).all()  # no CartPole falls within 7 steps
        assert {failure.signal for failure in env.failures.values()} == {"SIGKILL"}


def assert_cut(data: TensorDictBase, cut: torch.Tensor) -> None:
    """These steps are what a step is that the end of a worker cut short, and the step after it begins an episode."""
    rows = cut.squeeze(-1)
    assert not data["invalid_transition"].any()
    assert data["next", "done"][cut].all() and data["next", "truncated"][cut].all()
    assert not data["next", "terminated"][cut].any() and (data["next", "reward"][cut] == 0).all()
    assert (data["next", "observation"][rows] == data["observation"][rows]).all()
    after = data["observation"][:, 1:][rows[:, :-1]]
    assert (after.abs() <= 0.05).all() and not data["done"].any()


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [{"autoreset_mode": "Disabled"}, {"copy": False}], ids=str)
def test_what_torchrl_needs_is_not_the_users(word: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(word))):
        make_env("CartPole-v1", 2, **word)


def test_vector_env_of_another_mode_is_refused() -> None:
    for mode in ("Disabled", "NextStep"):
        with (
            contextlib.closing(envhub.make_vec("CartPole-v1", 2, autoreset_mode=mode)) as envs,
            pytest.raises(ValueError, match="SAME_STEP"),
        ):
            HubTorchEnv(envs)


def test_error_of_an_env_is_raised_and_the_session_goes_on(options: dict[str, Any]) -> None:
    with contextlib.closing(made("lengthens", options)) as env:
        ones = functools.partial(_with_action, env.action_spec.zero() + torch.tensor([0, 1]))
        for _ in range(2):
            env.rollout(10, functools.partial(_with_action, env.action_spec.zero()))
        with pytest.raises(ArithmeticError, match="third episode"):
            env.step(ones(env.reset()))
        assert env.reset()["observation"].tolist() == [[4, 0]] * NUM_ENVS
        data = env.rollout(20, functools.partial(_with_action, env.action_spec.zero()), break_when_any_done=False)
        assert data["next", "done"].any()


def test_failed_making_leaves_no_worker() -> None:
    before = workers()
    with pytest.raises(TypeError, match="no_such_argument"):
        make_env("CartPole-v1", 2, no_such_argument=1)
    with pytest.raises(RuntimeError):
        make_env("CartPole-v1", 2, device="nowhere")
    assert wait_until(lambda: workers() <= before)
