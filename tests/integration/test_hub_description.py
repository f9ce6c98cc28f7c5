"""A hub describes itself to its clients: what further sessions could have."""

from __future__ import annotations

from contextlib import closing

from envhub_client.connection.connection import connect
from hubs import ServedHub

import envhub
from envhub.protocol.messages import Capacity


def capacity_of(address: str) -> Capacity:
    with closing(connect(address)) as connection:
        capacity = connection.welcome.capacity
    assert capacity is not None
    return capacity


def test_capacity_shrinks_by_a_session_and_grows_again_with_its_end(hub: ServedHub) -> None:
    before = capacity_of(hub.tcp)
    assert before.cpus >= before.cpus_free >= 0
    assert before.envs_free is not None and before.sessions_free is not None
    with closing(envhub.make_vec("CartPole-v1", 3, hub=hub.tcp, num_workers=1)):
        while_used = capacity_of(hub.tcp)
        assert while_used.cpus == before.cpus
        assert while_used.cpus_free == max(0, before.cpus_free - 1)
        assert while_used.envs_free == before.envs_free - 3
        assert while_used.sessions_free == before.sessions_free - 1
        with envhub.connect(hub.tcp) as client:
            assert client.stats()["capacity"] == vars(while_used)
    assert capacity_of(hub.tcp) == before
