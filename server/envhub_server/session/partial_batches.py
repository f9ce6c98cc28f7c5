"""Partial batches: rows that SEND posts, and RECEIVE returns once they are done."""

from __future__ import annotations

from envhub.arena.layout import split_share, whole_shares
from envhub.protocol import messages
from envhub.protocol.messages import Failure, Make, Receive, Send
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.infos import RowInfos
from envhub_server.session.instructions import Instructions
from envhub_server.session.requests import refusal
from envhub_server.session.slots import SlotTable


class PartialBatches:
    """The pending partial batches.

    Attributes:
        rows_out: the number of rows that were posted and not received.
        receiving: the number of rows that RECEIVE waits for; 0 without a pending RECEIVE.
    """

    def __init__(self, make: Make, is_vector: bool, slots: SlotTable, infos: RowInfos) -> None:
        self._make, self._is_vector, self._slots, self._infos = make, is_vector, slots, infos
        self.rows_out = self.receiving = 0

    def problem(self, send: Send) -> Failure | None:
        """The reason why these rows cannot be posted; None if they can."""
        shares = self._make.num_envs, len(self._slots)
        if self._is_vector and not whole_shares(send.rows, *shares):
            return refusal(split_share(*shares))
        return None

    def on_posted(self, posted: stimuli.PartPosted) -> do.Answer:
        """Count the rows of SEND."""
        self.rows_out += posted.rows
        return do.Answer(messages.Done())

    def on_receive(self, receive: Receive) -> do.TakePart | do.Fail:
        """Wait for the wanted number of rows, at most for all that are out."""
        if not self.rows_out:
            return do.Fail(refusal("no env is under way"))
        self.receiving = max(1, min(receive.min_envs, self.rows_out))
        return do.TakePart(self.receiving)

    def end_receive(self) -> Instructions:
        """End the pending RECEIVE, if there is one; the next RECEIVE returns its rows."""
        if not self.receiving:
            return []
        self.receiving = 0
        return [do.LeavePart()]

    def on_done(self, done: stimuli.PartDone) -> do.Answer | do.Fail | None:
        """The answer of RECEIVE; None without a pending RECEIVE."""
        if not self.receiving:
            return None
        if done.raised is not None:
            self.rows_out -= 1
            number = self._make.first_env + done.raised
            unknown = Failure("internal", "session", f"env {number} failed, and no worker said why")
            return do.Fail(self._infos.failures.pop(done.raised, unknown))
        self.rows_out -= len(done.rows)
        large = [(row, self._infos.large.pop(row)) for row in done.large if row in self._infos.large]
        rows = tuple(sorted([*done.small, *large]))
        return do.Answer(messages.Done(), rows=rows, part=done.rows)
