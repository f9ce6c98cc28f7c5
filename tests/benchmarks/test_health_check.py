"""The CPU time of ``envhub health``, next to that of the import of its sockets."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hubs import serve

RUNS = 15

pytestmark = pytest.mark.benchmark


def cpu_s(cache: Path, *arguments: str) -> float:
    """The median of the CPU time of Python with these arguments, whose modules are compiled."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = str(cache)
    times_s = []
    for _ in range(1 + RUNS):
        process = subprocess.Popen([sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        times_s.append(used.ru_utime + used.ru_stime)
    return statistics.median(times_s[1:])


def test_health_check_takes_less_than_three_imports_of_zmq(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        health_s = cpu_s(tmp_path / "cache", "-m", "envhub", "health", hub.ipc, "--timeout", "20")
    zmq_s = cpu_s(tmp_path / "cache", "-c", "import zmq")
    print(f"envhub health {health_s:.3f} s, import zmq {zmq_s:.3f} s of CPU time")
    assert health_s < 3 * zmq_s
