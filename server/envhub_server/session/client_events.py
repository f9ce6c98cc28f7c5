"""Events of a session's client: requests, the progress of rows, who drives, takeover, and the end."""

from __future__ import annotations

import math
from typing import Any

from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import Failure
from envhub_server.session.effects import RowBlobs
from envhub_server.session.requests import WAITING_MAX, refusal
from envhub_server.session.slots import SAMPLE_S
from envhub_server.session.state import (
    HANDLERS,
    LIVE,
    LOST,
    MAKING,
    OVER,
    SERVING,
    Driver,
    IllegalEvent,
    LaneName,
    Method,
    Phase,
    SessionState,
    allowed_in,
    handles,
)

DONE = messages.Done()

_TAKEN_OVER = Failure("session_lost", "session", "another client took the session over while its envs were made")
_LEASE_OVER = Failure("session_lost", "session", "its lease ran out")


def _ends_session(method: Method) -> Method:
    """Allow a method that ends the session, at once if no process is left."""
    for phases, then in (
        (MAKING, (Phase.CLOSING,)),
        ((*SERVING, Phase.BROKEN), (Phase.CLOSING, Phase.ENDED)),
        ((Phase.CLOSING,), ()),
    ):
        method = allowed_in(*phases, then=then)(method)
    return method


