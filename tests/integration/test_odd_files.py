"""A pipe, a device, a socket or a folder in place of a file holds nobody up; and no secret gets into a core file."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from envhub_server.ipc.replay_file import FILE_BYTES_MAX
from hubs import below, serve, wait_until

import envhub
from envhub.files import open_regular_file, read_regular_file

KINDS = ("pipe", "socket", "folder", "device", "link to a pipe")


@pytest.fixture(params=KINDS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The path of something that is no regular file."""
    path = tmp_path / "odd"
    with socket.socket(socket.AF_UNIX) as bound:
        match request.param:
            case "pipe":
                os.mkfifo(path)
            case "socket":
                bound.bind(str(path))
            case "folder":
                path.mkdir()
            case "device":
                path = Path("/dev/zero")
            case _:
                os.mkfifo(tmp_path / "pipe")
                path.symlink_to("pipe")
        yield path


def test_only_regular_files_are_opened_and_no_descriptor_is_left(odd: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError):
            open_regular_file(odd)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular_file(tmp_path / "file", 4)


def refused(*words: str, **environ: str) -> str:
    """What a command says that ends at once with status 2."""
    line = [sys.executable, "-m", "envhub", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, env={**os.environ, **environ})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    return done.stderr


@pytest.mark.long
def test_replay_of_a_pipe_or_of_an_endless_file_ends_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.replay")
    assert "no regular file" in refused("replay", str(tmp_path / "pipe.replay"), "--trust")
    assert "no regular file" in refused("replay", "/dev/zero", "--trust")
    with (tmp_path / "huge.replay").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    assert f"more than {FILE_BYTES_MAX} bytes" in refused("replay", str(tmp_path / "huge.replay"), "--trust")


@pytest.mark.long
def test_pipe_is_no_hub_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused("serve", "--config", str(tmp_path / "pipe"))


def soft_limits(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_CORE)


@pytest.mark.long
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="no process may write a core file here")
def test_hub_zygote_and_commands_with_keys_write_no_core_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        with serve(tmp_path, "CartPole-v1") as hub:
            envhub.make_vec("CartPole-v1", 1, hub=hub.ipc).close()
            pids = [hub.process.pid, *(pid for pid, _ in below(psutil.Process(hub.process.pid)))]
            assert len(pids) == 2 and {soft_limits(pid)[0] for pid in pids} == {0}
        line = [sys.executable, "-m", "envhub", "login"]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as login:
            assert wait_until(lambda: soft_limits(login.pid)[0] == 0)  # while it waits for the address
            login.communicate(b"")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
