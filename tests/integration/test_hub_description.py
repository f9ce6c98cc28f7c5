"""A hub describes itself to its clients: its name, and what further sessions could have."""

from __future__ import annotations

import pickle
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sims
from envhub_client.connection.connection import connect
from hubs import ServedHub, free_port, serve, wait_until

import envhub
from envhub.env_failure import EnvFailure, failure_info
from envhub.protocol.messages import Capacity
from envhub.values import codec


def capacity_of(address: str) -> Capacity:
    with closing(connect(address)) as connection:
        capacity = connection.welcome.capacity
    assert capacity is not None
    return capacity


def test_capacity_shrinks_by_a_session_and_grows_again_with_its_end(hub: ServedHub) -> None:
    with envhub.connect(hub.tcp) as client:  # a session that another test has left may still be ending
        assert wait_until(lambda: client.health()["sessions"] == 0)
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


@pytest.mark.long
def test_hub_plans_with_the_cpus_that_it_is_given(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "--cpus", "1") as hub:
        assert capacity_of(hub.tcp).cpus == 1
        with closing(envhub.make_vec("CartPole-v1", 8, hub=hub.tcp)) as envs:
            assert envs.sizing.num_workers == 1


@pytest.mark.parametrize("lane", ["wire", "auto"])
def test_steps_are_counted_on_each_lane_and_on_when_their_session_has_ended(hub: ServedHub, lane: str) -> None:
    with envhub.connect(hub.ipc) as client:
        before = client.stats()["steps"]
        with closing(client.make_vec("CartPole-v1", 3, lane=lane, num_workers=1)) as envs:
            envs.reset(seed=1)
            for _ in range(4):
                envs.step([0, 1, 0])
            assert lane == "auto" or envs.lane == "wire"
            (session,) = client.sessions()
            assert session["steps"] == client.stats()["steps"] - before == 15
            token = envs.detach()
        with closing(client.attach(token)) as envs:  # in other memory
            envs.step([0, 1, 0])
            assert client.stats()["steps"] - before == 18
        assert wait_until(lambda: client.health()["sessions"] == 0)
        assert client.stats()["steps"] - before == 18


@pytest.mark.long
def test_errors_and_failures_name_their_hub(tmp_path: Path) -> None:
    with serve(tmp_path, "naughty=sims:Naughty", "--name", "sim 3") as hub:
        options: dict[str, Any] = {"on_crash": "truncate", "restart_wait": 0.0}
        with closing(envhub.make_vec("naughty", 2, hub=hub.tcp, num_workers=2, **options)) as envs:
            envs.reset()
            with pytest.raises(ValueError, match="one is not allowed") as raised:
                envs.step([0, 1])
            cause = raised.value.__cause__
            assert isinstance(cause, envhub.EnvRaised)
            assert (cause.hub, cause.address) == ("sim 3", hub.tcp)
            copy = pickle.loads(pickle.dumps(cause))
            assert (copy.hub, str(copy)) == ("sim 3", str(cause))
            envs.reset()
            failure = envs.step([0, 3])[-1]["env_failure"][1]
            assert failure.hub == failure["hub"] == "sim 3"
            hub.stop(signal.SIGKILL)
            with pytest.raises(envhub.HubLost) as lost:
                envs.step([0, 0])
            assert lost.value.hub == "sim 3"
        assert '"name": "sim 3"' in hub.log.splitlines()[0]


def test_private_hub_has_no_name() -> None:
    with closing(envhub.make_vec(sims.Naughty, 2, num_workers=2)) as envs:
        envs.reset()
        with pytest.raises(ValueError) as raised:
            envs.step([0, 1])
        assert isinstance(raised.value.__cause__, envhub.EnvRaised) and raised.value.__cause__.hub is None


@pytest.mark.long
def test_truncation_by_the_loss_of_a_hub_names_that_hub_and_later_ones_the_next(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"num_workers": 2, "on_hub_loss": "recreate", "restart_wait": 60.0}
    with serve(tmp_path, "naughty=sims:Naughty", "--name", "first", binds=[address]) as hub:
        envs = envhub.make_vec("naughty", 2, hub=address, **options)
        envs.reset()
        hub.stop(signal.SIGKILL)
    with closing(envs), serve(tmp_path, "naughty=sims:Naughty", "--name", "second", binds=[address]):
        failures = envs.step([0, 0])[-1]["env_failure"]
        assert [(failure.cause, failure.hub) for failure in failures] == [("hub_lost", "first")] * 2
        envs.step([0, 0])
        failure = envs.step([0, 3])[-1]["env_failure"][1]
        assert (failure.cause, failure.hub) == ("crash", "second")


def test_loss_of_a_hub_is_named_after_the_lost_one() -> None:
    blob = failure_info(EnvFailure("hub_lost", "gone", hub="first"))
    assert EnvFailure.from_map(codec.decode(blob)["env_failure"], "second").hub == "first"
    assert "hub" not in codec.decode(failure_info(EnvFailure("crash", "gone")))["env_failure"]
