"""Hubs that drain: they make no session any more, tell trainers why, and end with the last one or at the deadline."""

from __future__ import annotations

import logging
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.envs.vector_env import HubVectorEnv
from hubs import free_port, serve, wait_until

import envhub
from envhub.cli.commands import app

LANES = pytest.mark.parametrize("lane", ["auto", pytest.param("wire", marks=pytest.mark.long)])
COUNTER = "counter=sims:Counter"


def told(envs: HubVectorEnv, caplog: pytest.LogCaptureFixture, text: str) -> bool:
    """Whether the trainer, which steps, reads this."""

    def steps() -> bool:
        envs.step([1] * envs.num_envs)
        return text in caplog.text

    return wait_until(steps, 20)


@pytest.mark.long
@LANES
def test_hub_without_a_deadline_ends_with_its_last_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], lane: str
) -> None:
    caplog.set_level(logging.WARNING, "envhub")
    with serve(tmp_path, COUNTER) as hub, envhub.connect(hub.ipc) as client:
        with closing(client.make_vec("counter", 2, lane=lane)) as envs:
            envs.reset()
            with pytest.raises(SystemExit, match="0"):
                app(["drain", hub.ipc, "--message", "a new disk"])
            assert capsys.readouterr().out == "the hub drains: it ends with its 1 session, when they end\n"
            assert told(envs, caplog, ": a new disk; it makes no session any more, and ends with its last one")
            with pytest.raises(envhub.HubLost, match=r"the hub drains, by user .*: a new disk; .* use another hub"):
                client.make_vec("counter")
            health = client.health()
            assert health["status"] == "draining" and "a new disk" in health["why"]
            assert client.stats()["capacity"] == {**client.stats()["capacity"], "envs_free": 0, "sessions_free": 0}
            with pytest.raises(SystemExit, match="1"):
                app(["health", hub.ipc, "--timeout", "20"])
            token = envs.detach()
        with closing(client.attach(token)) as again:  # whoever has a session may hand it on
            assert again.step([1, 1])[0][0, 0] > 1
            assert hub.process.poll() is None
        assert hub.process.wait(20) == 0 and '"event": "stopping"' not in hub.log


@pytest.mark.long
@LANES
def test_trainer_of_a_session_that_the_deadline_ends_reads_who_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lane: str
) -> None:
    caplog.set_level(logging.WARNING, "envhub")
    with serve(tmp_path, COUNTER) as hub, envhub.connect(hub.ipc) as client:
        with closing(client.make_vec("counter", 2, lane=lane)) as envs:
            envs.reset()
            client.drain(3600, "next year")
            assert told(
                envs, caplog, "next year; it makes no session any more, and ends with its last one, or in 3600 s"
            )
            client.drain(0.5, "the move")  # the last order holds
            count = 0
            with pytest.raises(envhub.HubLost, match=r"shutting down, drained by user .*: the move"):
                while True:
                    count = int(envs.step([1, 1])[0][0, 0])
            assert count > 1 and "the move; it makes" in caplog.text
        assert hub.process.wait(20) == 0
        (ended,) = (line for line in hub.audit if line["event"] == "session_ended")
        assert ended["by"].startswith("user ") and "the move" in ended["why"]


@pytest.mark.long
def test_drain_that_waits_says_how_many_sessions_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cut in (0, 1):
        with serve(tmp_path, COUNTER) as hub, ThreadPoolExecutor(1) as thread, envhub.connect(hub.ipc) as client:
            envs = client.make_vec("counter")
            client._connection.protocol.reconnect_s = 1.2  # it sends its order again each second
            waiting = thread.submit(client.drain, 2.5 if cut else None, "a new disk", wait=True)
            with envhub.connect(hub.ipc) as other:
                assert wait_until(lambda other=other: other.health()["status"] == "draining")
                with closing(envs):
                    if cut:
                        assert waiting.result() == {"cut": 1}
                    else:
                        assert not waiting.done()
            assert waiting.result() == {"cut": cut}
            assert hub.process.wait(20) == 0
    for cut in (0, 1):
        with serve(tmp_path, COUNTER) as hub, ExitStack() as last:
            if cut:
                last.enter_context(closing(envhub.make_vec("counter", hub=hub.ipc)))
            with pytest.raises(SystemExit, match=str(cut)):
                app(["drain", hub.ipc, "--deadline", "0.1", "--wait"])
            assert capsys.readouterr().out == f"the hub has ended; it cut {cut} session{'' if cut else 's'}\n"
            assert hub.process.wait(20) == 0


