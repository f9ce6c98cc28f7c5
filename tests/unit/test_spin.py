from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable

import pytest

from envhub.arena.spin import HAS_FENCE, SKIPS_MAX, SPIN_US, SPIN_US_MAX, Spinner, fence, spin_us


class Clock:
    """Every look at it takes a microsecond."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class After:
    """Ready at the n-th question."""

    def __init__(self, questions: float) -> None:
        self.left = questions

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_what_is_ready_needs_no_clock() -> None:
    clock = Clock()
    assert Spinner(50, clock).spin(After(0)) and clock.now_ns == 0


def test_what_gets_ready_in_time_is_seen() -> None:
    assert Spinner(50, Clock()).spin(After(20))


def test_a_spin_is_bounded() -> None:
    clock = Clock()
    assert not Spinner(50, clock).spin(After(float("inf")))
    assert clock.now_ns <= 52_000


def test_without_a_limit_no_side_spins() -> None:
    clock = Clock()
    spinner = Spinner(0, clock)
    assert not spinner.spin(After(1)) and spinner.spin(After(0)) and clock.now_ns == 0


def test_vain_spins_become_rare_and_a_good_one_brings_them_back() -> None:
    clock = Clock()
    spinner = Spinner(10, clock)
    spun = []
    for _ in range(600):
        before = clock.now_ns
        spinner.spin(After(float("inf")))
        spun.append(clock.now_ns > before)
    starts = [number for number, did in enumerate(spun) if did]
    gaps = [after - before - 1 for before, after in itertools.pairwise(starts)]
    assert gaps[:8] == [1, 3, 7, 15, 31, 63, 127, 127] and max(gaps) == SKIPS_MAX
    while not spinner.spin(After(2)):
        pass
    assert spinner.spin(After(2))


@pytest.mark.parametrize(
    ("processes", "cpus", "quota", "wanted"),
    [(2, 4, False, SPIN_US), (4, 4, False, SPIN_US), (5, 4, False, 0), (2, 4, True, 0)],
)
def test_no_process_spins_where_cpus_are_short(
    processes: int, cpus: int, quota: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envhub.arena.spin.HAS_FENCE", True)
    monkeypatch.delenv("ENVHUB_SPIN_US", raising=False)
    assert spin_us(processes, cpus, quota) == wanted
    monkeypatch.setattr("envhub.arena.spin.HAS_FENCE", False)
    assert spin_us(processes, cpus, quota) == 0


def test_variable_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_SPIN_US", "7")
    assert spin_us(100, 1, True) == 7
    for wrong in ("-1", "x", "", str(SPIN_US_MAX + 1), "1" * 5000):
        monkeypatch.setenv("ENVHUB_SPIN_US", wrong)
        with pytest.raises(ValueError, match="ENVHUB_SPIN_US"):
            spin_us(1, 1, False)


TRIED_S = 40.0
LOOKS = 100  # in vain, before a process leaves its CPU to others, of which the one it waits for may be one


def missed(rounds: int, between: Callable[[], None]) -> int:
    """How often of two processes, that each store a word and then load the other's, neither sees the other's."""
    with mmap.mmap(-1, 4096) as shared:
        words = memoryview(shared).cast("q")
        # Each word in a cache line of its own: where each stands, what it stores, and whether it saw the other's.
        places = [[words[8 * place : 8 * place + 1] for place in range(3 * side, 3 * side + 3)] for side in (0, 1)]
        child = os.fork()
        own, other = places if child else reversed(places)
        (own_round, own_word, own_saw), (other_round, other_word, other_saw) = own, other
        found = 0
        for number in range(1, rounds + 1):
            own_round[0] = number
            for looks in itertools.count(1):
                if other_round[0] >= number:
                    break
                if looks % LOOKS == 0:
                    os.sched_yield()
            own_word[0] = number
            between()
            saw = other_word[0] == number
            own_saw[0] = 2 * number + saw
            for looks in itertools.count(1):
                if other_saw[0] >> 1 >= number:
                    break
                if looks % LOOKS == 0:
                    os.sched_yield()
            found += not saw and not other_saw[0] & 1
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        for word in (own_round, own_word, own_saw, other_round, other_word, other_saw, words):
            word.release()
        return found


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_FENCE, reason="this machine has no fence that Python can reach")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes have to run at the same time")
def test_fence_has_at_least_one_of_two_see_what_the_other_stored() -> None:
    rounds, tries, begun_s = 5_000, 0, time.monotonic()
    while not missed(rounds, lambda: None):
        tries += 1
        if tries == 80 or time.monotonic() - begun_s > TRIED_S:
            pytest.skip("without a fence nothing was missed, either: the two hardly ran at the same time")
    assert missed(max(20_000, (1 + tries) * rounds), fence) == 0
