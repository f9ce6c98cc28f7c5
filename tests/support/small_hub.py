"""A hub that has 4 MiB of shared memory to give: ``python small_hub.py ADDRESS``."""

from __future__ import annotations

import sys

from envhub_server.config import HubConfig
from envhub_server.serve import serve

if __name__ == "__main__":
    envs = "wide=odd_sims:Wide", "shows=large_sims:shows"
    config = HubConfig(bind=(sys.argv[1],), envs=envs, arena_bytes_max=4 << 20)
    serve(config, lambda hub, page: None, lambda hub: None, lambda: config)
