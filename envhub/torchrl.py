"""TorchRL: ``make_env``, an env of TorchRL whose envs live in a hub; ``pip install "envhub-rl[torchrl]"``."""

from envhub_client.frameworks import needs

with needs("torchrl"):
    from envhub_client.frameworks.torchrl import HubTorchEnv, make_env

__all__ = ["HubTorchEnv", "make_env"]
