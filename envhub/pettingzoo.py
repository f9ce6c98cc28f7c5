"""PettingZoo: a ``ParallelEnv`` over a hub, and a batched one; ``pip install "envhub-rl[pettingzoo]"``."""

from envhub_client.frameworks.extras import needs

with needs("pettingzoo"):
    from envhub_client.frameworks.pettingzoo import HubParallelEnv, HubParallelVectorEnv, make, make_vec

__all__ = ["HubParallelEnv", "HubParallelVectorEnv", "make", "make_vec"]
