from __future__ import annotations

from envhub_server.repeats import KINDS_MAX, REPEAT_S, Repeats


def test_one_line_of_a_kind_in_a_while_and_the_next_says_how_many_were_left_out() -> None:
    repeats = Repeats()
    assert repeats.left_out("a", 100.0) == 0
    assert [repeats.left_out("a", 100.0 + second) for second in (0, 1, REPEAT_S - 0.1)] == [None] * 3
    assert repeats.left_out("b", 101.0) == 0
    assert repeats.left_out("a", 100.0 + REPEAT_S) == 3
    assert repeats.left_out("a", 101.0 + REPEAT_S) is None


def test_only_so_many_kinds_are_remembered_and_a_flood_of_kinds_is_written() -> None:
    repeats = Repeats()
    for number in range(KINDS_MAX + 1):
        assert repeats.left_out(number, 100.0) == 0
    assert repeats.left_out(KINDS_MAX, 100.0) is None
    assert repeats.left_out(0, 100.0) == 0  # it was forgotten
