"""Output that cannot be written ends no hub, and a command in good order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import envhub
from envhub.cli import print_line, standard_streams

COMMAND = [sys.executable, "-m", "envhub"]


@contextmanager
def opened(kind: str) -> Iterator[int]:
    """A descriptor on a full disk, or of a pipe that nobody reads, has no room, or would not wait for room."""
    if kind == "disk":
        descriptors = [os.open("/dev/full", os.O_WRONLY)]
    else:
        reading, writing = os.pipe()
        descriptors = [writing] if kind == "closed" else [writing, reading]
        if kind == "closed":
            os.close(reading)
        else:
            os.set_blocking(writing, False)
            while True:
                try:
                    os.write(writing, bytes(4096))
                except BlockingIOError:
                    break
            os.set_blocking(writing, kind == "full")
    try:
        yield descriptors[0]
    finally:
        for each in descriptors:
            os.close(each)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "full",
        pytest.param("closed", marks=pytest.mark.long),
        *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("disk", "nonblocking")),
    ],
)
def test_hub_serves_until_it_is_told_to_stop_whatever_becomes_of_its_output(tmp_path: Path, kind: str) -> None:
    address = f"ipc://{tmp_path}/hub.sock"
    command = [*COMMAND, "serve", "CartPole-v1", "--bind", address]
    with opened(kind) as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path) as hub:
        try:
            with closing(envhub.make_vec("CartPole-v1", 1, hub=address)) as envs:
                envs.reset()
                envs.step([0])
            hub.send_signal(signal.SIGTERM)
            assert hub.wait(15) == 0
        finally:
            hub.kill()


def ended(arguments: list[str], stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    environ = {**os.environ, "COLUMNS": "200"}
    run = subprocess.run([*COMMAND, *arguments], stdout=stdout, stderr=stderr, text=True, timeout=60, env=environ)
    return run.returncode, run.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--help"],
        *(pytest.param(each, marks=pytest.mark.chaos) for each in (["keys", "list", "--keys", "keys"], ["ls"])),
    ],
)
def test_command_whose_output_cannot_be_written_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ended(["keys", "add", "alice", "--keys", "keys"], subprocess.DEVNULL)[0] == 0
    with opened("closed") as output:
        assert ended(arguments, output) == (1, "")
    with opened("disk") as output:
        assert ended(arguments, output) == (1, "envhub: its output cannot be written: No space left on device\n")


def test_command_waits_for_room_where_another_program_made_its_output_nonblocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened("nonblocking") as output, open(f"/proc/self/fd/{output}", "rb", 0) as reader:
        reading = threading.Timer(0.05, reader.read, (1 << 20,))
        with open(output, "w", closefd=False) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            with standard_streams():
                reading.start()
                print_line("line")
        reading.join()
        assert reader.read(1 << 20) == b"line\n"


def test_status_of_a_command_is_the_same_where_its_error_cannot_be_written(tmp_path: Path) -> None:
    for kind in ("closed", "disk"):
        with opened(kind) as output:
            assert ended(["replay", str(tmp_path / "none")], output, output)[0] == 2