@pytest.mark.long
def test_idle_hub_ends_at_once_and_a_signal_ends_one_that_drains(tmp_path: Path) -> None:
    with serve(tmp_path, COUNTER) as hub, envhub.connect(hub.tcp) as client:
        client.drain()
        assert hub.process.wait(20) == 0
    with serve(tmp_path, COUNTER) as hub, closing(envhub.make_vec("counter", hub=hub.tcp)) as envs:
        envs.reset()
        with envhub.connect(hub.tcp) as client:
            client.drain(message="a new disk")
        assert hub.stop(signal.SIGTERM) == 0
        with pytest.raises(envhub.HubLost, match="a new disk"):
            envs.step([1])
    with serve(tmp_path, COUNTER) as hub, closing(envhub.make_vec("counter", hub=hub.tcp)) as envs:
        with envhub.connect(hub.tcp) as client:
            client.drain(0, "a new disk")
        assert hub.process.wait(20) == 0
        with pytest.raises(envhub.HubLost, match="a new disk"):
            envs.step([1])


@pytest.mark.long
def test_fleet_makes_nothing_on_a_hub_that_drains_and_goes_on_elsewhere(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hubs = [stack.enter_context(serve(tmp_path / f"{number}", COUNTER)) for number in folders(tmp_path, 2)]
        made: dict[str, Any] = {"hub": [hub.tcp for hub in hubs], "num_workers": 2}
        options = {"on_hub_loss": "redistribute", "split": [2, 2]}
        with closing(envhub.make_vec("counter", 4, **made, **options)) as envs, envhub.connect(hubs[0].tcp) as client:
            envs.reset()
            client.drain(1, "a new disk")
            with closing(envhub.make_vec("counter", 2, **made)) as others:
                assert others.address == hubs[1].tcp
            truncated = np.zeros(4, int)
            assert wait_until(lambda: bool((stepped(envs, truncated)[:2] == 1).all()))
            assert hubs[0].process.wait(20) == 0
            assert wait_until(lambda: hubs[0].tcp not in f"{stepped(envs, truncated)}{envs.address}")
            assert truncated.tolist()[2:] == [0, 0]


def folders(path: Path, count: int) -> range:
    for number in range(count):
        (path / f"{number}").mkdir()
    return range(count)


def stepped(envs: HubVectorEnv, truncated: np.ndarray) -> np.ndarray:
    """How often each env was truncated for a lost hub, after one more step."""
    *_, infos = envs.step([1] * envs.num_envs)
    for env, failure in enumerate(infos.get("env_failure", ())):
        if failure is not None:
            assert failure.cause == "hub_lost" and "a new disk" in failure.message
            truncated[env] += 1
    return truncated


class Trainer:
    """Steps counters through the losses of their hub, and checks that each step follows the one before."""

    def __init__(self, address: str, lane: str) -> None:
        self.losses, self.since = 0, 0  # and the steps since the last one
        options: dict[str, Any] = {"lane": lane, "on_hub_loss": "recreate", "reconnect_timeout": 300.0}
        self._envs = envhub.make_vec("counter", 2, hub=address, **options)

    def run(self, ended: threading.Event) -> None:
        with closing(self._envs) as envs:
            counts = envs.reset()[0][:, 0]
            while not ended.is_set():
                observations, _, _, truncations, infos = envs.step([1, 1])
                if truncations.any():
                    assert truncations.all() and (observations[:, 0] == counts).all()
                    assert "drained by" in infos["env_failure"][0].message
                    counts = envs.step([1, 1])[0][:, 0]
                    assert counts.tolist() == [0, 0]
                    self.losses, self.since = self.losses + 1, 0
                else:
                    counts += 1
                    assert (observations[:, 0] == counts).all()
                self.since += 1


def have_gone_on(running: list[Trainer], runs: list[Future[None]], losses: int) -> bool:
    """Whether all trainers step after so many losses, or one has failed."""
    return any(run.done() for run in runs) or all((each.losses, each.since > 10) == (losses, True) for each in running)


@pytest.mark.parametrize(("trainers", "upgrades"), [(2, 1), pytest.param(8, 10, marks=pytest.mark.long)])
def test_no_trainer_is_lost_by_upgrades_of_its_hub(tmp_path: Path, trainers: int, upgrades: int) -> None:
    binds, ended = [f"tcp://127.0.0.1:{free_port()}", f"ipc://{tmp_path}/hub.sock"], threading.Event()
    with ThreadPoolExecutor(trainers) as pool, ExitStack() as last:
        last.callback(ended.set)
        hub = last.enter_context(serve(tmp_path, COUNTER, binds=binds))
        lanes = [(hub.tcp, "auto"), (hub.ipc, "auto"), (hub.ipc, "wire")]
        running = [Trainer(*lanes[number % 3]) for number in range(trainers)]
        runs = [pool.submit(each.run, ended) for each in running]
        for upgrade in range(1, upgrades + 1):
            with envhub.connect(hub.ipc, 60) as client:
                client.drain(0.3, f"version {upgrade}")
            assert hub.process.wait(60) == 0
            hub = last.enter_context(serve(tmp_path, COUNTER, binds=binds))
            assert wait_until(partial(have_gone_on, running, runs, upgrade))
        ended.set()
        for run in runs:
            run.result()
        assert [each.losses for each in running] == [upgrades] * trainers
