"""What the kernel and the disk have of a process that was stopped or killed."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from envhub_server.network.connections import silent_s
from envhub_server.replay import files_in, keep


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
