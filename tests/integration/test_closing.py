"""Envs close within their own time; those that are cut short are named, wherever they are."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import sims
from hubs import ServedHub, lives, serve, signalled_in_a_wait, stopped, wait_until, worker_pids

import envhub

OFFER = "slow_close=sims:slow_close"
PLACES = ["private", *(pytest.param(place, marks=pytest.mark.long) for place in ("several", "wire", "tcp", "ipc"))]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("other"), OFFER, "--name", "other") as served:
        yield served


@pytest.fixture
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options by which envs are made at this place."""
    if request.param in ("private", "wire"):
        return {"lane": "wire" if request.param == "wire" else "auto"}
    hub = request.getfixturevalue("hub")
    if request.param == "several":
        return {"hub": [hub.tcp, request.getfixturevalue("other").ipc], "split": [2, 2]}
    return {"hub": getattr(hub, request.param)}


def made(seconds: Sequence[float], folder: Path, **options: Any) -> envhub.HubVectorEnv:
    kwargs = [{"seconds": each, "path": str(folder / str(env))} for env, each in enumerate(seconds)]
    options = {"num_workers": len(seconds), **options}
    if "hub" in options:
        envs = envhub.make_vec("slow_close", len(seconds), env_kwargs=kwargs, **options)
    else:
        envs = envhub.make_vec([lambda own=own: sims.SlowClose(**own) for own in kwargs], **options)
    envs.reset()
    return envs


def whole(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in folder.iterdir() if each.read_text() == "whole")


