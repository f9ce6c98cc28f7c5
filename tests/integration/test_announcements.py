"""Hubs that announce themselves in a folder: clients find them by it, and a fleet is listed by it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.connection import known_hubs
from envhub_client.fleet.members import members
from envhub_server.network.key_folder import KeyFolder
from hubs import ServedHub, serve, wait_until
from new_keys import admitted
from pages import ROOT, blocks, section

import envhub
from envhub.cli.commands import app
from envhub.errors import AccessDenied, AddressError, HubUnreachable
from envhub.transport import announcement as announcements
from envhub.transport.announcement import PERIOD_S, PERIODS_MAX, Announcement

ENVS = ("counter=sims:counter", "naughty=sims:naughty")
PAGE = ROOT / "client/docs/fleets.md"
LOOPBACK = ("tcp://127.0.0.1:0",)
PATIENTLY = ("--timeout", "30")  # by default a hub that answers after 5 s is unreachable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "hubs"


@contextlib.contextmanager
def announced(
    tmp_path: Path, *arguments: str, binds: tuple[str, ...] = LOOPBACK, **options: Any
) -> Iterator[ServedHub]:
    with serve(tmp_path, *ENVS, "--announce", str(tmp_path / "hubs"), *arguments, binds=binds, **options) as hub:
        yield hub


def announcement_in(folder: Path, name: str) -> Announcement:
    return announcements.read(folder / f"hub-{name}.json")[0]


def run(*arguments: str) -> int:
    """Run the command in this process; returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    return int(ended.value.code or 0)


