"""Runs a supervisor without a hub: ``python supervised.py ENV ACTION`` tells how a worker ended.

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
from envhub_server.loop import Loop
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Events, ExitCause, WorkerExited, WorkerHandle

START_TIMEOUT_S = 30.0


class HubLoop:
    """Waits for descriptors as a hub's loop does."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.events: Events = deque()

    @property
    def causes(self) -> list[ExitCause]:
        """How workers have ended."""
        return [event.cause for _, event in self.events if isinstance(event, WorkerExited)]

    def run(self, until: Callable[[], object], timeout_s: float) -> None:
        """Handle what comes until the condition is true, or the time is over."""
        end_s = time.monotonic() + timeout_s
        while not until() and time.monotonic() < end_s:
            self.loop.poller.handle(self.loop.poller.wait(0.01))
            self.loop.schedule.call_expired(self.loop.clock.now_s())


def build(env: str) -> control.Build:
    """Of one env of ``launchers`` that acts in its constructor already."""
    nothing = {"modules": [], "factories": b"", "autoreset_mode": "NextStep", "allow_pickle": False}
    return control.Build(worker=0, rows=[0], name="", kwargs=msgpack.packb({}), entry=env, **nothing)  # type: ignore[arg-type]


def main(env: str, how: str) -> None:
    """Have a worker make the env; then dump and kill it, kill it, or wait for its end, and print the ending."""
    loop = HubLoop()
    supervisor = Supervisor(loop.loop, loop.events, os.environ)
    (worker,) = supervisor.start(1, [0])
    worker.send(build(env))
    act(loop, worker, how)
    loop.run(lambda: loop.causes, START_TIMEOUT_S)
    supervisor.close()
    print("\n" + json.dumps(dataclasses.asdict(loop.causes[0])))


def act(loop: HubLoop, worker: WorkerHandle, how: str) -> None:
    if how in ("dump", "kill"):
        loop.run(lambda: "about to" in worker.log_tail, START_TIMEOUT_S)
    if how == "dump":
        worker.dump_stacks()
        loop.run(lambda: "in main" in worker.log_tail, START_TIMEOUT_S)
    if how in ("dump", "kill"):
        worker.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
