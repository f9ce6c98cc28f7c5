"""tianshou: ``HubVectorEnv``, a ``BaseVectorEnv`` whose envs live in a hub; ``pip install "envhub-rl[tianshou]"``."""

from envhub_client.frameworks import needs

with needs("tianshou"):
    from envhub_client.frameworks.tianshou import TianshouVectorEnv as HubVectorEnv
    from envhub_client.frameworks.tianshou import ValidReplayBuffer

__all__ = ["HubVectorEnv", "ValidReplayBuffer"]
