"""Trouble of sessions, read off rows of ``Client.sessions``: stuck, crash-looping, leaking or slow.

These rules know no clock: a row's ``age_s`` is the time. What shows only over time, a leak, is read off the memory of
each worker in earlier rows, which ``remember`` keeps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any, Iterable, Mapping, Sequence, Tuple

Row = Mapping[str, Any]
Samples = Sequence[Tuple[float, int]]  # of a worker: the session's age in seconds, and bytes
Memory = Mapping[Tuple[str, int], Samples]  # by session and process id

STUCK_S = 5.0
PATIENT_S = dict.fromkeys(("importing", "building", "closing"), 60.0)  # these take long in good health
IDLE = ("", "waiting")
STUCK_STEPS = 10  # or, if its steps are long, after the time of this number of its slowest
LOOP_S, LOOP_RESTARTS = 60.0, 3  # of one worker; a session breaks after 5 by default
LEAK_S, LEAK_SAMPLES = 4.0, 5
LEAK_BYTES, LEAK_SHARE = 16 << 20, 0.02  # what a worker has grown by, and as a share of its size
SAMPLES_MAX, SAMPLE_S = 64, 0.5
# Times as long as neighbours, and least milliseconds, of what is slow: shorter ones vary as much on a busy machine.
SLOW = (("p50", 4.0, 1.0), ("p99", 10.0, 50.0))
ENVS_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """A trouble of one worker of a session."""

    trouble: str  # "stuck", "crash-looping", "leaking" or "slow"
    session: str
    worker: int
    env: int  # the cause, or one of the worker's, by which it is restarted; -1 if none is known
    text: str  # a sentence

    def __str__(self) -> str:
        return f"{self.trouble}: {self.text}"


def findings(rows: Sequence[Row], memory: Memory | None = None, stuck_s: float = STUCK_S) -> list[Finding]:
    """Return the trouble of all these sessions, those of several hubs together, in the order of the rows.

    Args:
        rows: of ``Client.sessions``; envs of one name are compared with each other, over all rows.
        memory: as ``remember`` returned it, for leaks.
        stuck_s: how long a step, a reset or a call may take.
    """
    result: list[Finding] = []
    for row in rows:
        result += _stuck(row, stuck_s)
        result += _crash_looping(row)
        result += _leaking(row, memory or {})
        result += _slow(row, rows)
    return result


def remember(memory: Memory, rows: Iterable[Row]) -> dict[tuple[str, int], Samples]:
    """Return the memory with the sizes in these rows, and without workers that have none."""
    kept: dict[tuple[str, int], Samples] = {}
    for row in rows:
        for process in row["processes"]:
            place = row["session"], process["pid"]
            samples = kept[place] = memory.get(place, ())
            gap_s = max(SAMPLE_S, (samples[-1][0] - samples[0][0]) / SAMPLES_MAX * 2) if samples else 0.0
            if not process["memory_bytes"] or process["doing"] in PATIENT_S:  # imports take memory, and are no leak
                continue
            if not samples or row["age_s"] >= samples[-1][0] + gap_s:
                kept[place] = [*samples, (row["age_s"], process["memory_bytes"])]
                if len(kept[place]) > SAMPLES_MAX:
                    kept[place] = kept[place][::2]
    return kept


def _stuck(row: Row, stuck_s: float) -> Iterable[Finding]:
    for process in row["processes"]:
        doing, since_s = process["doing"], process["since_s"]
        if doing in IDLE or since_s is None:
            continue
        limit_s = PATIENT_S.get(doing, stuck_s)
        if doing == "step":
            limit_s = max(limit_s, STUCK_STEPS * (process["env_ms"]["p99"] or 0.0) / 1000)
        if since_s >= limit_s:
            env = "" if process["env"] is None or len(process["envs"]) == 1 else f" of env {process['env']}"
            yield _finding("stuck", row, process, f"has executed {doing}{env} for {since_s:.0f} s")


def _crash_looping(row: Row) -> Iterable[Finding]:
    lately = defaultdict(list)
    for reason in row["reasons"]:
        if reason["ago_s"] <= LOOP_S:
            lately[reason["worker"]].append(reason)
    for worker, reasons in lately.items():
        if len(reasons) >= LOOP_RESTARTS or row["phase"] == "broken":
            last = min(reasons, key=lambda each: each["ago_s"])
            text = f"worker {worker} was restarted {len(reasons)} times within {LOOP_S:.0f} s, last by: {last['why']}"
            env = -1 if last["env"] is None else last["env"]
            yield Finding("crash-looping", row["session"], worker, env, text)


def _leaking(row: Row, memory: Memory) -> Iterable[Finding]:
    for process in row["processes"]:
        samples = memory.get((row["session"], process["pid"]), ())
        for part in (1, 2, 4):  # it may have begun later; a shorter part would be an episode's ups and downs
            late = samples[len(samples) - len(samples) // part :]
            if growth := _growth(late):
                (began_s, _), (now_s, size) = late[0], late[-1]
                text = f"has grown by {growth / 2**20:.0f} MiB in {now_s - began_s:.0f} s, to {size / 2**20:.0f} MiB"
                yield _finding("leaking", row, process, text)
                break


def _growth(samples: Samples) -> int:
    """Bytes by which a worker has grown, if it grew from each third of the time to the next; else 0."""
    third = len(samples) // 3
    if len(samples) < LEAK_SAMPLES or samples[-1][0] - samples[0][0] < LEAK_S:
        return 0
    least = [min(size for _, size in samples[at : at + third]) for at in (0, third, len(samples) - third)]
    growth = samples[-1][1] - samples[0][1]
    is_steady = min(least[1] - least[0], least[2] - least[1]) >= growth / 8
    return growth if is_steady and growth >= max(LEAK_BYTES, LEAK_SHARE * samples[0][1]) else 0


def _slow(row: Row, rows: Sequence[Row]) -> Iterable[Finding]:
    slow: set[int] = set()  # workers of which something is said
    for rank, ratio, least_ms in SLOW:
        own = [*_timed(row, rank)]
        for process, env, ms in own:
            if ms < least_ms or process["worker"] in slow:
                continue
            others = [other for _, each, other in own if each != env]
            if not others:  # one env alone has its neighbours in other sessions
                alike = [each for each in rows if each["env"] == row["env"] and each is not row]
                others = [other for each in alike for _, _, other in _timed(each, rank)]
            times = ms / median(others) if others else 0.0
            if times >= ratio:
                slow.add(process["worker"])
                text = f"a step of env {env} takes {ms:.1f} ms ({rank}), {times:.0f} times as long as neighbours"
                yield Finding("slow", row["session"], process["worker"], env, text)


def _timed(row: Row, rank: str) -> Iterable[tuple[Mapping[str, Any], int, float]]:
    """Yield worker, env and milliseconds: the p50 of each env, or the p99 of each worker with its first env."""
    for process in row["processes"]:
        times = process["envs_ms"] if rank == "p50" else [process["env_ms"]["p99"]]
        yield from ((process, env, ms) for env, ms in zip(process["envs"], times) if ms)


def _finding(trouble: str, row: Row, process: Mapping[str, Any], text: str) -> Finding:
    envs = process["envs"]
    env = process["env"] if process["env"] is not None else envs[0] if envs else -1
    numbers = ", ".join(map(str, envs[:ENVS_SHOWN])) + ", ..." * (len(envs) > ENVS_SHOWN)
    name = f"worker {process['worker']} (env{'s' * (len(envs) > 1)} {numbers})"
    return Finding(trouble, row["session"], process["worker"], env, f"{name} {text}")
