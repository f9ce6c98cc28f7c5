"""PettingZoo: a ``ParallelEnv`` over a hub; ``pip install "envhub-rl[pettingzoo]"``."""

from envhub_client.frameworks import needs

with needs("pettingzoo"):
    from envhub_client.frameworks.pettingzoo import HubParallelEnv, make

__all__ = ["HubParallelEnv", "make"]
