"""Reports of a hub about itself and its sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from envhub.protocol.hub import HubProtocol
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.network import descriptor_guard
from envhub_server.network.access import Access

SESSION_NAME_BYTES = 4  # of its token, by which an administrator may call it


def stats(sessions: Collection[SessionRuntime], protocol: HubProtocol, access: Access, requests: int) -> dict[str, Any]:
    """The counters of a hub that has taken so many requests."""
    return {
        "envs": sum(each.state.make.num_envs for each in sessions),
        "workers": sum(len(each.pids) for each in sessions),
        "restarts": sum(each.state.restarts for each in sessions),
        "lanes": dict(Counter(each.state.ownership.lane.value for each in sessions)),
        "arena_bytes": sum(each.arena_bytes for each in sessions),
        "requests": requests,
        "replayed": protocol.replayed,
        "refused": protocol.refused,
        "malformed": protocol.malformed,
        "failures": dict(protocol.failures),
        "connections": len(access.connections),
        "connections_ended": access.connections_ended,
        "handshakes_refused": access.handshakes_refused,
        "handshakes_unfinished": access.handshakes_unfinished,
        "descriptors": descriptor_guard.in_use(),
    }


def described(runtime: SessionRuntime, leased: bool) -> dict[str, Any]:
    """One session."""
    return {
        "session": runtime.token[
            :SESSION_NAME_BYTES
        ].hex(),  # enough to tell sessions apart; the whole token is a key to it
        "env": runtime.state.make.name or "factories",
        "num_envs": runtime.state.make.num_envs,
        "workers": runtime.pids,
        "sizing": "" if runtime.state.sizing.count is None else runtime.state.sizing.count.reason,
        "restarts": runtime.state.restarts,
        "recycled": runtime.state.recycled,
        "phase": runtime.state.phase.value,
        "lane": runtime.state.ownership.lane.value,
        "leased": leased,
    }
