"""Settings of the hubs of a fleet, which are the same for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HubSettings:
    """Settings of each hub of a fleet; none of them is secret, for Ray keeps them.

    Attributes:
        envs: what it offers, as ``envhub serve`` takes it.
        config: text of a configuration file of ``envhub serve``; empty for none.
        cpus: number of CPUs that Ray reserves for it.
        runtime_env: of Ray, for its processes.
        resources: further resources that Ray reserves for it.
    """

    envs: tuple[str, ...] = ()
    config: str = ""
    cpus: float = 1.0
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


def read_config(envs: tuple[str, ...], path: str) -> str:
    """Return the text of a configuration file for hubs that offer these envs; empty for no file.

    Raises:
        ValueError: it cannot be used, or sets what the fleet sets.
    """
    from envhub_server.serve import config_of

    config = config_of(envs, None, Path(path) if path else None)
    if config.bind or config.keys is not None:
        raise ValueError(f"{path}: the hubs of a fleet have addresses and keys of their own; leave out bind and keys")
    return Path(path).read_text() if path else ""
