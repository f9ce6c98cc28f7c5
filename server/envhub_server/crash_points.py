"""Crash points: where a process of the hub can be told to kill itself, for tests that do so at each of them in turn.

``ENVHUB_CRASH_AT=ROLE:NUMBER:FILE`` has the first process of that role (``hub``, ``zygote`` or ``worker``) that comes
to its NUMBER-th point kill itself with SIGKILL there. It makes FILE before, with the point's name in it, and where
FILE stands already nobody is killed: so whoever takes the place of the dead lives, and a run that comes to its end
without FILE has fewer points. It is read once, when a process starts; where it is not set nothing is wrapped.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
from typing import Any, Callable

VARIABLE = "ENVHUB_CRASH_AT"

# Before and after each call of these is a point: a message sent or received, an outcome or a word stored, a bell rung,
# a request taken, a reply sent, an instruction carried out.
_CHANNEL = (
    "envhub_server.channel:Channel.send",
    "envhub_server.channel:Channel.receive",
)
POINTS = {
    "worker": (
        *_CHANNEL,
        "envhub_server.rows:Row.step",
        "envhub_server.rows:Row.reset",
        "envhub_server.worker:Worker._finish",
        "envhub_server.worker:Worker._ring",
    ),
    "zygote": (*_CHANNEL, "envhub_server.zygote:Zygote._fork_worker"),
    "hub": (
        *_CHANNEL,
        "envhub.wire:receive",
        "envhub.wire:send",
        "envhub_server.hosting:Host._carry_out",
        "envhub_server.supervisor:WorkerProcess.ring",
    ),
}


def install(role: str) -> None:
    """Wrap what is listed for this role, if the environment says so."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    where, number, file = wanted.split(":", 2)
    if where == role:
        countdown = Countdown(f"{role} {number}", int(number), file)
        for place in POINTS[role]:
            countdown.wrap(place)


class Countdown:
    """Counts the points that this process passes, and ends it at one of them."""

    def __init__(self, label: str, number: int, file: str) -> None:
        """End this process at its ``number``-th point unless ``file`` exists; it is to hold ``label`` and the point."""
        self._label = label
        self._left = number
        self._file = file
        self._pid = os.getpid()  # children pass points, too, and are not meant

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
        if os.getpid() != self._pid:
            return
        self._left -= 1
        if self._left:
            return
        try:
            descriptor = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        os.write(descriptor, f"{self._label}: {point}".encode())
        os.kill(self._pid, signal.SIGKILL)
