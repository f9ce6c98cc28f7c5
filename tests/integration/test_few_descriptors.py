"""A hub that may open too few files to serve anybody ends at its start, and says how they become more."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hubs import serve

import envhub

LIMITED = (
    "import resource, runpy, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)); "
    "runpy.run_module('envhub', run_name='__main__', alter_sys=True)"
)
PROGRAM = (
    "import resource, gymnasium, envhub; resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)); "
    "envhub.AsyncVectorEnv([lambda: gymnasium.make('CartPole-v1')])"
)


@pytest.mark.parametrize("limit", [40, *(pytest.param(each, marks=pytest.mark.long) for each in (32, 120))])
def test_hub_that_can_serve_nobody_says_so_and_ends(tmp_path: Path, limit: int) -> None:
    binds = ["--bind", "tcp://127.0.0.1:0", "--bind", f"ipc://{tmp_path}/hub.sock"]
    command = [sys.executable, "-c", LIMITED, str(limit), "serve", "CartPole-v1", *binds]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert f"the limit is {limit}, " in line and " are in use, " in line and "`ulimit -n 1024`" in line
    assert [*tmp_path.iterdir()] == []


@pytest.mark.long
def test_private_hub_that_can_serve_nobody_says_so() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert "envhub: the private hub cannot start: too few open files: the limit is 80, " in run.stderr
    assert "envhub.errors.HubUnreachable: the private hub did not start" in run.stderr


@pytest.mark.long
def test_hub_that_starts_serves_one_client_after_the_other(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", program=("-c", LIMITED, "176")) as hub:
        for _ in range(3):
            for address in hub.addresses:
                with closing(envhub.make_vec("CartPole-v1", 1, hub=address)) as envs:
                    envs.reset()
