"""The private hub: the process that ``hub=None`` starts, which belongs to one program and ends with it.

Started by ``envhub_client.private_hub`` as ``ADDRESS OWNER_PIDFD READY_FD``; it writes one byte to the last once it
listens.
"""

from __future__ import annotations

import logging
import os
import sys

import structlog

from envhub_server.config import HubConfig
from envhub_server.hub import Hub, run_hub


def main(address: str, owner: int, ready_fd: int) -> None:
    """Serve the program behind the pidfd ``owner`` on this address until it ends."""
    # Its program has a terminal of its own to write on; only trouble is worth a line there.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )

    def ready(hub: Hub) -> None:
        os.write(ready_fd, b"1")
        os.close(ready_fd)

    run_hub(HubConfig(binds=(address,), owner=owner), ready)
