"""Stable-Baselines3: a ``VecEnv`` whose envs live in a hub; ``pip install "envhub-rl[sb3]"``."""

from functools import partial

from envhub_client.frameworks import needs, raise_missing

with needs("sb3"):
    from envhub_client.frameworks.sb3 import HubVecEnv, WholeDictReplayBuffer, WholeHerReplayBuffer, WholeReplayBuffer

__all__ = ["HubVecEnv", "WholeDictReplayBuffer", "WholeHerReplayBuffer", "WholeReplayBuffer"]
__getattr__ = partial(raise_missing, __name__)
