"""Usage of a hub by each client: what counts towards its quotas, and for how long."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from envhub_server.hub.directory import MINUTE_S, ClientUsage
from envhub_server.hub.planner import Usage
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.network.connections import OWN_USER, Holder, Quotas
from sessions import ready

from envhub.protocol.messages import Hosting

ALICE = Holder("alice", quotas=Quotas(makes_per_minute_max=2, arena_bytes_max=100))
BOB = replace(ALICE, name="bob")


@pytest.fixture
def usage() -> ClientUsage:
    """The usage of a hub on which alice has two sessions, one of them with a spare, and bob has one."""
    owned = [("alice", ready(3, 2, hosting=Hosting(spares=1))), ("bob", ready(4, 4)), ("alice", ready(1, 1))]
    directory: Any = SimpleNamespace(sessions=[SimpleNamespace(owner=owner, state=state) for owner, state in owned])
    return ClientUsage(ArenaBudget(1000), directory)


def test_sessions_of_all_count_for_the_hub_and_the_own_ones_with_their_spares_for_a_client(usage: ClientUsage) -> None:
    of_hub = Usage(hub_sessions=3, hub_envs=8, busy_workers=7)
    assert usage.of(OWN_USER) == of_hub
    assert usage.of(ALICE) == replace(of_hub, sessions=2, envs=4, processes=4)
    assert usage.of(BOB) == replace(of_hub, sessions=1, envs=4, processes=4)


def test_makes_of_a_minute_count_and_no_earlier_ones(usage: ClientUsage) -> None:
    assert [usage.count_make(ALICE, at_s) for at_s in (0.0, 1.0)] == ["", ""]
    why = "alice has 2 and wants 1 more, of makes_per_minute_max=2 of its key"
    assert usage.count_make(ALICE, MINUTE_S - 0.1) == why and usage.count_make(BOB, MINUTE_S - 0.1) == ""
    assert usage.count_make(ALICE, MINUTE_S) == ""  # one that was refused does not count
    assert usage.count_make(ALICE, MINUTE_S) == why
    assert usage.count_make(replace(ALICE, quotas=Quotas(makes_per_minute_max=3)), MINUTE_S) == ""
    assert not any(usage.count_make(OWN_USER, 0.0) for _ in range(100))


def test_memory_is_used_by_clients_apart_within_that_of_all_by_the_limit_of_the_moment(usage: ClientUsage) -> None:
    usage.budget(ALICE).use(60)
    assert (usage.budget(ALICE).left, usage.budget(BOB).left, usage.budget(OWN_USER).left) == (40, 100, 940)
    assert usage.budget(replace(ALICE, quotas=Quotas(arena_bytes_max=70))).left == 10
    usage.budget(OWN_USER).use(930)
    assert usage.budget(BOB).left == 10
