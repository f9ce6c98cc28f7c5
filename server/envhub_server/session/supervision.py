"""The supervision of processes: hanging envs, memory, their end, and its description for clients and infos."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile
from typing import Any

from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import hide_folders_in, raised_text, shortened
from envhub.protocol.messages import Failure, Make
from envhub_server.ipc import control
from envhub_server.processes.worker_handle import ExitCause
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import (
    SAMPLE_S,
    KilledFor,
    Late,
    Ordered,
    Overrun,
    Process,
    Progress,
    Stage,
    WorkerLoss,
)

AT_WORK_S = 1.0  # for the step, reset or call that a process is at when it is asked
LOOK_S, TELL_S = 4.0, 5.0  # from the end's beginning until slow processes write their stacks, and until that is told
MEMORY_S = 0.2  # between two measurements of processes with a memory limit
SAMPLE_IDLE_S = 1.0  # longest time between two samples, while the client drives and does not step
NO_TURN = -1  # the progress word of a process that maps an arena
STACKS_S = 2.0  # for a process on a busy machine to write its stacks before it is killed


class Supervision:
    """Judges the samples of the processes of one session."""

    def __init__(self, launcher: Launcher) -> None:
        self._faults, self._memory_bytes_max = launcher.make.faults, launcher.rules.hosting.memory_max
        self._slots, self._deadlines, self._effects = launcher.slots, launcher.deadlines, launcher.effects
        self._planned_s = SAMPLE_S  # the interval before the next sample
        self.idle_samples = 0  # in a row

    @property
    def concerns_processes(self) -> bool:
        """True if a process is sampled without a pending request: it builds its envs or maps the arena."""
        if any(slot.process is not None and slot.serving is None for slot in self._slots):
            return True
        return any(spare.stage in (Stage.BUILDING, Stage.MAPPING) for spare in self._slots.spares.values())

    # --- samples ------------------------------------------------------------------------------------------------------

    def plan_next_sample(self, samples: bool, idle: bool, now_s: float) -> None:
        """Plan the next sample, if one is needed; the interval grows while the session is ``idle``."""
        if not samples:
            self._deadlines.sample_at_s = math.inf
            return
        self.idle_samples = self.idle_samples + 1 if idle else 0
        faults = self._faults
        shortest_s = min(faults.init_s, faults.step_s, faults.reset_s, faults.call_s)
        longest_s = min(SAMPLE_IDLE_S, shortest_s / 4)
        self._planned_s = max(SAMPLE_S, min(longest_s, SAMPLE_S * self.idle_samples))
        self._deadlines.sample_at_s = now_s + self._planned_s

    def on_sampled(self, progress: Sequence[Progress | None], now_s: float) -> None:
        for process in self._slots.processes:
            if process.stage is Stage.LEAVING or process.killed_for is not None:
                continue
            late = self._sample(process, progress, now_s)
            if late is None:
                continue
            if late.expired:
                process.killed_for, process.kill_at_s = late, now_s + STACKS_S
            self._effects.report_late(process.number, late)

    def _sample(self, process: Process, progress: Sequence[Progress | None], now_s: float) -> Late | None:
        detector, planned_s = process.detector, self._planned_s
        rows, slot = self._slots[process.slot_index].rows, self._slots.of(process)
        if process.stage is Stage.MAPPING:
            return detector.sample(now_s, planned_s, "init", rows[0], NO_TURN)
        if process.stage is Stage.BUILDING:
            row = rows[min(process.built, len(rows) - 1)]
            return detector.sample(now_s, planned_s, "init", row, process.built)
        at = None if slot is None else progress[slot.index]
        if at is not None and at.kind:
            return detector.sample(now_s, planned_s, at.kind, at.row, at.word)
        detector.rest()  # the process waits for others or for a request
        return None

    # --- memory -------------------------------------------------------------------------------------------------------

    def measures(self, now_s: float) -> bool:
        return now_s >= self._deadlines.memory_at_s

    def on_measured(self, memory: Mapping[int, int], now_s: float) -> None:
        if not self.measures(now_s):
            return
        self._deadlines.memory_at_s = now_s + MEMORY_S
        bytes_max = self._memory_bytes_max or math.inf
        for number, nbytes in memory.items():
            process = self._slots.process(number)
            if nbytes > bytes_max and process is not None and process.killed_for is None:
                process.killed_for = Overrun(nbytes, int(bytes_max))
                self._effects.kill(number)

    def reason(self, number: int) -> str:
        """The reason why this process is killed; empty if it is not."""
        process = self._slots.process(number)
        why = None if process is None else process.killed_for
        return "" if why is None else kill_reason(why)


class EnvClosing:
    """Has the processes of one session close their envs, and says which envs were cut short.

    Each is asked to, has ``close_timeout`` for each env, and is killed then.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._make, self._slots = launcher.make, launcher.slots
        self._deadlines, self._effects = launcher.deadlines, launcher.effects
        self._at_work_until_s = self._look_at_s = self._tell_at_s = math.inf
        self._cut: dict[str, list[int]] = {}  # rows that are not told yet, by the reason

    def next_s(self) -> float:
        killed_s = (process.kill_at_s for process in self._slots.processes)
        return min(self._at_work_until_s, self._look_at_s, self._tell_at_s, *killed_s)

    @property
    def waits(self) -> bool:
        return any(process.kill_at_s < math.inf for process in self._slots.processes)

    def ask(self, process: Process, now_s: float) -> None:
        self._list_unclosed(process)
        process.kill_at_s = self._close_by_s(now_s, 1)
        self._effects.tell(process.number, control.CloseEnvs())

    def _list_unclosed(self, process: Process) -> None:
        process.is_closing, served = True, process.stage is Stage.SERVING  # else its envs were not used
        process.unclosed = [*self._slots[process.slot_index].rows] if served else []

    def _close_by_s(self, now_s: float, num_envs: int) -> float:
        return min(now_s + num_envs * self._make.faults.close_s, self._deadlines.end_by_s)

    def ask_all(self, now_s: float) -> None:
        """Ask all processes; one that makes its envs would read that only afterwards, and is killed."""
        self._at_work_until_s, self._look_at_s, self._tell_at_s = now_s + AT_WORK_S, now_s + LOOK_S, now_s + TELL_S
        for process in self._slots.processes:
            if process.stage is Stage.BUILDING:
                self._effects.kill(process.number)
            elif process.stage is not Stage.LEAVING:
                self.ask(process, now_s)

    def hurry(self) -> None:
        """Heed that a draining hub gives envs no time after ``end_by_s``."""
        for process in self._slots.processes:
            if process.kill_at_s < math.inf:
                process.kill_at_s = min(process.kill_at_s, self._deadlines.end_by_s)

    def on_closing(self, process: Process, sent: control.Closing, now_s: float) -> None:
        """Note which rows a process closes now; each row has its time once, whatever the process says."""
        left = [row for row in process.unclosed if row not in process.closing and sent.rows]
        process.unclosed, process.closing = left, [row for row in sent.rows if row in left]
        if process.closing:
            process.kill_at_s = self._close_by_s(now_s, len(process.closing))

    def on_elapsed(self, progress: Sequence[Progress | None], now_s: float) -> None:
        """Kill the processes whose time is up, and report those that take long."""
        looks_at_work, self._at_work_until_s = _has_come(self._at_work_until_s, now_s)
        for process in self._slots.processes:
            if now_s >= process.kill_at_s:
                limit = f"each env has close_timeout={self._make.faults.close_s:g} s"
                if now_s >= self._deadlines.end_by_s:
                    limit = "the hub is shutting down, which gives envs drain_close_timeout"
                self.kill([process], limit)
            elif looks_at_work and self._is_at_work(process, progress):
                self.kill([process], f"an env was still at its step, reset or call after {AT_WORK_S:g} s")
        slow = [(each, each.closing or each.unclosed) for each in self._slots.processes if each.unclosed]
        looks, self._look_at_s = _has_come(self._look_at_s, now_s)
        for each, rows in slow if looks else ():
            self._effects.report_late(each.number, Late("close", rows[0], LOOK_S, self._make.faults.close_s))
        tells, self._tell_at_s = _has_come(self._tell_at_s, now_s)
        if tells and slow:
            self._effects.report_closing(tuple((each.number, tuple(rows)) for each, rows in slow))

    def _is_at_work(self, process: Process, progress: Sequence[Progress | None]) -> bool:
        slot = self._slots.of(process)
        if slot is None or process.closing or not process.unclosed:
            return False
        at = progress[slot.index]
        return at is not None and bool(at.kind)

    def kill(self, processes: Iterable[Process], why: str) -> None:
        """Kill these processes; without a reason it is not told that their envs are cut short."""
        for process in processes:
            if not process.is_closing:
                self._list_unclosed(process)
            process.kill_at_s = math.inf
            self.on_ended(process, why)
            self._effects.kill(process.number)

    def on_ended(self, process: Process, why: str) -> None:
        """Note that a process has closed no more envs than it has sent."""
        if process.unclosed and why:
            self._cut.setdefault(why, []).extend(process.unclosed)
        process.unclosed = []

    def tell(self) -> None:
        cut, self._cut = self._cut, {}
        for why, rows in cut.items():
            text = f"{envs(sorted(rows), self._make.row_offset)} ended before close was over: {why}"
            # Event: The processes of envs ended before these had closed; `note` says which, and why. Their client is
            # told.
            self._effects.notify("envs_cut_short", text)


