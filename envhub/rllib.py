"""RLlib: ``register``, env creators, ``CutEpisodes``, ``FleetEnvRunner``; needs ``pip install "envhub-rl[rllib]"``."""

from envhub_client.frameworks import needs

with needs("rllib"):
    from envhub_client.frameworks.rllib import (
        CutEpisodes,
        FleetEnvRunner,
        env_creator,
        multi_agent_env_creator,
        register,
    )

__all__ = ["CutEpisodes", "FleetEnvRunner", "env_creator", "multi_agent_env_creator", "register"]
