"""The folder of replays: files of envs that failed, of which some give way once it is full."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from envhub.regular_file import open_regular_file
from envhub_server.catalog.replay_shares import Kept, giving_way, share_of
from envhub_server.ipc.replay_file import SUFFIX

ENVIRONMENT_VARIABLE = "ENVHUB_REPLAYS"
UNFINISHED = f"{SUFFIX}.part"


def default_path(environ: Mapping[str, str]) -> Path | None:
    """The folder of this user's hubs: ``ENVHUB_REPLAYS``, else one in the user's state folder; None for "off"."""
    said = environ.get(ENVIRONMENT_VARIABLE, "")
    if said == "off":
        return None
    if said:
        return Path(said)
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".local" / "state"
    return Path(state) / "envhub" / "replays"


class ReplayFolder:
    """A bounded folder of files."""

    def __init__(self, path: Path, count_max: int, bytes_max: int) -> None:
        """Bound the number of files and their bytes; the folder is made when the first file is kept."""
        self.path = path
        self._count_max, self._bytes_max = count_max, bytes_max
        self._files: dict[str, Kept] = {}  # by file name; a finished file never changes

    def keep(self, name: str, blob: bytes) -> Path:
        """Write a file under this name, whole or not at all, and remove surplus files.

        Raises:
            OSError: it cannot be written, or there is no room for it.
        """
        if len(blob) > self._bytes_max:
            raise OSError(f"{len(blob)} bytes are more than replays_bytes_max={self._bytes_max}")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path / f"{name}{SUFFIX}"
        descriptor, written = tempfile.mkstemp(dir=self.path, prefix=".", suffix=f"-{name}{UNFINISHED}")
        try:
            with open(descriptor, "wb") as file:
                with contextlib.suppress(OSError):  # where files cannot be locked, leftovers stay
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(blob)
                file.flush()
                os.fsync(descriptor)  # else the file may be empty after a loss of power
                os.replace(written, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise
        self._files.pop(path.name, None)
        self._look()
        unfinished = sum(size for _, size in _unfinished(self.path))
        bytes_max = max(
            self._bytes_max - unfinished, len(blob)
        )  # the new file is kept even if others are being written
        for each in giving_way(self._files.values(), self._count_max, bytes_max):
            (self.path / f"{each}{SUFFIX}").unlink(missing_ok=True)
        return path

    def _look(self) -> None:
        """Learn which replays of hubs there are; only new ones are asked for their size, for there may be many."""
        names = {name for name in os.listdir(self.path) if _is_of_a_hub(name, SUFFIX)}
        for name in self._files.keys() - names:
            del self._files[name]
        self._files |= _kept(self.path, names - self._files.keys())

    def remove_leftovers(self) -> None:
        """Remove what hubs were writing when they were killed; what another hub is writing is locked by it."""
        for path, _ in _unfinished(self.path):
            with contextlib.suppress(OSError), open_regular_file(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _is_of_a_hub(name: str, suffix: str) -> bool:
    """True if a hub has named this file. Another one, also with this suffix, is a user's own, and is never removed."""
    return name.endswith(suffix) and share_of(name.removesuffix(suffix)) != ""


def files_in(folder: Path) -> list[Path]:
    """All replays in this folder, the newest first."""
    names = [path.name for path in folder.glob(f"*{SUFFIX}")]
    return [folder / f"{file.name}{SUFFIX}" for file in sorted(_kept(folder, names).values(), reverse=True)]


def _kept(folder: Path, names: Iterable[str]) -> dict[str, Kept]:
    """The replays in the files of these names."""
    files = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another hub has removed it
            status = os.stat(folder / name)
            if stat.S_ISREG(status.st_mode):  # a pipe is not to be read, nor a folder to be removed
                files[name] = Kept(status.st_mtime_ns, name.removesuffix(SUFFIX), status.st_size)
    return files


def _unfinished(folder: Path) -> list[tuple[Path, int]]:
    """The files that are being written, or were when their hub was killed, and their sizes."""
    files = []
    for name in os.listdir(folder) if folder.exists() else ():
        if _is_of_a_hub(name, UNFINISHED):
            with contextlib.suppress(FileNotFoundError):  # it is finished
                files.append((folder / name, os.stat(folder / name).st_size))
    return files
