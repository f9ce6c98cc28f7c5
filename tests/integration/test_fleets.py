"""Several hubs by one name: a fleet is listed, the example of a Slurm job runs, and a folder of hubs is refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hubs import free_port, serve
from pages import ROOT, blocks

import envhub
from envhub import cli
from envhub.errors import AddressError

PAGE = ROOT / "client/docs/fleets.md"
LOOPBACK = ("tcp://127.0.0.1:0",)
PATIENTLY = ("--timeout", "30")  # by default a hub that answers after 5 s is unreachable


def run(*arguments: str) -> int:
    """Run the command in this process; returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.run([*arguments])
    return int(ended.value.code or 0)


@pytest.mark.long
def test_hubs_are_listed_with_what_they_do_and_one_that_was_killed_is_unreachable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ipc, host = f"ipc://{tmp_path}/hub.sock", socket.gethostname()
    with serve(tmp_path, "counter=sims:counter", binds=LOOPBACK) as a, serve(tmp_path, binds=[ipc]) as b:
        with contextlib.closing(envhub.make_vec("counter", 3, hub=a.tcp, num_workers=1)) as envs:
            envs.reset()
            for _ in range(5):
                envs.step(np.zeros(3, int))
            assert run("fleet", "ls", a.tcp, b.ipc, a.tcp, "--json", *PATIENTLY) == 0
            reports = {report["name"]: report for report in json.loads(capsys.readouterr().out)}
        assert [*reports] == [a.tcp, ipc]
        counts = ("sessions", "envs", "envs_free", "cpus", "losses")
        assert [reports[a.tcp][count] for count in counts] == [1, 3, 4093, len(os.sched_getaffinity(0)), 0]
        assert [reports[ipc][count] for count in counts] == [0, 0, 4096, len(os.sched_getaffinity(0)), 0]
        assert all(report["state"] == "ok" and report["steps_per_s"] == 0.0 for report in reports.values())

        assert run("fleet", "ls", ipc, *PATIENTLY) == 0
        assert capsys.readouterr().out.split()[:4] == [ipc, ipc, host, "ok"]
        a.stop(signal.SIGKILL)
        assert run("fleet", "ls", a.tcp, "--timeout", "0.2") == 1
        listing = capsys.readouterr()
        assert listing.out.split()[:4] == [a.tcp, a.tcp, "-", "unreachable"]
        assert f"{a.tcp}: no hub answered at {a.tcp}" in listing.err


def test_folder_of_hubs_is_refused_with_the_ways_to_name_hubs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = "name them by a list of their addresses, by dns://NAME:PORT or by ray://FLEET"
    for hub in ("file:///home/me/hubs", "FILE:~/hubs", ["file:///home/me/hubs", "tcp://127.0.0.1:1"]):
        with pytest.raises(AddressError, match=ways):
            envhub.make_vec("CartPole-v1", 2, hub=hub)
    (tmp_path / "hub.toml").write_text('announce = "hubs"')
    assert run("serve", "CartPole-v1", "--config", str(tmp_path / "hub.toml")) == 2
    assert ways in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hub.toml"]


@pytest.mark.long
def test_example_of_a_slurm_job_runs_without_slurm(tmp_path: Path) -> None:
    """Two addresses of this machine are the nodes: ``srun`` starts the command once for each of them."""
    (script,), (program,) = blocks("bash slurm", [PAGE]), blocks("python slurm", [PAGE])
    (keys,) = [block for block in blocks("sh", [PAGE]) if "keys add" in block]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "envhub": f'exec {sys.executable} -m envhub "${{@/\\*/$NODE}}"',  # one machine has each port once
        "python": f'exec {sys.executable} "$@"',
        "srun": 'shift; trap "kill \\$(jobs -p)" TERM\n'
        'for node in 127.0.0.1 127.0.0.2; do NODE=$node "$@" & done; wait; wait',
        "scontrol": '[ "$*" = "show hostnames" ] && printf "127.0.0.1\\n127.0.0.2\\n"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").write_text(f"{program}\nprint(envs.address)\n")
    kept = {name: value for name, value in os.environ.items() if name != "XDG_CONFIG_HOME"}
    environ = {**kept, "HOME": str(tmp_path), "PATH": f"{programs}:{kept['PATH']}", "SLURM_JOB_ID": str(free_port())}
    runs: dict[str, Any] = {"env": environ, "cwd": tmp_path, "timeout": 100, "check": True}
    subprocess.run(["sh", "-ec", keys], **runs)
    assert (tmp_path / "hub-address").stat().st_mode & 0o777 == 0o600
    job = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, **runs)
    assert "127.0.0.1:" in job.stdout and "stopping" in job.stderr, job.stderr
