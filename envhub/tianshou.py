"""tianshou: ``HubVectorEnv``, a ``BaseVectorEnv`` whose envs live in a hub; ``pip install "envhub-rl[tianshou]"``."""

from envhub_client.frameworks.extras import needs

with needs("tianshou"):
    from envhub_client.frameworks.tianshou import (
        AsyncCollector,
        HubEnvFactory,
        ValidReplayBuffer,
        WholeEpisodeStats,
    )
    from envhub_client.frameworks.tianshou import TianshouVectorEnv as HubVectorEnv

__all__ = ["AsyncCollector", "HubEnvFactory", "HubVectorEnv", "ValidReplayBuffer", "WholeEpisodeStats"]
