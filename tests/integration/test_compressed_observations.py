"""Observations that come compressed, large ones beside the hub's loop, are those of the same envs uncompressed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from envhub_client.session import maker
from envhub_server.hub.resources import INLINE_BYTES_MAX
from hubs import ServedHub, serve, wait_until
from same import assert_same

import envhub
from envhub.secret import Secret
from envhub.transport.address import Address, HubKeys
from envhub.values.compression import METHODS

NUM_ENVS = 4
MIB_EACH = 3  # more than is compressed in the loop, in the observations of all


OFFERED = ("wide=odd_sims:Wide", "counter=sims:counter", "ALE/Pong-v5")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), *OFFERED) as served:
        yield served


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ServedHub]:
    """A hub that has compressed nothing yet."""
    with serve(tmp_path, *OFFERED) as served:
        yield served


@pytest.mark.long
@pytest.mark.parametrize("compression", METHODS)
@pytest.mark.parametrize("copy", [True, False])
def test_compressed_observations_are_the_same(hub: ServedHub, compression: str, copy: bool) -> None:
    kwargs: dict[str, Any] = {"hub": hub.tcp, "copy": copy}
    with (
        closing(envhub.make_vec("ALE/Pong-v5", 2, compression=compression, **kwargs)) as envs,
        closing(envhub.make_vec("ALE/Pong-v5", 2, compression=None, **kwargs)) as others,
    ):
        assert_same(envs.reset(seed=3), others.reset(seed=3), "reset")
        others.action_space.seed(1)
        for number in range(20):
            actions = others.action_space.sample()
            assert_same(envs.step(actions), others.step(actions), f"step {number}")
        for each in (envs, others):
            each.send(np.array([1]), [1])
        assert_same(envs.recv(), others.recv(), "part")


def test_addresses_of_other_machines_and_keys_are_compressed_by_default(hub: ServedHub) -> None:
    with closing(envhub.make_vec("counter", 2, hub=hub.tcp)) as envs:
        assert envs.compression == ""
    address = hub.tcp.replace("127.0.0.1", "0.0.0.0")  # not known to be this machine
    with closing(envhub.make_vec("counter", 2, hub=address, compression=None)) as envs:
        assert envs.compression == ""
    with closing(envhub.make_vec("counter", 2, hub=address)) as envs:
        assert envs.compression == "zstd"
        envs.reset()
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
    keys = HubKeys(b"h" * 32, Secret(b"s" * 32))
    assert Address(hub.tcp, host="127.0.0.1", port=5555, keys=keys).crosses_network
    assert Address("ipc:///a", path="/a", tunnelled=True).crosses_network


def test_library_that_is_missing_is_named(hub: ServedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker, "available", lambda: ["zstd"])
    with pytest.raises(envhub.RequestRefused, match=r"this client lacks .*pip install lz4"):
        envhub.make_vec("counter", 2, hub=hub.tcp, compression="lz4")


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="compression must be"):
        envhub.make_vec("CartPole-v1", 2, compression="zip")


def wide(hub: ServedHub, compression: str, **options: Any) -> envhub.HubVectorEnv:
    arguments = {"num_workers": 2, "compression": compression, "mebibytes": MIB_EACH}
    return envhub.make_vec("wide", NUM_ENVS, hub=hub.tcp, lane="wire", **arguments, **options)


@pytest.mark.parametrize("compression", ["lz4", pytest.param("zstd", marks=pytest.mark.long)])
def test_replies_are_those_of_each_step_and_a_thread_makes_the_large_ones(fresh: ServedHub, compression: str) -> None:
    assert NUM_ENVS * (MIB_EACH << 20) > INLINE_BYTES_MAX
    process = psutil.Process(fresh.process.pid)
    with closing(envhub.make_vec("counter", 2, hub=fresh.tcp, compression=compression)) as small:
        small.reset()
        small.step([0, 0])
        threads = process.num_threads()
        with closing(wide(fresh, compression)) as envs:
            for _ in range(2):
                assert not envs.reset()[0].any()
                for step in range(1, 5):
                    envs.step_async(np.zeros(NUM_ENVS, int))
                    small.step([0, 0])  # of another session, meanwhile
                    observations = envs.step_wait()[0]
                    assert observations.dtype == np.float64 and (observations == step).all()
            envs.send(np.zeros(2, int), [1, 3])
            observations, *_, env_ids = envs.recv(2)
            assert sorted(env_ids.tolist()) == [1, 3] and (observations == 5).all()
        assert process.num_threads() == threads + 1


@pytest.mark.long
def test_session_that_is_closed_meanwhile_ends_and_leaves_the_hub_as_it_is(hub: ServedHub) -> None:
    for number in range(4):
        envs = wide(hub, "zstd")
        envs.reset()
        envs.step_async(np.zeros(NUM_ENVS, int))
        envs.close(terminate=bool(number % 2))
    with closing(wide(hub, "zstd")) as envs:
        envs.reset()
        assert (envs.step(np.zeros(NUM_ENVS, int))[0] == 1).all()
    with envhub.connect(hub.tcp) as client:  # a client waits for an end with ``terminate`` for two seconds only
        assert wait_until(lambda: not client.sessions())


@pytest.mark.parametrize("compression", ["auto", *(pytest.param(method, marks=pytest.mark.long) for method in METHODS)])
def test_session_that_is_taken_over_meanwhile_goes_on_as_the_other_asks(hub: ServedHub, compression: str) -> None:
    envs = wide(hub, "zstd")
    envs.reset()
    envs.step_async(np.zeros(NUM_ENVS, int))
    with envhub.connect(hub.tcp) as client, closing(client.attach(envs.token, compression=compression)) as other:
        assert other.compression == compression.replace("auto", "")
        assert not other.reset()[0].any()
        assert (other.step(np.zeros(NUM_ENVS, int))[0] == 1).all()
    with suppress(envhub.EnvHubError):
        envs.close()


@pytest.mark.long
def test_hub_that_is_stopped_meanwhile_answers_what_it_has_begun(fresh: ServedHub) -> None:
    envs = wide(fresh, "zstd")
    envs.reset()
    seen: list[float] = []
    began = threading.Event()

    def step() -> None:
        with suppress(envhub.EnvHubError):
            while True:
                envs.step_async(np.zeros(NUM_ENVS, int))
                seen.append(float(envs.step_wait()[0].max()))
                began.set()

    stepping = threading.Thread(target=step)
    stepping.start()
    assert began.wait(30)
    assert fresh.stop() == 0
    stepping.join(30)
    assert not stepping.is_alive() and seen == [float(each) for each in range(1, len(seen) + 1)] and seen
    with suppress(envhub.EnvHubError):
        envs.close()
