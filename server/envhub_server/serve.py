"""``envhub serve``: runs a hub in this process, and checks its configuration first."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec

from envhub.errors import AddressError
from envhub.transport import address
from envhub_server import log
from envhub_server.catalog.registry import Registry
from envhub_server.config import HubConfig
from envhub_server.hub.hub import Hub


def check_config(config: HubConfig) -> None:
    """Refuse a configuration that offers every environment to other machines.

    Raises:
        AddressError: every registered environment would be offered to other machines.
    """
    for bind in config.binds:
        parsed = address.parse(bind)
        if not config.envs and not parsed.is_ipc and not parsed.is_loopback:
            raise AddressError(f"{bind} can be reached from other machines: name the environments to offer there")


def check_packages(config: HubConfig) -> None:
    """Refuse factories of packages that do not exist. A worker checks the modules in these packages later.

    Raises:
        FactoryNotFound: a factory's package does not exist.
    """
    registry = Registry(config.envs)
    for factory in registry.factories if config.python == sys.executable else ():
        package = factory.partition(":")[0].partition(".")[0]
        # A worker also imports from the working directory. Nothing is imported here.
        if package not in sys.modules and not PathFinder.find_spec(package, [os.getcwd()]) and not find_spec(package):
            raise registry.not_found(factory, f"No module named {package!r}")


def serve(config: HubConfig, ready: Callable[[Hub], None] = lambda hub: None) -> None:
    """Run a hub in this process, in its main thread, until SIGTERM or SIGINT.

    Without addresses it listens on the default address of clients. It logs one line per change of a session or worker
    to stderr.

    Args:
        config: the environments and addresses, among others.
        ready: called once the hub listens; ``hub.addresses`` are the real ones.

    Raises:
        AddressError: an address is malformed, in use, or open to other machines without ``insecure``.
        FactoryNotFound: ``config.envs`` has a factory that does not exist.
    """
    if not config.binds:
        config = HubConfig(**{**config.__dict__, "binds": (address.default_address(),)})
    check_config(config)
    check_packages(config)
    log.configure()
    run_hub(config, ready)


def run_hub(config: HubConfig, ready: Callable[[Hub], None]) -> None:
    """Open a hub, call ``ready``, serve until the hub is stopped, and leave nothing behind; raises as ``serve``."""
    _open_standard_streams()
    # As many descriptors as the system allows: libzmq ends the process when it cannot accept a connection.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hub = Hub(config)
    with hub.opened():
        ready(hub)
        hub.run()


def _open_standard_streams() -> None:
    """Open closed standard streams: else a socket would get the number of one, and prints would go into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
