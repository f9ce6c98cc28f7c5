"""``envhub serve``: a hub of its own, with its log and its words to the operator."""

from __future__ import annotations

import os
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
from envhub_server.hub_process import run_hub


def check_config(config: HubConfig) -> None:
    """Refuse a configuration that offers too much to too many.

    Raises:
        AddressError: every registered environment would be offered to other machines.
    """
    for bind in config.binds:
        parsed = address.parse(bind)
        if not config.envs and not parsed.is_ipc and not parsed.is_loopback:
            raise AddressError(f"{bind} can be reached from other machines: name the environments to offer there")


def check_packages(config: HubConfig) -> None:
    """Refuse factories of packages that do not exist. The modules in there are looked for by a worker, a little later.

    Raises:
        FactoryNotFound: a factory's package is not to be found.
    """
    registry = Registry(config.envs)
    for factory in registry.factories if config.python == sys.executable else ():
        package = factory.partition(":")[0].partition(".")[0]
        if not _is_importable(package):
            raise registry.not_found(factory, f"No module named {package!r}")


def _is_importable(package: str) -> bool:
    """Whether a worker finds the package, from the working directory on; nothing is imported."""
    return (
        package in sys.modules
        or PathFinder.find_spec(package, [os.getcwd()]) is not None
        or find_spec(package) is not None
    )


def serve(config: HubConfig, ready: Callable[[Hub], None] = lambda hub: None) -> None:
    """Run a hub in this process, in its main thread, until SIGTERM or SIGINT.

    Without addresses it listens where clients look by default. One structured line per change of a session or worker
    goes to stderr.

    Args:
        config: what to serve, and where.
        ready: called once the hub listens; ``hub.addresses`` are the real ones.

    Raises:
        AddressError: an address is malformed, in use, or open to other machines without ``insecure``.
        FactoryNotFound: it was told to offer a factory that does not exist.
    """
    if not config.binds:
        config = HubConfig(**{**config.__dict__, "binds": (address.default_address(),)})
    check_config(config)
    check_packages(config)
    log.configure()
    run_hub(config, ready)
