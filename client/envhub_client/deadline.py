"""Deadline of a wait."""

from __future__ import annotations

import time
from collections.abc import Sequence

from envhub import errors

ANSWER_S = 5.0
_ADDRESSES_SHOWN = 10  # in one error


class Deadline:
    """The end of ``timeout`` seconds from now, on the monotonic clock."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        try:
            self._end_s = time.monotonic() + timeout
        except TypeError:
            raise TypeError(f"timeout must be a number of seconds, got {errors.brief(timeout)}") from None

    def left_s(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._end_s - time.monotonic())


def answer_timeout(deadline: Deadline | None) -> float | None:
    """For how long to wait for what a hub has at hand: each wait asks again, and in no time would have no answer."""
    return None if deadline is None else max(ANSWER_S, deadline.left_s())


def seconds_text(timeout: float) -> str:
    """The seconds as text, with few digits: what is left of a caller's timeout has many that say nothing."""
    return f"{timeout:.2g}" if timeout < 1 else f"{round(timeout, 2):g}"


def no_reply(addresses: Sequence[str], timeout: float) -> str:
    names = [*addresses[:_ADDRESSES_SHOWN]]
    if others := len(addresses) - len(names):
        names.append(f"{others} others")
    hubs = f"the hubs at {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else errors.hub_at(names[0])
    return f"no reply from {hubs} within {seconds_text(timeout)} s; it can be waited for again"
