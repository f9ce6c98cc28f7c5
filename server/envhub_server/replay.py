"""``envhub replay``: runs a failed env again, in a process with the interpreter that it failed in, and compares."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envhub.arena.stand_in import ENDED, FRESH
from envhub.errors import printable, raised_text, shortened
from envhub.job_signals import STACKS
from envhub.regular_file import read_regular_file
from envhub.transport.folder_owners import weakness_of
from envhub.values import codec
from envhub_server.ipc import control, journal
from envhub_server.ipc.journal import BY_REQUEST, CALL, FIRST, History
from envhub_server.ipc.replay_file import FILE_BYTES_MAX, Replay, unpack
from envhub_server.processes.exit_cause import signal_name
from envhub_server.processes.interpreter import (
    InterpreterKey,
    InterpreterUnusable,
    environment_of,
    find,
    not_executed,
)
from envhub_server.processes.memory_use import memory_bytes
from envhub_server.processes.zygote_process import BOOTSTRAP, exposed

STACKS_S = 0.5  # for a process that hangs to write its stacks, before it is killed
SAMPLE_S = 0.05
MAKE_S = 300.0
LINE_CHARS_MAX = 300  # of a failure, in a list

Process = subprocess.Popen[bytes]
Show = Callable[[np.ndarray, float], None]


class ReplayError(ValueError):
    """A replay cannot be run."""


@dataclass(frozen=True)
class Comparison:
    """The result of a replay.

    Attributes:
        alike: True if the env failed at the same call in the same way.
        text: the result, for people.
        frames: number of frames that its env showed.
    """

    alike: bool
    text: str
    frames: int = 0


@dataclass
class Course:
    """The progress of a run, from the reports of its process.

    Attributes:
        call: the last call that began; -1 before the env was made.
        differs: the first call after which the observation was another; None for none.
        end: the last report, or how the process ended.
        show: takes its frames.
        frames: number of frames that it took.
        unseen: why there are no more frames; empty if nothing was said of that.
    """

    call: int = -1
    differs: int | None = None
    end: dict[str, Any] | None = None
    show: Show | None = None
    frames: int = 0
    unseen: str = ""
    _unread: bytes = b""

    def hear(self, chunk: bytes) -> None:
        """Read the reports from the pipe."""
        self._unread += chunk
        while b"\n" in self._unread:
            line, _, rest = self._unread.partition(b"\n")
            report = json.loads(line)
            if "frame" in report:
                nbytes = math.prod(report["frame"])
                if len(rest) < nbytes:
                    return  # the rest of the frame has not arrived
                if self.show is not None:
                    self.show(np.frombuffer(rest[:nbytes], np.uint8).reshape(report["frame"]), report["fps"])
                    self.frames += 1
                rest = rest[nbytes:]
            else:
                self._note(report)
            self._unread = rest

    def _note(self, report: dict[str, Any]) -> None:
        if "call" in report:
            self.call = report["call"]
        elif "differs" in report:
            self.differs = report["differs"]
        elif "unseen" in report:
            self.unseen = report["unseen"]
        else:
            self.end = report


def read(path: Path) -> Replay:
    """Read the replay in this file.

    Raises:
        ReplayError: it cannot be read, or is not a replay.
    """
    try:
        return unpack(read_regular_file(path, FILE_BYTES_MAX))
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ReplayError(f"{path} is no replay: {error}") from error


class Listed(NamedTuple):
    """A replay in a list, each field in one line."""

    name: str
    time: str  # of writing
    client: str  # empty for one without a key
    failure: str


def listed(path: Path) -> Listed:
    """Describe a replay for a list; of a file that is no replay the failure says why."""
    written, client = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S"), ""
    try:
        replay = read(path)
        failure, client = replay.failure, replay.client
        text = failure["message"]
        if failure["exception"] and text != raised_text(failure["exception"], ""):
            text = raised_text(failure["exception"], text)
        if replay.calls().unrepeatable:
            text = f"(cut) {text}"
    except ReplayError as error:
        text = str(error)
    parts = path.stem, written, client, shortened(" ".join(text.split()), LINE_CHARS_MAX)
    return Listed(*printable(parts))


def is_own(path: Path, folder: Path | None) -> bool:
    """True if a hub of this user wrote the file: it is the user's, in this folder of the user's hubs.

    No other user can replace it either, as between this look and the run.
    """
    try:
        owner, folders = path.stat().st_uid, (path.resolve().parent, folder and folder.resolve())
    except OSError:
        return False
    return owner == os.geteuid() and folders[0] == folders[1] and weakness_of(str(path)) is None


def announced(path: Path) -> str:
    """Describe the program and env that ``run`` will run: another user's file may name any program.

    Raises:
        ReplayError: it cannot be read, or is not a replay.
    """
    replay = read(path)
    build, key = replay.orders()[0], _interpreter(replay)
    named = [*build.setups, build.entry or build.name, *build.wrappers]
    text = f"runs {', '.join(named)} with {key.python} in {build.cwd or os.getcwd()}, {_modules(replay, build)}"
    variables = [f"{name}={value}" for name, value in (*key.variables, *build.variables.items())]
    text += f", variables {' '.join(variables)}" if variables else ""
    text += f", libraries from {os.pathsep.join(key.ld_library_path)}" if key.ld_library_path else ""
    shown: str = printable(text)
    return shown


def _modules(replay: Replay, build: control.Build) -> str:
    spec = codec.decode(replay.spec) if replay.spec else None
    imported = [*build.modules, *([str(spec.entry_point)] if spec is not None else [])]
    first = f"imports {', '.join(imported)} " if imported else "modules "
    return f"{first}from {os.pathsep.join(build.sys_path)}"


def run(path: Path, until: int | None = None, use_pdb: bool = False, show: Show | None = None) -> Comparison:
    """Run the replay in this file, with the terminal's input and output, and compare the results.

    Args:
        path: the file.
        until: the call to stop before, from 0; None for all.
        use_pdb: debug the call that failed, or with ``until`` that call.
        show: takes the frame after each call, uint8 ``(height, width, 3)``, and the frames per second of its env.

    Raises:
        ReplayError: the file cannot be run: it is incomplete, or its interpreter does not exist.
    """
    replay = read(path)
    history = replay.calls()
    if history.unrepeatable:
        raise ReplayError(f"{path.name} cannot be run again from a reset: {history.unrepeatable}")
    if replay.lacks:
        raise ReplayError(f"{path.name} lacks what is no plain data: {'; '.join(replay.lacks)}")
    course = _run(replay, history, path, (until, use_pdb), show)
    comparison = _verdict(replay, history, course)
    unseen = f"\nit shows no frames: {course.unseen}" if course.unseen else ""
    return replace(comparison, text=f"{comparison.text}{unseen}", frames=course.frames)


def _run(replay: Replay, history: History, path: Path, how: tuple[int | None, bool], show: Show | None) -> Course:
    until, use_pdb = how
    ours, theirs = os.pipe()
    flags = str(int(use_pdb)), str(int(show is not None))
    arguments = [str(path.absolute()), str(theirs), "" if until is None else str(until), *flags]
    with open(ours, "rb", buffering=0) as reports:
        try:
            key = _interpreter(replay)
            program = find(key.python)
            command = [program, BOOTSTRAP, "replay", *arguments, *exposed()]
            process = subprocess.Popen(command, env=environment_of(key, program, os.environ), pass_fds=[theirs])
        except InterpreterUnusable as error:
            raise ReplayError(f"the interpreter of {path.name}: {error}") from error
        except OSError as error:
            raise ReplayError(f"the interpreter of {path.name}: {not_executed(program, error)}") from error
        finally:
            os.close(theirs)
        course = Course(show=show)
        try:
            _follow(course, replay, history, process, reports.fileno(), use_pdb)
        finally:
            code = process.wait()
    course.end = course.end or {"code": code}
    return course


def _interpreter(replay: Replay) -> InterpreterKey:
    said = replay.interpreter
    return InterpreterKey(said["python"], tuple(said["variables"].items()), tuple(said["ld_library_path"]))


def _follow(course: Course, replay: Replay, history: History, process: Process, reports: int, use_pdb: bool) -> None:
    """Note the process's reports until it ends; kill it if it hangs or takes too much memory."""
    heard_s = time.monotonic()
    while True:
        ready, _, _ = select.select([reports], [], [], SAMPLE_S)
        if ready:
            chunk, heard_s = os.read(reports, 1 << 16), time.monotonic()
            if not chunk:
                return
            course.hear(chunk)
        elif use_pdb or course.end is not None:
            continue
        elif replay.memory_max and memory_bytes(process.pid) > replay.memory_max:
            course.end = {"overrun": course.call}
            process.kill()
            return
        elif time.monotonic() - heard_s > _limit_s(replay, history, course):
            process.send_signal(STACKS)  # for the stacks of its threads
            time.sleep(STACKS_S)
            course.end = {"late": course.call}
            process.kill()
            return