def listed(capsys: pytest.CaptureFixture[str], *hubs: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status of ``envhub fleet ls``, and its reports by name."""
    capsys.readouterr()
    status = run("fleet", "ls", *hubs, "--json", *PATIENTLY)
    return status, {report["name"]: report for report in json.loads(capsys.readouterr().out)}


def is_denied(hub: str) -> bool:
    try:
        envhub.connect(hub).close()
    except AccessDenied as error:
        return "does not know this key" in str(error)
    return False


def test_two_hubs_of_a_folder_are_found_one_drained_has_gone_and_one_killed_is_skipped(
    tmp_path: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hubs = f"file://{folder}"
    ipc, host = f"ipc://{tmp_path}/hub.sock", socket.gethostname()
    with announced(tmp_path, "--name", "a") as a, announced(tmp_path, "--name", "b", binds=(*LOOPBACK, ipc)) as b:
        assert members(hubs) == (("a", a.tcp), ("b", ipc))  # by the ports that they took
        assert announcement_in(folder, "b").local_addresses == [ipc, b.tcp]
        with pytest.raises(AddressError, match=r"2 hubs are announced in .* \(a, b\)"):
            envhub.connect(hubs)
        with contextlib.closing(envhub.make_vec("counter", 3, hub=a.tcp, num_workers=1)) as envs:
            envs.reset()
            for _ in range(5):
                envs.step(np.zeros(3, int))
            status, reports = listed(capsys, hubs, b.tcp)
            assert run("fleet", "ls", hubs, *PATIENTLY) == 0
            table = capsys.readouterr().out
        assert status == 0 and [*reports] == ["a", "b", b.tcp]
        assert reports["a"]["state"] == "ok" and reports["a"]["address"] == a.tcp
        counts = ("sessions", "envs", "envs_free", "cpus", "losses")
        assert [reports["a"][count] for count in counts] == [1, 3, 4093, len(os.sched_getaffinity(0)), 0]
        assert [reports["b"][count] for count in counts] == [0, 0, 4096, len(os.sched_getaffinity(0)), 0]
        assert all(report["steps_per_s"] == 0.0 for report in reports.values())
        titles, line, _ = (row.split() for row in table.splitlines())
        assert titles[:4] == ["name", "address", "host", "state"] and line[:2] == ["a", a.tcp] and line[3] == "ok"

        a.stop(signal.SIGKILL)
        assert [member.name for member in members(hubs)] == ["b"]
        (record,) = (each for each in caplog.records if ".json: " in each.getMessage())  # others tell of a stall
        assert f"hub-a.json: its hub, process {a.process.pid} of this machine, has ended" in record.getMessage()
        assert run("fleet", "ls", hubs, *PATIENTLY) == 1
        listing = capsys.readouterr()
        assert [line.split()[:4] for line in listing.out.splitlines()[1:]] == [
            ["a", "-", host, "stale"],
            ["b", ipc, host, "ok"],
        ]
        assert "a: its hub, process" in listing.err
        with envhub.connect(hubs) as client:
            assert client.address == ipc and client.stats()["steps"] == 0
        monkeypatch.setenv("ENVHUB_ADDRESS", hubs)
        assert run("health", *PATIENTLY) == 0

        assert b.stop() == 0
        assert [*folder.iterdir()] == [folder / "hub-a.json"]
        with pytest.raises(HubUnreachable, match=r"no hub is announced in .* \(hub-a.json: its hub"):
            members(hubs)


@pytest.mark.long
def test_hub_that_drains_is_not_announced_while_its_requests_end(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        announced(tmp_path, "--drain-timeout", "60") as hub,
        contextlib.closing(envhub.make_vec("naughty", 1, hub=f"file://{folder}")) as envs,
    ):
        envs.reset()
        envs.step_async(np.array([8]))  # which never ends
        with envhub.connect(hub.tcp) as client:
            assert wait_until(lambda: client.sessions()[0]["phase"] != "ready")
        hub.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: not [*folder.iterdir()])
        assert hub.process.poll() is None
        assert listed(capsys, hub.tcp)[1][hub.tcp]["state"] == "draining"
        assert hub.stop() == 0


@pytest.mark.long
def test_hub_has_the_name_under_which_it_is_announced(tmp_path: Path, folder: Path) -> None:
    def name_in_errors(address: str) -> str | None:
        with envhub.connect(address) as client:
            return client._connection.hub

    with announced(tmp_path, "--name", "sim"), announced(tmp_path, "--name", "sim") as second:
        assert wait_until(lambda: len(members(f"file://{folder}")) == 2)
        name = f"sim-{second.tcp.rpartition(':')[2]}"
        assert members(f"file://{folder}")[1] == (name, second.tcp)
        assert wait_until(lambda: name_in_errors(second.tcp) == name)


@pytest.mark.long
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_clients_on_other_systems_read_announcements(tmp_path: Path, folder: Path, platform: str) -> None:
    program = f"""
import other_platform
other_platform.become({platform!r})
from envhub_client.fleet.members import members
print(members("file://{folder}"))
import envhub
print(envhub.connect("file://{folder}").health()["status"])
"""
    with announced(tmp_path, "--name", "sim", "--insecure", binds=("tcp://0.0.0.0:0",)) as hub:
        place = hub.tcp.replace("0.0.0.0", "127.0.0.1")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ran = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
        assert ran.stdout.splitlines() == [f"(Member(name='sim', address='{place}'),)", "ok"], ran.stderr


@pytest.mark.long
def test_envs_go_on_at_the_hub_that_comes_back_at_another_port(tmp_path: Path, folder: Path) -> None:
    with announced(tmp_path, "--name", "sim") as first:
        options = {"hub": f"file://{folder}", "on_hub_loss": "recreate", "num_workers": 1}
        with contextlib.closing(envhub.make_vec("counter", 2, **options)) as envs:
            envs.reset()
            first.stop(signal.SIGKILL)
            with announced(tmp_path, "--name", "sim") as second:
                assert members(f"file://{folder}") == (("sim", second.tcp),) and second.tcp != first.tcp
                _, _, _, truncations, infos = envs.step(np.zeros(2, int))
                assert truncations.all() and infos["_env_failure"].all()
                envs.step(np.zeros(2, int))


@pytest.mark.long
def test_envs_of_several_hubs_are_made_again_at_the_hub_of_the_same_name(tmp_path: Path, folder: Path) -> None:
    with announced(tmp_path, "--name", "a"), announced(tmp_path, "--name", "b") as second:
        options: dict[str, Any] = {"split": (1, 2), "on_hub_loss": "recreate", "num_workers": 1}
        with contextlib.closing(envhub.make_vec("counter", 3, hub=f"file://{folder}", **options)) as envs:
            envs.reset()
            second.stop(signal.SIGKILL)
            truncated = np.zeros(3, bool)
            with announced(tmp_path, "--name", "b") as third:
                assert members(f"file://{folder}")[1] == ("b", third.tcp) and third.tcp != second.tcp
                for _ in range(4):
                    truncated |= envs.step(np.zeros(3, int))[3]
                assert truncated.tolist() == [False, True, True]
                with envhub.connect(third.tcp) as client:
                    assert [session["num_envs"] for session in client.sessions()] == [2]


@pytest.mark.long
def test_announcement_is_renewed_and_one_of_a_stopped_hub_is_not(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with announced(tmp_path, "--name", "sim") as hub:
        path = folder / "hub-sim.json"
        first_s = path.stat().st_mtime
        assert wait_until(lambda: path.stat().st_mtime > first_s, timeout=PERIODS_MAX * PERIOD_S)
        hub.process.send_signal(signal.SIGSTOP)
        try:
            written_s = path.stat().st_mtime - (PERIODS_MAX + 1) * PERIOD_S
            os.utime(path, (written_s, written_s))
            assert listed(capsys, f"file://{folder}")[1]["sim"]["why"].startswith("it is stale: last renewed 2")
            began_s = time.monotonic()
            assert run("fleet", "ls", hub.tcp, "--timeout", "1") == 1 and "unreachable" in capsys.readouterr().out
            assert time.monotonic() - began_s < 5.0
        finally:
            hub.process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: path.stat().st_mtime > written_s + PERIOD_S, timeout=PERIODS_MAX * PERIOD_S)
        assert [member.name for member in members(f"file://{folder}")] == ["sim"]


def test_hub_with_keys_is_announced_to_other_machines_and_wants_a_key(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    keys = KeyFolder(tmp_path / "keys")
    keys.make_secret()
    token = admitted(keys, "alice")
    with announced(tmp_path, "--keys", str(keys.path), "--name", "sim", binds=("tcp://0.0.0.0:0",)) as hub:
        port = hub.tcp.rpartition(":")[2]
        announcement = announcement_in(folder, "sim")
        assert announcement.local_addresses == [f"tcp://127.0.0.1:{port}"]
        assert announcement.addresses and all(each.endswith(f":{port}") for each in announcement.addresses)
        secrets = [token[43:], (keys.path / "server.key").read_text().strip()]
        assert not [secret for secret in secrets if secret in (folder / "hub-sim.json").read_text()]
        status, reports = listed(capsys, f"file://{folder}")
        assert status == 1 and "wants a key, and none is here: run `envhub keygen`" in reports["sim"]["why"]

        keys.add("bob", known_hubs.key_of(known_hubs.make_own_key()), "use")
        with envhub.connect(f"file://{folder}") as client:
            assert client.address == f"tcp://127.0.0.1:{port}" and client.health()["status"] == "ok"
        keys.remove("bob")
        assert wait_until(lambda: is_denied(f"file://{folder}"))
        known_hubs.keep("fleet", f"envhub://{token}@elsewhere:5555")  # as of another hub with the same folder of keys
        with envhub.connect(f"file://{folder}") as client:
            assert client.health()["status"] == "ok"


@pytest.mark.long
def test_examples_of_the_page_run_without_slurm(tmp_path: Path, folder: Path) -> None:
    """``srun`` is a script that starts the command in as many processes, as Slurm does on one node."""
    (script,), (program,) = blocks("bash slurm", [PAGE]), blocks("python fleet", [PAGE])
    programs, home = tmp_path / "bin", tmp_path
    programs.mkdir()
    for name, text in {
        "envhub": f'exec {sys.executable} -m envhub "$@"',
        "srun": 'for task in 1 2; do "$@" & done; wait',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {**os.environ, "HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}
    environ = {name: value for name, value in environ.items() if name != "XDG_CONFIG_HOME"}
    runs: dict[str, Any] = {"env": environ, "timeout": 60, "check": True, "stdout": subprocess.PIPE, "text": True}
    (keys,) = [block for block in blocks("sh", [PAGE]) if "keygen" in block]
    subprocess.run(["sh", "-ec", keys], **runs)
    with subprocess.Popen(["bash", "-c", script], env=environ, stderr=subprocess.DEVNULL) as job:
        assert wait_until(lambda: folder.is_dir() and len([*folder.glob("hub-*.json")]) == 2)
        first, second = announcements.read_folder(folder)[0]
        try:
            assert second.name == f"{first.name}-{second.local_addresses[0].rpartition(':')[2]}"
            listing = subprocess.run(["envhub", "fleet", "ls", "file:~/hubs", "--json"], **runs).stdout
            assert [report["state"] for report in json.loads(listing)] == ["ok", "ok"]
            subprocess.run([sys.executable, "-c", program.replace("/home/me/hubs", str(folder))], **runs)
        finally:
            for hub in (first, second):
                os.kill(hub.pid, signal.SIGTERM)
            assert job.wait(30) == 0
    assert not [*folder.iterdir()]


def test_page_has_every_key_of_the_file() -> None:
    keys = re.findall(r"^\| (`.*?) \|", section(ROOT / "server/docs/announcements.md", "The file"), re.MULTILINE)
    assert [key for line in keys for key in re.findall(r"`(\w+)`", line)] == [*Announcement.__struct_fields__]


def test_hub_that_cannot_be_announced_does_not_start(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert run("serve", "CartPole-v1", "--announce", str(folder), "--bind", f"ipc://{tmp_path}/hub.sock") == 2
    assert re.search(r"envhub serve: announcements in .* can be written to by", capsys.readouterr().err)
    assert not (tmp_path / "hub.sock").exists()
