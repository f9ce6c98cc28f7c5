"""Runs a supervisor without a hub, and tells how a worker ended: ``python supervised.py ENV ACTION``.

It is a program of its own because a supervisor reaps every child of its process that nobody else knows.
"""

from __future__ import annotations

import dataclasses
import json
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack
from envhub_server.ipc import control
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Handlers, WorkerHandle

START_TIMEOUT_S = 30.0


class Loop:
    """Watches descriptors as a hub's loop does."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}

    def register(self, descriptor: int, handler: Callable[[], object]) -> None:
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def want_writable(self, descriptor: int, wanted: bool) -> None:
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unregister(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def run(self, until: Callable[[], object], timeout_s: float) -> None:
        """Call handlers until the condition is true, or the time is over."""
        end_s = time.monotonic() + timeout_s
        while not until() and time.monotonic() < end_s:
            for descriptor, _ in self._epoll.poll(0.01):
                if descriptor in self._handlers:
                    self._handlers[descriptor]()


def build(env: str) -> control.Build:
    """Of one env of ``launchers`` that acts in its constructor already."""
    nothing = {"modules": [], "factories": b"", "autoreset_mode": "NextStep", "allow_pickle": False}
    return control.Build(worker=0, rows=[0], name="", kwargs=msgpack.packb({}), entry=env, **nothing)  # type: ignore[arg-type]


def main(env: str, how: str) -> None:
    """Have a worker make the env; then dump and kill it, kill it, or wait for its end, and print the ending."""
    loop = Loop()
    supervisor = Supervisor(loop, sys.executable)
    heard: list[Any] = []
    endings: list[ExitCause] = []
    (worker,) = supervisor.start([Handlers(heard.append, endings.append, lambda pid: None)])
    worker.tell(build(env))
    act(loop, worker, how, endings)
    loop.run(lambda: endings, START_TIMEOUT_S)
    supervisor.close()
    print("\n" + json.dumps(dataclasses.asdict(endings[0])))


def act(loop: Loop, worker: WorkerHandle, how: str, endings: list[ExitCause]) -> None:
    if how in ("dump", "kill"):
        loop.run(lambda: "about to" in worker.log_tail, START_TIMEOUT_S)
    if how == "dump":
        worker.dump()
        loop.run(lambda: "in main" in worker.log_tail, START_TIMEOUT_S)
    if how in ("dump", "kill"):
        worker.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
