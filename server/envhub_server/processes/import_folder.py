"""The folder from which workers import envs' own modules, and a check that other users cannot write to it.

A module that is written there runs as the hub's user.
"""

from __future__ import annotations

import contextlib
import os

from envhub.files import weakness_of


def import_folder(folder: str) -> str:
    """The working directory of workers, given that of their environment, which is empty for the hub's own.

    Empty if it does not exist any more.
    """
    if folder:
        return folder
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


class UnsafeFolder(ValueError):
    """An env would be imported from a folder that others may write to."""


def trusted(folder: str) -> str:
    """The folder, if workers may import from it; else empty."""
    weakness = weakness_of(folder) if folder else None
    return "" if weakness is not None and weakness.open else folder
