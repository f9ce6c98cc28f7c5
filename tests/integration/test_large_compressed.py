"""Large observations are compressed beside the hub's loop: what their clients get, and when, is as if it were in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from envhub_server.hub.resources import INLINE_BYTES_MAX
from hubs import ServedHub, serve, wait_until

import envhub

NUM_ENVS = 4
MIB_EACH = 3  # more than is compressed in the loop, in the observations of all


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ServedHub]:
    with serve(tmp_path, "wide=odd_sims:Wide", "counter=sims:counter") as served:
        yield served


def wide(hub: ServedHub, compression: str, **options: Any) -> envhub.HubVectorEnv:
    arguments = {"num_workers": 2, "compression": compression, "mebibytes": MIB_EACH}
    return envhub.make_vec("wide", NUM_ENVS, hub=hub.tcp, lane="wire", **arguments, **options)


@pytest.mark.parametrize("compression", ["lz4", pytest.param("zstd", marks=pytest.mark.long)])
def test_replies_are_those_of_each_step_and_a_thread_makes_the_large_ones(hub: ServedHub, compression: str) -> None:
    assert NUM_ENVS * (MIB_EACH << 20) > INLINE_BYTES_MAX
    process = psutil.Process(hub.process.pid)
    with closing(envhub.make_vec("counter", 2, hub=hub.tcp, compression=compression)) as small:
        small.reset()
        small.step([0, 0])
        threads = process.num_threads()
        with closing(wide(hub, compression)) as envs:
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


@pytest.mark.long
def test_session_that_is_taken_over_meanwhile_goes_on_for_the_other(hub: ServedHub) -> None:
    envs = wide(hub, "zstd")
    envs.reset()
    envs.step_async(np.zeros(NUM_ENVS, int))
    with envhub.connect(hub.tcp) as client, closing(client.attach(envs.token, compression="zstd")) as other:
        assert not other.reset()[0].any()
        assert (other.step(np.zeros(NUM_ENVS, int))[0] == 1).all()
    with suppress(envhub.EnvHubError):
        envs.close()


@pytest.mark.long
def test_hub_that_is_stopped_meanwhile_answers_what_it_has_begun(hub: ServedHub) -> None:
    envs = wide(hub, "zstd")
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
    assert hub.stop() == 0
    stepping.join(30)
    assert not stepping.is_alive() and seen == [float(each) for each in range(1, len(seen) + 1)] and seen
    with suppress(envhub.EnvHubError):
        envs.close()
