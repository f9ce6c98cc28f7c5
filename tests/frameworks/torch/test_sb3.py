"""``HubVecEnv`` beside ``SubprocVecEnv``, and what trains with it."""

from __future__ import annotations

import contextlib
import functools
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ale_py
import framework_envs
import gymnasium
import numpy as np
import pytest
import torch
from framework_envs import Dies, Kinds, cartpole
from gymnasium.spaces import Box, Dict, Discrete
from hubs import serve, signalled_in_a_wait, stopped, worker_pids
from same import assert_same
from sb3_contrib import MaskablePPO
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecMonitor

from envhub.sb3 import HubVecEnv, WholeDictReplayBuffer, WholeHerReplayBuffer, WholeReplayBuffer

torch.set_num_threads(1)

NUM_ENVS, STEPS = 4, 400


def breakout() -> gymnasium.Env[Any, Any]:
    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Breakout-v5", render_mode="rgb_array")


Makes = Callable[[type], VecEnv]
PROGRAMS: dict[str, Makes] = {
    "CartPole": lambda kind: make_vec_env("CartPole-v1", NUM_ENVS, seed=3, vec_env_cls=kind),
    "Pendulum": lambda kind: make_vec_env("Pendulum-v1", NUM_ENVS, seed=3, vec_env_cls=kind),
    "dicts": lambda kind: make_vec_env(Kinds, NUM_ENVS, seed=3, vec_env_cls=kind),
    "Atari": lambda kind: make_atari_env(breakout, 2, seed=3, vec_env_cls=kind),
}


def comparable(infos: Any) -> list[dict[str, Any]]:
    """The infos without what is another time in each run."""
    found = []
    for info in infos:
        episode = {key: value for key, value in info["episode"].items() if key != "t"} if "episode" in info else None
        found.append({**info, **({"episode": episode} if episode else {})})
    return found


def history(envs: VecEnv, steps: int) -> Iterator[Any]:
    yield envs.observation_space, envs.action_space, envs.render_mode
    envs.action_space.seed(5)
    envs.set_options([{"level": row} if row else {} for row in range(envs.num_envs)])
    yield envs.reset(), comparable(envs.reset_infos)
    for _ in range(steps):
        actions = np.array([envs.action_space.sample() for _ in range(envs.num_envs)])
        observations, rewards, dones, infos = envs.step(actions)
        yield observations, rewards, dones, comparable(infos), comparable(envs.reset_infos)
    yield envs.reset(), comparable(envs.reset_infos)


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_those_of_subproc_vec_env(program: str) -> None:
    steps = 100 if program == "Atari" else STEPS
    with (
        contextlib.closing(PROGRAMS[program](SubprocVecEnv)) as theirs,
        contextlib.closing(PROGRAMS[program](HubVecEnv)) as ours,
    ):
        for number, (found, wanted) in enumerate(zip(history(ours, steps), history(theirs, steps), strict=True)):
            assert_same(found, wanted, f"{program} {number}")


@pytest.mark.parametrize("alone", [True, False])
def test_texts_are_in_arrays_as_with_subproc_vec_env(alone: bool) -> None:
    found = []
    for env_class in (SubprocVecEnv, HubVecEnv):
        with contextlib.closing(env_class([functools.partial(framework_envs.Speaks, alone)] * 2)) as envs:
            shown = [envs.reset()]
            for _ in range(4):
                *results, infos = envs.step(np.zeros(2, int))
                shown.append((*results, comparable(infos)))
            found.append(shown)
    assert_same(found[1], found[0], "texts")


@pytest.mark.parametrize("kind", [gymnasium.spaces.Dict, gymnasium.spaces.Tuple])
def test_actions_with_parts_are_given_for_each_env(kind: type) -> None:
    shown, parts = [], {"number": Discrete(5), "vector": Box(-1, 1, (2,), np.float64)}
    space = kind(parts if kind is Dict else tuple(parts.values()))
    for env_class in (SubprocVecEnv, HubVecEnv):
        with contextlib.closing(env_class([functools.partial(framework_envs.Composed, space)] * NUM_ENVS)) as envs:
            envs.reset()
            envs.action_space.seed(5)
            actions = [[envs.action_space.sample() for _ in range(NUM_ENVS)] for _ in range(2)]
            shown.append([envs.step(each)[0] for each in actions])  # type: ignore[arg-type]
    assert np.array_equal(*shown) and np.unique(shown).size > NUM_ENVS


