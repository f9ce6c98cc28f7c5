"""Memory that is not to be had: whoever asks for it is told, and nobody else notices."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import sims
from envhub_client.private_hub.process import private_hub
from hubs import HERE, ServedHub, serve, wait_until

import envhub

MIB = 1 << 20


OFFERED = ("wide=odd_sims:Wide", "hungry=odd_sims:Hungry", "counter=sims:counter")


@pytest.fixture
def hungry_hub(tmp_path: Path) -> Iterator[ServedHub]:
    """A hub of a test that limits its memory."""
    with serve(tmp_path, *OFFERED) as hub:
        yield hub


@pytest.fixture(scope="module")
def unlimited_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("unlimited"), *OFFERED) as hub:
        yield hub


def made(address: str, name: str = "counter", num_envs: int = 2, **options: object) -> envhub.HubVectorEnv:
    envs = envhub.make_vec(name, num_envs, hub=address, **options)
    envs.reset()
    return envs


def limit_memory(hub: ServedHub, more: int) -> None:
    """Let the hub have so many bytes of address space besides what it has; -1 is as many as there are."""
    most = -1 if more < 0 else psutil.Process(hub.process.pid).memory_info().vms + more
    resource.prlimit(hub.process.pid, resource.RLIMIT_AS, (most, -1))


@pytest.mark.long
@pytest.mark.parametrize("lane", ["wire", "auto"])
def test_arena_for_which_the_hub_has_no_memory_is_refused(hungry_hub: ServedHub, lane: str) -> None:
    with contextlib.closing(made(hungry_hub.ipc, lane=lane)) as honest:
        limit_memory(hungry_hub, 48 * MIB)
        for _ in range(3):
            with pytest.raises(envhub.RequestRefused, match=r"\d+ bytes of shared memory are not available: .*memory"):
                made(hungry_hub.tcp, "wide", 2, mebibytes=32)
            assert honest.step(np.zeros(2, int))[3].tolist() == [False, False]
        limit_memory(hungry_hub, -1)
        made(hungry_hub.tcp, "wide", 2, mebibytes=32).close()
        assert "internal_error" not in hungry_hub.log
        assert wait_until(lambda: len(hungry_hub.workers()) == honest.num_workers)


def test_first_large_observation_needs_no_thread(hungry_hub: ServedHub) -> None:
    with contextlib.closing(envhub.make_vec("wide", 1, hub=hungry_hub.tcp, mebibytes=1)) as envs:
        limit_memory(hungry_hub, 4 * MIB)  # a thread takes more
        envs.reset()
        assert envs.step(np.zeros(1, int))[0].shape == (1, MIB // 8)


@pytest.mark.long
def test_sessions_share_what_memory_the_hub_may_give(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/hub.sock"
    with subprocess.Popen([sys.executable, "small_hub.py", address], cwd=HERE, stderr=subprocess.DEVNULL) as hub:
        try:
            assert wait_until((tmp_path / "hub.sock").exists, 20)
            first = made(address, "wide", 1, mebibytes=1)  # there are two of each observation
            with pytest.raises(envhub.RequestRefused, match=r"of arena_bytes_max \d+ are left"):
                made(address, "wide", 1, mebibytes=1)
            assert first.step(np.zeros(1, int))[0][0, 0] == 1
            first.close()
            made(address, "wide", 1, mebibytes=1).close()
            envs = made(address, "shows", 5, lane="wire", num_workers=1)
            envs.set_attr("big", bytes(300_000))
            assert envs.get_attr("big") == (bytes(300_000),) * 5  # which counts until it is read

            def is_set() -> bool:
                with contextlib.suppress(envhub.RequestRefused):
                    envs.set_attr("big", bytes(700_000))
                    return True
                return False

            assert wait_until(is_set, 10)
            with pytest.raises(envhub.RequestRefused, match=r"of 15\d+ bytes, where at most 10\d+ fit"):
                envs.set_attr("big", bytes(1_500_000))
            envs.close()
        finally:
            hub.terminate()
        assert hub.wait(15) == 0


@pytest.mark.long
def test_env_that_allocates_without_end_is_reported_as_out_of_memory(unlimited_hub: ServedHub) -> None:
    with contextlib.closing(made(unlimited_hub.ipc, "hungry", 2, num_workers=2)) as envs:
        with pytest.raises(MemoryError) as caught:
            envs.step(np.array([0, 1]))
        assert isinstance(caught.value.__cause__, envhub.EnvRaised) and caught.value.__cause__.env_index == 1
        envs.reset()
        assert envs.step(np.array([0, 0]))[0][:, 0].tolist() == [1, 1]


def test_no_process_can_truncate_an_arena(unlimited_hub: ServedHub) -> None:
    with contextlib.closing(made(unlimited_hub.ipc)) as envs:
        assert envs.lane == "shared"
        arenas = [path for path in Path(f"/proc/{unlimited_hub.process.pid}/fd").iterdir() if _is_arena(path)]
        assert arenas
        descriptor = os.open(arenas[0], os.O_RDWR)
        try:
            for size in (0, 1 << 30):
                with pytest.raises(PermissionError) as caught:
                    os.ftruncate(descriptor, size)
                assert caught.value.errno == errno.EPERM
        finally:
            os.close(descriptor)
        assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [1, 1]


def _is_arena(path: Path) -> bool:
    try:
        return "memfd:envhub-arena" in os.readlink(path)
    except FileNotFoundError:
        return False


FRAME = (480, 480, 3)
PAGES = int(np.prod(FRAME)) // 4096  # of one frame


class Drawn(sims.Counter):
    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full(FRAME, 7, np.uint8)


def _faults(pids: Sequence[int]) -> int:
    """The pages that these processes have got so far."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for pid in pids)
    return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)


def test_frames_take_no_new_pages() -> None:
    with closing(envhub.make_vec(partial(Drawn, render_mode="rgb_array"), 2)) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            envs.render([1])
        pids = private_hub().pid, *envs.call("pid")
        before = _faults(pids)
        for _ in range(20):
            envs.render([1])
        assert (_faults(pids) - before) / 20 < PAGES