class ClientEvents(SessionState):
    """A session as its client and the hub tell it what to do.

    A request has ``quiescent``: True if every row is done.
    """

    def on_request(self, now_s: float, message: Any, quiescent: bool) -> None:
        handler = HANDLERS.get(type(message), {}).get(self.phase)
        if handler is None:
            raise IllegalEvent(f"{type(message).__name__} in phase {self.phase.value}")
        prepared = self.snapshots.restoring
        if prepared is not None and prepared.is_held and getattr(message, "action", "") != "commit":
            self.snapshots.give_up()
        self.requests.pending_reply = True
        handler(self, now_s, message, quiescent)

    # --- whole batches ------------------------------------------------------------------------------------------------

    @handles(messages.Step, Phase.READY, then=(Phase.MOVING,))
    def on_step(self, now_s: float, _: messages.Step, quiescent: bool) -> None:
        # Inlined, because every step on the wire lane comes this way: no problem, and the hub drives already.
        # A draining hub closes a session without a pending request.
        infos, deadlines = self.infos, self.deadlines
        if self.driver is Driver.CLIENT or self.requests.rows_out:
            if problem := self.problem(quiescent):
                self.fail(problem)
                return
            self.begin(Phase.MOVING, now_s)
        else:
            if self.requests.failure is not None or infos.failures or infos.large:
                self.forget_last()
            if not now_s < deadlines.sample_at_s < math.inf:
                deadlines.sample_at_s = now_s + SAMPLE_S
            self.phase = Phase.MOVING
        self.effects.post_step()

    @handles(messages.Reset, Phase.READY, then=(Phase.MOVING,))
    def on_reset(self, now_s: float, reset: messages.Reset, quiescent: bool) -> None:
        self._post(now_s, self.requests.reset_problem(reset), quiescent)

    def _post(self, now_s: float, problem: Failure | None, quiescent: bool) -> None:
        if problem := problem or self.problem(quiescent):
            self.fail(problem)
            return
        self.begin(Phase.MOVING, now_s)
        self.effects.post_message()

    @allowed_in(Phase.MOVING, then=(Phase.READY,))
    @allowed_in(*LIVE)
    def on_not_posted(self, now_s: float, why: Failure) -> None:
        """Refuse a request that does not fit the arena; no env has moved."""
        if self.phase is Phase.MOVING:
            self.phase = Phase.READY
        self.fail(why)

    @allowed_in(Phase.MOVING, then=(Phase.READY,))
    @allowed_in(*LIVE)
    def on_rows_done(self, now_s: float) -> None:
        """Answer the reset, step or call: every row is done."""
        if self.phase is not Phase.MOVING:
            return
        self.phase = Phase.READY
        if self.requests.failure is None:
            self.answer(DONE, arrays=True)
        else:
            self.fail(self.requests.failure)
        if self.takeover_pending:
            self.advance_takeover(True)

    # --- partial batches ----------------------------------------------------------------------------------------------

    @handles(messages.Send, Phase.READY)
    def on_send(self, now_s: float, send: messages.Send, quiescent: bool) -> None:
        problem = self.problem(quiescent, partial=True) or self.requests.part_problem(send)
        if problem is None:
            self.begin(Phase.READY, now_s)
            if misfit := self.effects.post_part():
                problem = Failure("bad_actions", "request", f"{misfit}; no env has moved")
        if problem is not None:
            self.fail(problem)
            return
        self.requests.rows_out += len(send.rows)
        if send.min_envs:
            self._wait_for_part(send.min_envs)
        else:
            self.answer(DONE)

    @handles(messages.Receive, Phase.READY)
    def on_receive(self, now_s: float, receive: messages.Receive, quiescent: bool) -> None:
        if self.requests.rows_out:
            self._wait_for_part(receive.min_envs)
        else:
            self.answer(DONE)  # it has crossed the last results

    def _wait_for_part(self, min_envs: int) -> None:
        """Have the request wait for results; of too many that wait the oldest is answered without results."""
        parts = self.requests
        parts.pending_reply = False
        parts.min_envs = min_envs  # also for those before it, from now on
        parts.waiting += 1
        self.effects.keep_waiting()
        if parts.waiting > WAITING_MAX:
            self.reply_part(self.effects.answer_part)
        parts.take_part()

    @allowed_in(*LIVE)
    def on_part_done(
        self,
        now_s: float,
        rows: tuple[int, ...],
        small: RowBlobs = (),
        large: tuple[int, ...] = (),
        raised: int | None = None,
    ) -> None:
        """Answer the oldest request that waits with these done rows, or with one row that ``raised``, and no other."""
        # ``small`` has the encoded infos in the arena, ``large`` the rows whose infos came on the channel.
        parts, infos = self.requests, self.infos
        if not parts.waiting:
            return
        if raised is None:
            parts.rows_out -= len(rows)
            sent = [(row, info) for row in large if (info := infos.take(row)) is not None]
            self.reply_part(self.effects.answer_part, tuple(sorted([*small, *sent])), rows)
        else:
            parts.rows_out -= 1
            text = f"env {self.make.row_offset + raised} failed, and no worker said why"
            unknown = Failure("internal", "session", text)
            self.reply_part(self.effects.fail_part, infos.failures.pop(raised, unknown))
        while parts.waiting and not parts.rows_out:
            self.reply_part(self.effects.answer_part)
        parts.take_part()

    # --- other requests -----------------------------------------------------------------------------------------------

    @handles(messages.Call, Phase.READY, then=(Phase.MOVING,))
    def on_call(self, now_s: float, call: messages.Call, quiescent: bool) -> None:
        # The name of a class is only compared.
        forbidden = None if call.question == "wrapped" else self.requests.forbidden(call.name)
        self._post(now_s, forbidden or self.requests.rows_problem(call.rows), quiescent)

    @handles(messages.SetAttr, Phase.READY, then=(Phase.MOVING,))
    def on_set_attr(self, now_s: float, message: messages.SetAttr, quiescent: bool) -> None:
        count, requests = len(message.rows) or self.make.num_envs, self.requests
        problem = requests.forbidden(message.name)
        if problem is None and len(message.values) not in (1, count):
            problem = refusal(f"set_attr needs 1 or {count} values, got {len(message.values)}")
        self._post(now_s, problem or requests.rows_problem(message.rows), quiescent)

    @handles(messages.Collect, Phase.READY)
    def on_collect(self, now_s: float, collect: messages.Collect, quiescent: bool) -> None:
        """Answer with the kept infos or the failure of these rows."""
        self.quiescent = quiescent  # a client that drives asks so why it may not begin a step of a draining hub
        self.answer_rows(self.infos.collect(collect.rows))

    @handles(messages.TemplatesRequest, Phase.READY)
    def on_templates(self, now_s: float, request: messages.TemplatesRequest, quiescent: bool) -> None:
        self.answer(self.infos.templates(request.numbers))

    @handles(messages.SnapshotRequest, Phase.READY)
    def on_snapshot(self, now_s: float, wanted: messages.SnapshotRequest, quiescent: bool) -> None:
        """Drop snapshots, and list those that are left, or begin to take one or to restore rows from one."""
        snapshots = self.snapshots
        snapshots.drop(wanted.drop)
        if wanted.action == "list":
            self.answer(snapshots.table())
            return
        begin = {"take": snapshots.take, "commit": snapshots.commit}.get(wanted.action, snapshots.restore)
        self.on_snapshot_advanced(self.problem(quiescent) or begin(wanted, now_s))

    def on_snapshot_advanced(self, outcome: Failure | messages.Table | None) -> None:
        """Answer the request for a snapshot, if it is done; in a session that is over, another one may be pending."""
        if self.phase not in SERVING:
            return
        if isinstance(outcome, Failure):
            self.fail(outcome)
        elif outcome is not None:
            self.answer(outcome)

    # While a request is pending, the protocol admits only CLOSE; while SEND and RECEIVE wait, also those above.
    @handles(tuple(HANDLERS), Phase.BROKEN)
    def on_broken_request(self, now_s: float, _: Any, quiescent: bool) -> None:
        assert self.requests.failure is not None
        self.fail(self.requests.failure)

    @handles(tuple(HANDLERS), Phase.CLOSING)
    def on_closing_request(self, now_s: float, _: Any, quiescent: bool) -> None:
        draining = self.deadlines.end_by_s != math.inf
        why = self.shutdown if draining else refusal(f"the session is {self.phase.value}")
        self.fail(self.abandoned or why)

    # --- who drives, and takeover -------------------------------------------------------------------------------------

    @allowed_in(*LIVE)
    def on_side_connected(self, now_s: float, quiescent: bool, process: int = 0) -> None:
        """Let the client drive if nothing is pending: this process has connected to the side socket with the ticket."""
        hub_drives = self.lane is LaneName.WIRE and self.driver is Driver.HUB
        if not (hub_drives and not self.takeover_pending and self.awaits_request and quiescent):
            self.effects.refuse_side()
            return
        self.deadlines.sample_at_s = now_s + SAMPLE_S
        self.supervision.idle_samples = 0
        self.lane, self.driver, self.holder = LaneName.SHARED, Driver.CLIENT, process
        self.effects.grant()
        self.effects.give_drive()

    @allowed_in(*LIVE)
    def on_side_closed(self, now_s: float, quiescent: bool) -> None:
        """Continue on the wire lane, for the client that takes over if one waits: the other has let go or has ended."""
        self.lane, self.let_go_by_s = LaneName.WIRE, math.inf
        self.effects.close_side()
        if self.takeover_pending:
            self.effects.transfer()
        if quiescent:
            self.take_drive()
        self.advance_takeover(quiescent)

    @allowed_in(*LIVE)
    def on_attached(self, now_s: float, quiescent: bool) -> None:
        """Begin a takeover, which waits until the envs are made; of several clients the last one gets the session."""
        self.takeover_pending = True
        if self.making:
            self.fail(_TAKEN_OVER)
            self.effects.transfer()
        elif self.phase in OVER:
            self.effects.transfer()
            self.refuse_takeover(self.abandoned or LOST)
        else:
            self.deadlines.plan_sample(now_s)
            if self.lane is LaneName.SHARED:
                self.let_go_by_s = now_s + self.make.faults.restart_wait_s
                self.effects.recall()
            else:
                self.effects.transfer()
                self.advance_takeover(quiescent)

    @allowed_in(*LIVE)
    def on_attach_given_up(self, now_s: float) -> None:
        """Go on for the holder: the client that attaches is gone."""
        if self.takeover_pending:
            self.keep_holder()

    # --- the end ------------------------------------------------------------------------------------------------------

    @handles(messages.Close)
    @_ends_session
    def on_close(self, now_s: float, close: messages.Close, quiescent: bool) -> None:
        if self.phase is Phase.CLOSING:  # its client waits no longer
            self.close(now_s, close.terminate, "the program waited no longer")
            return
        # Earlier failures and requests are not reported any more.
        self.requests.failure, self.requests.waiting = None, 0
        self.close(now_s, close.terminate)

    @_ends_session
    def on_lease_expired(self, now_s: float) -> None:
        self.abandon(_LEASE_OVER, now_s, terminate=False)

    @_ends_session
    def on_draining(
        self, now_s: float, by_s: float, end_by_s: float, quiescent: bool, why: Failure = SHUTTING_DOWN
    ) -> None:
        """Begin no further request, and end once the pending request is answered, or at ``by_s``: the hub drains."""
        # After ``end_by_s`` no env gets more time to close.
        deadlines, self.shutdown = self.deadlines, why
        deadlines.drain_by_s = min(deadlines.drain_by_s, by_s)
        deadlines.end_by_s = min(deadlines.end_by_s, end_by_s)
        self.closing.hurry()
        self.quiescent = quiescent
        deadlines.plan_sample(now_s)
        if self.lane is LaneName.SHARED:
            self.effects.wind_up()

    @_ends_session
    def on_abandoned(self, now_s: float, why: Failure) -> None:
        """End the session at once: the hub wants so."""
        self.abandon(why, now_s)