ASKED: dict[str, Callable[[VecEnv, Any], Any]] = {
    "value": lambda envs, indices: envs.get_attr("value", indices),
    "property": lambda envs, indices: envs.get_attr("computed", indices),
    "space": lambda envs, indices: envs.get_attr("action_space", indices),
    "set": lambda envs, indices: (envs.set_attr("note", {"a": [1]}, indices), envs.get_attr("note", indices)),
    "method": lambda envs, indices: envs.env_method("method", 5, indices=indices, plus=2),
    "wrapped": lambda envs, indices: envs.env_is_wrapped(Monitor, indices),
    "not wrapped": lambda envs, indices: envs.env_is_wrapped(gymnasium.wrappers.TimeLimit, indices),
    "has": lambda envs, _: [envs.has_attr(name) for name in ("value", "method", "computed", "missing", "lock")],
}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[VecEnv, VecEnv]]:
    with contextlib.ExitStack() as stack:
        made = [make_vec_env(Kinds, NUM_ENVS, seed=1, vec_env_cls=kind) for kind in (HubVecEnv, SubprocVecEnv)]
        for envs in made:
            stack.callback(envs.close)
            envs.reset()
        yield made[0], made[1]


@pytest.mark.parametrize("indices", [None, -1, [3, 0], [1, 1], []], ids=str)
@pytest.mark.parametrize("asked", ASKED)
def test_attributes_and_methods_are_those_of_subproc_vec_env(
    both: tuple[VecEnv, VecEnv], asked: str, indices: Any
) -> None:
    found, wanted = (ASKED[asked](envs, indices) for envs in both)
    assert_same(found, wanted, asked)


def test_method_as_an_attribute_is_called_in_the_hub(both: tuple[VecEnv, VecEnv]) -> None:
    ours, _ = both
    methods = ours.get_attr("method", [2, 0])
    assert [method(2, plus=1) for method in methods] == [7, 7]


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda envs: envs.get_attr("missing"), AttributeError),
        (lambda envs: envs.env_method("missing", indices=[1]), AttributeError),
        (lambda envs: envs.get_attr("raising"), ValueError),
        (lambda envs: envs.env_method("fails"), RuntimeError),
        (lambda envs: envs.env_method("method"), TypeError),
        (lambda envs: envs.get_attr("lock"), Exception),  # which cannot be pickled
        (lambda envs: envs.get_attr("value", 7), IndexError),
    ],
)
def test_what_ends_workers_of_subproc_vec_env_is_an_exception(
    both: tuple[VecEnv, VecEnv], ask: Callable[[VecEnv], Any], error: type[Exception]
) -> None:
    ours, _ = both
    with pytest.raises(error):
        ask(ours)
    assert ours.get_attr("value") == [3] * NUM_ENVS
    ours.step(np.zeros(NUM_ENVS, int))


def test_frames_are_tiled() -> None:
    with contextlib.closing(make_vec_env("CartPole-v1", 4, vec_env_cls=HubVecEnv)) as envs:
        envs.reset()
        assert envs.render_mode == "rgb_array"
        frame = envs.render()
        assert frame is not None and frame.shape == (800, 1200, 3)
    with contextlib.closing(HubVecEnv([Kinds])) as envs, pytest.warns(UserWarning, match="rgb_array"):
        assert envs.get_images() == [None]


@pytest.mark.parametrize("goes_on", ["reset", "step", "get_attr"])
def test_program_goes_on_after_ctrl_c_in_a_step(goes_on: str) -> None:
    before = worker_pids()
    with contextlib.closing(VecMonitor(HubVecEnv([framework_envs.Sleeps] * 2))) as envs:
        envs.reset()
        workers = worker_pids() - before
        # After it, the step still takes its time.
        with stopped(*workers), pytest.raises(KeyboardInterrupt), signalled_in_a_wait(signal.SIGINT):
            envs.step(np.array([1000, 1000]))
        if goes_on == "get_attr":
            assert envs.get_attr("episodes") == [1, 1]
        if goes_on != "step":
            assert envs.reset().tolist() == [[2, 0]] * 2  # type: ignore[union-attr]
        observations, *_ = envs.step(np.array([0, 0]))
        assert observations.shape == (2, 2)  # type: ignore[union-attr]


