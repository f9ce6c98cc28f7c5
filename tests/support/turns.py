"""Ways of doing the same thing, measured in turns in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

TURNS = 5


def tell_ratios(
    measure: str, rates: Mapping[str, Callable[[], float]], yardstick: str, targets: Mapping[str, float]
) -> None:
    """Print the median rate of each way, and its ratio to the yardstick's beside the target; no ratio fails a test.

    Args:
        measure: what is measured, such as ``SB3 step, CartPole-v1, 16 envs``.
        rates: for each way a function that measures it once, and returns a rate per second.
        yardstick: the way that the others are compared with.
        targets: the ratio that each other way is meant to have.
    """
    measured: dict[str, list[float]] = {way: [] for way in rates}
    for _ in range(TURNS):
        for way, rate in rates.items():
            measured[way].append(rate())
    medians = {way: statistics.median(found) for way, found in measured.items()}
    for way, target in targets.items():
        each = [one / other for one, other in zip(measured[way], measured[yardstick], strict=True)]
        print(
            f"\n{measure}, {way}: {medians[way] / medians[yardstick]:.2f} of {yardstick}'s (target {target}; "
            f"turns {min(each):.2f} to {max(each):.2f}); {medians[way]:,.0f} to {medians[yardstick]:,.0f} a second"
        )
    assert all(min(found) > 0 for found in measured.values())
