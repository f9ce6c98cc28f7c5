"""Functions that make an env of a package, as its own documentation does; see server/docs/simulators.md."""

from __future__ import annotations

import random
import string
import tempfile
import warnings
from typing import Any

import numpy as np

warnings.filterwarnings("ignore", category=DeprecationWarning)


def seed_globally(seed: int | None) -> None:
    """Seed the global random numbers of Python and of NumPy, which some packages draw from."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)


def seeded_globally(env: Any) -> Any:
    """An env of Gymnasium whose resets seed the global random numbers."""
    import gymnasium

    class Seeded(gymnasium.Wrapper):  # type: ignore[misc,type-arg]
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seed_globally(seed)
            return self.env.reset(seed=seed, options=options)

    return Seeded(env)


# --- gym --------------------------------------------------------------------------------------------------------------


def minigrid_of_gym() -> Any:
    import gym
    import gym_minigrid  # noqa: F401

    return gym.make("MiniGrid-DoorKey-5x5-v0")


def crafter_env() -> Any:
    import crafter

    return crafter.Env(seed=3)


def mario_of_gym() -> Any:
    import gym_super_mario_bros
    from gym_super_mario_bros.actions import SIMPLE_MOVEMENT
    from nes_py.wrappers import JoypadSpace

    return JoypadSpace(gym_super_mario_bros.make("SuperMarioBros-v3", apply_api_compatibility=True), SIMPLE_MOVEMENT)


def coinrun_of_gym() -> Any:
    import gym

    return gym.make("procgen:procgen-coinrun-v0", start_level=0, num_levels=1, rand_seed=3)


def or_gym_knapsack() -> Any:
    import or_gym

    seed_globally(3)  # its items are of the global random numbers
    env = or_gym.make("Knapsack-v0")
    env.unwrapped.seed = env.unwrapped.set_seed
    return env


class SeededSokoban:
    """Sokoban, whose rooms are of the global random numbers, which its own ``seed`` does not seed."""

    def __init__(self) -> None:
        import gym
        import gym_sokoban  # noqa: F401

        self.env = gym.make("Sokoban-small-v0").unwrapped
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def seed(self, seed: int | None = None) -> None:
        seed_globally(seed)

    def reset(self) -> Any:
        return self.env.reset()

    def step(self, action: Any) -> Any:
        return self.env.step(action)


def sokoban_of_gym() -> Any:
    return SeededSokoban()


class SwitchOfAgents:
    """An env of ma-gym, whose lists of observations and of actions are arrays here, and whose end is that of all."""

    def __init__(self) -> None:
        import gym
        import ma_gym  # noqa: F401

        self.env = gym.make("Switch2-v0").unwrapped
        low, high = (np.stack([getattr(each, end) for each in self.env.observation_space]) for end in ("low", "high"))
        self.observation_space = gym.spaces.Box(low, high, dtype=low.dtype)
        self.action_space = gym.spaces.MultiDiscrete([each.n for each in self.env.action_space])

    def seed(self, seed: int | None = None) -> Any:
        return self.env.seed(seed)

    def reset(self) -> Any:
        return np.array(self.env.reset(), self.observation_space.dtype)

    def step(self, action: Any) -> Any:
        observations, rewards, ended, info = self.env.step(action)
        return np.array(observations, self.observation_space.dtype), np.array(rewards), all(ended), info


def switch_of_gym() -> Any:
    return SwitchOfAgents()


def slime_of_gym() -> Any:
    import gym
    import slimevolleygym  # noqa: F401

    return gym.make("SlimeVolley-v0")


# --- Gymnasium, by functions ------------------------------------------------------------------------------------------


def metaworld_reach() -> Any:
    import gymnasium
    import metaworld  # noqa: F401

    return gymnasium.make("Meta-World/MT1", env_name="reach-v3", seed=3)


def retro_airstriker() -> Any:
    import stable_retro

    return stable_retro.make("Airstriker-Genesis-v0")


def sumo_crossing() -> Any:
    import os
    from pathlib import Path

    os.environ["LIBSUMO_AS_TRACI"] = "1"
    import sumo
    import sumo_rl

    os.environ.setdefault("SUMO_HOME", sumo.SUMO_HOME)
    nets = Path(sumo_rl.__file__).parent / "nets/2way-single-intersection"
    files = {"net_file": str(nets / "single-intersection.net.xml")}
    files["route_file"] = str(nets / "single-intersection-gen.rou.xml")
    return sumo_rl.SumoEnvironment(**files, use_gui=False, num_seconds=1000, single_agent=True)


class TextGame:
    """A game of TextWorld, whose envs have no spaces: an action is the number of a command."""

    COMMANDS = ("look", "inventory", "go north", "go south", "go east", "go west", "open chest", "take key")

    def __init__(self) -> None:
        import gymnasium
        import textworld
        import textworld.gym

        options = textworld.GameOptions()
        options.path = tempfile.mkdtemp(prefix="textworld-")
        options.seeds = 3
        file, _ = textworld.make(options)
        self.env = textworld.gym.make(textworld.gym.register_game(file, max_episode_steps=20))
        self.observation_space = gymnasium.spaces.Text(8192, charset=string.printable)
        self.action_space = gymnasium.spaces.Discrete(len(self.COMMANDS))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return self.env.reset()

    def step(self, action: Any) -> Any:
        observation, score, ended, info = self.env.step(self.COMMANDS[action])
        return observation, score, ended, False, info

    def close(self) -> None:
        self.env.close()


def textworld_game() -> Any:
    return TextGame()


def nethack(name: str) -> Any:
    """An env of NetHack, whose random numbers are not those that a reset seeds."""
    import gymnasium

    class Seeded(gymnasium.Wrapper):  # type: ignore[misc,type-arg]
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed is not None:
                self.numbers = random.Random(seed)
            core, display = (self.numbers.randrange(1 << 31) for _ in range(2))
            self.unwrapped.seed(core=core, disp=display, reseed=False)
            return self.env.reset(seed=seed, options=options)

    return Seeded(gymnasium.make(name))


def nle_score() -> Any:
    return nethack("nle:NetHackScore-v0")


def minihack_room() -> Any:
    return nethack("minihack:MiniHack-Room-5x5-v0")


def bluesky_descent() -> Any:
    import bluesky_gym
    import gymnasium

    bluesky_gym.register_envs()
    return seeded_globally(gymnasium.make("DescentEnv-v0"))


def pogema_env() -> Any:
    from pogema import GridConfig, pogema_v0

    return pogema_v0(GridConfig(integration="gymnasium", num_agents=1, size=8, seed=3, map="\n".join(["." * 8] * 8)))


def popgym_recall() -> Any:
    from popgym.envs.repeat_previous import RepeatPreviousEasy

    return RepeatPreviousEasy()


def trading_env() -> Any:
    import gym_trading_env  # noqa: F401
    import gymnasium
    import pandas as pd

    times = pd.date_range("2020-01-01", periods=200, freq="h")
    prices = pd.DataFrame({"close": np.linspace(1, 2, 200), "feature_close": np.linspace(0, 1, 200)}, index=times)
    prices = prices.assign(open=prices.close, high=prices.close, low=prices.close, volume=1.0)
    return seeded_globally(gymnasium.make("TradingEnv", df=prices, positions=[-1, 0, 1], verbose=0))


def robosuite_lift() -> Any:
    import robosuite
    from robosuite.wrappers import GymWrapper

    options = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False}
    env = robosuite.make("Lift", robots="Panda", seed=3, **options)
    return GymWrapper(env)


def nasim_tiny() -> Any:
    import gymnasium
    import nasim

    env = nasim.make_benchmark("tiny", seed=3)
    return seeded_globally(gymnasium.wrappers.TransformAction(env, int, env.action_space))


def minatar_breakout() -> Any:
    from minatar.gym import BaseEnv

    return BaseEnv(game="breakout")


# --- dm_env, PettingZoo -----------------------------------------------------------------------------------------------


def cartpole_swingup() -> Any:
    from dm_control import suite

    return suite.load("cartpole", "swingup")


def bsuite_catch() -> Any:
    from bsuite.environments.catch import Catch

    return Catch(seed=3)


def jumanji_snake() -> Any:
    import jumanji
    from jumanji.wrappers import JumanjiToDMEnvWrapper

    return JumanjiToDMEnvWrapper(jumanji.make("Snake-v1"))


class ConnectX:
    """The game of kaggle-environments, against a player that takes the first column that is not full."""

    def __init__(self) -> None:
        import gymnasium
        import kaggle_environments

        self.env = kaggle_environments.make("connectx").train([None, self.first_column])
        self.observation_space = gymnasium.spaces.Box(0, 2, (42,), np.int8)
        self.action_space = gymnasium.spaces.Discrete(7)

    @staticmethod
    def first_column(observation: Any, configuration: Any) -> int:
        return next(column for column in range(configuration.columns) if not observation.board[column])

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return np.array(self.env.reset().board, np.int8), {}

    def step(self, action: Any) -> Any:
        observation, reward, ended, info = self.env.step(int(action))
        return np.array(observation.board, np.int8), float(reward or 0), ended, False, info


def kaggle_connectx() -> Any:
    return ConnectX()


# --- vector envs ------------------------------------------------------------------------------------------------------


def envpool_cartpole(num_envs: int, seed: Any = 0) -> Any:
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=seed)
