"""A process of ``envhub serve`` that ends with the thread that started it, and its output by lines."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

LINE_BYTES_MAX = 1 << 14
READ_BYTES = 1 << 16
LISTENING = "listening on "

# The kernel kills the hub when the thread that started it ends, and the hub is an ``envhub serve`` as any other. It has
# a process group of its own, and no session of its own: Linux shares the CPUs among sessions first.
_BOOT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.setpgid(0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, "-m", "envhub", "serve", *sys.argv[2:]])
"""


class HubProcess:
    """A process of ``envhub serve`` with these arguments, a child of the thread that makes this object.

    Attributes:
        pid: of the process.
        addresses: where it listens, in the order of ``binds``; empty before it listens at all of them.
    """

    def __init__(
        self, arguments: Sequence[str], binds: Sequence[str], environ: Mapping[str, str], files: Sequence[int]
    ) -> None:
        options = [part for bind in binds for part in ("--bind", bind)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), *arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "PYTHONUNBUFFERED": "1"},
            pass_fds=files,
        )
        self.pid = self._process.pid
        self.addresses: tuple[str, ...] = ()
        self._binds = len(binds)
        self._listening: list[str] = []

    def attend(self, say: Callable[[str], None], stop: int, stop_timeout_s: float) -> int:
        """Hand each line of its stderr to ``say`` until it ends; returns its exit status, negative for a signal.

        Args:
            say: called with each line.
            stop: a descriptor. Once it is readable, the process gets a SIGTERM.
            stop_timeout_s: the seconds after which it then gets a SIGKILL.
        """
        pidfd = os.pidfd_open(self.pid)
        readers = {reader.descriptor: reader for reader in self._readers(say)}
        kill_at_s: float | None = None
        try:
            with selectors.DefaultSelector() as selector:
                for descriptor in (*readers, pidfd, stop):
                    selector.register(descriptor, selectors.EVENT_READ)
                ready: set[int] = set()
                while pidfd not in ready:
                    left_s = None if kill_at_s is None else max(0.0, kill_at_s - time.monotonic())
                    ready = {key.fd for key, _ in selector.select(left_s)}
                    for descriptor in ready & readers.keys():
                        if not readers[descriptor].read():
                            selector.unregister(descriptor)
                    if stop in ready:
                        selector.unregister(stop)
                        self._process.terminate()
                        kill_at_s = time.monotonic() + stop_timeout_s
                    elif kill_at_s is not None and time.monotonic() >= kill_at_s:
                        self._process.kill()
            for reader in readers.values():
                reader.finish()
        finally:
            os.close(pidfd)
            status = self._end()
        return status

    def _readers(self, say: Callable[[str], None]) -> list[LineReader]:
        assert self._process.stdout is not None and self._process.stderr is not None
        return [LineReader(self._process.stdout, self._hear), LineReader(self._process.stderr, say)]

    def _hear(self, line: str) -> None:
        """Take the addresses from the lines that the hub prints first."""
        if not self.addresses and line.startswith(LISTENING):
            self._listening.append(line.removeprefix(LISTENING))
            if len(self._listening) == self._binds:
                self.addresses = tuple(self._listening)

    def _end(self) -> int:
        """Kill what is left of it, and return its exit status."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # before it is reaped, after which another may have its number
        status = self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        return status


class LineReader:
    """Reads the lines of a pipe without waiting, each of at most ``LINE_BYTES_MAX`` bytes.

    Attributes:
        descriptor: of the pipe.
    """

    def __init__(self, stream: IO[bytes], take: Callable[[str], None]) -> None:
        self.descriptor = stream.fileno()
        self._take = take
        self._rest = b""
        os.set_blocking(self.descriptor, False)

    def read(self) -> bool:
        """Take the lines that have come; returns False at the end of the pipe, or if nothing has come."""
        try:
            chunk = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line[:LINE_BYTES_MAX].decode(errors="replace"))
        return bool(chunk)

    def finish(self) -> None:
        """Take what the pipe still has, as its writer has ended."""
        while self.read():
            pass
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
