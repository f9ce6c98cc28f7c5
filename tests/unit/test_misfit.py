"""What is wrong with a value that does not fit its space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envhub.values.spaces import misfit

SPACE = spaces.Dict(
    {
        "pos": spaces.Box(-1, 1, (2,)),
        "parts": spaces.Tuple([spaces.Discrete(5), spaces.Text(3)]),
        "any": spaces.Graph(spaces.Discrete(2), None),
    }
)
FITS = {"pos": np.zeros(2, np.float32), "parts": (1, "a"), "any": None}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "observation is None, and its space has the keys 'any', 'parts', 'pos'"),
        ({"pos": FITS["pos"], "parts": (1, "a")}, "observation has no 'any', which its space has"),
        ({**FITS, "pos": np.zeros(3)}, "observation['pos'] is of shape (3,), and its space of shape (2,)"),
        ({**FITS, "pos": None}, "observation['pos'] is None, and its space of shape (2,)"),
        ({**FITS, "pos": [[1], [1, 2]]}, "observation['pos'] is no array: its parts have several lengths"),
        ({**FITS, "parts": [2]}, "observation['parts'] has 1 parts, and its space 2"),
        ({**FITS, "parts": 3}, "observation['parts'] is a int, and its space a tuple of 2"),
        ({**FITS, "parts": (0.5, "a")}, "observation['parts'][0] is of dtype float64, and its space of dtype int64"),
        (
            {**FITS, "parts": (2**70, "a")},
            "observation['parts'][0] is an int of more than 64 bits, and its space of dtype int64",
        ),
        (FITS, ""),
    ],
)
def test_first_part_that_does_not_fit_is_named(value: Any, why: str) -> None:
    assert misfit(SPACE, value, "observation") == why
