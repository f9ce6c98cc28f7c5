"""Stable-Baselines3: a ``VecEnv`` whose envs live in a hub; ``pip install "envhub-rl[sb3]"``."""

from envhub_client.frameworks import needs

with needs("sb3"):
    from envhub_client.frameworks.sb3 import HubVecEnv, WholeDictReplayBuffer, WholeHerReplayBuffer, WholeReplayBuffer

__all__ = ["HubVecEnv", "WholeDictReplayBuffer", "WholeHerReplayBuffer", "WholeReplayBuffer"]
