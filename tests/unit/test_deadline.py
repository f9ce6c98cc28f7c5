"""Deadlines: their seconds in texts."""

from __future__ import annotations

import pytest
from envhub_client.deadline import shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0442694, "0.044"), (0.682282, "0.68"), (0.3, "0.3"), (5, "5"), (119.9987, "120"), (2.5, "2.5")],
)
def test_seconds_are_shown_with_few_digits(seconds: float, text: str) -> None:
    assert shown(seconds) == text
