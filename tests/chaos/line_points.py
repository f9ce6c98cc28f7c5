"""A worker that is killed between any two of its statements: injected by an env, for the product knows nothing of it.

The env's constructor installs a trace function. With ``record`` it writes a line to that file for each statement that
the worker executes from then on: which request it serves, and which statement of which file, ``PHASE FILE:LINE``. With
``point`` it kills the worker before the ``occurrence``-th execution of that statement, if no other worker was before.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from chaos.chain_env import ChainEnv

MODULES = (
    "envhub_server.worker.process",
    "envhub_server.worker.stepper",
    "envhub_server.worker.builder",
    "envhub_server.worker.calls",
    "envhub_server.worker.row",
    "envhub_server.ipc.channel",
    "envhub.arena.memory",
)


class LinePoints:
    """The trace function of one worker."""

    def __init__(self, record: str, point: str, occurrence: int, killed: str) -> None:
        self._files = {sys.modules[name].__file__ or "": name.rpartition(".")[2] for name in MODULES}
        self._record = _first(record)
        self._point, self._left, self._killed = point, occurrence, killed
        self._phase = "build"

    def install(self) -> None:
        """Trace what is executed from now on, also in the calls that are under way."""
        sys.settrace(self.trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                frame.f_trace = self.trace
            frame = frame.f_back

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """As ``sys.settrace`` wants it."""
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None
        name = frame.f_code.co_name
        caller = frame.f_back.f_code.co_name if frame.f_back is not None else ""
        if event == "call" and (caller == "handle" or name == "serve_rows"):
            self._phase = name
        if event == "line":
            self._pass(f"{self._phase} {file}:{frame.f_lineno}")
        return self.trace

    def _pass(self, point: str) -> None:
        if self._record >= 0:
            os.write(self._record, f"{point}\n".encode())
        if point == self._point:
            self._left -= 1
            if not self._left and _first(self._killed) >= 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _first(path: str) -> int:
    """A descriptor of this new file; -1 where there is no name, or where it exists."""
    try:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600) if path else -1
    except FileExistsError:
        return -1


_installed: list[LinePoints] = []  # once for all envs of a worker


class TracedEnv(ChainEnv):
    """A chain in a worker that is traced."""

    def __init__(
        self, length: int, record: str = "", point: str = "", occurrence: int = 1, killed: str = "", large: bool = False
    ) -> None:
        super().__init__(length=length)
        self._large = large
        if not _installed:
            _installed.append(LinePoints(record, point, occurrence, killed))
            _installed[0].install()

    def step(self, action: Any) -> Any:
        seen, reward, terminated, truncated, _ = super().step(action)
        info = {"story": "x" * 5000} if self._large and self._steps % 2 else {"steps": self._steps}
        return seen, reward, terminated, truncated, info

    def echo(self, value: Any) -> Any:
        return value