def test_step_that_nobody_waited_for_is_dropped() -> None:
    with contextlib.closing(HubVecEnv([cartpole] * 2)) as envs:
        envs.reset()
        envs.step_async(np.array([0, 0]))
        first = envs.reset()
        assert np.abs(first).max() < 0.05  # type: ignore[arg-type]
        envs.step_async(np.array([0, 0]))
        envs.step(np.array([1, 1]))
        assert envs.get_attr("_elapsed_steps") == [2, 2]


def test_autoreset_mode_is_not_the_users() -> None:
    with pytest.raises(TypeError, match="autoreset_mode is not to be given: Stable-Baselines3"):
        HubVecEnv("CartPole-v1", 2, autoreset_mode="NextStep")


def returns_of(envs: VecEnv) -> list[tuple[float, int]]:
    with contextlib.closing(envs):
        model = PPO("MlpPolicy", envs, n_steps=64, batch_size=64, n_epochs=2, seed=7, device="cpu")
        found: list[tuple[float, int]] = []

        class Ends:
            def __call__(self, local: dict[str, Any], _: Any) -> bool:
                ended = [info["episode"] for info in local["infos"] if "episode" in info]
                found.extend((float(each["r"]), int(each["l"])) for each in ended)
                return True

        model.learn(2048, callback=Ends())
    return found


def test_training_is_the_same_wherever_the_envs_are(tmp_path: Path) -> None:
    def made(kind: type, **options: Any) -> VecEnv:
        return make_vec_env("CartPole-v1", NUM_ENVS, seed=11, vec_env_cls=kind, vec_env_kwargs=options)

    with serve(tmp_path, "monitored=framework_envs:monitored", cwd=Path(__file__).parent) as hub:
        served = HubVecEnv("monitored", NUM_ENVS, hub=hub.tcp)
        served.seed(11)
        wanted = returns_of(made(DummyVecEnv))
        assert len(wanted) > 20
        assert returns_of(made(HubVecEnv)) == wanted
        assert returns_of(served) == wanted


def test_keywords_of_a_subproc_vec_env_may_stay() -> None:
    options = {"start_method": "fork", "num_workers": 1}
    with contextlib.closing(make_vec_env("CartPole-v1", 2, vec_env_cls=HubVecEnv, vec_env_kwargs=options)) as envs:
        assert envs.reset().shape == (2, 4)
    with pytest.raises(ValueError, match="cannot find context for 'forked'"):
        HubVecEnv("CartPole-v1", 2, start_method="forked")


def test_episode_that_a_crash_cut_short_is_not_counted() -> None:
    ended, cut = 0, 0
    with contextlib.closing(HubVecEnv([dies] * 2, num_workers=2, restarts_max=1000)) as envs:
        envs.reset()
        for _ in range(150):
            observations, rewards, dones, infos = envs.step(np.array([0, 1]))
            assert np.isfinite(observations).all()  # type: ignore[arg-type]
            for row, info in enumerate(infos):
                assert (
                    dones[row] == ("terminal_observation" in info) == (("episode" in info) or ("env_failure" in info))
                )
                ended += "episode" in info
                if "env_failure" in info:
                    cut += 1
                    assert info["TimeLimit.truncated"] and rewards[row] == 0
                    assert info["env_failure"].signal == "SIGKILL"
                    assert np.abs(observations[row]).max() < 0.05  # type: ignore[call-overload]  # it was reset
    assert ended > 5 and cut > 2


def test_step_that_cut_an_episode_short_is_in_no_buffer() -> None:
    with contextlib.closing(HubVecEnv([Dies] * 4, num_workers=2, restarts_max=1000)) as envs:
        settings: dict[str, Any] = {"replay_buffer_class": WholeReplayBuffer, "buffer_size": 4000, "seed": 1}
        model = DQN("MlpPolicy", envs, **settings, learning_starts=10**6)  # it acts at random
        seen = Seen()
        model.learn(600, callback=seen)
    assert seen.cut > 3
    buffer: Any = model.replay_buffer
    size, stored = buffer.pos, slice(buffer.pos)  # without the steps in which all were cut short
    assert 100 < size <= model.num_timesteps // 4
    assert (buffer.observations[stored] != buffer.next_observations[stored]).any(-1).all()
    assert (buffer.rewards[stored] == 1).all() and not buffer.timeouts[stored].any()


