"""``envhub replay``: runs a failed env again, in a process with the interpreter that it failed in, and compares."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from envhub.errors import printable, raised_text, shortened
from envhub.files import weakness_of
from envhub.process import STACKS
from envhub.values import codec
from envhub_server.ipc.process_marks import memory_bytes
from envhub_server.ipc.replay_file import SUFFIX, Replay, read_replay
from envhub_server.processes.interpreter import InterpreterKey, InterpreterUnusable, execute, find
from envhub_server.processes.worker_handle import signal_name

STACKS_S = 0.5  # for a process that hangs to write its stacks, before it is killed
SAMPLE_S = 0.05
MAKE_S = 300.0
LINE_CHARS_MAX = 300  # of a failure, in a list
STATE_BYTES_MAX = 1 << 16


class ReplayError(ValueError):
    """A replay cannot be run."""


class Comparison(NamedTuple):
    """The result of a replay: whether the env failed at the same call in the same way, and the text for people."""

    alike: bool
    text: str


def read(path: Path) -> Replay:
    try:
        return read_replay(str(path))
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ReplayError(f"{path} is no replay: {error}") from error


def listed(path: Path) -> tuple[str, str, str]:
    written = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    try:
        text = _recorded(read(path))
    except ReplayError as error:
        text = str(error)
    name, written, text = printable((path.stem, written, shortened(" ".join(text.split()), LINE_CHARS_MAX)))
    return name, written, text


def is_own(path: Path, folder: Path | None) -> bool:
    """True if a hub of this user wrote the file: it is the user's, in this folder of the user's hubs."""
    # No other user can replace it either, as between this look and the run.
    try:
        owner, folders = path.stat().st_uid, (path.resolve().parent, folder and folder.resolve())
    except OSError:
        return False
    return owner == os.geteuid() and folders[0] == folders[1] and weakness_of(str(path)) is None


def announced(path: Path) -> str:
    """Describe the program and env that ``run`` will run: another user's file may name any program."""
    replay = read(path)
    build, key = replay.orders()[0], _interpreter(replay)
    spec = codec.decode(replay.spec) if replay.spec else None
    imported = ", ".join([*build.modules, *([] if spec is None else [str(spec.entry_point)])])
    text = f"runs {', '.join([*build.setups, build.entry or build.name, *build.wrappers])} with {key.python}"
    text += f" in {build.cwd or os.getcwd()}, {f'imports {imported} ' if imported else 'modules '}"
    text += f"from {os.pathsep.join(build.sys_path)}"
    variables = [f"{name}={value}" for name, value in (*key.variables, *build.variables.items())]
    text += f", variables {' '.join(variables)}" if variables else ""
    text += f", libraries from {os.pathsep.join(key.ld_library_path)}" if key.ld_library_path else ""
    visible: str = printable(text)
    return visible


def run(path: Path, use_pdb: bool = False) -> Comparison:
    replay = read(path)
    if replay.lacks:
        raise ReplayError(f"{path.name} lacks what is no plain data: {'; '.join(replay.lacks)}")
    if replay.cut:
        raise ReplayError(f"{path.name} cannot be run again: {replay.cut}")
    with open(os.memfd_create("envhub-replay"), "rb") as memory:
        process = _started(replay, path, memory.fileno(), use_pdb)
        try:
            killed = _watched(process, replay, memory.fileno(), use_pdb)
        finally:
            code = process.wait()
        state = json.loads(os.pread(memory.fileno(), STATE_BYTES_MAX, 0) or "{}")
    return _verdict(replay, state, killed, code)


def _interpreter(replay: Replay) -> InterpreterKey:
    return InterpreterKey(replay.python, tuple(replay.variables.items()), tuple(replay.ld_library_path))


def _started(replay: Replay, path: Path, memory: int, use_pdb: bool) -> subprocess.Popen[bytes]:
    try:
        key = _interpreter(replay)
        arguments = ["replay", str(path.absolute()), str(memory), str(int(use_pdb))]
        return execute(find(key.python), key, os.environ, arguments, {}, pass_fds=[memory])
    except (InterpreterUnusable, OSError) as error:
        raise ReplayError(f"the interpreter of {path.name}: {error}") from error