def _has_come(at_s: float, now_s: float) -> tuple[bool, float]:
    """True if the time has come, and the time from now on."""
    return (True, math.inf) if now_s >= at_s else (False, at_s)


LOG_TAIL_CHARS_MAX = 4096
LOGGED_CHARS_MAX = 200
FRAMES_MAX = 3  # of a stack, the innermost ones
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STACKS = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
MIB = 1 << 20
_WHAT = {"init": "its making or its first step", "reset": "its reset", "step": "its step", "call": "a call"}


def worker_named(slot: int, rows: Sequence[int], row_offset: int = 0) -> str:
    """A worker and its envs, by their numbers in the vector env that the session is a part of."""
    return f"worker {slot} ({envs(rows, row_offset)})"


def envs(rows: Sequence[int], row_offset: int) -> str:
    """Envs by their numbers in the vector env that the session is a part of."""
    numbers = [str(row_offset + row) for row in rows]
    return f"{'env' if len(rows) == 1 else 'envs'} {', '.join(numbers)}"


def unready_failure(make: Make, why: str, hide_folders: bool) -> Failure:
    why = hide_folders_in(why) if hide_folders else why
    return Failure("env_unready", "hub", f"{make.name or 'a factory'!r} is not ready: {why}")


def exit_failure(
    make: Make, slot: int, rows: Sequence[int], cause: ExitCause, why: KilledFor | None, hide_folders: bool
) -> Failure:
    """The failure of a worker that ended by itself, or that the hub ended for this reason."""
    # Its text has the envs' numbers in the vector env that the session is a part of; ``env_index`` is a row.
    tail = cause.log_tail[-LOG_TAIL_CHARS_MAX:]
    tail = hide_folders_in(tail) if hide_folders else tail
    worker = worker_named(slot, rows, make.row_offset)
    reason_text = "" if why is None else kill_reason(why, make.row_offset)
    if isinstance(why, Late):
        text = f"{reason_text}; its {worker} was ended"
        return Failure("env_timeout", "request", text, env_index=why.row, worker=slot, log_tail=tail)
    ended = reason_text if isinstance(why, Ordered) else f"{reason_text}, and was ended"
    text = f"{worker} {cause.how if why is None else ended}"
    return Failure("worker_died", "request", text, env_index=rows[0], worker=slot, log_tail=tail)


