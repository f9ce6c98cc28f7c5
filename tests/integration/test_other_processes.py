"""What the kernel and the disk have of a process that was stopped or killed."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from envhub_server.catalog.replay_folder import ReplayFolder, files_in
from envhub_server.network.client_liveness import silent_s


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


def killed_while_it_writes(folder: Path) -> None:
    """Leave what a hub leaves that is killed within ``keep``."""
    child = os.fork()
    if not child:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        ReplayFolder(folder, 10, 1000).keep(f"a{NAMED}", b"x" * 300)
    os.waitpid(child, 0)


def test_what_a_killed_hub_was_writing_counts_until_it_is_removed(tmp_path: Path) -> None:
    killed_while_it_writes(tmp_path)
    killed_while_it_writes(tmp_path)
    (tmp_path / ".mine").touch()
    folder = ReplayFolder(tmp_path, 10, 1000)
    for name in ("b", "c", "d"):
        folder.keep(f"{name}{NAMED}", b"x" * 200)
    assert {path.stem for path in files_in(tmp_path)} == {f"c{NAMED}", f"d{NAMED}"}
    folder.remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", f"c{NAMED}.replay", f"d{NAMED}.replay"]


def test_new_file_stays_whatever_another_hub_is_writing(tmp_path: Path) -> None:
    folder = ReplayFolder(tmp_path, 10, 1000)
    for _ in range(4):
        killed_while_it_writes(tmp_path)
    for name in ("a", "b"):
        folder.keep(f"{name}{NAMED}", b"x" * 900)
        assert [path.stem for path in files_in(tmp_path)] == [f"{name}{NAMED}"]
