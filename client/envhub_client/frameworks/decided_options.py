"""Options of ``make_vec`` that a training framework leaves no choice of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_decided(options: Mapping[str, Any], framework: str, *names: str) -> None:
    """Check that none of ``names`` is among the options that a user gave.

    Raises:
        TypeError: one is.
    """
    for name in names:
        if name in options:
            raise TypeError(f"{name} is not to be given: {framework} needs a certain one, and sets it; leave it out")
