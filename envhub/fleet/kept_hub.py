"""A hub that is started again when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from envhub.fleet.hub_process import HubProcess
from envhub.fleet.reports import HubState

LINES_MAX = 2000  # of its log that are kept
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 30.0
STABLE_S = 10.0  # a process that ran for so long is started again at once
STOP_TIMEOUT_S = 30.0  # for the hub to drain


class KeptHub:
    """A hub that ``run`` keeps.

    Attributes:
        state: of the hub.
        starts: number of times that it was started.
        why: how it ended the last time; empty if it has not.
        failures: number of times in a row that it ended without listening.
    """

    def __init__(
        self, arguments: Sequence[str], binds: Sequence[str], environ: Mapping[str, str], files: Sequence[int] = ()
    ) -> None:
        """Prepare a hub, which gets these open ``files`` by their numbers.

        The first of ``binds`` may be on port 0, and is on the port that it got from then on.
        """
        self.state = HubState.STARTING
        self.starts = 0
        self.why = ""
        self.failures = 0
        self._arguments, self._binds, self._environ, self._files = arguments, binds, environ, files
        self._process: HubProcess | None = None
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._stopping, self._stopped = threading.Event(), threading.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which it listens; empty if it does not."""
        process = self._process
        return process.addresses if process is not None else ()

    @property
    def pid(self) -> int:
        """Pid of its process; 0 without one."""
        process = self._process
        return process.pid if process is not None else 0

    def log(self, lines: int) -> list[str]:
        """Return the last lines of its log, the newest last."""
        return [*self._lines][-lines:] if lines > 0 else []

    def say(self, line: str) -> None:
        """Add a line to its log, which is also on this process's stderr."""
        self._lines.append(line)
        with contextlib.suppress(OSError):  # such as of a full disk, which ends no hub
            print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Let the hub drain, and wait until its process has ended."""
        self._stopping.set()
        os.write(self._stop_write, b"x")
        self._stopped.wait()

    def run(self) -> None:
        """Keep the hub until ``stop`` is called; the process ends with the thread that calls this."""
        binds, backoff_s = self._binds, 0.0
        while not self._stopping.wait(backoff_s):
            started_s = time.monotonic()
            addresses = self._run_once(binds)
            # It comes back where it was, unless another process has taken that port meanwhile.
            binds = [*addresses[:1], *self._binds[1:]] if addresses else self._binds
            is_stable = time.monotonic() - started_s > STABLE_S
            backoff_s = 0.0 if is_stable else min(max(2 * backoff_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
        self.state = HubState.STOPPED
        self._stopped.set()

    def _run_once(self, binds: Sequence[str]) -> tuple[str, ...]:
        """Run a process to its end; returns the addresses that it had."""
        self.state = HubState.STARTING
        self.starts += 1
        process = self._process = HubProcess(self._arguments, binds, self._environ, self._files)
        try:
            status = process.attend(self.say, self._stop_read, STOP_TIMEOUT_S)
        finally:
            self._process, self.state = None, HubState.WAITING
        if not self._stopping.is_set():
            how = f"exited with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
            self.why = f"the hub {how}"
            self.failures = 0 if process.addresses else self.failures + 1
            self.say(f"{self.why} and is started again")
        return process.addresses
