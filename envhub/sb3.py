"""Stable-Baselines3: a ``VecEnv`` whose envs live in a hub; ``pip install "envhub-rl[sb3]"``."""

from envhub_client.frameworks.extras import needs

with needs("sb3"):
    from envhub_client.frameworks.sb3 import (
        HubVecEnv,
        ValidDictReplayBuffer,
        ValidReplayBuffer,
        WholeEpisodeMonitor,
    )

__all__ = ["HubVecEnv", "ValidDictReplayBuffer", "ValidReplayBuffer", "WholeEpisodeMonitor"]
