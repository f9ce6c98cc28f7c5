from __future__ import annotations

import math

from envhub_server.loop import Clock
from envhub_server.session.slots import HangDetector, Late

from envhub.protocol.messages import Faults

FAULTS = Faults(step_s=60.0, reset_s=10.0, init_s=100.0, call_s=20.0)


def test_env_that_stays_at_the_same_turn_is_reported_as_slow_and_then_as_over() -> None:
    detector = HangDetector(FAULTS)
    found = [detector.sample(float(now_s), 10.0, "step", 3, turn=7) for now_s in range(0, 61, 10)]
    assert found[:3] == [None] * 3
    assert found[3] == Late("step", 3, 30.0, 60.0) and not found[3].expired
    assert found[4:6] == [None] * 2
    assert found[6] is not None and found[6].expired


def test_worker_that_goes_on_is_never_late_however_long_its_batch_takes() -> None:
    detector = HangDetector(FAULTS)
    assert not any(detector.sample(50.0 * turn, 50.0, "step", turn % 16, turn) for turn in range(1000))


def test_rest_between_two_steps_does_not_count() -> None:
    detector = HangDetector(FAULTS)
    assert detector.sample(0.0, 59.0, "step", 0, 1) is None
    detector.rest()
    assert detector.sample(1000.0, 59.0, "step", 0, 1) is None
    assert detector.sample(1059.0, 59.0, "step", 0, 1) == Late("step", 0, 59.0, 60.0)  # slow


def test_env_that_is_slow_again_after_a_rest_is_reported_again() -> None:
    detector = HangDetector(FAULTS)
    for begin_s in (0.0, 1000.0):
        found = [detector.sample(begin_s + now_s, 10.0, "step", 3, turn=7) for now_s in range(0, 41, 10)]
        assert [late is not None for late in found] == [False, False, False, True, False]
        detector.rest()


def test_each_kind_has_its_own_time() -> None:
    for kind, limit_s in {"init": 100.0, "reset": 10.0, "step": 60.0, "call": 20.0}.items():
        detector = HangDetector(FAULTS)
        detector.sample(0.0, limit_s, kind, 0, 1)
        early, late = (detector.sample(at_s, limit_s, kind, 0, 1) for at_s in (limit_s - 0.1, limit_s))
        assert (early is None or not early.expired) and late is not None and late.expired


def test_late_sample_counts_for_twice_the_planned_interval() -> None:
    detector = HangDetector(Faults(step_s=0.7))
    assert detector.sample(0.0, 0.1, "step", 0, 1) is None
    assert detector.sample(1.9, 0.1, "step", 0, 1) is None  # hub and worker were frozen together
    assert detector.sample(3.8, 0.1, "step", 0, 1) is None
    assert detector.sample(3.9, 0.1, "step", 0, 1) is None
    late = detector.sample(5.0, 0.1, "step", 0, 1)
    assert late is not None and late.expired and math.isclose(late.waited_s, 0.7)


def test_no_time_passes_while_the_hub_is_stopped() -> None:
    now_s = 100.0
    clock = Clock(lambda: now_s)
    planned_s = clock.now_s() + 0.1
    now_s = 100.5
    assert clock.woke(planned_s) == 0.0 and clock.now_s() == 100.5
    now_s = 160.5
    assert math.isclose(clock.woke(100.6), 59.9) and math.isclose(clock.now_s(), 100.6)
    now_s = 161.0
    assert math.isclose(clock.now_s(), 101.1)
    assert clock.woke(math.inf) == 0.0


def test_largest_lag_of_the_last_minute_is_reported() -> None:
    now = [100.0]
    clock = Clock(lambda: now[0])
    assert clock.lag_s() == 0.0
    for now[0], planned_s in [(100.0, 99.5), (110.0, 109.0), (120.0, 119.75), (130.0, 129.9), (140.0, 141.0)]:
        assert clock.woke(planned_s) == 0.0
    lags = []
    for now[0] in (150.0, 169.1, 180.0, 189.95):
        lags.append(round(clock.lag_s(), 2))
    assert lags == [1.0, 0.25, 0.1, 0.0]


def test_time_in_which_something_was_handled_is_lag() -> None:
    now_s = 100.0
    clock = Clock(lambda: now_s)
    clock.note(100.0, 4.0)
    assert clock.lag_s() == 4.0
    now_s = 101.0
    clock.note(101.0, 0.5)
    assert clock.lag_s() == 4.0
    now_s = 161.0
    assert clock.lag_s() == 0.5
    now_s = 162.0
    assert clock.lag_s() == 0.0


def test_time_in_which_the_hub_was_stopped_is_no_lag() -> None:
    now_s = 110.0
    clock = Clock(lambda: now_s)
    assert clock.woke(100.0) == 10.0 and clock.lag_s() == 0.0
