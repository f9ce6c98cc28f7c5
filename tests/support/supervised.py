"""Runs a supervisor without a hub: ``python supervised.py ENV ACTION`` tells how a worker ended.

``python supervised.py zygotes LIBRARY,... ...`` starts a worker that shares each of these sets in turn, and tells of
which sets there are zygotes then.

It is a program of its own because a supervisor reaps every child of its process that nobody else knows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable

import msgpack
from envhub_server.ipc import control
from envhub_server.loop import Poller
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Events, ExitCause, WorkerExited, WorkerHandle

START_TIMEOUT_S = 30.0


class Loop:
    """Waits for descriptors as a hub's loop does."""

    def __init__(self) -> None:
        self.poller = Poller()
        self.events: Events = deque()

    @property
    def causes(self) -> list[ExitCause]:
        """How workers have ended."""
        return [event.cause for _, event in self.events if isinstance(event, WorkerExited)]

    def run(self, until: Callable[[], object], timeout_s: float) -> None:
        """Handle what comes until the condition is true, or the time is over."""
        end_s = time.monotonic() + timeout_s
        while not until() and time.monotonic() < end_s:
            self.poller.handle(self.poller.wait(0.01))


def build(env: str) -> control.Build:
    """Of one env of ``launchers`` that acts in its constructor already."""
    nothing = {"modules": [], "factories": b"", "autoreset_mode": "NextStep", "allow_pickle": False}
    return control.Build(worker=0, rows=[0], name="", kwargs=msgpack.packb({}), entry=env, **nothing)  # type: ignore[arg-type]


def main(env: str, how: str) -> None:
    """Have a worker make the env; then dump and kill it, kill it, or wait for its end, and print the ending."""
    loop = Loop()
    supervisor = Supervisor(loop.poller, loop.events, os.environ)
    (worker,) = supervisor.start(1, [0])
    worker.send(build(env))
    act(loop, worker, how)
    loop.run(lambda: loop.causes, START_TIMEOUT_S)
    supervisor.close()
    print("\n" + json.dumps(dataclasses.asdict(loop.causes[0])))


def act(loop: Loop, worker: WorkerHandle, how: str) -> None:
    if how in ("dump", "kill"):
        loop.run(lambda: "about to" in worker.log_tail, START_TIMEOUT_S)
    if how == "dump":
        worker.dump_stacks()
        loop.run(lambda: "in main" in worker.log_tail, START_TIMEOUT_S)
    if how in ("dump", "kill"):
        worker.kill()


def zygotes(*libraries: str) -> None:
    """Start a worker with each set of libraries in turn, and print the sets of which there are zygotes."""
    loop = Loop()
    supervisor = Supervisor(loop.poller, loop.events, os.environ)
    born: list[bool] = []
    for number, library in enumerate(libraries):
        (worker,) = supervisor.start(1, [number], libraries=library.split(","))
        loop.run(lambda worker=worker: worker.pid, START_TIMEOUT_S)  # type: ignore[misc]
        born.append(worker.pid is not None)
    loop.run(lambda: not supervisor._retired, START_TIMEOUT_S)
    left = [",".join(key.libraries) for key in supervisor._in_use if key.libraries]
    supervisor.close()
    print(json.dumps({"born": born, "left": left}))


if __name__ == "__main__":
    if sys.argv[1] == "zygotes":
        zygotes(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
