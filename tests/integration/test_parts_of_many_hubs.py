"""``send`` and ``recv`` over several hubs: no hub waits for another, and each result comes exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
from chaos.chaos_proxy import proxy
from chaos.interrupts import Interrupt
from envhub_client.federation import lane
from fleets import addresses, served_hubs
from hubs import ServedHub, stopped, wait_until
from partial_batches import received

import envhub

NUM_ENVS, SPLIT = 4, [2, 2]
CYCLES = 100


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    with served_hubs(tmp_path_factory, 2, ["naughty=sims:Naughty"]) as hubs:
        yield hubs


def made(hubs: list[str]) -> envhub.HubVectorEnv:
    return envhub.make_vec("naughty", NUM_ENVS, hub=hubs, split=SPLIT, num_workers=NUM_ENVS)


def token_of(envs: envhub.HubVectorEnv, env: int) -> str:
    """The token of the session that has this env."""
    token: bytes = envs._session.lane.parts[env // SPLIT[0]].connection.protocol.token
    return token.hex()


def test_second_hub_begins_before_the_first_one_has_answered(two: list[ServedHub]) -> None:
    with proxy(two[0].tcp) as first, closing(made([first.address, two[1].tcp])) as envs:
        envs.reset()
        first.hold()
        envs.send([7, 9, 10, 11])
        with envhub.connect(two[1].tcp) as client, client.attach(token_of(envs, 2), observe=True) as observer:
            assert wait_until(lambda: observer.observe().steps.tolist() == [2, 2])
        first.hold(False)
        assert received(envs) == {0: 7, 1: 9, 2: 10, 3: 11}


@pytest.mark.parametrize("lanes", ["wire", "shared"])
def test_rows_of_other_hubs_cycle_while_those_of_one_sleep(
    two: list[ServedHub], lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    park = lane._park
    with closing(made(addresses(two, lanes, 2))) as envs:
        envs.reset()

        def park_if_asked(descriptors: Sequence[int], seconds: float) -> None:
            for part in envs._session.lane._outstanding_parts():
                assert lanes == "shared" or part.connection.protocol.receives, "a wait for a hub that was not asked"
            park(descriptors, seconds)

        monkeypatch.setattr(lane, "_park", park_if_asked)
        with stopped(*envs.call("pid")[:2]):
            envs.send([7, 9, 0, 0])
            for cycle in range(CYCLES):
                _, rewards, *_, env_ids = envs.recv(2, timeout=20)
                assert env_ids.tolist() == [2, 3]
                assert cycle == 0 or rewards.tolist() == [10, 11]
                envs.send([10, 11], [2, 3])
        assert received(envs) == {0: 7, 1: 9, 2: 10, 3: 11}
        assert envs.get_attr("count") == (1, 1, CYCLES + 1, CYCLES + 1)


@pytest.mark.parametrize(
    "stride", [211, pytest.param(17, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.chaos)]
)
@pytest.mark.parametrize("lanes", ["wire", "shared"])
def test_interrupted_send_is_done_by_all_hubs_or_by_none(two: list[ServedHub], lanes: str, stride: int) -> None:
    with closing(made(addresses(two, lanes, 2))) as envs:
        envs.reset()
        pid, counts = envs.call("pid")[0], np.zeros(NUM_ENVS, int)
        for turn in range(1, 1000):
            interrupt = Interrupt(turn * stride)
            with stopped(pid):
                envs.send([7], [0])
                with pytest.raises(envhub.HubTimeout):
                    envs.recv(timeout=0.01)
                interrupt.during(lambda: envs.send([9, 10, 11], [1, 2, 3]))
            rewards = received(envs)
            assert rewards in ({0: 7, 1: 9, 2: 10, 3: 11}, {0: 7}), rewards
            counts[[*rewards]] += 1
            assert envs.get_attr("count") == tuple(counts)
            if not interrupt.raised:
                break
        assert not interrupt.raised and turn * stride > 100
