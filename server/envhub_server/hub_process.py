"""The process that a hub runs in: its standard streams, its limits, and the hub from its start to its end."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

from envhub_server.config import HubConfig
from envhub_server.hub.hub import Hub


def fill_standard_streams() -> None:
    """Open what is closed of the standard streams, or else sockets would take their numbers, and prints go there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the system does: libzmq ends the process that cannot accept a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_hub(config: HubConfig, ready: Callable[[Hub], None]) -> None:
    """Open a hub, tell ``ready``, serve until it is told to stop, and leave nothing behind.

    Raises:
        AddressError: an address cannot be bound.
        FactoryNotFound: it was told to offer a factory that does not exist.
    """
    fill_standard_streams()
    raise_descriptor_limit()
    hub = Hub(config)
    with hub.opened():
        ready(hub)
        hub.run()
