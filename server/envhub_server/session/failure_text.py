"""Descriptions of workers' ends, for clients and for infos."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import raised_text, shortened, without_folders
from envhub.protocol.messages import Failure, Faults, Make
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.session.build_order import WorkerRules
from envhub_server.session.hang_detector import Late

LOG_TAIL_CHARS_MAX = 4096
LOGGED_CHARS_MAX = 200
_STACKS = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
MIB = 1 << 20
_WHAT = {"init": "its making or its first step", "reset": "its reset", "step": "its step", "call": "a call"}


@dataclass(frozen=True)
class Overrun:
    """A worker took more memory than it may: it had so many bytes, and may have ``bytes_max``.

    If there is an ``owner``, that is what all workers of this client may have, which had ``owner_bytes``.
    """

    nbytes: int
    bytes_max: int
    owner: str = ""
    owner_bytes: int = 0


@dataclass(frozen=True)
class WorkerLoss:
    """Failure in the results of an ended worker's rows.

    Attributes:
        failure: what happened; ``env_index`` is to be each row's own.
        raises: whether the step raises; else it is a truncation.
        info: that row's info, encoded, where it does not.
    """

    failure: Failure
    raises: bool
    info: bytes


def named(worker: int, rows: Sequence[int]) -> str:
    """A worker and its envs."""
    envs = f"env {rows[0]}" if len(rows) == 1 else f"envs {', '.join(map(str, rows))}"
    return f"worker {worker} ({envs})"


def unready(make: Make, why: str, rules: WorkerRules) -> Failure:
    """Description of an env whose interpreter cannot be used."""
    why = without_folders(why) if rules.hide_folders else why
    return Failure("env_unready", "hub", f"{make.name or 'a factory'!r} is not ready: {why}")


def failure(
    worker: int, rows: Sequence[int], ending: ExitCause, why: Late | Overrun | None, hide_folders: bool
) -> Failure:
    """Description of a worker that ended, or was ended because an env was late or it took too much memory."""
    tail = ending.log_tail[-LOG_TAIL_CHARS_MAX:]
    tail = without_folders(tail) if hide_folders else tail
    if isinstance(why, Late):
        text = f"{reason(why)}; its {named(worker, rows)} was ended"
        return Failure("env_timeout", "request", text, env_index=why.row, worker=worker, log_tail=tail)
    text = f"{named(worker, rows)} {ending.how if why is None else f'{reason(why)}, and was ended'}"
    return Failure("worker_died", "request", text, env_index=rows[0], worker=worker, log_tail=tail)


def reason(why: Late | Overrun) -> str:
    """The reason why the hub ended a worker; of its memory, as words that follow the worker's name."""
    if isinstance(why, Late):
        return f"env {why.row} did not finish {_WHAT[why.kind]} within {why.kind}_timeout={why.limit_s:g} s"
    text = f"had {why.nbytes // MIB} MiB of memory, "
    if why.owner:
        text += f"the most of the workers of {why.owner}, which had {why.owner_bytes // MIB} MiB together, more "
        return f"{text}than worker_memory_bytes_max={why.bytes_max} of its key"
    return f"{text}more than memory_max={why.bytes_max} bytes"


def logged(failure: Failure) -> dict[str, Any]:
    """The fields of a log line on a failed request; an exception of an env has its class, env and replay."""
    if failure.scope != "env":
        return {"code": failure.code, "why": shortened(failure.message, LOGGED_CHARS_MAX)}
    why = shortened(raised_text(failure.type, failure.message), LOGGED_CHARS_MAX)
    replay = {"replay": failure.replay} if failure.replay else {}
    return {"code": failure.code, "env": failure.env_index, "why": why, **replay}


def env_failure(told: Failure, ending: ExitCause, why: Late | Overrun | None, restarts: int) -> EnvFailure:
    """Cause for which the envs of an ended worker are truncated."""
    timed_out = isinstance(why, Late)
    cause = "timeout" if timed_out else "crash" if why is None else "memory"
    stacks = _STACKS.search(told.log_tail) if timed_out else None
    return EnvFailure(
        cause,
        told.message,
        signal=ending.signal,
        exit_status=ending.status,
        traceback=told.log_tail[stacks.start() :] if stacks else "",
        restarts=restarts,
        log_tail=told.log_tail,
        replay=told.replay,
    )


def cut(worker: int, rows: Sequence[int]) -> bytes:
    """The info of the envs of a worker that is recycled in the middle of their episodes."""
    text = f"{named(worker, rows)} was recycled: its envs were not between episodes at one time"
    return failure_info(EnvFailure("recycle", text))


def loss(told: Failure, found: EnvFailure, faults: Faults) -> WorkerLoss:
    """Decide the results of the worker's rows, by the session's policy."""
    timed_out = told.code == "env_timeout"
    policy = faults.on_timeout if timed_out else faults.on_crash
    return WorkerLoss(told, policy == "raise", failure_info(found))


def exhausted(told: Failure, how_often: str) -> Failure:
    """Describe why a worker is not started again; ``how_often`` is as of ``Restarts.told``."""
    text = f"{told.message}; {how_often} and is not started again: close this session, mend the env"
    return Failure(
        "restarts_exhausted", "session", text, told.env_index, told.worker, log_tail=told.log_tail, replay=told.replay
    )
