"""PettingZoo: a ``ParallelEnv`` over a hub; ``pip install "envhub-rl[pettingzoo]"``."""

from functools import partial

from envhub_client.frameworks import needs, raise_missing

with needs("pettingzoo"):
    from envhub_client.frameworks.pettingzoo import HubParallelEnv, make

__all__ = ["HubParallelEnv", "make"]
__getattr__ = partial(raise_missing, __name__)
