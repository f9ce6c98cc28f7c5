"""The rules that find trouble in rows of sessions, and those that do not see it where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from envhub.diagnosis import SAMPLES_MAX, Finding, Memory, findings, remember

MIB = 1 << 20


def process(worker: int = 0, **changes: Any) -> dict[str, Any]:
    idle = {"envs": [worker], "doing": "waiting", "env": None, "since_s": 0.1, "memory_bytes": 100 * MIB}
    untimed = {"env_ms": {"p50": None, "p99": None}, "envs_ms": [None]}
    return {"worker": worker, "pid": 1000 + worker, **untimed, **idle, **changes}


def row(*processes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known = {"session": "0badcafe", "env": "sim", "age_s": 100.0, "phase": "ready", "reasons": []}
    return {**known, "processes": list(processes) or [process()], **changes}


def troubles(*rows: dict[str, Any], memory: Memory | None = None) -> list[tuple[str, int, int]]:
    return [(each.trouble, each.worker, each.env) for each in findings(rows, memory)]


@pytest.mark.parametrize(
    ("doing", "is_stuck"),
    [
        ({"doing": "step", "env": 3, "since_s": 6.0}, True),
        ({"doing": "step", "env": 3, "since_s": 4.0}, False),
        ({"doing": "reset", "env": 3, "since_s": 6.0}, True),
        ({"doing": "call", "env": 3, "since_s": 6.0}, True),
        ({"doing": "building", "env": 3, "since_s": 59.0}, False),
        ({"doing": "building", "env": 3, "since_s": 61.0}, True),
        ({"doing": "waiting", "since_s": 3600.0}, False),
        ({"doing": "step", "env": 3, "since_s": None}, False),
        # Its steps take a second each in good health.
        ({"doing": "step", "env": 3, "since_s": 6.0, "env_ms": {"p50": 900.0, "p99": 1000.0}}, False),
        ({"doing": "step", "env": 3, "since_s": 11.0, "env_ms": {"p50": 900.0, "p99": 1000.0}}, True),
    ],
)
def test_worker_is_stuck_that_executes_one_thing_for_long(doing: dict[str, Any], is_stuck: bool) -> None:
    assert troubles(row(process(2, **{"envs": [1, 3], **doing}))) == [("stuck", 2, 3)] * is_stuck


def test_stuck_is_told_in_a_sentence_with_the_env_and_the_time() -> None:
    (finding,) = findings([row(process(2, envs=[1, 3], doing="step", env=3, since_s=12.3))])
    assert str(finding) == "stuck: worker 2 (envs 1, 3) has executed step of env 3 for 12 s"
    assert findings([row(process(doing="step", env=0, since_s=12.3))], stuck_s=20.0) == []


@pytest.mark.parametrize(
    ("ago_s", "workers", "phase", "count"),
    [
        ([1, 5, 9], [1, 1, 1], "ready", 1),
        ([1, 5], [1, 1], "ready", 0),
        ([1, 5, 61], [1, 1, 1], "ready", 0),
        ([1, 5, 9], [0, 1, 2], "ready", 0),  # each once, which is not a loop
        ([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1], "ready", 2),
        ([1], [1], "broken", 1),
    ],
)
def test_worker_is_crash_looping_that_was_restarted_often_lately(
    ago_s: list[float], workers: list[int], phase: str, count: int
) -> None:
    reasons = [
        {"ago_s": ago, "worker": worker, "env": worker, "why": "killed by SIGSEGV"}
        for ago, worker in zip(ago_s, workers, strict=True)
    ]
    found = findings([row(reasons=reasons, phase=phase)])
    assert [each.trouble for each in found] == ["crash-looping"] * count
    assert all(each.text.endswith("last by: killed by SIGSEGV") for each in found)


def remembered(size: Callable[[float], float], seconds: int, doing: str = "step") -> Memory:
    memory: Memory = {}
    for second in range(seconds):
        each = row(process(memory_bytes=int(size(second) * MIB), doing=doing), age_s=float(second))
        memory = remember(memory, [each])
    return memory


@pytest.mark.parametrize(
    ("size", "seconds", "is_leaking"),
    [
        (lambda second: 100 + 8 * second, 8, True),
        (lambda second: 100 + 8 * second, 4, False),  # too short a time to tell
        (lambda second: 100, 300, False),
        (lambda second: 100 + (second % 10) * 10, 300, False),  # it goes up and down
        (lambda second: 100 + min(second, 5) * 40, 300, False),  # it has grown, and stays
        (lambda second: 100 + second / 60, 3600, True),  # 1 MiB a minute
        (lambda second: 100 + max(0, second - 2400) * 0.1, 3600, True),  # it begins late
        (lambda second: 4000 + second / 12, 600, False),  # next to nothing of what it has
    ],
)
def test_worker_is_leaking_whose_memory_grows_steadily(
    size: Callable[[float], float], seconds: int, is_leaking: bool
) -> None:
    memory = remembered(size, seconds)
    assert all(len(samples) <= SAMPLES_MAX + 1 for samples in memory.values())
    assert troubles(row(), memory=memory) == [("leaking", 0, 0)] * is_leaking


def test_memory_that_imports_and_envs_take_when_they_are_made_is_no_leak() -> None:
    assert troubles(row(), memory=remembered(lambda second: 100 + 8 * second, 10, "importing")) == []


def test_memory_of_a_worker_that_ended_is_forgotten_with_it() -> None:
    memory = remembered(lambda second: 100 + 8 * second, 10)
    after = remember(memory, [row(process(pid=4711), age_s=10.0)])
    assert list(after) == [("0badcafe", 4711)] and troubles(row(process(pid=4711)), memory=after) == []


def times(worker: int, p50: float | None, p99: float | None = None) -> dict[str, Any]:
    return process(worker, env_ms={"p50": p50, "p99": p99 or p50}, envs_ms=[p50])


@pytest.mark.parametrize(
    ("rows", "slow"),
    [
        ([row(times(0, 2.0), times(1, 2.5), times(2, 20.0))], [("0badcafe", 2)]),
        ([row(times(0, 2.0), times(1, 2.5), times(2, 6.0))], []),
        ([row(times(0, 0.02), times(1, 0.02), times(2, 0.4))], []),  # by the machine's other work
        ([row(times(0, 2.0, 4.0), times(1, 2.5, 4.0), times(2, 2.5, 30.0))], []),
        ([row(times(0, 2.0, 4.0), times(1, 2.5, 4.0), times(2, 2.5, 300.0))], [("0badcafe", 2)]),  # now and then
        ([row(times(0, 2.0), times(1, None))], []),
        # One worker alone is compared with those of other sessions of the same env.
        ([row(times(0, 20.0)), row(times(0, 2.0), session="11111111")], [("0badcafe", 0)]),
        ([row(times(0, 20.0)), row(times(0, 2.0), session="11111111", env="other")], []),
        ([row(times(0, 20.0))], []),
    ],
)
def test_worker_is_slow_whose_env_takes_far_longer_than_its_neighbours(
    rows: list[dict[str, Any]], slow: list[tuple[str, int]]
) -> None:
    assert [(each.session, each.worker) for each in findings(rows)] == slow


@pytest.mark.parametrize(
    ("envs_ms", "slow"),
    [
        ([2.0, 20.0, 2.5], [3]),
        ([2.0, 6.0, 2.5], []),
        ([0.02, 0.4, 0.02], []),
        ([None, 20.0, None], []),
        ([None, 20.0, 2.0], [3]),
        ([], []),
    ],
)
def test_env_is_slow_that_takes_far_longer_than_others_of_its_worker(envs_ms: list[float], slow: list[int]) -> None:
    worker = process(1, envs=[1, 3, 5], envs_ms=envs_ms, env_ms={"p50": 20.0, "p99": 25.0})
    assert [each.env for each in findings([row(worker)])] == slow


def test_findings_of_all_kinds_come_in_the_order_of_the_rows() -> None:
    stuck = process(0, doing="step", env=0, since_s=6.0)
    first, second = row(stuck, session="aaaaaaaa"), row(stuck, session="bbbbbbbb")
    expected = Finding("stuck", "aaaaaaaa", 0, 0, "worker 0 (env 0) has executed step for 6 s")
    assert findings([first, second])[0] == expected
    assert [each.session for each in findings([second, first])] == ["bbbbbbbb", "aaaaaaaa"]
