"""The table of a hub's sessions: what each is, does and costs, and how the last ones ended.

It looks at the sessions once a second, and at the costs of their processes only when somebody asks. What it cannot see
then, such as who ends a session and why workers were replaced, the session notes in its ``Biography``.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from typing import Any

import msgpack

from envhub.errors import brief, hidden, shortened
from envhub.protocol.messages import Make, Status
from envhub.values import codec
from envhub_server.hub.biography import LOOK_S, TEXT_CHARS_MAX, UNTIMED, Costs, SlowRequests, latencies
from envhub_server.hub.directory import Directory
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.ipc import process_marks
from envhub_server.log import log
from envhub_server.loop import Loop
from envhub_server.network.connections import Holder
from envhub_server.session.slots import Process, Stage
from envhub_server.session.state import Phase

ENDED_ROWS_MAX = 500  # sessions that have ended, of which the table has a row
KWARGS_BYTES_MAX = 4096  # of the arguments of an env that are shown
NO_KWARGS = msgpack.packb({})

Row = dict[str, Any]


class SessionTable:
    """A row for each session of one hub, and for the last ones that have ended."""

    def __init__(self, directory: Directory, loop: Loop, slow: SlowRequests) -> None:
        self._directory, self._loop, self._slow = directory, loop, slow
        self._ended: deque[tuple[float, str, Row]] = deque(maxlen=ENDED_ROWS_MAX)  # the time, the owner, and the row

    def plan_look(self) -> None:
        """Look at the sessions once a second while there are any."""
        self._loop.schedule.set(self._look, self._loop.clock.now_s() + LOOK_S if self._directory.sessions else math.inf)

    def _look(self) -> None:
        now_s = self._loop.clock.now_s()
        for runtime in self._directory.sessions:
            _look_at(runtime, now_s)
        self.plan_look()

    def ended(self, runtime: SessionRuntime) -> Row:
        """Keep the row of a session that has ended, and log it; returns the row."""
        row, ending = self._row(runtime), runtime.ended
        del row["processes"], row["workers"]
        key, why = row["owner"]["key"], shortened(hidden(ending.why), TEXT_CHARS_MAX)
        end: Row = {"by": ending.by, "why": why, "how": ending.how}
        row.update(end, lane=runtime.life.ended_lane)
        self._ended.append((self._loop.clock.now_s(), key, row))
        # Event: A session of `owner` has ended, and all that it had is freed; `by` says who ended it, `how` what became
        # of its envs.
        log.info("session_ended", session=runtime.name, client=key, owner=key, **end, audit=True)
        return row

    # --- rows ---------------------------------------------------------------------------------------------------------

    def answer(self, question: Status, holder: Holder) -> list[Row]:
        if question.what == "ended":
            return self.ended_rows(holder, question.session)
        seen = [each for each in self._directory.sessions if holder.owns(each.owner)]
        if question.what == "slow":
            return self._slow.rows(holder, seen)
        return [self._row(each) for each in seen if question.session in ("", each.name)]

    def ended_rows(self, holder: Holder, name: str = "") -> list[Row]:
        now_s = self._loop.clock.now_s()
        return [
            {**row, "ended_s": round(now_s - ended_s, 1)}
            for ended_s, owner, row in self._ended
            if holder.owns(owner) and name in ("", row["session"])
        ]

    def _row(self, runtime: SessionRuntime) -> Row:
        state, life, now_s = runtime.state, runtime.life, self._loop.clock.now_s()
        _look_at(runtime, now_s)
        idle_s = round(now_s - life.moved_s, 1)
        if runtime.memory is not None:
            life.times = latencies(runtime.memory, len(state.slots))
        processes = [_process_row(runtime, each, now_s, idle_s) for each in state.slots.processes]
        costs = [*life.costs.values()]
        return {
            "session": runtime.name,
            "label": hidden(life.label),
            "env": state.make.name[:TEXT_CHARS_MAX] or "factories",
            "kwargs": kwargs_text(state.make),
            "num_envs": state.make.num_envs,
            "owner": life.owner,
            "age_s": round(now_s - life.made_s, 1),
            "idle_s": idle_s,
            "phase": state.phase.value,
            "lane": state.lane.value,
            "leased": runtime.token in self._directory.protocol.leases,
            "steps": runtime.steps,
            "steps_per_s": None if life.steps_per_s is None else round(life.steps_per_s, 1),
            "step_ms": life.times.step_ms,
            "env_ms": life.times.env_ms,
            "cpu_s": round(life.cpu_before_s + sum(each.cpu_s for each in costs), 2),
            "cpu": round(sum(each.cpu or 0.0 for each in costs), 2),
            "memory_bytes": sum(each.memory_bytes for each in costs),
            "workers": runtime.pids,
            "processes": processes,
            "restarts": state.restarts,
            "reasons": [
                {"ago_s": round(now_s - at_s, 1), "worker": worker, "env": env, "why": why}
                for at_s, worker, env, why in life.reasons
            ],
            "recycled": state.recycled,
            "replays": [*life.replays],
            "snapshots": len(runtime.snapshots),
            "snapshots_bytes": state.snapshots.nbytes,
            "sizing": "" if state.launcher.count is None else state.launcher.count.reason,
        }


def _look_at(runtime: SessionRuntime, now_s: float) -> None:
    rests = runtime.state.phase in (Phase.READY, Phase.BROKEN) and runtime.quiescent
    # The sum changes whenever a row has done a reset, a step or a call.
    moves = 0 if runtime.memory is None else int(runtime.memory.arena.done.sum())
    runtime.life.look(runtime.steps, moves, not rests, now_s)


def _process_row(runtime: SessionRuntime, process: Process, now_s: float, idle_s: float) -> Row:
    state, worker = runtime.state, runtime.workers.get(process.number)
    slot, rows = state.slots.of(process), state.slots[process.slot_index].rows
    times = runtime.life.times if slot is not None and runtime.memory is not None else None
    costs = None if worker is None or worker.pid is None else _costs(runtime, process.number, worker.pid, now_s)
    doing, env, since_s = _doing(runtime, process)
    return {
        "worker": state.slots.worker(process.number),
        "pid": None if worker is None else worker.pid,
        "envs": rows if slot is not None else [],
        "doing": doing,
        "env": env,
        "since_s": round(idle_s if since_s is None else since_s, 1),
        "cpu_s": costs and round(costs.cpu_s, 2),
        "cpu": costs and costs.cpu and round(costs.cpu, 2),
        "memory_bytes": costs and costs.memory_bytes,
        "restarts": state.launcher.restarts.count(process.slot_index),
        "env_ms": UNTIMED if slot is None or times is None else times.worker_ms[slot.index],
        "envs_ms": [] if times is None else [times.envs_ms[row]["p50"] for row in rows],
    }


def _doing(runtime: SessionRuntime, process: Process) -> tuple[str, int | None, float | None]:
    """The present act of a process, at which of its envs, and since when, if that is known."""
    slots, memory, rows = runtime.state.slots, runtime.memory, runtime.state.slots[process.slot_index].rows
    if process.is_closing or process.stage is Stage.LEAVING:
        closing = process.closing or process.unclosed
        return "closing", closing[0] if closing else None, None
    if process.stage in (Stage.BUILDING, Stage.MAPPING):
        return "building", rows[min(process.built, len(rows) - 1)], process.detector.waited_s
    if memory is not None and (slot := slots.of(process)) is not None:
        at, work_s = memory.progress(slot.index), memory.at_work_ns(slot.index) / 1e9
        if at.kind:
            # A process that does not begin with what was posted, as it is stopped, has no time there.
            return at.verb, at.row, work_s or process.detector.waited_s
        if work_s:  # no request of the session
            return "building" if at.is_first else "call", at.row, work_s
    return "waiting", None, None


def _costs(runtime: SessionRuntime, number: int, pid: int, now_s: float) -> Costs:
    """Costs of a process, which are a second old at most."""
    life = runtime.life
    for each in life.costs.keys() - runtime.workers.keys():
        life.cpu_before_s += life.costs.pop(each).cpu_s
    last = life.costs.get(number)
    if last is None or now_s - last.taken_s >= LOOK_S:
        pids = pid, *runtime.services.supervisor.orphans().get(pid, ())
        cpu_s = process_marks.cpu_s(*pids)
        since_s, before_s = (life.made_s, 0.0) if last is None else last[:2]
        cpu = max(0.0, cpu_s - before_s) / max(now_s - since_s, LOOK_S)
        last = life.costs[number] = Costs(now_s, cpu_s, cpu, process_marks.memory_bytes(*pids))
    return last


def kwargs_text(make: Make) -> str:
    """The arguments of the envs, for people; only plain values are shown, and those of tuples, but no secrets."""

    def plain(code: int, data: bytes) -> object:
        return tuple(msgpack.unpackb(data, ext_hook=plain)) if code == codec.TUPLE else codec.Repr("…")

    blob = bytes((make.kwargs_each or [make.kwargs])[0]) or NO_KWARGS
    text = f"{len(blob)} bytes"
    with contextlib.suppress(ValueError, TypeError, AttributeError):  # it is no such map; the worker says why
        if len(blob) <= KWARGS_BYTES_MAX:
            fields = msgpack.unpackb(blob, ext_hook=plain)
            text = ", ".join(f"{name}={brief(value)}" for name, value in fields.items())
            text = shortened(hidden(text), TEXT_CHARS_MAX)
    return f"{text}; each env has its own" if make.kwargs_each else text
