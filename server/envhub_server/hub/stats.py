"""What a hub tells of itself and of its sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from envhub.protocol.hub import HubProtocol
from envhub_server.hub.runtime import SessionRuntime


def health(hub: int, draining: bool, up_s: float, sessions: int, lag_s: float) -> dict[str, Any]:
    """Whether a hub serves."""
    return {
        "status": "draining" if draining else "ok",
        "hub": f"{hub:016x}",
        "uptime_s": up_s,
        "sessions": sessions,
        "loop_lag_s": lag_s,
    }


def stats(hosts: Collection[SessionRuntime], protocol: HubProtocol, requests: int) -> dict[str, Any]:
    """The counters of a hub that has taken so many requests."""
    return {
        "envs": sum(host.session.make.num_envs for host in hosts),
        "workers": sum(len(host.pids) for host in hosts),
        "restarts": sum(host.session.restarts for host in hosts),
        "lanes": dict(Counter(host.lane for host in hosts)),
        "arena_bytes": sum(host.arena_bytes for host in hosts),
        "requests": requests,
        "replayed": protocol.replayed,
        "refused": protocol.refused,
        "malformed": protocol.malformed,
    }


def described(host: SessionRuntime, leased: bool) -> dict[str, Any]:
    """One session."""
    return {
        "session": host.token.hex()[:8],  # enough to tell sessions apart; the whole token is a key to it
        "env": host.session.make.name or "factories",
        "num_envs": host.session.make.num_envs,
        "workers": host.pids,
        "sizing": "" if host.session.sizing is None else host.session.sizing.reason,
        "restarts": host.session.restarts,
        "phase": host.session.phase.value,
        "lane": host.lane,
        "leased": leased,
    }