def _limit_s(replay: Replay, history: History, course: Course) -> float:
    """The time limit of the running call, in seconds."""
    if not 0 <= course.call < history.calls:
        return MAKE_S
    kind = history.kind(course.call)
    name = "reset" if kind in (journal.RESET, journal.AUTORESET) else "init" if kind == FRESH else "step"
    return float(replay.limits.get(name, math.inf))


def _verdict(replay: Replay, history: History, course: Course) -> Comparison:
    end, failure = course.end or {}, replay.failure
    if "not_made" in end:
        return Comparison(False, f"the env could not be made: {end['not_made']}")
    if "stopped" in end:
        return Comparison(True, f"stopped before {_named(replay, history, end['stopped'])}")
    if "left" in end:
        return Comparison(True, f"stopped in {_named(replay, history, end['left'])}, where the debugger was left")
    now, recorded = _happened(end), _recorded(failure)
    # A hub measures memory now and then, and may find that there is too much of it some steps later.
    late = now == ("memory",) and course.call < replay.failed_at
    same = now == recorded and (course.call == replay.failed_at or late)
    not_run = _not_run(history)
    if course.differs is not None:
        text = f"observation differs first at {_named(replay, history, course.differs)}; "
        if not not_run:  # which else may be why
            text = f"{'reset without a seed' if _is_unseeded(history) else 'non-deterministic simulator'}: {text}"
        now_text = "it did not fail" if not now else f"it {_failed(now)} at {_named(replay, history, course.call)}"
        return Comparison(
            False,
            f"{text}{now_text}, and {_failed(recorded)} at {_named(replay, history, replay.failed_at)} before{not_run}",
        )
    if same:
        return Comparison(True, f"failed alike: {_failed(now)} at {_named(replay, history, course.call)}")
    before = f"it {_failed(recorded)} at {_named(replay, history, replay.failed_at)} before"
    if not now:
        return Comparison(False, f"did not fail, and every observation was the same; {before}{not_run}")
    otherwise = f"failed otherwise: {_failed(now)} at {_named(replay, history, course.call)}"
    return Comparison(False, f"{otherwise}; {before}{not_run}")


