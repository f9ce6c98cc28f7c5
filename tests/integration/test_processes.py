"""How a hub starts its workers, and that it minds every process below it."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import sims
from envhub_client.connection.connection import Connection
from envhub_client.connection.zeromq_transport import ZeroMqTransport
from envhub_client.private_hub.process import PrivateHub, private_hub
from envhub_server.network.connections import silent_s
from envhub_server.processes.interpreter import InterpreterKey, InterpreterUnusable, ZygoteProcess
from envhub_server.replay import files_in, keep
from hubs import ServedHub, below, serve, wait_until

import envhub


def zygotes(hub: ServedHub) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid, _ in below(psutil.Process(hub.process.pid))]


@pytest.fixture
def own_hub(tmp_path: Path) -> Iterator[ServedHub]:
    """A hub of the test's own, which has one zygote. In the common hub other tests start more, for other envs."""
    with serve(tmp_path, "counter=sims:counter") as served:
        yield served


def test_hub_without_its_zygote_gets_another(own_hub: ServedHub) -> None:
    with closing(envhub.make_vec("counter", 2, hub=own_hub.ipc)) as envs:
        envs.reset()
        (zygote,) = zygotes(own_hub)
        zygote.kill()
        zygote.wait(60)
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]  # workers do not depend on it
        with closing(envhub.make_vec("counter", 2, hub=own_hub.ipc)) as others:
            others.reset()
        assert [process.pid != zygote.pid for process in zygotes(own_hub)] == [True]


@pytest.mark.long
def test_session_whose_zygote_is_killed_before_it_forks_is_refused(own_hub: ServedHub) -> None:
    with closing(envhub.make_vec("counter", 1, hub=own_hub.ipc)):
        (zygote,) = zygotes(own_hub)
    zygote.suspend()
    with ThreadPoolExecutor() as pool, envhub.connect(own_hub.ipc) as client:
        making = pool.submit(envhub.make_vec, "counter", 1, hub=own_hub.ipc)
        building = wait_until(lambda: "building" in [session["phase"] for session in client.sessions()])
        zygote.kill()  # whatever else happened: nobody must wait for it
        assert building
        with pytest.raises(envhub.WorkerDied, match=r"worker 0 \(env 0\) could not be started"):
            making.result(30)
    with closing(envhub.make_vec("counter", 1, hub=own_hub.ipc)) as envs:
        envs.reset()


@pytest.mark.long
def test_private_session_gets_the_environment_that_the_program_has_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("one", "two"):
        for name in ("ENVHUB_TEST_WORLD", "LD_TEST_WORLD"):  # one for a running process, one for its start
            monkeypatch.setenv(name, value)
            with closing(envhub.make_vec([sims.Counter], 1)) as envs:
                assert envs.call("environment", name) == (value,)


@pytest.mark.long
def test_workers_outlive_the_change_to_another_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(envhub.make_vec([sims.Counter], 1)) as before:
        before.reset()
        hub = psutil.Process(private_hub().pid)
        assert wait_until(lambda: len(below(hub)) == 1)  # that of an earlier test may have been about to end
        old = psutil.Process(below(hub)[0][0])
        monkeypatch.setenv("LD_TEST_ANOTHER_WORLD", "1")
        with closing(envhub.make_vec([sims.Counter], 1)) as after:
            after.reset()
            assert wait_until(lambda: not old.is_running())
            assert before.step([0])[0][:, 0].tolist() == after.step([0])[0][:, 0].tolist() == [1]


@pytest.mark.long
def test_proxy_of_multiprocessing_works_in_a_factory() -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        seen = manager.list()

        def make() -> sims.Counter:
            seen.append("made")
            return sims.Counter()

        with closing(envhub.make_vec([make] * 2)):
            assert list(seen) == ["made", "made"]


