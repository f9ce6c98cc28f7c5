"""Infos and texts of any size are what the env gave, and a large one takes the way of a small one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import large_sims
import numpy as np
import pytest
from combinations import each_value
from gymnasium.vector import SyncVectorEnv
from hubs import HERE, ServedHub, serve, wait_until
from large_sims import DIE, Shows
from same import assert_same

import envhub

NUM_ENVS = 3
SIZES = (16, 3_000, 100, 9_000, 8_000, 70_000, 1 << 20, 20, 5_000_000)
ZEROS = np.zeros(NUM_ENVS, np.int64)


@pytest.fixture(scope="module")
def large_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("large"), "shows=large_sims:shows", "much=large_sims:Much") as hub:
        yield hub


@contextlib.contextmanager
def made(where: str, hub: ServedHub, kind: str, sizes: tuple[int, ...], **options: Any) -> Iterator[Any]:
    """The envs by this lane: of a private hub (shared, wire), or of a served one (ipc, tcp)."""
    if where in ("ipc", "tcp"):
        envs = envhub.make_vec("shows", NUM_ENVS, hub=getattr(hub, where), kind=kind, sizes=sizes, **options)
    else:
        lane = "auto" if where == "shared" else "wire"
        envs = envhub.make_vec([partial(Shows, kind, sizes)] * NUM_ENVS, num_workers=2, lane=lane, **options)
    with contextlib.closing(envs):
        yield envs


@contextlib.contextmanager
def small_hub(folder: Path) -> Iterator[str]:
    """The address of a hub that has 4 MiB of shared memory to give."""
    address = f"ipc://{folder}/hub.sock"
    with subprocess.Popen([sys.executable, "small_hub.py", address], cwd=HERE, stderr=subprocess.DEVNULL) as hub:
        try:
            assert wait_until((folder / "hub.sock").exists)
            yield address
        finally:
            hub.terminate()


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "kind"), each_value(["shared", "tcp", "wire", "ipc"], ["info", "text", "array", "ints"])
)
def test_values_of_any_size_are_what_the_env_gave(where: str, kind: str, large_hub: ServedHub) -> None:
    sizes = SIZES[:6] if where in ("ipc", "tcp") or kind == "ints" else SIZES  # more is dropped, or slow to compare
    sync = SyncVectorEnv([partial(Shows, kind, sizes)] * NUM_ENVS)
    with made(where, large_hub, kind, sizes) as envs:
        assert_same(envs.reset(seed=1), sync.reset(seed=1), "reset")
        for number in range(2 * len(sizes)):
            assert_same(envs.step(ZEROS), sync.step(ZEROS), f"step {number}")


@pytest.mark.parametrize(
    ("where", "kind"), each_value(["shared", "ipc"], ["info", "text", "array"], others=pytest.mark.long)
)
def test_step_with_large_values_is_no_request_to_the_hub(where: str, kind: str, large_hub: ServedHub) -> None:
    with made(where, large_hub, kind, (100_000,)) as envs:
        assert envs.lane == "shared"
        envs.reset(seed=1)
        envs.step(ZEROS)
        before = envs._session.connection.protocol._sent_seq
        for _ in range(20):
            envs.step(ZEROS)
        assert envs._session.connection.protocol._sent_seq == before
        arena = envs._session.lane._arena
        assert (arena.info_length > arena.layout.info_bytes).all()
        assert set((arena.info_template > 0).tolist()) == {kind == "array"}  # numbers are in columns


def test_parts_of_a_batch_have_large_values(large_hub: ServedHub) -> None:
    for where in ("shared", "tcp"):
        with made(where, large_hub, "info", (100_000,)) as envs:
            envs.reset(seed=1)
            for count in (1, 2, 3):
                envs.send(np.zeros(2, np.int64), [0, 2])
                *_, infos, env_ids = envs.recv()
                assert env_ids.tolist() == [0, 2]
                assert infos["shown"].tolist() == [large_sims.LETTERS[count] * 100_000] * 2


@pytest.mark.parametrize("where", ["shared", "wire", "tcp"])
def test_large_text_is_repeated_when_its_env_dies(where: str, large_hub: ServedHub) -> None:
    with made(where, large_hub, "text", (100_000,), restart_wait=30.0) as envs:
        envs.reset(seed=1)
        last = envs.step(ZEROS)[0]
        assert last[0] == "b" * 100_000
        observations, _, _, truncations, infos = envs.step(np.array([DIE, 0, 0]))
        assert truncations[0] and observations[0] == last[0] and infos["env_failure"][0].cause
        assert envs.step(ZEROS)[0][0] == "a" * 100_000


def test_client_that_takes_over_has_large_values(large_hub: ServedHub) -> None:
    with contextlib.closing(envhub.connect(large_hub.ipc)) as client:
        with contextlib.closing(client.make_vec("shows", NUM_ENVS, kind="text", sizes=(100_000,))) as left:
            left.reset(seed=1)
            left.step(ZEROS)
            token = left.detach()
        with contextlib.closing(client.attach(token)) as envs:
            for letter in "cde":
                assert envs.step(ZEROS)[0] == (letter * 100_000,) * NUM_ENVS


@pytest.mark.parametrize("kind", ["info", "array"])
def test_client_without_addresses_for_large_infos_asks_the_hub(kind: str, large_hub: ServedHub) -> None:
    sync = SyncVectorEnv([partial(Shows, kind, (100_000,))] * NUM_ENVS)
    with made("ipc", large_hub, kind, (100_000,)) as envs:
        assert_same(envs.reset(seed=1), sync.reset(seed=1), "reset")
        arena = envs._session.lane._arena
        arena.rooms, arena.large_infos = np.zeros(NUM_ENVS, np.int64), np.zeros((NUM_ENVS, 0), np.uint8)
        for number in range(4):
            assert_same(envs.step(ZEROS), sync.step(ZEROS), f"step {number}")
        envs.send(np.zeros(2, np.int64), [0, 2])
        shown, wanted = envs.recv()[4]["shown"], sync.step(ZEROS)[4]["shown"]
        assert_same(shown, wanted[[0, 2]], "a part")


@pytest.mark.long
def test_memory_of_large_infos_counts_and_has_a_limit(tmp_path: Path) -> None:
    with small_hub(tmp_path) as address, contextlib.closing(envhub.connect(address)) as client:
        with contextlib.closing(client.make_vec("shows", NUM_ENVS, kind="info", sizes=(100, 100_000))) as envs:
            envs.reset(seed=1)
            before = client.stats()["arena_bytes"]
            for _ in range(4):
                envs.step(ZEROS)
            assert NUM_ENVS * 100_000 < client.stats()["arena_bytes"] - before < NUM_ENVS * 200_000
        with contextlib.closing(client.make_vec("shows", 5, kind="info", sizes=(1_000_000, 900_000))) as envs:
            envs.reset(seed=1)
            for letter, size in (("b", 900_000), ("c", 1_000_000), ("d", 900_000)):  # not all five have memory
                assert envs.step(np.zeros(5, np.int64))[4]["shown"].tolist() == [letter * size] * 5
            assert client.stats()["arena_bytes"] < 4 << 20


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("where", ["ipc", "tcp"])
def test_info_that_is_too_large_loses_its_largest_entries_only(where: str, mode: str, large_hub: ServedHub) -> None:
    options = {"autoreset_mode": mode, "hub": getattr(large_hub, where)}
    with contextlib.closing(envhub.make_vec("much", 2, **options)) as envs:
        envs.reset(seed=1)
        infos = envs.step(np.zeros(2, np.int64))[4]
        assert infos["info_dropped"].all() and "huge" not in infos and infos["small"].tolist() == [1, 1]
        assert infos["episode"]["r"].tolist() == [0.5, 0.5] and "frames" not in infos["episode"]
        _, _, terminations, _, infos = envs.step(np.zeros(2, np.int64))
        assert terminations.all() and infos["info_dropped"].all()
        ended = infos["final_info"] if mode == "SameStep" else infos
        assert ended["episode"]["r"].tolist() == [0.5, 0.5] and ended["small"].tolist() == [2, 2]
        if mode == "SameStep":
            assert [final[0] for final in infos["final_obs"]] == [2, 2]
    assert "of which these entries are dropped" in large_hub.log and "episode/frames, huge" in large_hub.log


@pytest.mark.long
def test_operator_sets_the_limit_of_an_info(tmp_path: Path) -> None:
    limit = ("--info-bytes-max", str(8 << 20))
    with (
        serve(tmp_path, "much=large_sims:Much", *limit) as hub,
        contextlib.closing(envhub.make_vec("much", 1, hub=hub.tcp)) as envs,
    ):
        envs.reset(seed=1)
        infos = envs.step(np.zeros(1, np.int64))[4]
        assert "info_dropped" not in infos and len(infos["huge"][0]) == 2 << 20
