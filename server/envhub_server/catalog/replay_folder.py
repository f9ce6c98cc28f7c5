"""The folder of replays: files of envs that failed, of which the oldest are removed once it is full."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from envhub_server.ipc.replay_file import SUFFIX

ENVIRONMENT_VARIABLE = "ENVHUB_REPLAYS"
FILES_MAX = 1000
NAME_CHARS_MAX = 60  # of an env, in the name of a file

_OTHER = re.compile(r"[^A-Za-z0-9._-]+")
_NAMED = re.compile(rf".+-[0-9a-f]{{16}}-(?:env|worker)[0-9]+--?[0-9]+{re.escape(SUFFIX)}(?:\.part)?")


def default_path(environ: Mapping[str, str]) -> Path | None:
    """The folder of this user's hubs: ``ENVHUB_REPLAYS``, else one in the user's state folder; None for "off"."""
    said = environ.get(ENVIRONMENT_VARIABLE, "")
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".local" / "state"
    return None if said == "off" else Path(said or Path(state) / "envhub" / "replays")


def name_beginning(env: str, drawn: str) -> str:
    """The beginning of the names of a session's replays, with 16 random hexadecimal digits."""
    return f"{_OTHER.sub('-', env).strip('-.')[:NAME_CHARS_MAX] or 'env'}-{drawn}"


def files_in(folder: Path, suffix: str = SUFFIX) -> list[tuple[Path, os.stat_result]]:
    """All regular files with this suffix, the newest first."""
    files = []
    for path in folder.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):  # another hub has removed it
            if stat.S_ISREG((status := path.lstat()).st_mode):  # a pipe is not to be read, nor a folder to be removed
                files.append((path, status))
    return sorted(files, key=lambda each: each[1].st_mtime_ns, reverse=True)


def keep(folder: Path, name: str, blob: bytes, bytes_max: int) -> None:
    """Write a file under this name, whole or not at all; remove the oldest beyond ``bytes_max`` or ``FILES_MAX``.

    Only files that hubs have named are counted and removed, with those that were left unfinished by a hub's end. Raises
    ``OSError``.
    """
    if len(blob) > bytes_max:
        raise OSError(f"{len(blob)} bytes are more than replays_bytes_max={bytes_max}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, part = folder / f"{name}{SUFFIX}", folder / f"{name}{SUFFIX}.part"
    try:
        with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file)  # else the file may be empty after a loss of power
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    nbytes = 0
    for number, (other, status) in enumerate(files_in(folder, f"{SUFFIX}*")):
        nbytes += status.st_size
        if (number >= FILES_MAX or nbytes > bytes_max) and other != path and _NAMED.fullmatch(other.name):
            other.unlink(missing_ok=True)
