"""Events of a session's client: requests, the progress of rows, who drives, takeover, and the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import Call, Close, Collect, Failure, Receive, Reset, Send, SetAttr, Step
from envhub_server.ipc import control
from envhub_server.session.effects import RowBlobs
from envhub_server.session.requests import Question, refusal
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
# While a request is pending, the protocol admits only CLOSE.
_REQUESTS = (Step, Reset, Call, SetAttr, Send, Receive, Collect, messages.TemplatesRequest)


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
        self.requests.asked = True
        handler(self, now_s, message, quiescent)

    # --- whole batches ------------------------------------------------------------------------------------------------

    @handles(Step)
    @allowed_in(Phase.READY, then=(Phase.MOVING,))
    def on_step(self, now_s: float, _: Step, quiescent: bool) -> None:
        # Inlined, because every step on the wire lane comes this way: no problem, and the hub drives already.
        # A draining hub closes a session without a pending request.
        infos, deadlines = self.infos, self.deadlines
        if self.ownership.driver is Driver.CLIENT or self.partial_batches.rows_out:
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

    @handles(Reset)
    @allowed_in(Phase.READY, then=(Phase.MOVING,))
    def on_reset(self, now_s: float, reset: Reset, quiescent: bool) -> None:
        if problem := self.requests.reset_problem(reset) or self.problem(quiescent):
            self.fail(problem)
            return
        self.begin(Phase.MOVING, now_s)
        self.effects.post_reset()
        self.requests.tell_reset(reset)

    @allowed_in(Phase.MOVING, then=(Phase.READY,))
    @allowed_in(*LIVE)
    def on_actions_refused(self, now_s: float, problem: str) -> None:
        """Refuse the actions of a step or of a partial batch, which do not fit the arena; no env has moved."""
        if self.phase is Phase.MOVING:
            self.phase = Phase.READY
        self.fail(Failure("bad_actions", "request", problem))

    @allowed_in(Phase.MOVING, then=(Phase.READY,))
    @allowed_in(*LIVE)
    def on_rows_done(self, now_s: float) -> None:
        """Answer the reset or step: every row is done."""
        if self.phase is not Phase.MOVING:
            return
        self.phase = Phase.READY
        if self.requests.failure is None:
            self.answer(DONE, arrays=True)
        else:
            self.fail(self.requests.failure)
        if self.ownership.takeover_pending:
            self.advance_takeover(True)

    # --- partial batches ----------------------------------------------------------------------------------------------

    @handles(Send)
    @allowed_in(Phase.READY)
    def on_send(self, now_s: float, send: Send, quiescent: bool) -> None:
        """Post a partial batch; a pending RECEIVE ends without an answer."""
        self.partial_batches.end_receive()
        if problem := self.problem(quiescent, partial=True) or self.partial_batches.problem(send):
            self.fail(problem)
            return
        self.begin(Phase.READY, now_s)
        self.effects.post_part()

    @allowed_in(*LIVE)
    def on_part_posted(self, now_s: float, rows: int) -> None:
        """Answer SEND: a partial batch of this many rows is with its workers."""
        self.partial_batches.rows_out += rows
        self.answer(DONE)

    @handles(Receive)
    @allowed_in(Phase.READY)
    def on_receive(self, now_s: float, receive: Receive, quiescent: bool) -> None:
        if problem := self.partial_batches.on_receive(receive):
            self.fail(problem)

    @allowed_in(*LIVE)
    def on_part_done(
        self,
        now_s: float,
        rows: tuple[int, ...],
        small: RowBlobs = (),
        large: tuple[int, ...] = (),
        raised: int | None = None,
    ) -> None:
        """Answer RECEIVE with its done rows, as many as it waits for; or with one row that ``raised``, and no other."""
        # ``small`` has the encoded infos in the arena, ``large`` the rows whose infos came on the channel.
        if not self.partial_batches.receiving:
            return
        if raised is None:
            self.answer(DONE, rows=self.partial_batches.on_done(rows, small, large), part=rows)
        else:
            self.fail(self.partial_batches.on_raised(raised))

    # --- other requests -----------------------------------------------------------------------------------------------

    @handles(Call)
    @allowed_in(Phase.READY, then=(Phase.CALLING,))
    def on_call(self, now_s: float, call: Call, quiescent: bool) -> None:
        # The name of a class is only compared.
        if call.question != "wrapped" and (forbidden := self.requests.forbidden(call.name)):
            self.fail(forbidden)
        else:
            wanted = control.CallRows(
                [], call.name, call.args, call.only_kind, call.skip_unreset, call.question, reset_first=call.reset_first
            )
            self._ask(now_s, call.rows, lambda rows: replace(wanted, rows=rows), quiescent)

    @handles(SetAttr)
    @allowed_in(Phase.READY, then=(Phase.CALLING,))
    def on_set_attr(self, now_s: float, message: SetAttr, quiescent: bool) -> None:
        question = self.requests.forbidden(message.name) or self.requests.assignment(message)
        if isinstance(question, Failure):
            self.fail(question)
        else:
            self._ask(now_s, message.rows, question, quiescent)

    def _ask(self, now_s: float, rows: list[int], question: Callable[[list[int]], Question], quiescent: bool) -> None:
        if problem := self.requests.rows_problem(rows) or self.problem(quiescent):
            self.fail(problem)
            return
        self.begin(Phase.CALLING, now_s)
        self.requests.ask(rows, question)

    @handles(Collect)
    @allowed_in(Phase.READY)
    def on_collect(self, now_s: float, collect: Collect, quiescent: bool) -> None:
        """Answer with the kept infos or the failure of these rows."""
        self.answer_rows(self.infos.collect(collect.rows))

    @handles(messages.TemplatesRequest)
    @allowed_in(Phase.READY)
    def on_templates(self, now_s: float, request: messages.TemplatesRequest, quiescent: bool) -> None:
        self.answer(self.infos.templates(request.numbers))

    @handles(*_REQUESTS)
    @allowed_in(Phase.BROKEN)
    def on_broken_request(self, now_s: float, _: Any, quiescent: bool) -> None:
        assert self.requests.failure is not None
        self.fail(self.requests.failure)

    @handles(*_REQUESTS)
    @allowed_in(Phase.CLOSING)
    def on_closing_request(self, now_s: float, _: Any, quiescent: bool) -> None:
        draining = self.deadlines.end_by_s != math.inf
        self.fail(SHUTTING_DOWN if draining else refusal(f"the session is {self.phase.value}"))

    # --- who drives, and takeover -------------------------------------------------------------------------------------

    @allowed_in(*LIVE)
    def on_side_connected(self, now_s: float, quiescent: bool, process: int = 0) -> None:
        """Let the client drive if nothing is pending: this process has connected to the side socket with the ticket."""
        ownership = self.ownership
        hub_drives = ownership.lane is LaneName.WIRE and ownership.driver is Driver.HUB
        if not (hub_drives and not ownership.takeover_pending and self.awaits_request and quiescent):
            self.effects.refuse_side()
            return
        self.deadlines.sample_at_s = now_s + SAMPLE_S
        self.supervision.begin_idle()
        ownership.lane, ownership.driver, ownership.holder = LaneName.SHARED, Driver.CLIENT, process
        self.effects.grant()
        self.effects.give_drive()

    @allowed_in(*LIVE)
    def on_side_closed(self, now_s: float, quiescent: bool) -> None:
        """Continue on the wire lane, for the client that takes over if one waits: the other has let go or has ended."""
        self.ownership.lane, self.ownership.let_go_by_s = LaneName.WIRE, math.inf
        self.effects.close_side()
        if self.ownership.takeover_pending:
            self.effects.transfer()
        if quiescent:
            self.take_drive()
        self.advance_takeover(quiescent)

    @allowed_in(*LIVE)
    def on_attached(self, now_s: float, quiescent: bool) -> None:
        """Begin a takeover, which waits until the envs are made; of several clients the last one gets the session."""
        ownership = self.ownership
        ownership.takeover_pending = True
        if self.making:
            self.fail(_TAKEN_OVER)
            self.effects.transfer()
        elif self.phase in OVER:
            self.effects.transfer()
            self.refuse_takeover(LOST)
        else:
            self.deadlines.plan_sample(now_s)
            if ownership.lane is LaneName.SHARED:
                ownership.let_go_by_s = now_s + self.make.faults.restart_wait_s
                self.effects.recall()
            else:
                self.effects.transfer()
                self.advance_takeover(quiescent)

    @allowed_in(*LIVE)
    def on_attach_given_up(self, now_s: float) -> None:
        """Go on for the holder: the client that attaches is gone."""
        if self.ownership.takeover_pending:
            self.keep_holder()

    # --- the end ------------------------------------------------------------------------------------------------------

    @handles(Close)
    @_ends_session
    def on_close(self, now_s: float, close: Close, quiescent: bool) -> None:
        if self.phase is Phase.CLOSING:  # its client waits no longer
            self.close(now_s, close.terminate, "the program waited no longer")
            return
        # Earlier failures and requests are not reported any more.
        self.requests.failure, self.partial_batches.receiving = None, 0
        self.close(now_s, close.terminate)

    @_ends_session
    def on_lease_expired(self, now_s: float) -> None:
        self.abandon(_LEASE_OVER, now_s, terminate=False)

    @_ends_session
    def on_draining(self, now_s: float, by_s: float, end_by_s: float, quiescent: bool) -> None:
        """Begin no further request, and end once the pending request is answered, or at ``by_s``: the hub drains."""
        # After ``end_by_s`` no env gets more time to close.
        deadlines = self.deadlines
        deadlines.drain_by_s = min(deadlines.drain_by_s, by_s)
        deadlines.end_by_s = min(deadlines.end_by_s, end_by_s)
        self.closing.hurry()
        self.quiescent = quiescent
        deadlines.plan_sample(now_s)
        if self.ownership.lane is LaneName.SHARED:
            self.effects.wind_up()

    @_ends_session
    def on_abandoned(self, now_s: float, why: Failure) -> None:
        """End the session at once: the hub wants so."""
        self.abandon(why, now_s)