def _happened(end: dict[str, Any]) -> tuple[str, ...]:
    """The failure in the form for comparison; empty without a failure."""
    if "late" in end:
        return ("timeout",)
    if "overrun" in end:
        return ("memory",)
    if "raised" in end:
        return (
            "nan" if end["invalid"] else "exception",
            end["raised"],
            end["message"] or raised_text(end["raised"], ""),
        )
    if "code" in end:
        code = end["code"]
        return ("crash", signal_name(-code) if code < 0 else f"status {code}")
    return ()


def _recorded(failure: dict[str, Any]) -> tuple[str, ...]:
    cause = failure["cause"]
    if cause in ("exception", "nan"):
        return (cause, failure["exception"], failure["message"][:1024] or raised_text(failure["exception"], ""))
    if cause in ("timeout", "memory"):
        return (cause,)
    return (cause, failure["signal"] or f"status {failure['exit_status']}")


def _failed(happened: tuple[str, ...]) -> str:
    cause, *rest = happened
    if cause in ("timeout", "memory"):
        return "hung" if cause == "timeout" else "had more memory than memory_max"
    if cause in ("exception", "nan"):
        return f"raised {rest[0]}: {rest[1]}"
    return f"ended by {rest[0]}"


def _named(replay: Replay, history: History, call: int) -> str:
    """A call, by its number and its place in the episode."""
    if call >= history.calls:
        return f"step {call}, after the last that is known"
    autoreset = (ENDED,) if replay.build["autoreset_mode"] == "NextStep" else ()
    resets = (journal.RESET, journal.AUTORESET, FRESH, *autoreset)
    since = next((back for back in range(call + 1) if history.kind(call - back) in resets), call)
    if since == call or history.rows > 1:  # each env of a vector env has episodes of its own
        return f"step {call}"
    return f"step {call} ({since} of its episode)"


def _is_unseeded(history: History) -> bool:
    """True if the env was reset without a seed, and the random numbers that it had are not known."""
    resets = [note for note in history.notes if note.kind in (BY_REQUEST, FIRST)]
    return any(note.seed is None and not note.generator for note in resets)


def _not_run(history: History) -> str:
    """Describe what the program called or set; empty if nothing."""
    names = sorted({note.options.decode("utf-8", "replace") for note in history.notes if note.kind == CALL})
    return f" (not run again: calls of {', '.join(names)})" if names else ""
