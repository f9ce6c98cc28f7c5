"""Hubs in processes of their own, started as a user starts them, and a look at what is left of them."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import envhub_client
import psutil

import envhub

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent
START_TIMEOUT_S = 60.0
_ACCEPTS = 0x10000  # a flag of /proc/net/unix
_FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (envhub, envhub_client))


class ServedHub:
    """An ``envhub serve`` process."""

    def __init__(self, process: subprocess.Popen[bytes], addresses: list[str], log: Path) -> None:
        self.process = process
        self.addresses = addresses
        self._log = log

    @property
    def tcp(self) -> str:
        return next(address for address in self.addresses if address.startswith("tcp://"))

    @property
    def ipc(self) -> str:
        return next(address for address in self.addresses if address.startswith("ipc://"))

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def audit(self) -> list[dict[str, Any]]:
        """The whole lines of the log that say who did what."""
        return [line for line in map(json.loads, self.log.splitlines()[: self.log.count("\n")]) if "audit" in line]

    def workers(self) -> list[psutil.Process]:
        return worker_processes(self.process.pid)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 15.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def serve(
    folder: Path,
    *arguments: str,
    binds: Sequence[str] | None = None,
    cwd: Path = HERE,
    environ: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "envhub"),
) -> Iterator[ServedHub]:
    """Run ``envhub serve`` until the block ends; its stderr goes to a file in ``folder``."""
    if binds is None:
        binds = ["tcp://127.0.0.1:0", f"ipc://{folder}/hub.sock"]
    options = [part for bind in binds for part in ("--bind", bind)]
    log = folder / f"hub-{time.monotonic_ns()}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", *arguments, *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            bufsize=0,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
        )
    try:
        addresses = _addresses(process, len(binds), log)
        yield ServedHub(process, addresses, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert '"internal_error"' not in log.read_text()


def _addresses(process: subprocess.Popen[bytes], count: int, log: Path) -> list[str]:
    """The addresses the hub prints; read from the descriptor, since a buffer would hide lines from ``select``."""
    assert process.stdout is not None
    printed = b""
    while printed.count(b"\n") < count:
        heard, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        chunk = os.read(process.stdout.fileno(), 4096) if heard else b""
        if not chunk:
            raise RuntimeError(f"the hub did not start: {printed!r}\n{log.read_text()}")
        printed += chunk
    return [line.removeprefix("listening on ") for line in printed.decode().splitlines()[:count]]


def below(hub: psutil.Process, name: str = "envhub-zygote") -> list[tuple[int, str]]:
    """Number and name of the hub's children of that name, or, if it is empty, of all of them."""
    found = []
    for child in hub.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((child.pid, child.name()))
    return [child for child in found if name in child[1]]


def worker_processes(parent: int) -> list[psutil.Process]:
    """The workers below a process, living ones only."""
    try:
        below = psutil.Process(parent).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if _is_worker(process)]


def worker_pids() -> set[int]:
    """The process ids of the workers of this process's own hubs."""
    return {process.pid for process in worker_processes(os.getpid())}


def worker_pid(others: Collection[int]) -> int:
    """The process id of the first worker of this process's own hubs that is none of these."""
    return next(process.pid for process in worker_processes(os.getpid()) if process.pid not in others)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return lives(process) and process.name() == "envhub-worker"
    except psutil.NoSuchProcess:
        return False


def lives(process: psutil.Process) -> bool:
    """Whether the process runs; one that waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Have these processes stopped: what they are to do is under way, however long the block takes."""
    processes = [psutil.Process(pid) for pid in pids]
    for process in processes:
        process.suspend()
    try:
        assert wait_until(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes))
        yield
    finally:
        for process in processes:
            process.resume()


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Within the block, SIGINT comes after so many seconds."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def signalled_in_a_wait(number: int) -> Iterator[None]:
    """Send the main thread this signal once it waits in EnvHub's code, for something that cannot happen meanwhile."""
    main, ended = threading.main_thread().ident, threading.Event()
    assert main is not None

    def waits() -> bool:
        found = {_place(main)}
        for _ in range(3):
            if ended.wait(0.01):
                return True
            found.add(_place(main))
        return len(found) == 1 and None not in found

    def send() -> None:
        wait_until(waits)
        while not ended.is_set():
            signal.pthread_kill(main, number)
            ended.wait(10)  # what a handler raises in a destructor is lost

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        ended.set()
        sending.join()


def _place(thread: int) -> str | None:
    """Where a thread is, as its stack says, if EnvHub was called there.

    Frames of another thread, as ``sys._current_frames`` makes them, crash CPython 3.11 now and then.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().split("\n\n")
    (stack,) = (stack for stack in stacks if f"0x{thread:016x}" in stack.partition("\n")[0])
    return stack if any(folder in stack for folder in _FOLDERS) else None


def free_port() -> int:
    """A port that is free, and that the kernel gives to nobody who has not asked for this one."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def listening(process: int) -> set[str]:
    """The addresses on which this process and all below it listen."""
    found = set()
    for each in [psutil.Process(process), *psutil.Process(process).children(recursive=True)]:
        try:
            ends = each.net_connections("all")
        except psutil.NoSuchProcess:  # it has ended, and listens nowhere
            continue
        for end in ends:
            if end.status == psutil.CONN_LISTEN:
                found.add(f"{end.laddr.ip}:{end.laddr.port}")
        numbers = _sockets(each.pid)
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *path = line.split()
            if inode in numbers and int(flags, 16) & _ACCEPTS:
                found.add(path[0] if path else "")
    return found


def _sockets(process: int) -> set[str]:
    """The inode numbers of the sockets that a process has open; none if it has ended."""
    found = set()
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # this one was closed meanwhile
                found.add(os.readlink(link))
    return {target[8:-1] for target in found if target.startswith("socket:")}


def kill_worker(pid: int) -> None:
    """Kill a worker, and wait until its hub has reaped it and so knows of its end."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not psutil.pid_exists(pid))


def at_rest(count: Callable[[], int]) -> int:
    """What this gives once it has been the same for half a second."""
    found, since_s = count(), time.monotonic()
    while time.monotonic() < since_s + 0.5:
        time.sleep(0.05)
        if (now := count()) != found:
            found, since_s = now, time.monotonic()
    return found


def session_row(hub: str, envs: Any) -> dict[str, Any]:
    """What the hub at this address says of the session of these envs."""
    with envhub.connect(hub) as client:
        (row,) = [each for each in client.sessions() if each["session"] == envs.token[:8]]
    return row


def written_replay(name: str) -> Path:
    """The file of the replay of this name, once the hub has written it: a moment after it told the name."""
    path = Path(os.environ["ENVHUB_REPLAYS"]) / f"{name}.replay"
    assert name and wait_until(path.exists, 10), path
    return path


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> bool:
    """Whether the condition came true in time."""
    end, late = time.monotonic() + timeout, False
    while not condition():
        if late:
            return False
        time.sleep(0.01)
        late = time.monotonic() > end
    return True


LANES = ["embedded", "ipc", "tcp"]  # every way to reach a hub, as the fixture ``address`` takes them


def lane_address(request: pytest.FixtureRequest, lane: str) -> str | None:
    if lane == "embedded":
        return None
    served: ServedHub = request.getfixturevalue("hub")
    return served.ipc if lane == "ipc" else served.tcp