def cut(log: pytest.LogCaptureFixture, why: str) -> list[int]:
    """The envs that warnings name as cut short for this reason."""
    texts = [each.getMessage() for each in log.records if (each.name, each.levelno) == ("envhub", logging.WARNING)]
    found = [re.search(rf"envs? ([\d, ]+) ended before close was over: {why}", text) for text in texts]
    return sorted(int(env) for each in found if each is not None for env in each[1].split(", "))


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_env_that_does_not_close_in_time_is_named_and_the_others_leave_whole_files(
    place: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made([0.0, 60.0, 0.0, 60.0], tmp_path, close_timeout=3.0, **place).close()
    assert cut(caplog, "each env has close_timeout=3 s") == [1, 3]
    assert whole(tmp_path) == [0, 2]


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_interrupt_ends_the_wait_for_envs_that_close(
    place: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = made([0.0, 60.0, 60.0, 0.0], tmp_path, **place)
    pids, main = envs.call("pid"), threading.get_ident()

    def interrupt() -> None:
        assert wait_until(lambda: not psutil.pid_exists(pids[0]) and not psutil.pid_exists(pids[3]))
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupting.start()
        envs.close()
    interrupting.join()
    assert cut(caplog, "the program waited no longer") == [1, 2]
    envs.close()
    assert envs.closed and whole(tmp_path) == [0, 3]


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_timeout_of_close_counts_for_envs_that_close(
    place: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = made([60.0] * 4, tmp_path, **place)
    envs.close(timeout=0.1)
    assert envs.closed and cut(caplog, "the program waited no longer") == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["step", pytest.param("step_wait", marks=pytest.mark.long)])
@pytest.mark.parametrize("place", ["private", *PLACES[2:]], indirect=True)
def test_env_that_hangs_in_a_step_is_not_waited_for(
    place: dict[str, Any], method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = made([0.0] * 3, tmp_path, **place)
    if method == "step_wait":
        envs.step_async([0, 8, 0])
    with pytest.raises(KeyboardInterrupt), signalled_in_a_wait(signal.SIGINT):
        getattr(envs, method)(*[[0, 8, 0]] * (method == "step"))
    envs.close()  # and not after ``step_timeout``, 300 s
    assert cut(caplog, "an env was still at its step, reset or call after 1 s") == [1] and whole(tmp_path) == [0, 2]


@pytest.mark.long
def test_each_env_of_a_process_has_its_own_time_and_slow_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made([3.5, 3.5], tmp_path, num_workers=1, close_timeout=6.0).close()
    assert whole(tmp_path) == [0, 1] and not cut(caplog, "")
    (told,) = [each.getMessage() for each in caplog.records if "slow to close" in each.getMessage()]
    assert re.search(r"slow to close: env 1; .*close_timeout=6 s; env 1 in close \(\S*sims.py, line \d+\)$", told)


def test_terminate_kills_envs_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made([60.0], tmp_path).close(terminate=True)
    assert not cut(caplog, "") and not worker_pids()


def test_vector_env_that_is_dropped_closes_its_envs(tmp_path: Path) -> None:
    envs = made([0.1, 0.1], tmp_path)
    envs.step_async([0, 0])
    del envs
    gc.collect()
    assert whole(tmp_path) == [0, 1]


def test_vector_envs_that_are_collected_with_all_that_they_have_close_their_envs(tmp_path: Path) -> None:
    for number in range(4):  # Python finalizes what a cycle has in an order of its own
        (tmp_path / str(number)).mkdir()
        envs: Any = made([0.0], tmp_path / str(number))
        envs.itself = envs
    del envs
    gc.collect()
    assert [whole(tmp_path / str(number)) for number in range(4)] == [[0]] * 4


ENDS = {"at its end": "", "by an exception": "raise SystemExit", "when it is killed": "os.kill(os.getpid(), 9)"}


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_program_that_ends_without_close_closes_its_envs_unless_it_is_killed(end: str, tmp_path: Path) -> None:
    seconds = 60 if "killed" in end else 1.5
    program = f"""
import os, envhub, sims
envs = envhub.make_vec([lambda env=env: sims.SlowClose({seconds}, f"{tmp_path}/{{env}}") for env in range(2)])
envs.reset()
print(*envs.call("pid"), flush=True)
{ENDS[end]}
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(sims.__file__).parent)}
    ran = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in ran.stdout.split()]
    assert pids and whole(tmp_path) == ([] if "killed" in end else [0, 1]) and not ran.stderr
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 10)


@pytest.mark.long
def test_hub_that_is_told_to_stop_gives_envs_its_own_time_and_names_those_that_it_cuts_short(tmp_path: Path) -> None:
    limits = "--drain-timeout", "1", "--drain-close-timeout", "1"
    folder = tmp_path / "files"
    folder.mkdir()
    with serve(tmp_path, OFFER, *limits) as hub, closing(made([0.1, 60.0], folder, hub=hub.tcp)):
        assert hub.stop() == 0 and whole(folder) == [0]
        assert "env 1 ended before close was over: the hub is shutting down" in hub.log


@pytest.mark.long
@pytest.mark.parametrize("policy", ["raise", "recreate"])
def test_hub_that_is_silent_while_envs_close_is_waited_for(tmp_path: Path, policy: Any) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    with serve(tmp_path, OFFER) as hub:
        envs = made([6.0], folder, hub=hub.ipc, on_hub_loss=policy)
        close = threading.Thread(target=envs.close)
        close.start()
        with stopped(hub.process.pid):
            close.join(2.7)
        close.join()
        assert whole(folder) == [0]


@pytest.mark.long
def test_env_that_closes_for_long_holds_up_no_other_session(hub: ServedHub, tmp_path: Path) -> None:
    slow_files, files = tmp_path / "slow", tmp_path / "quick"
    slow_files.mkdir()
    files.mkdir()
    slow = made([60.0], slow_files, hub=hub.tcp)
    slow.drop_pending()
    slow._session.connection.send(envhub.protocol.messages.Op.CLOSE, envhub.protocol.messages.Close())
    with closing(made([0.0], files, hub=hub.tcp)) as quick:
        for _ in range(20):
            quick.step([0])
    assert whole(files) == [0] and whole(slow_files) == []
    slow.close(timeout=0.1)


# --- a hub that is told to stop ---------------------------------------------------------------------------------------


GONE_S = 30.0  # 10 are promised, when `docker stop` kills; the rest is for a slow machine
NUM_ENVS = 8
OFFERED = ("sleeper=odd_sims:Sleeper", "stubborn=odd_sims:Stubborn")


def made_of(hub: ServedHub, name: str, lane: str) -> envhub.HubVectorEnv:
    address, options = hub.tcp if lane == "wire" else hub.ipc, {"num_workers": NUM_ENVS, "close_timeout": 5.0}
    envs = envhub.make_vec(name, NUM_ENVS, hub=address, lane=lane, **options)
    envs.reset()
    return envs


@pytest.mark.long
@pytest.mark.parametrize("name", ["sleeper", pytest.param("stubborn", marks=pytest.mark.long)])
def test_steps_under_way_are_answered_and_new_ones_refused(tmp_path: Path, name: str) -> None:
    with serve(tmp_path, *OFFERED) as hub, contextlib.ExitStack() as opened:
        sessions = [opened.enter_context(contextlib.closing(made_of(hub, name, lane))) for lane in ("wire", "auto")]
        assert [envs.lane for envs in sessions] == ["wire", "shared"]
        client = opened.enter_context(envhub.connect(hub.tcp))
        workers = hub.workers()
        with stopped(*(worker.pid for worker in workers)):
            for envs in sessions:
                envs.step_async(np.zeros(NUM_ENVS, int))
            # The hub has the request.
            assert wait_until(lambda: "moving" in [found["phase"] for found in client.sessions()])
            hub.process.terminate()
            assert wait_until(lambda: '"event": "stopping"' in hub.log)
            with pytest.raises(envhub.HubLost, match="shutting down"):
                client.make_vec("sleeper", 1)
        for envs in sessions:
            observations, _, _, truncations, _ = envs.step_wait(timeout=GONE_S)
            assert observations[:, 0].tolist() == [1] * NUM_ENVS and not truncations.any()
        for envs in sessions:
            with pytest.raises(envhub.HubLost):
                envs.step(np.zeros(NUM_ENVS, int))
        assert hub.process.wait(GONE_S) == 0
        assert not any(map(lives, workers))


@pytest.mark.long
@pytest.mark.parametrize("lane", ["wire", pytest.param("auto", marks=pytest.mark.chaos)])
def test_second_signal_does_not_wait_for_steps(tmp_path: Path, lane: str) -> None:
    offered = (*OFFERED, "--drain-timeout", "600")
    with serve(tmp_path, *offered) as hub, contextlib.closing(made_of(hub, "stubborn", lane)) as envs:
        workers = hub.workers()
        envs.step_async(np.full(NUM_ENVS, 6000))  # for which it waits after one signal
        hub.process.terminate()
        assert wait_until(lambda: '"event": "stopping"' in hub.log)
        hub.process.terminate()
        assert hub.process.wait(GONE_S) == 0
        assert not any(map(lives, workers))
        with pytest.raises(envhub.HubLost):
            envs.step_wait(timeout=10)
