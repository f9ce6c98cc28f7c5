"""When handshakes that were broken off say that the hub has another key."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from envhub_client.connection.broken_handshakes import BrokenHandshakes

AT_ONCE_S = 1.5


def broken(handshakes: BrokenHandshakes, at_s: float, number: int = errno.EPIPE, after_s: float = 0.1) -> bool:
    """A connection is made just after ``at_s``, and its handshake fails so much later."""
    handshakes.read(at_s)
    handshakes.begun()
    handshakes.read(at_s + after_s / 2)  # when its beginning has been read
    return handshakes.failed(number, at_s + after_s)


@pytest.fixture
def handshakes() -> BrokenHandshakes:
    return BrokenHandshakes(AT_ONCE_S)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ECONNRESET])
def test_third_in_a_row_that_is_ended_at_once_is_enough(handshakes: BrokenHandshakes, number: int) -> None:
    assert [broken(handshakes, at_s, number) for at_s in range(7)] == [False, False, True] * 2 + [False]


@pytest.mark.parametrize(
    "other",
    [
        lambda handshakes: broken(handshakes, 3, errno.EAGAIN),  # it has timed out here
        lambda handshakes: broken(handshakes, 3, errno.ETIMEDOUT),
        lambda handshakes: broken(handshakes, 3, after_s=AT_ONCE_S),  # it has timed out there
        BrokenHandshakes.succeeded,
        BrokenHandshakes.interrupted,
    ],
)
def test_whatever_else_comes_in_between_ends_the_row(
    handshakes: BrokenHandshakes, other: Callable[[BrokenHandshakes], object]
) -> None:
    assert not broken(handshakes, 1) and not broken(handshakes, 2)
    assert not other(handshakes)
    assert [broken(handshakes, at_s) for at_s in (6, 7, 8)] == [False, False, True]


def test_handshake_counts_as_begun_when_the_monitor_was_read_before(handshakes: BrokenHandshakes) -> None:
    def read(at_s: float) -> bool:
        handshakes.begun()
        enough = handshakes.failed(errno.EPIPE, at_s)
        handshakes.read(at_s)
        return enough

    for _ in range(3):
        handshakes.begun()
        assert not handshakes.failed(errno.EPIPE, 0)  # the monitor was never read before
    # A program that is busy elsewhere reads both events of a long time at once.
    assert not any(read(at_s) for at_s in (0, 4, 8, 12, 16))
    assert [read(at_s) for at_s in (16.5, 17, 17.5)] == [False, False, True]


def test_any_says_whether_the_last_one_failed(handshakes: BrokenHandshakes) -> None:
    assert not handshakes.any
    broken(handshakes, 1, errno.EAGAIN)
    assert handshakes.any
    handshakes.succeeded()
    assert not handshakes.any