def kill_reason(why: KilledFor, row_offset: int = 0) -> str:
    """The reason why the hub ended a worker, to follow the worker's name in a sentence."""
    if isinstance(why, Ordered):
        return why.text
    if isinstance(why, Late):
        limit = f"{why.kind}_timeout={why.limit_s:g} s"
        return f"env {row_offset + why.row} did not finish {_WHAT[why.kind]} within {limit}"
    return f"had {why.nbytes // MIB} MiB of memory, more than memory_max={why.bytes_max} bytes"


def slow_to_close(make: Make, by_stack: Mapping[str, Sequence[int]], hide_folders: bool) -> str:
    """Text that says which envs are slow to close and what they execute, by the stacks that their processes wrote."""
    rows = sorted(chain.from_iterable(by_stack.values()))
    text = f"slow to close: {envs(rows, make.row_offset)}; each env has close_timeout={make.faults.close_s:g} s"
    for stack, own in by_stack.items():
        main = stack.partition("Current thread ")[2] or stack  # the one that the signal has reached
        of_env = takewhile(lambda frame: "/envhub_server/worker/" not in frame[0], _FRAME.findall(main))
        frames = [f"{name} ({file}, line {line})" for file, line, name in islice(of_env, FRAMES_MAX)]
        if frames:
            text += f"; {envs(sorted(own), make.row_offset)} in {', called by '.join(frames)}"
    return hide_folders_in(text) if hide_folders else text


def logged(failure: Failure) -> dict[str, Any]:
    """The fields of a failed request's log line; an env's exception adds its class, env and replay."""
    if failure.scope != "env":
        return {"code": failure.code, "why": shortened(failure.message, LOGGED_CHARS_MAX)}
    why = shortened(raised_text(failure.type, failure.message), LOGGED_CHARS_MAX)
    replay = {"replay": failure.replay} if failure.replay else {}
    return {"code": failure.code, "env": failure.env_index, "why": why, **replay}


def env_failure_of(failure: Failure, exited: ExitCause, why: KilledFor | None, restarts: int) -> EnvFailure:
    timed_out = isinstance(why, Late)
    cause = {Late: "timeout", Overrun: "memory", Ordered: "restart"}.get(type(why), "crash")
    stacks = _STACKS.search(failure.log_tail) if timed_out else None
    return EnvFailure(
        cause,
        failure.message,
        signal=exited.signal,
        exit_status=exited.status,
        traceback=failure.log_tail[stacks.start() :] if stacks else "",
        restarts=restarts,
        log_tail=failure.log_tail,
        replay=failure.replay,
    )


def recycling_loss(make: Make, slot: int, rows: Sequence[int]) -> WorkerLoss:
    text = f"{worker_named(slot, rows, make.row_offset)} was recycled"
    failure = Failure("worker_died", "request", text, env_index=rows[0], worker=slot)
    return WorkerLoss(failure, False, failure_info(EnvFailure("recycle", text)))


def exhausted_failure(failure: Failure, count_text: str) -> Failure:
    """Describe why a worker is not started again; ``count_text`` is that of ``Restarts``."""
    text = f"{failure.message}; {count_text} and is not started again: close this session, fix the env"
    return replace(failure, code="restarts_exhausted", scope="session", message=text)
