"""tianshou: ``HubVectorEnv``, a ``BaseVectorEnv`` whose envs live in a hub; ``pip install "envhub-rl[tianshou]"``."""

from envhub_client.frameworks.extras import needs

with needs("tianshou"):
    from envhub_client.frameworks.tianshou import TianshouVectorEnv as HubVectorEnv
    from envhub_client.frameworks.tianshou_factory import HubEnvFactory
    from envhub_client.frameworks.tianshou_whole_episodes import AsyncCollector, ValidReplayBuffer, WholeEpisodeStats

__all__ = ["AsyncCollector", "HubEnvFactory", "HubVectorEnv", "ValidReplayBuffer", "WholeEpisodeStats"]
