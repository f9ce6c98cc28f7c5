"""Factories with data: each worker has its own only, the hub one copy for as long as the session lives."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from envhub_client.private_hub.process import private_hub
from hubs import serve, wait_until
from large_sims import WithData

import envhub
from envhub.protocol.messages import Make, append_offsets, offset_of

MIB = 1 << 20
DATA_BYTES = 8 * MIB


def factories(count: int, nbytes: int = DATA_BYTES) -> list[Any]:
    return [partial(WithData, bytes([number]) * nbytes) for number in range(count)]


def baseline() -> int:
    """The memory of a worker without data."""
    with contextlib.closing(envhub.make_vec([partial(WithData, b"x")], num_workers=1)) as envs:
        return int(envs.call("held")[0])


@pytest.mark.long
def test_worker_has_the_data_of_its_own_envs_only() -> None:
    without, nbytes = baseline(), 40 * MIB  # which the C library gives back as soon as it is freed
    with contextlib.closing(envhub.make_vec(factories(3, nbytes), num_workers=3)) as envs:
        assert envs.call("first") == (0, 1, 2)
        for held in envs.call("held"):
            assert held - without < 2 * nbytes  # not also the pickle, nor the data of others


@pytest.mark.long
def test_envs_are_made_again_from_their_own_data() -> None:
    options: dict[str, Any] = {"restart_wait": 30.0, "on_exception": "truncate"}
    with contextlib.closing(envhub.make_vec(factories(4), num_workers=2, **options)) as envs:
        envs.reset(seed=1)
        actions = np.array([0, 1, 2, 0])
        assert envs.step(actions)[3][2]
        envs.step(np.zeros(4, np.int64))
        assert envs.call("first") == (0, 1, 2, 3)


def test_spare_has_the_data_of_the_worker_whose_place_it_takes() -> None:
    with contextlib.closing(envhub.make_vec(factories(2), num_workers=2, spares=2, restart_wait=30.0)) as envs:
        envs.reset(seed=1)
        envs.step(np.array([1, 1]))
        envs.step(np.zeros(2, np.int64))
        assert envs.call("first") == (0, 1)


@pytest.mark.long
def test_hub_keeps_one_copy_and_forgets_it_with_the_session() -> None:
    baseline()  # starts the hub
    hub = psutil.Process(private_hub().pid)
    before = hub.memory_full_info().uss
    nbytes = 40 * MIB  # which the C library gives back as soon as it is freed
    with contextlib.closing(envhub.make_vec(factories(2, nbytes), num_workers=2)) as envs:
        envs.reset(seed=1)
        (memory,) = _factories_memory(hub)
        assert 2 * nbytes <= memory < 2 * nbytes + MIB
        assert wait_until(lambda: hub.memory_full_info().uss - before < nbytes)
    assert wait_until(lambda: not _factories_memory(hub))
    assert hub.memory_full_info().uss - before < nbytes


def _factories_memory(process: psutil.Process) -> list[int]:
    found = []
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "envhub-factories" in os.readlink(descriptor):
                found.append(descriptor.stat().st_size)
    return found


@pytest.mark.parametrize("count", [2, 5])
def test_factories_with_data_are_pickled_by_themselves_and_once_each(count: int) -> None:
    from envhub_client.session.factories import make_of_factories

    given = factories(count)
    make = make_of_factories([*given, given[0]])
    assert len(make.factories) < (count + 1) * DATA_BYTES  # the first is in it once
    places = [offset_of(make.factories, row) or (0, 0) for row in range(count + 1)]
    alone = [pickle.loads(make.factories[begin:end]) for begin, end in places]
    assert [each.args[0][0] for each in alone] == [*range(count), 0]


def test_factories_that_share_their_data_are_one_pickle() -> None:
    from envhub_client.session.factories import make_of_factories

    data = bytes(DATA_BYTES)
    make = make_of_factories([partial(WithData, data) for _ in range(4)])
    assert offset_of(make.factories, 0) is None and len(make.factories) < 1.1 * DATA_BYTES
    assert offset_of(make_of_factories([partial(WithData, data)] * 4).factories, 0) is None
    assert offset_of(make_of_factories([partial(WithData, b"small") for _ in range(4)]).factories, 0) is None


@pytest.mark.parametrize("places", [[(0, 1)], [(0, 1), (5, 4)], [(0, 1), (0, 99)], [(0, 1)] * 3])
def test_places_outside_of_the_factories_are_refused(places: list[tuple[int, int]]) -> None:
    from envhub_server.ipc.factories_memory import why_malformed

    assert why_malformed(Make(2, factories=append_offsets(bytes(9), places)))
    assert why_malformed(Make(2, factories=struct.pack("<Q", 1 << 60) + b"ENVHUBFP"))
    assert why_malformed(Make(3, factories=append_offsets(bytes(9), [(0, 4), (4, 9)])))
    assert why_malformed(Make(2, factories=append_offsets(b"", [(0, 0), (0, 0)])[1:]))
    assert not why_malformed(Make(2, factories=append_offsets(bytes(9), [(0, 4), (4, 9)])))
    assert not why_malformed(Make(2, factories=b"ENVHUBFP"))


@pytest.mark.long
def test_client_of_a_served_hub_sends_factories_with_data(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:Counter", "--allow-factories") as hub:
        process = psutil.Process(hub.process.pid)
        with contextlib.closing(envhub.make_vec(factories(3), num_workers=3, hub=hub.ipc)) as envs:
            assert envs.call("first") == (0, 1, 2)
            assert len(_factories_memory(process)) == 1
        assert wait_until(lambda: not _factories_memory(process))
