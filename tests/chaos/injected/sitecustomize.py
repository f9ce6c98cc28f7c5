"""Crash points: where a process of the hub kills itself, for tests that have it do so at each of them in turn.

Python imports this file by its name when it starts, in every process that has this folder in its ``PYTHONPATH``.
``ENVHUB_CRASH_AT=ROLE:NUMBER:FILE`` has the first process of that role (``hub``, ``zygote`` or ``worker``) that comes
to its NUMBER-th point kill itself with SIGKILL there. It makes FILE before, with the point's name in it, and where
FILE exists already nobody is killed: the process that takes the place of the dead one lives, and a run that comes to
its end without FILE has fewer points.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "ENVHUB_CRASH_AT"

# Before and after each call of these is a point: a message sent or received, an outcome or a word stored, a bell rung,
# a request taken, a reply sent, an event handled, a worker told.
_CHANNEL = ("envhub_server.ipc.channel:Channel.send", "envhub_server.ipc.channel:Channel.receive")
POINTS = {
    "worker": (
        *_CHANNEL,
        "envhub_server.worker.row:Row.step",
        "envhub_server.worker.row:Row.reset",
        "envhub_server.worker.stepper:Stepper._finish",
        "envhub_server.worker.stepper:Bells.ring",
    ),
    "zygote": (*_CHANNEL, "envhub_server.worker.zygote:Zygote._fork"),
    "hub": (
        *_CHANNEL,
        "envhub.transport.sockets:receive",
        "envhub.transport.sockets:send",
        "envhub_server.hub.runtime:SessionRuntime.handle",
        "envhub_server.hub.runtime:SessionRuntime.start_processes",
        "envhub_server.hub.runtime:SessionRuntime.tell",
        "envhub_server.hub.runtime:SessionRuntime.give_arena",
        "envhub_server.hub.resources:SessionResources.ring",
        "envhub_server.memory.lost_rows:LostWorkerRows.take",
    ),
}


class Wrapping(importlib.abc.MetaPathFinder):
    """Wraps the functions of a role in their modules as these are imported."""

    def __init__(self, countdown: Countdown, places: Sequence[str]) -> None:
        self._countdown = countdown
        self._places = places

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        places = [place for place in self._places if place.partition(":")[0] == name]
        spec = importlib.machinery.PathFinder.find_spec(name, path) if places else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            for place in places:
                self._countdown.wrap(place)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def role() -> str:
    """What this process is to its hub, by the name that it has given itself."""
    name = Path("/proc/self/comm").read_text().strip()
    return {"envhub-zygote": "zygote", "envhub-imports": "imports", "envhub-worker": "worker"}.get(name, "hub")


class Countdown:
    """Counts the points that this process passes, and ends it at one of them."""

    def __init__(self, role: str, number: int, file: str) -> None:
        """End the process of this role at its ``number``-th point, unless ``file`` exists, and name the point there."""
        self._role = role
        self._label = f"{role} {number}"
        self._left = number
        self._file = file

    def wrap(self, place: str) -> None:
        """Make points of the beginning and the end of every call of ``module:Class.function``."""
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *owners, name = path.split(".")
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, self._wrapped(getattr(owner, name), path))

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def passing(*args: Any, **kwargs: Any) -> Any:
            self._pass(f"before {name}")
            found = function(*args, **kwargs)
            self._pass(f"after {name}")
            return found

        return passing

    def _pass(self, point: str) -> None:
        if role() != self._role:  # a worker is forked from the zygote, with all that is wrapped
            return
        self._left -= 1
        if self._left:
            return
        try:
            descriptor = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        os.write(descriptor, f"{self._label}: {point}".encode())
        os.kill(os.getpid(), signal.SIGKILL)


if VARIABLE in os.environ:
    wanted, number, file = os.environ[VARIABLE].split(":", 2)
    sys.meta_path.insert(0, Wrapping(Countdown(wanted, int(number), file), POINTS[wanted]))
