"""PettingZoo: a ``ParallelEnv`` over a hub; ``pip install "envhub-rl[pettingzoo]"``."""

from typing import TYPE_CHECKING

from envhub_client.frameworks.extras import needs

with needs("pettingzoo"):
    from envhub_client.frameworks.pettingzoo import HubParallelEnv, make

if not TYPE_CHECKING:

    def __getattr__(name: str) -> None:
        from envhub_client.envs.vector_env import NOT_BATCHED

        raise AttributeError(NOT_BATCHED if name == "make_vec" else f"module {__name__!r} has no attribute {name!r}")


__all__ = ["HubParallelEnv", "make"]
