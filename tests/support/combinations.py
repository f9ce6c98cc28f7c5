"""Combinations of parameters, of which CI runs some."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def every_pair(
    *parameters: Collection[Any], some: Any = pytest.mark.long, others: Any = pytest.mark.chaos
) -> list[Any]:
    """Every combination of three or more parameters.

    Those marked as ``some`` are a part of them in which each value occurs with each value of each other parameter.
    """
    fewest, found = min(map(len, parameters)), []
    for combination in itertools.product(*map(enumerate, parameters)):
        numbers, values = zip(*combination, strict=True)
        found.append(pytest.param(*values, marks=others if sum(numbers) % fewest else some))
    return found


def each_value(*parameters: Collection[Any], others: Any = pytest.mark.chaos) -> list[Any]:
    """Every combination of parameters; all but so few that each value occurs in one are marked as ``others``."""
    most, found = max(map(len, parameters)), []
    few = {tuple(number % len(values) for values in parameters) for number in range(most)}
    for combination in itertools.product(*map(enumerate, parameters)):
        numbers, values = zip(*combination, strict=True)
        found.append(pytest.param(*values, marks=() if numbers in few else others))
    return found
