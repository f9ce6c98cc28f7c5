"""Stable-Baselines3: ``HubVecEnv``, a ``VecEnv`` whose envs live in a hub; ``pip install "envhub-rl[sb3]"``."""

from envhub_client.frameworks.extras import needs

with needs("sb3"):
    from envhub_client.frameworks.sb3 import HubVecEnv

__all__ = ["HubVecEnv"]
