"""Each event of the log has one sentence, and the page has them all."""

from __future__ import annotations

import pytest
from logged_events import PAGE, events, updated


@pytest.mark.parametrize("name", events())
def test_event_has_one_sentence_and_lines_that_are_limited_alike(name: str) -> None:
    event = events()[name]
    assert len(event.sentences) == 1, 'write "# Event: ..." above one of its calls'
    assert event.sentences[0].endswith(".") and event.levels and len(event.once_per) <= 1


def test_list_is_made_of_the_calls() -> None:
    page = PAGE.read_text()
    assert all(f"\n- `{name}` (" in page for name in events())
    assert page == updated(page), "run: python tests/support/logged_events.py"
