"""The folder of replays: files of envs that failed, the oldest of which give way."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from envhub_server.ipc.replay_file import SUFFIX

ENVIRONMENT_VARIABLE = "ENVHUB_REPLAYS"
NAME_CHARS_MAX = 60  # of an env, in the name of a file
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")


def default_path(environ: Mapping[str, str]) -> Path | None:
    """The folder of this user's hubs: what ``ENVHUB_REPLAYS`` says, else one for state; None where that says "off"."""
    said = environ.get(ENVIRONMENT_VARIABLE, "")
    if said == "off":
        return None
    if said:
        return Path(said)
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".local" / "state"
    return Path(state) / "envhub" / "replays"


def name_beginning(env: str, session: str) -> str:
    """What the names of the replays of this session begin with."""
    return f"{_OTHER.sub('-', env).strip('-.')[:NAME_CHARS_MAX] or 'env'}-{session}"


class ReplayFolder:
    """A bounded folder of files."""

    def __init__(self, path: Path, count_max: int, bytes_max: int) -> None:
        """Of at most so many files and bytes; the folder is made when the first file is kept."""
        self.path = path
        self._count_max, self._bytes_max = count_max, bytes_max

    def keep(self, name: str, blob: bytes) -> Path:
        """Write a file under this name, whole or not at all, and remove the oldest that are too many.

        Raises:
            OSError: it cannot be written, or is larger than the folder may be.
        """
        if len(blob) > self._bytes_max:
            raise OSError(f"{len(blob)} bytes are more than replays_bytes_max={self._bytes_max}")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path / f"{name}{SUFFIX}"
        descriptor, written = tempfile.mkstemp(dir=self.path, prefix=".")
        try:
            with open(descriptor, "wb") as file:
                file.write(blob)
            os.replace(written, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise
        self._prune()
        return path

    def _prune(self) -> None:
        nbytes = 0
        for number, (_, path, size) in enumerate(_found(self.path)):
            nbytes += size
            if number >= self._count_max or nbytes > self._bytes_max:
                path.unlink(missing_ok=True)


def files_in(folder: Path) -> list[Path]:
    """All replays in this folder, the newest first."""
    return [path for _, path, _ in _found(folder)]


def _found(folder: Path) -> list[tuple[int, Path, int]]:
    """When each replay was written, its path and its size, the newest first."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another hub has removed it
            status = path.stat()
            found.append((status.st_mtime_ns, path, status.st_size))
    return sorted(found, reverse=True)
