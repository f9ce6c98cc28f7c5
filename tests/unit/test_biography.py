"""What is kept of a session for the table: its end, its rate, and the arguments of its envs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from envhub_server.hub.biography import CLOSED, KILLED, NOT_MADE, Biography, Ending, in_one_line
from envhub_server.hub.status import KWARGS_BYTES_MAX, kwargs_text

from envhub.protocol.messages import Make
from envhub.values import codec

LEASE = Ending("lease", "its lease ran out", CLOSED)
OPS = Ending("admin ops", "a demo", KILLED)


@pytest.mark.parametrize(
    "endings, kept",
    [
        ([LEASE], LEASE),
        ([OPS, LEASE], OPS),
        ([LEASE, OPS], LEASE._replace(how=KILLED)),
        ([OPS._replace(how=NOT_MADE), OPS], OPS._replace(how=NOT_MADE)),
    ],
)
def test_first_reason_of_an_end_counts_and_envs_that_are_killed_are_not_closed(
    endings: list[Ending], kept: Ending
) -> None:
    life = Biography(0.0)
    for each in endings:
        life.end(each)
    assert life.ending == kept


def test_failure_of_an_end_says_who_and_why() -> None:
    assert OPS.failure("1a2b3c4d").message == "session 1a2b3c4d was ended by admin ops: a demo"
    assert LEASE.failure("1a2b3c4d").message == "session 1a2b3c4d has ended: its lease ran out"
    assert OPS.failure("").code == "session_lost" and in_one_line(" a\nb\x1b" + "c" * 999).startswith("a b c")
    assert len(in_one_line("c" * 999)) == 200


def test_rate_is_of_the_time_between_looks_that_are_a_second_apart() -> None:
    life = Biography(0.0)
    assert life.steps_per_s is None and math.isnan(life.looked_s)
    for now_s, steps, rate in (
        (10.0, 100, None),
        (10.5, 150, None),
        (12.0, 300, 100.0),
        (12.5, 300, 100.0),
        (13.0, 300, 0.0),
    ):
        life.look(steps, steps, False, now_s)
        assert life.steps_per_s == rate
    assert life.moved_s == 12.0
    life.look(300, 300, True, 14.0)
    assert life.moved_s == 14.0


@pytest.mark.parametrize(
    "kwargs, text",
    [
        ({}, ""),
        ({"size": (2, 3), "name": "maze", "gravity": 9.8}, "size=(2, 3), name='maze', gravity=9.8"),
        ({"table": np.zeros(3), "big": 1 << 70}, "table=…, big=…"),
        ({"token": "envhub://" + "A" * 86 + "@h:1"}, "***"),
        ({"text": "x" * KWARGS_BYTES_MAX}, "4105 bytes"),
    ],
)
def test_arguments_are_shown_as_far_as_they_are_plain_and_no_secret(kwargs: dict[str, Any], text: str) -> None:
    shown = kwargs_text(Make(1, kwargs=codec.encode(kwargs)))
    assert text in shown and "AAAA" not in shown and len(shown) <= 200
    each = kwargs_text(Make(2, kwargs=b"\x80", kwargs_each=[codec.encode(kwargs)] * 2))
    assert each == f"{shown}; each env has its own"
    assert kwargs_text(Make(1, kwargs=b"\xc1")) == "1 bytes"