def test_process_that_an_env_leaves_behind_is_reaped(hub: ServedHub) -> None:
    with closing(envhub.make_vec("counter", 1, hub=hub.ipc)) as envs:
        (pid,) = envs.call("leave_a_process_behind")
        assert psutil.Process(pid).ppid() == hub.process.pid
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.long
def test_session_that_finds_too_few_descriptors_is_refused_and_leaves_none(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub, closing(envhub.make_vec("counter", 1, hub=hub.ipc)) as envs:
        process = psutil.Process(hub.process.pid)
        envs.reset()
        before = process.num_fds()
        process.rlimit(psutil.RLIMIT_NOFILE, (2 * (before + 50), 2 * (before + 50)))  # of which the hub keeps half
        with pytest.raises(envhub.RequestRefused, match="100 workers take up to"):
            envhub.make_vec("counter", 100, hub=hub.ipc, num_workers=100)
        with closing(envhub.make_vec("counter", 2, hub=hub.ipc, num_workers=2)) as others:
            others.reset()
        assert wait_until(lambda: process.num_fds() <= before + 1)  # one is the latest client's connection
        assert envs.step([0])[0][:, 0].tolist() == [1]


@pytest.mark.long
def test_hub_ends_while_its_zygote_hangs(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub:
        with closing(envhub.make_vec("counter", 1, hub=hub.ipc)) as envs:
            envs.reset()
            (zygote,) = zygotes(hub)
            zygote.suspend()
            with ThreadPoolExecutor() as pool:
                making = pool.submit(envhub.make_vec, "counter", 1, hub=hub.ipc)
                assert wait_until(lambda: hub.log.count("session_made") == 2)
                hub.process.send_signal(signal.SIGTERM)
                assert wait_until(lambda: "stopping" in hub.log)
                assert hub.stop(signal.SIGTERM) == 0
                with pytest.raises(envhub.EnvHubError, match="shutting down"):
                    making.result(30)
        assert not zygote.is_running()


ZYGOTE_OF_A_PROGRAM = """
import os, psutil, envhub
from envhub_client.private_hub.process import PrivateHub, private_hub
hub = psutil.Process(private_hub().pid)
(first,) = hub.children()
for variables in ({}, {"FOO": "1"}, {"PYTHONHASHSEED": "7"}):
    os.environ.update(variables)
    envs = envhub.make_vec("CartPole-v1", 2, num_workers=1)
    envs.reset()
    zygotes = [child for child in hub.children() if child.name() == "envhub-zygote"]
    print(zygotes == [first], first.is_running())
    envs.close()
"""


@pytest.mark.long
def test_zygote_that_a_private_hub_starts_first_is_used_until_the_program_changes_what_it_needs() -> None:
    command = [sys.executable, "-c", ZYGOTE_OF_A_PROGRAM]
    environ = {**os.environ, "PYTHONHASHSEED": "random"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environ)
    assert ran.stdout.splitlines()[:2] == ["True True", "True True"]
    assert ran.stdout.splitlines()[2].startswith("False")


@pytest.mark.long
def test_private_hub_starts_in_a_folder_with_a_longer_path_than_a_socket_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr("envhub_client.private_hub.process.MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    hub = PrivateHub()
    hub.start()
    try:
        assert not [*folder.iterdir()]
        with closing(Connection(ZeroMqTransport(hub.address, hub.own)).await_hub()) as connection:
            assert connection.welcome.private
    finally:
        hub.stop()
        hub.forget()


def test_zygote_that_cannot_be_executed_leaves_nothing(tmp_path: Path) -> None:
    before = {*os.listdir("/proc/self/fd")}
    (tmp_path / "odd").touch(0o755)
    with pytest.raises(InterpreterUnusable, match=r"odd .* is no program"):
        ZygoteProcess("hub", InterpreterKey(str(tmp_path / "odd")), {})
    assert {*os.listdir("/proc/self/fd")} <= before


FORKED = """
import gc, logging, os, sys
import envhub

logging.getLogger("envhub").setLevel("ERROR")  # so that nothing on stderr tells of a slow making, or a slow hub
held = [envhub.make_vec("counter", 1, hub=sys.argv[1]), envhub.connect(sys.argv[1])]
if not os.fork():
    held.clear()
    gc.collect()
    os._exit(0)
os.wait()
held[0].reset()
held[0].close()
held[1].close()
"""


def test_child_that_drops_what_its_parent_has_says_nothing(hub: ServedHub) -> None:
    run = [sys.executable, "-W", "ignore", "-c", FORKED, hub.tcp]
    found = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == ("", "")


PROGRAM = """
import gc, os
from envhub_server.worker.zygote import warm_up
before = set(os.listdir("/proc/self/fd"))
assert warm_up()
gc.collect()
after = set(os.listdir("/proc/self/fd"))
assert after == before, [(name, os.readlink(f"/proc/self/fd/{name}")) for name in after - before]
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_warm_up_steps_an_env_and_leaves_no_descriptor_and_no_thread_behind() -> None:
    environment = {"PATH": "", "ENVHUB_WORKER": "hub:0000000000", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=60)


def test_kernel_reports_whether_a_process_of_this_machine_is_stopped(tmp_path: Path) -> None:
    path = f"{tmp_path}/socket"
    program = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nsys.stdin.read()"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        peer = subprocess.Popen([sys.executable, "-c", program, path], stdin=subprocess.PIPE)
        accepted, _ = listener.accept()
    with accepted, peer:
        assert silent_s(accepted.fileno()) == 0.0
        peer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED | os.WNOWAIT)
        assert silent_s(accepted.fileno()) == math.inf
        peer.kill()


NAMED = "-0123456789abcdef-env0-0"  # at the end of the name of a file that a hub has made


def killed_while_it_writes(folder: Path, name: str) -> None:
    """Leave what a hub leaves that is killed within ``keep``."""
    child = os.fork()
    if not child:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        keep(folder, f"{name}{NAMED}", b"x" * 300, 1000)
    os.waitpid(child, 0)


def test_what_a_killed_hub_was_writing_counts_and_is_removed_as_any_old_file(tmp_path: Path) -> None:
    killed_while_it_writes(tmp_path, "a")
    killed_while_it_writes(tmp_path, "b")
    (tmp_path / ".mine").touch()
    assert len([*tmp_path.glob("*.part")]) == 2
    for name in ("c", "d", "e"):
        keep(tmp_path, f"{name}{NAMED}", b"x" * 300, 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", *(f"{name}{NAMED}.replay" for name in "cde")]
    assert {path.stem for path, _ in files_in(tmp_path)} == {f"{name}{NAMED}" for name in "cde"}
