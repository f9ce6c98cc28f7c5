"""What a worker finds its steps to take: CPU time, waiting, and nothing of what it spent in the run queue."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import pytest
from envhub_server.ipc.control import StepTimes
from envhub_server.worker import step_timer
from envhub_server.worker.step_timer import EACH_UNTIL, ONE_IN, StepTimer


def timed(timer: StepTimer, work: Callable[[], object], batches: int = 1) -> StepTimes:
    for _ in range(batches):
        timer.start()
        work()
        timer.stop(1)
    return timer.times


def compute() -> None:
    end_s = time.thread_time() + 0.005
    while time.thread_time() < end_s:
        pass


def test_steps_that_compute_take_cpu_time_and_wait_for_nothing() -> None:
    found = timed(StepTimer(), compute, 8)
    assert found.steps == 8 and found.cpu_ns >= 8 * 5_000_000
    assert found.wait_ns < found.cpu_ns / 2  # whatever else the machine has to do meanwhile


def test_steps_that_sleep_wait() -> None:
    found = timed(StepTimer(), lambda: time.sleep(0.005), 8)
    assert found.wait_ns >= 8 * 4_000_000 and found.cpu_ns < found.wait_ns


def test_step_whose_other_threads_compute_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = StepTimer()
    clocks = {"perf_counter_ns": [0, 1000], "thread_time_ns": [0, 10], "process_time_ns": [0, 900]}
    for name, values in clocks.items():
        monkeypatch.setattr(step_timer.time, name, iter(values).__next__)
    monkeypatch.setattr(timer, "_queued_ns", iter([0, 50]).__next__)
    monkeypatch.setattr(step_timer, "_voluntary_switches", iter([0, 1]).__next__)
    timer.start()
    timer.stop(1)
    assert timer.times == StepTimes(1, 900, 50)


@pytest.mark.parametrize("instead", [b"", b"nonsense\n"])
def test_kernel_that_does_not_tell_of_its_queue_is_done_without(instead: bytes, tmp_path: os.PathLike[str]) -> None:
    timer = StepTimer()
    other = os.open(os.path.join(tmp_path, "file"), os.O_RDWR | os.O_CREAT)
    os.write(other, instead)
    taken = timer._schedstat
    os.dup2(other, taken)  # as an env does that closes descriptors and opens others
    os.close(other)
    assert timed(timer, compute).cpu_ns >= 5_000_000
    os.close(taken)


def test_first_batches_are_left_out_and_later_ones_timed_now_and_then() -> None:
    timer = StepTimer()
    timed_batches = []
    for batch in range(1, 500):
        timer.batches_left -= 1
        if not timer.batches_left:
            timer.start()
            timer.stop(1)
            timed_batches.append(batch)
    assert timed_batches[:EACH_UNTIL] == list(range(3, 3 + EACH_UNTIL))
    later = timed_batches[EACH_UNTIL:]
    assert {after - before for before, after in itertools.pairwise(later)} == {ONE_IN}


def test_new_times_are_reported_after_8_batches_and_then_after_four_times_as_many_each() -> None:
    timer = StepTimer()
    reported = []
    for batch in range(1, 600):
        timer.start()
        if timer.stop(2):
            reported.append(batch)
    assert reported == [8, 32, 128, 512]
    assert timer.times.steps == 2 * (599 - 512)  # what was reported is not reported again
