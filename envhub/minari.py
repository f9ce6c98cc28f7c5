"""Minari: ``record`` and its ``Recorder``; needs ``pip install "envhub-rl[minari]"``."""

from envhub_client.frameworks.extras import needs

with needs("minari"):
    from envhub_client.frameworks.minari import Recorder, record

__all__ = ["Recorder", "record"]
