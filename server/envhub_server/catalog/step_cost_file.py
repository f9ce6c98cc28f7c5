"""The file in which private hubs keep the measured costs of steps for later programs.

It is small and belongs to the user. A missing, broken or old file changes only the number of workers. Each program
replaces the whole file at once, so it is always complete.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from envhub.protocol.messages import Make
from envhub.regular_file import open_regular_file
from envhub_server.catalog.step_costs import StepCost, StepCosts, key
from envhub_server.log import Logger

ENVIRONMENT_VARIABLE = "ENVHUB_CACHE"
FILE_BYTES_MAX = 1 << 20

log = Logger("envhub.hub")


def read(path: Path | None) -> StepCosts:
    """The costs in the file at ``path``; none if it cannot be read, or the path is None."""
    if path is None:
        return StepCosts()
    try:
        with open_regular_file(path) as file:
            return StepCosts.of_text(file.read(FILE_BYTES_MAX).decode("utf-8", "replace"))
    except FileNotFoundError:
        return StepCosts()
    except OSError as error:
        # Event: The file of what steps take cannot be read; it counts as empty.
        log.warning("step_costs_unread", path=str(path), error=str(error))
        return StepCosts()


def write(path: Path | None, noted: Mapping[str, StepCost]) -> None:
    """Add these costs to those in the file now; logs a failure, after which the file is as before."""
    if path is None or not noted:
        return
    costs = read(path)
    for known_as, cost in noted.items():
        costs.note(known_as, cost)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(costs.text())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        # Event: The file of what steps take cannot be written.
        log.warning("step_costs_unwritten", path=str(path), error=str(error))


class KnownCosts:
    """The costs that a hub knows, from the file at ``path``, if there is one, and all its sessions."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._costs = read(path)
        self._unwritten: dict[str, StepCost] = {}

    def find(self, make: Make) -> StepCost | None:
        """The cost of a step of such envs, if it is known."""
        return self._costs.find(key(make))

    def note(self, make: Make, cost: StepCost) -> None:
        """Note the cost of a step of these envs; the first note is written at once, later ones by ``write``."""
        if not (known_as := key(make)):
            return
        self._costs.note(known_as, cost)
        first = known_as not in self._unwritten
        self._unwritten[known_as] = cost
        if first:
            write(self._path, {known_as: cost})

    def write(self) -> None:
        """Write all costs that are not written yet."""
        write(self._path, self._unwritten)
        self._unwritten.clear()


def cache_path(environ: Mapping[str, str]) -> Path | None:
    """The file in the user's cache folder; None if ``ENVHUB_CACHE`` is ``off``, or the user has no such folder."""
    if environ.get(ENVIRONMENT_VARIABLE, "").lower() in ("off", "0", "no", "false"):
        return None
    folder = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # as the XDG base directory specification says
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        folder = os.path.join(home, ".cache")
    return Path(folder, "envhub", "step_costs.json")
