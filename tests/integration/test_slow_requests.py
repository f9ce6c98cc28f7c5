"""Times of sessions' steps in their rows, and the list of slow steps, resets and calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hubs import ServedHub, serve, wait_until

import envhub
from envhub.diagnosis import findings

SLOW_MS = 100
SLEEPS, HANGS = 6, 8  # actions: for 0.2 s, and for ever


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), "naughty=sims:Naughty", "--slow-ms", str(SLOW_MS)) as served:
        yield served


@pytest.fixture(params=["ipc", "tcp"])
def envs(request: pytest.FixtureRequest, hub: ServedHub) -> Iterator[envhub.HubVectorEnv]:
    """Four envs in two workers: 0 and 2, 1 and 3."""
    with closing(envhub.make_vec("naughty", 4, hub=getattr(hub, request.param), num_workers=2)) as made:
        made.reset()
        yield made


@pytest.fixture
def client(hub: ServedHub) -> Iterator[envhub.Client]:
    with envhub.connect(hub.ipc) as connected:
        yield connected


@pytest.mark.long
def test_env_that_is_slower_than_its_neighbours_is_named(envs: envhub.HubVectorEnv, client: envhub.Client) -> None:
    for _ in range(6):
        envs.step([0, 0, SLEEPS, 0])
    (row,) = client.sessions()
    assert row["step_ms"]["p50"] >= 200 and row["step_ms"]["p99"] >= row["step_ms"]["p50"]
    slow, fast = row["processes"]
    assert (slow["envs"], fast["envs"]) == ([0, 2], [1, 3])
    assert slow["env_ms"]["p50"] >= 200 > fast["env_ms"]["p50"]
    assert slow["envs_ms"][1] >= 200 > slow["envs_ms"][0]
    assert [(each.trouble, each.worker, each.env) for each in findings([row])] == [("slow", 0, 2)]
    slowest = next(each for each in reversed(client.slow()) if each["worker"] == 0)
    assert (slowest["env"], slowest["envs"], slowest["verb"]) == ("naughty", [2], "step")
    assert slowest["session"] == row["session"] and slowest["ms"] >= 200 and slowest["ago_s"] >= 0


def test_slow_reset_and_calls_are_listed(envs: envhub.HubVectorEnv, client: envhub.Client) -> None:
    before = len(client.slow())
    envs.reset(options={"nap": 0.15})
    envs.set_attr("nap", [0.0, 0.3, 0.0, 0.0])
    expected = {(0, "reset"), (1, "reset"), (1, "set nap")}
    # A worker answers before it tells the hub how long that took.
    assert wait_until(lambda: {(row["worker"], row["verb"]) for row in client.slow()[before:]} >= expected)
    assert all({*row["envs"]} <= {row["worker"], row["worker"] + 2} for row in client.slow()[before:])


def test_env_that_is_stuck_is_named_while_it_is_and_afterwards(
    envs: envhub.HubVectorEnv, client: envhub.Client
) -> None:
    def step() -> None:
        with contextlib.suppress(envhub.SessionLost):
            envs.step([0, HANGS, 0, 0])

    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert wait_until(lambda: bool(client.slow()) and client.slow()[-1]["ago_s"] is None)
        running = client.slow()[-1]
        (row,) = client.sessions()
        waiting, stuck = row["processes"]
        assert (waiting["doing"], waiting["env"]) == ("waiting", None)
        assert (stuck["doing"], stuck["env"]) == ("step", 1) and stuck["since_s"] >= SLOW_MS / 1000
    finally:
        client.end(client.sessions()[0]["session"])
        thread.join()
    assert wait_until(lambda: not client.sessions())
    ended = client.slow()[-1]
    assert (ended["envs"], ended["verb"]) == ([1], "step") and ended["ms"] >= running["ms"] and ended["ago_s"] >= 0


def test_any_words_of_a_client_make_numbers(hub: ServedHub, client: envhub.Client) -> None:
    with closing(envhub.make_vec("naughty", 2, hub=hub.ipc, num_workers=2)) as envs:
        envs.reset()
        arena: Any = envs._session.lane._arena
        for word in (-1, 1, 1 << 62, -1 << 63, (1 << 63) - 1):
            for words in (arena.since, arena.progress, arena.step_ns, arena.worker_ns, arena.env_ns):
                words[...] = word
            (row,) = client.sessions()
            times = [row["step_ms"], row["env_ms"], *(each["env_ms"] for each in row["processes"])]
            assert all(each["p99"] is None if word < 0 else each["p50"] == each["p99"] >= 0 for each in times)
            assert all(each["since_s"] >= 0 for each in row["processes"]) and client.slow() is not None
        envs.step([0, 0])
