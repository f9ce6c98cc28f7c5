"""The process of a zygote, and the hub's ends of what connects the two.

A private hub starts its first one before it imports what it needs itself, so this module imports little.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from envhub.process import blocked
from envhub_server.ipc import process_marks
from envhub_server.processes.interpreter import Environment

BOOTSTRAP = str(Path(__file__).parents[1] / "worker" / "bootstrap.py")


class ZygoteProcess:
    """A process that executes the bootstrap of workers.

    Attributes:
        hub: the hub's name in the marks of its processes.
        process: the process.
        pidfd: readable once the process has ended.
        flags: the options of its interpreter.
        control: the socket for control messages.
        said: the pipe by which the bootstrap says how far it has come.
        outputs: the pipes of its stdout and its stderr, which ``WorkerOutput`` owns once it reads them.
    """

    def __init__(
        self,
        hub: str,
        program: str,
        environ: Environment,
        folder: str = "",
        libraries: Sequence[str] = (),
        guarded: int = 0,
        imports: str = "",
        flags: tuple[str, ...] = (),
    ) -> None:
        """Start the process. Raises ``OSError`` and leaves nothing behind.

        Args:
            hub: as the attribute.
            program: the interpreter's.
            environ: its environment variables, without its mark.
            folder: its working directory; empty for the hub's.
            libraries: that it imports for all workers that it forks.
            guarded: the number of running workers that it is about to guard.
            imports: the folder from which workers import what is nowhere else; empty for none.
            flags: options of the interpreter.
        """
        self.hub, self.flags = hub, flags
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as far_ends:
            self.control, control = socket.socketpair()
            undo.callback(self.control.close)
            far_ends.callback(control.close)
            self.control.setblocking(False)
            pipes = []
            for _ in ("said", "stdout", "stderr"):
                near, far = os.pipe()
                undo.callback(os.close, near)
                far_ends.callback(os.close, far)
                os.set_blocking(near, False)
                pipes.append((near, far))
            (self.said, *self.outputs), (said, stdout, stderr) = zip(*pipes, strict=True)
            numbers = map(str, (control.fileno(), said, os.getpid(), guarded))
            with blocked():
                self.process = subprocess.Popen(
                    [program, *flags, BOOTSTRAP, *numbers, ",".join(libraries), imports, *exposed()],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={**environ, process_marks.VARIABLE: process_marks.mark(hub, process_marks.NO_WORKER)},
                    cwd=folder or None,
                    pass_fds=[control.fileno(), said],
                )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            self.pidfd = os.pidfd_open(self.process.pid)
            undo.pop_all()

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()
        os.close(self.said)
        os.close(self.pidfd)


def exposed() -> list[str]:
    """The modules that a bootstrap makes importable, as its last arguments; imports none of them."""
    specs = map(find_spec, ("envhub", "envhub_server", "msgpack_numpy"))
    return [f"{spec.name}={spec.origin}" for spec in specs if spec is not None]
