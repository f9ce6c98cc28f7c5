"""Vector envs that have all of their envs on one hub of several, by ``hub_index``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from fleets import served_hubs
from hubs import ServedHub, free_port

import envhub
from envhub.errors import HubUnreachable

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    with served_hubs(tmp_path_factory, 3, ["CartPole-v1"], "--cpus", "4") as hubs:
        yield hubs


def made(hubs: list[str], index: int, **options: Any) -> envhub.HubVectorEnv:
    return envhub.make_vec("CartPole-v1", 2, hub=hubs, num_workers=1, hub_index=index, **options)


def hubs_of(envs: envhub.HubVectorEnv) -> set[str | None]:
    return {envs._session.hub_of(env) for env in range(envs.num_envs)}


def test_hubs_are_taken_in_turn_by_number(three: list[ServedHub]) -> None:
    hubs = [hub.tcp for hub in three]
    for index in (0, 1, 2, 4):
        with closing(made(hubs, index)) as envs:
            assert hubs_of(envs) == {f"hub-{index % 3}"}
    assert envhub.make("CartPole-v1", hub=hubs, hub_index=1).close() is None


@pytest.mark.long
def test_hub_that_is_out_of_reach_is_skipped(three: list[ServedHub]) -> None:
    gone = f"tcp://127.0.0.1:{free_port()}"
    with closing(made([three[0].tcp, three[1].tcp, gone], 2)) as envs:
        assert hubs_of(envs) == {"hub-0"}
    with pytest.raises(HubUnreachable, match=gone):
        made([f"tcp://127.0.0.1:{free_port()}", gone], 0)


def test_hub_index_comes_with_several_hubs_and_without_split(three: list[ServedHub]) -> None:
    with pytest.raises(ValueError, match="split, hub_index and on_hub_loss='redistribute' are for several hubs"):
        envhub.make_vec("CartPole-v1", 2, hub=three[0].tcp, hub_index=1)
    with pytest.raises(ValueError, match="hub_index chooses one"):
        made([three[0].tcp, three[1].tcp], 1, split=[1, 1])
    with pytest.raises(TypeError, match="hub_index must be a whole number"):
        made([three[0].tcp, three[1].tcp], "1")  # type: ignore[arg-type]


@pytest.mark.long
def test_envs_of_a_lost_hub_are_truncated_once_and_go_on_together_on_the_one_with_most_free_cpus(
    three: list[ServedHub], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with served_hubs(tmp_path_factory, 1, ["CartPole-v1"]) as (lost,):
        busy = envhub.make_vec("CartPole-v1", 3, num_workers=3, hub=three[0].tcp)
        hubs = [three[0].tcp, lost.tcp, three[1].tcp]
        # No row of another hub waits for these, so they wait for a hub, whatever restart_wait says.
        options = {"on_hub_loss": "redistribute", "reconnect_timeout": 30, "restart_wait": 0}
        with closing(busy), closing(made(hubs, 1, **options)) as envs:
            envs.reset(seed=1)
            envs.step([0, 1])
            lost.stop(signal.SIGKILL)
            began_s, cut = time.monotonic(), 0
            for _ in range(30):
                *_, truncations, infos = envs.step([0, 1])
                invalid = infos.get("invalid_transition", np.zeros(2, bool))
                assert (truncations >= invalid).all()
                cut += int(invalid.sum())
                if invalid.any():
                    assert {failure.cause for failure in infos["env_failure"]} == {"hub_lost"}
            print(f"30 steps with a loss took {time.monotonic() - began_s:.1f} s")
            assert cut == 2
            assert hubs_of(envs) == {"hub-1"}