def _watched(process: subprocess.Popen[bytes], replay: Replay, memory: int, use_pdb: bool) -> str:
    """Wait until the process ends; kill it if it hangs or takes too much memory, and return which."""
    seen, seen_s, limits_s = b"", time.monotonic(), {**replay.limits_s, "init": MAKE_S}
    while process.poll() is None:
        time.sleep(SAMPLE_S)
        state = os.pread(memory, STATE_BYTES_MAX, 0)
        if state != seen:
            seen, seen_s = state, time.monotonic()
        elif use_pdb:
            continue
        elif replay.memory_max and memory_bytes(process.pid) > replay.memory_max:
            process.kill()
            return "memory"
        elif time.monotonic() - seen_s > limits_s.get(json.loads(seen or "{}").get("kind", "init"), math.inf):
            process.send_signal(STACKS)  # for the stacks of its threads
            time.sleep(STACKS_S)
            process.kill()
            return "timeout"
    return ""


def _verdict(replay: Replay, state: dict[str, Any], killed: str, code: int) -> Comparison:
    end = killed or state.get("end", "crash")
    ended = signal_name(-code) if code < 0 else f"status {code}"
    now = _failed(end, state.get("raised", ""), state.get("message", ""), ended)
    if not state.get("made"):
        return Comparison(False, f"the env could not be made: it {now}")
    at, before = state["name"], f"it {_recorded(replay)} at {state['before']} before"
    if end == "left":
        return Comparison(True, f"stopped in {at}, where the debugger was left")
    if end == "survived":
        return Comparison(False, f"did not fail; {before}")
    # A hub measures memory now and then, and may find that there is too much of it some steps later.
    if now == _recorded(replay) and (at == state["before"] or end == "memory"):
        return Comparison(True, f"failed alike: {now} at {at}")
    return Comparison(False, f"failed otherwise: {now} at {at}; {before}")


def _recorded(replay: Replay) -> str:
    return _failed(replay.cause, replay.exception, replay.message[:1024], replay.ended)


def _failed(cause: str, exception: str, message: str, ended: str) -> str:
    if cause in ("timeout", "memory"):
        return "hung" if cause == "timeout" else "had more memory than memory_max"
    if cause in ("exception", "nan"):
        return f"raised {raised_text(exception, '' if message == raised_text(exception, '') else message)}"
    return f"ended by {ended}"


ENVIRONMENT_VARIABLE = "ENVHUB_REPLAYS"
FILES_MAX = 1000
NAME_CHARS_MAX = 60  # of an env, in the name of a file

_OTHER = re.compile(r"[^A-Za-z0-9._-]+")
_NAMED = re.compile(rf".+-[0-9a-f]{{16}}-(?:env|worker)[0-9]+(?:--?[0-9]+){{1,2}}{re.escape(SUFFIX)}(?:\.part)?")


def default_path(environ: Mapping[str, str]) -> Path | None:
    """The folder of this user's hubs: ``ENVHUB_REPLAYS``, else one in the user's state folder; None for "off"."""
    setting = environ.get(ENVIRONMENT_VARIABLE, "")
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".local" / "state"
    return None if setting == "off" else Path(setting or Path(state) / "envhub" / "replays")


def name_beginning(env: str, drawn: str) -> str:
    return f"{_OTHER.sub('-', env).strip('-.')[:NAME_CHARS_MAX] or 'env'}-{drawn}"


def files_in(folder: Path, suffix: str = SUFFIX) -> list[tuple[Path, os.stat_result]]:
    files = []
    for path in folder.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):  # another hub has removed it
            if stat.S_ISREG((status := path.lstat()).st_mode):  # a pipe is not to be read, nor a folder to be removed
                files.append((path, status))
    return sorted(files, key=lambda each: each[1].st_mtime_ns, reverse=True)


def bytes_in(folder: Path) -> int:
    return sum(status.st_size for _, status in files_in(folder, f"{SUFFIX}*"))


def keep(folder: Path, name: str, blob: bytes, bytes_max: int) -> None:
    """Write a file, whole or not at all; remove the oldest of hubs beyond the limits. Raises ``OSError``."""
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