class Seen(BaseCallback):
    """How many episodes were cut short."""

    cut = 0

    def _on_step(self) -> bool:
        self.cut += sum("invalid_transition" in info for info in self.locals["infos"])
        return True


def test_buffer_of_dicts_has_no_step_that_cut_an_episode_short() -> None:
    space = gymnasium.spaces.Dict({"at": gymnasium.spaces.Box(0, 9, (1,))})
    buffer = WholeDictReplayBuffer(100, space, gymnasium.spaces.Discrete(2), n_envs=3)
    for cut in ([], [1], [0, 1, 2], [0, 2]):
        at = {"at": np.arange(3.0).reshape(3, 1)}
        infos = [{"invalid_transition": True} if row in cut else {} for row in range(3)]
        buffer.add(at, at, np.zeros((3, 1), int), np.arange(3.0), np.zeros(3, bool), infos)
    assert buffer.pos == 3
    assert buffer.observations["at"][:3, :, 0].tolist() == [[0, 1, 2], [0, 0, 2], [1, 1, 1]]
    sparing = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    with pytest.raises(ValueError, match="takes no optimize_memory_usage"):
        WholeReplayBuffer(100, space["at"], gymnasium.spaces.Discrete(2), **sparing)
    assert buffer.rewards[:3].tolist() == [[0, 1, 2], [0, 0, 2], [1, 1, 1]]


class Goal(gymnasium.Env[Any, Any]):
    """Counts to 9, of which it knows how near it is; its rewards are never 0."""

    observation_space = Dict({key: Box(0, 9, (1,)) for key in ("observation", "achieved_goal", "desired_goal")})
    action_space = Discrete(2)

    def _observed(self) -> dict[str, Any]:
        at = np.array([self.at], np.float32)
        return {"observation": at, "achieved_goal": at, "desired_goal": np.array([9], np.float32)}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, _: Any) -> np.ndarray:
        return -1 - np.abs(achieved - desired).sum(-1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self._observed(), -1.0, self.at == 9, False, {}


def goals_that_die() -> gymnasium.Env[Any, Any]:
    return Monitor(Dies(Goal()))


def test_hindsight_draws_no_step_that_cut_an_episode_short() -> None:
    with contextlib.closing(HubVecEnv([goals_that_die] * 3, num_workers=3, restarts_max=1000)) as envs:
        settings: dict[str, Any] = {"replay_buffer_class": WholeHerReplayBuffer, "buffer_size": 150}
        model = DQN("MultiInputPolicy", envs, **settings, learning_starts=60, seed=1)
        model.learn(300)  # twice as many as the buffer has
        buffer: Any = model.replay_buffer
        drawn = buffer.sample(2000)
    assert (buffer.rewards == 0).sum() > 3
    assert (drawn.next_observations["observation"] == drawn.observations["observation"] + 1).all()
    assert (drawn.rewards < 0).all()


def dies() -> gymnasium.Env[Any, Any]:
    return Monitor(Dies(cartpole()))


def test_masks_and_evaluation_find_the_envs() -> None:
    with contextlib.closing(make_vec_env(Kinds, 2, vec_env_cls=HubVecEnv)) as envs:
        MaskablePPO("MultiInputPolicy", envs, n_steps=32, batch_size=32, device="cpu").learn(64)
        assert envs.has_attr("action_masks")
    with contextlib.closing(make_vec_env("CartPole-v1", 2, vec_env_cls=HubVecEnv)) as envs:
        assert envs.env_is_wrapped(Monitor) == [True, True]
        model = PPO("MlpPolicy", envs, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that the envs are not wrapped with a Monitor
            mean, _ = evaluate_policy(model, envs, n_eval_episodes=4)
        assert mean > 0


def test_workers_do_not_import_torch() -> None:
    before = worker_pids()
    with contextlib.closing(make_vec_env("CartPole-v1", 4, vec_env_cls=HubVecEnv)) as envs:
        envs.reset()
        own = worker_pids() - before
        assert own
        assert not [pid for pid in own if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
