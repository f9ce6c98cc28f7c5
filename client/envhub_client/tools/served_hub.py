"""A hub in a process of its own, as ``envhub serve`` runs one: what ``envhub demo`` and ``envhub bench`` talk to."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envhub.errors import HubUnreachable

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0  # a hub takes up to 5 s to drain and 2 s more to close its envs
POLL_S = 0.01
LISTENING = "listening on "


@dataclass(frozen=True)
class ServedHub:
    """A running hub."""

    tcp: str  # its address on the loopback interface
    ipc: str  # its address in the file system
    pid: int  # of its process


@contextlib.contextmanager
def served_hub(*envs: str) -> Iterator[ServedHub]:
    """Serve ``envs``, as for ``envhub serve``, on loopback tcp and on ipc until the block is left.

    The hub is gone afterwards, also where the block is left by Ctrl-C, SIGTERM or SIGHUP.
    """
    with tempfile.TemporaryDirectory(prefix="envhub-") as name, _signals_unwind():
        folder = Path(name)
        binds = ["--bind", "tcp://127.0.0.1:0", "--bind", f"ipc://{folder / 'hub.sock'}"]
        # Files, not pipes: what workers print goes the same way, and nothing would empty a pipe later on.
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "envhub", "serve", *envs, *binds],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C on the terminal is the program's, which ends the hub in good order
            )
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while len(printed := addresses((folder / "stdout").read_text())) < 2:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise HubUnreachable(f"`envhub serve` did not start: {(folder / 'stderr').read_text().strip()}")
                time.sleep(POLL_S)
            yield ServedHub(printed[0], printed[1], process.pid)
        finally:
            stop(process, STOP_TIMEOUT_S)


def stop(process: subprocess.Popen[Any], timeout: float) -> None:
    """Terminate a process, and kill it if that takes more than ``timeout`` seconds."""
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also where a second Ctrl-C ended the wait; the workers of a killed hub end with it
        process.kill()
        process.wait()


def addresses(printed: str) -> list[str]:
    """The addresses in what ``envhub serve`` has printed so far; a line still being written does not count."""
    lines = [line for line in printed.splitlines(keepends=True) if line.endswith("\n")]
    return [line.removeprefix(LISTENING).strip() for line in lines if line.startswith(LISTENING)]


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, through every ``finally``."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return
    # A program under nohup ignores SIGHUP, and one that has handlers of its own knows better.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
