"""Deadlines: their seconds in texts."""

from __future__ import annotations

import pytest
from envhub_client.deadline import no_reply, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0442694, "0.044"), (0.682282, "0.68"), (0.3, "0.3"), (5, "5"), (119.9987, "120"), (2.5, "2.5")],
)
def test_seconds_are_shown_with_few_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "hubs"),
    [
        (1, "hub at 0"),
        (2, "hubs at 0 and 1"),
        (3, "hubs at 0, 1 and 2"),
        (10, "hubs at 0, 1, 2, 3, 4, 5, 6, 7, 8 and 9"),
        (12, "hubs at 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 others"),
    ],
)
def test_error_names_the_hubs_that_have_not_replied(count: int, hubs: str) -> None:
    text = no_reply([str(number) for number in range(count)], 0.5)
    assert text == f"no reply from the {hubs} within 0.5 s; it can be waited for again"
