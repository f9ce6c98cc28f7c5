"""Combinations of parameters, of which CI runs some."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def every_pair(*parameters: Collection[Any]) -> list[Any]:
    """Every combination of three or more parameters.

    The long ones are a part of them in which each value occurs with each value of each other parameter; the others are
    chaos.
    """
    fewest, found = min(map(len, parameters)), []
    for combination in itertools.product(*map(enumerate, parameters)):
        numbers, values = zip(*combination, strict=True)
        found.append(pytest.param(*values, marks=pytest.mark.chaos if sum(numbers) % fewest else pytest.mark.long))
    return found
