"""Rendering envs that failed: a frame for each of them, whatever has become of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envhub.errors import EnvTimeout, RestartsExhausted, WorkerDied
from envhub.protocol.messages import Call
from envhub_client.results.rendered import Frames
from envhub_client.session.faults import FaultOptions


class Rendering:
    """Decides how a call goes on where it renders, and has a frame for each env; other calls it leaves as they are."""

    def __init__(self, num_envs: int, render_mode: str | None, faults: FaultOptions) -> None:
        self._frames = Frames(num_envs, render_mode)
        self._faults = faults

    def again(self, call: Call, results: Sequence[Any]) -> Call | None:
        """The call to make after these results, to see how large frames are; None where they are known."""
        if call.skip_unreset and not call.reset_first and self._frames.lacks_one(results):
            return replace(call, reset_first=True)
        return None

    def after_failure(self, call: Call, error: WorkerDied | EnvTimeout) -> Call:
        """The call to make after one that ended so: an env that died is made again, and left alone until its reset.

        Raises:
            WorkerDied, EnvTimeout: the error, where the call does not render, or the session's policy is to raise.
        """
        policy = self._faults.on_timeout if isinstance(error, EnvTimeout) else self._faults.on_crash
        if not call.skip_unreset or policy == "raise" or isinstance(error, RestartsExhausted):
            raise error
        if call.reset_first:
            self._frames.give_up()
        return replace(call, reset_first=False)

    def complete(self, call: Call, results: tuple[Any, ...], rows: Sequence[int]) -> tuple[Any, ...]:
        """The results of the call for these rows; if it renders, a frame for every env."""
        return self._frames.complete(results, rows) if call.skip_unreset else results
