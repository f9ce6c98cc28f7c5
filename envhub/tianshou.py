"""tianshou: ``HubVectorEnv``, a ``BaseVectorEnv`` whose envs live in a hub; ``pip install "envhub-rl[tianshou]"``."""

from functools import partial

from envhub_client.frameworks import needs, raise_missing

with needs("tianshou"):
    from envhub_client.frameworks.tianshou import TianshouVectorEnv as HubVectorEnv
    from envhub_client.frameworks.tianshou import ValidReplayBuffer

__all__ = ["HubVectorEnv", "ValidReplayBuffer"]
__getattr__ = partial(raise_missing, __name__)
