"""Texts of a peer: what a terminal would obey is written out, and what names folders is left out."""

from __future__ import annotations

import pytest

from envhub.errors import EnvRaised, printable, shortened, shown, without_folders
from envhub.protocol.messages import Failure


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('File "/home/op/sims/robot.py", line 3, in act', 'File "robot.py", line 3, in act'),
        ("[Errno 2] No such file or directory: '/etc/passwd'", "[Errno 2] No such file or directory: 'passwd'"),
        ("/a/b.py:3: Warning", "b.py:3: Warning"),
        ("PYTHONPATH=/a/b:/c/d", "PYTHONPATH=b:d"),
        ("/srv", "srv"),
        ("no file '/srv/my sims/näme/a b.txt' or '/x y/z'", "no file 'a b.txt' or 'z'"),
        ("see ~/sims/arm.xml, file:///srv/sims/leg.xml", "see arm.xml, file://leg.xml"),
        ("ALE/Pong-v5 at tcp://127.0.0.1:5555/x", "ALE/Pong-v5 at tcp://127.0.0.1:5555/x"),
        ("1 / 2, and/or, 3/4, ./here, ../there", "1 / 2, and/or, 3/4, ./here, ../there"),
    ],
)
def test_folders_are_left_out(text: str, told: str) -> None:
    assert without_folders(text) == told


def test_texts_are_changed_wherever_they_are() -> None:
    failure = Failure("env_raised", "env", "a\x1b[2J /x/y", args=b"/x/y", env_index=3)
    assert printable(failure) == Failure("env_raised", "env", "a\\x1b[2J /x/y", args=b"/x/y", env_index=3)
    assert without_folders(failure).message == "a\x1b[2J y"
    assert without_folders([("/x/y", 1), {"/k/l": None}]) == [("y", 1), {"l": None}]


def test_text_is_shortened_at_a_word() -> None:
    assert shortened("a few words", 11) == "a few words"
    assert shortened("a few words more", 11) == "a few…"
    assert shortened("a few words, more", 13) == "a few words…"
    assert shortened("a few words", 6) == "a few…"
    assert shortened("x" * 50, 10) == "x" * 9 + "…"
    assert shown(["one", "two"], 9) == "['one'…"
    assert all(len(shortened("some words of a text", most)) <= most for most in range(1, 25))


def test_exception_without_a_text_is_told_with_its_class_its_env_and_its_replay() -> None:
    told = str(EnvRaised(3, "builtins.AssertionError", "", "Traceback: …", 1, "simbox", "arm-1"))
    assert told.startswith(
        "env 3 in worker 1 of the hub at simbox raised AssertionError\n\nOn the hub's machine `envhub "
    )
    assert "`envhub replay arm-1`" in told
    assert str(EnvRaised(3, "builtins.KeyError", "'pose'")) == "env 3 raised KeyError: 'pose'"
