"""Descriptions of workers' ends, for clients and for infos."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice, takewhile
from typing import Any

from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import raised_text, shortened, without_folders
from envhub.protocol.messages import Failure, Faults, Make
from envhub_server.processes.worker_handle import ExitCause
from envhub_server.session.slots import Late, Overrun, WorkerLoss

LOG_TAIL_CHARS_MAX = 4096
LOGGED_CHARS_MAX = 200
FRAMES_MAX = 3  # of a stack, the innermost ones
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STACKS = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
MIB = 1 << 20
_WHAT = {"init": "its making or its first step", "reset": "its reset", "step": "its step", "call": "a call"}


def named(slot: int, rows: Sequence[int], row_offset: int = 0) -> str:
    """A worker and its envs, by their numbers in the vector env that the session is a part of."""
    return f"worker {slot} ({envs(rows, row_offset)})"


def envs(rows: Sequence[int], row_offset: int) -> str:
    """Envs by their numbers in the vector env that the session is a part of."""
    numbers = [str(row_offset + row) for row in rows]
    return f"{'env' if len(rows) == 1 else 'envs'} {', '.join(numbers)}"


def unready(make: Make, why: str, hide_folders: bool) -> Failure:
    why = without_folders(why) if hide_folders else why
    return Failure("env_unready", "hub", f"{make.name or 'a factory'!r} is not ready: {why}")


def failure(
    make: Make, slot: int, rows: Sequence[int], ending: ExitCause, why: Late | Overrun | None, hide_folders: bool
) -> Failure:
    """The failure of a worker that ended by itself, or that the hub ended for a late env or for its memory.

    Its text has the envs' numbers in the vector env that the session is a part of; ``env_index`` is a row.
    """
    tail = ending.log_tail[-LOG_TAIL_CHARS_MAX:]
    tail = without_folders(tail) if hide_folders else tail
    worker = named(slot, rows, make.row_offset)
    reason_text = "" if why is None else reason(why, make.row_offset)
    if isinstance(why, Late):
        text = f"{reason_text}; its {worker} was ended"
        return Failure("env_timeout", "request", text, env_index=why.row, worker=slot, log_tail=tail)
    text = f"{worker} {ending.how if why is None else f'{reason_text}, and was ended'}"
    return Failure("worker_died", "request", text, env_index=rows[0], worker=slot, log_tail=tail)


def reason(why: Late | Overrun, row_offset: int = 0) -> str:
    """The reason why the hub ended a worker, to follow the worker's name in a sentence."""
    if isinstance(why, Late):
        return (
            f"env {row_offset + why.row} did not finish {_WHAT[why.kind]} within {why.kind}_timeout={why.limit_s:g} s"
        )
    return f"had {why.nbytes // MIB} MiB of memory, more than memory_max={why.bytes_max} bytes"


def slow_to_close(make: Make, by_stack: Mapping[str, Sequence[int]], hide_folders: bool) -> str:
    """Text that says which envs are slow to close and what they execute, by the stacks that their processes wrote."""
    rows = sorted(chain.from_iterable(by_stack.values()))
    text = f"slow to close: {envs(rows, make.row_offset)}; each env has close_timeout={make.faults.close_s:g} s"
    for stack, own in by_stack.items():
        of_env = takewhile(lambda frame: "/envhub_server/worker/" not in frame[0], _FRAME.findall(stack))
        frames = [f"{name} ({file}, line {line})" for file, line, name in islice(of_env, FRAMES_MAX)]
        if frames:
            text += f"; {envs(sorted(own), make.row_offset)} in {', called by '.join(frames)}"
    return without_folders(text) if hide_folders else text


def logged(failure: Failure) -> dict[str, Any]:
    """The fields of a failed request's log line; an env's exception adds its class, env and replay."""
    if failure.scope != "env":
        return {"code": failure.code, "why": shortened(failure.message, LOGGED_CHARS_MAX)}
    why = shortened(raised_text(failure.type, failure.message), LOGGED_CHARS_MAX)
    replay = {"replay": failure.replay} if failure.replay else {}
    return {"code": failure.code, "env": failure.env_index, "why": why, **replay}


def env_failure(failure: Failure, ending: ExitCause, why: Late | Overrun | None, restarts: int) -> EnvFailure:
    timed_out = isinstance(why, Late)
    cause = "timeout" if timed_out else "crash" if why is None else "memory"
    stacks = _STACKS.search(failure.log_tail) if timed_out else None
    return EnvFailure(
        cause,
        failure.message,
        signal=ending.signal,
        exit_status=ending.status,
        traceback=failure.log_tail[stacks.start() :] if stacks else "",
        restarts=restarts,
        log_tail=failure.log_tail,
        replay=failure.replay,
    )


def recycled(make: Make, slot: int, rows: Sequence[int]) -> WorkerLoss:
    text = f"{named(slot, rows, make.row_offset)} was recycled"
    failure = Failure("worker_died", "request", text, env_index=rows[0], worker=slot)
    return WorkerLoss(failure, False, failure_info(EnvFailure("recycle", text)))


def loss(failure: Failure, env_failure: EnvFailure, faults: Faults) -> WorkerLoss:
    """Decide the results of the worker's rows, by the session's policy."""
    timed_out = failure.code == "env_timeout"
    policy = faults.on_timeout if timed_out else faults.on_crash
    return WorkerLoss(failure, policy == "raise", failure_info(env_failure))


def exhausted(failure: Failure, count_text: str) -> Failure:
    """Describe why a worker is not started again; ``count_text`` is that of ``Restarts``."""
    text = f"{failure.message}; {count_text} and is not started again: close this session, fix the env"
    env_index, tail, kept = failure.env_index, failure.log_tail, failure.replay
    return Failure("restarts_exhausted", "session", text, env_index, failure.worker, log_tail=tail, replay=kept)
