from __future__ import annotations

import itertools

import pytest

from envhub.arena.spin import SKIPS_MAX, SPIN_US, SPIN_US_MAX, Spinner, spin_us


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
