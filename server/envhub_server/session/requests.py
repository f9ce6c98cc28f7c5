"""The pending request: its messages for the slots, its failure and its answer."""

from __future__ import annotations

from typing import Any

from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import Failure, Make, Reset
from envhub_server.ipc import control
from envhub_server.session.effects import Effects
from envhub_server.session.slots import Slot, SlotTable


def refusal(text: str) -> Failure:
    """The failure of a refused request."""
    return Failure("refused", "request", text)


class Requests:
    """The requests of one session; one at a time is pending.

    Attributes:
        asked: True if a request waits for its answer; the first request is MAKE.
        failure: the failure of the pending request, or of the session.
        has_pending: True if a slot has a ``pending`` message.
    """

    def __init__(self, make: Make, is_vector: bool, slots: SlotTable, effects: Effects) -> None:
        self._make, self._is_vector, self._slots, self._effects = make, is_vector, slots, effects
        self.asked = True
        self.failure: Failure | None = None
        self.has_pending = False

    def clear_pending(self) -> None:
        """Forget the pending messages, so that the next processes do not get them."""
        self.has_pending = False
        for slot in self._slots:
            slot.pending = None

    def note_failure(self, failure: Failure) -> None:
        """Note a failure of the request; the failure of the first env is reported."""
        if self.failure is None or (failure.env_index or 0) < (self.failure.env_index or 0):
            self.failure = failure

    def tell(self, slot: Slot, message: Any) -> None:
        """Send a slot its message of the request, now or once its next process serves."""
        slot.pending, self.has_pending = message, True
        if process := slot.serving:
            self._effects.tell(process.number, message)
        elif isinstance(message, control.ResetRows) and not message.rows:
            slot.pending = None
            self._effects.keep_rows(slot.index)

    def report_stale(self, slot: Slot, message: Any) -> None:
        """Report a stale answer of the process of this slot."""
        fields = {"worker": slot.index, "message": type(message).__name__, "of": message.number}
        # Event: A worker answered a request that has ended; it is ignored.
        self._effects.warn("stale_answer_dropped", fields)

    # --- requests that are refused ------------------------------------------------------------------------------------

    def problem(self, draining: bool, rows_out: int, driven: bool) -> Failure | None:
        """The reason why a request cannot begin now; None if it can.

        Args:
            draining: True if the hub shuts down.
            rows_out: the number of rows that RECEIVE has not returned, for a request of the whole batch.
            driven: True if the client drives, and rows are pending.
        """
        if draining:
            return SHUTTING_DOWN
        if rows_out:
            return refusal("envs are under way that RECEIVE has not returned")
        if driven:
            return refusal("a step that the client drives has not ended; wait for it")
        return None

    def forbidden(self, name: str) -> Failure | None:
        """The refusal of a name that network clients may not use, such as ``__setstate__``, which may import."""
        if not name.startswith("_") or self._make.program_environment is not None:
            return None
        text = f"{name!r} begins with an underscore: only the program of a private hub (hub=None) may use such a name"
        return Failure("not_permitted", "request", text)

    def reset_problem(self, reset: Reset) -> Failure | None:
        """The reason why this reset cannot be executed; None if it can."""
        num_envs, each = self._make.num_envs, reset.options_each
        seeds, mask = reset.seeds or [None] * num_envs, reset.mask or [True] * num_envs
        if len(seeds) != num_envs or len(mask) != num_envs or not any(mask):
            return refusal(f"a reset needs {num_envs} seeds and a mask of {num_envs}, some True")
        if len(each) not in (0, num_envs):
            return refusal(f"a reset needs the options of {num_envs} envs, got {len(each)}")
        if each and self._is_vector:
            return refusal("a vector env takes options for all of its envs, and not for each")
        return None

    def tell_reset(self, reset: Reset, seeds: list[int | None], mask: list[bool]) -> None:
        """Send each slot the rows that it must reset."""
        for slot in self._slots:
            rows = [row for row in slot.rows if mask[row]]
            options_each = [reset.options_each[row] for row in rows] if reset.options_each else []
            message = control.ResetRows(rows, [seeds[row] for row in rows], reset.options, options_each)
            self.tell(slot, message)
