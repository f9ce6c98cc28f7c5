"""Handlers of a client's requests, and of the stimuli that complete them."""

from __future__ import annotations

import math
from collections.abc import Callable

from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import (
    Call,
    Collect,
    Failure,
    Receive,
    Reset,
    Send,
    SetAttr,
    Step,
    TemplatesRequest,
)
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.calls import Answer, Question
from envhub_server.session.deadlines import SAMPLE_S
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import Driver, Phase
from envhub_server.session.requests import refusal, stale
from envhub_server.session.slots import Process
from envhub_server.session.state import SessionState

_POST_STEP: Instructions = [do.PostStep()]
_OUTCOME = do.Answer(messages.Done(), arrays=True)  # the answer to a reset or a step


def on_step(state: SessionState, _: Step, quiescent: bool, now_s: float) -> Instructions:
    """Begin a step."""
    # Inlined, because every step on the wire lane comes this way: no problem, and the hub drives already.
    # A draining hub closes a session without a pending request.
    infos, deadlines = state.infos, state.deadlines
    if state.ownership.driver is Driver.CLIENT or state.partial_batches.rows_out:
        if problem := state.problem(quiescent):
            return state.answer(do.Fail(problem))
        return [*state.begin(Phase.MOVING, now_s), do.PostStep()]
    if state.requests.failure is not None or infos.failures or infos.large:
        state.forget_last()
    if not now_s < deadlines.sample_at_s < math.inf:
        deadlines.sample_at_s = now_s + SAMPLE_S
    state.phase = Phase.MOVING
    return _POST_STEP


def on_actions_refused(state: SessionState, refused: stimuli.ActionsRefused, now_s: float) -> Instructions:
    """Refuse the actions of a step or of a partial batch."""
    if state.phase is Phase.MOVING:
        state.phase = Phase.READY
    return state.answer(do.Fail(Failure("bad_actions", "request", refused.problem)))


def on_rows_done(state: SessionState, _: stimuli.RowsDone, now_s: float) -> Instructions:
    """Answer the reset or step."""
    state.phase = Phase.READY
    failure = state.requests.failure
    answered = state.answer(_OUTCOME if failure is None else do.Fail(failure))
    return [*answered, *state.advance_takeover(True)] if state.ownership.claimed else answered


def on_reset(state: SessionState, reset: Reset, quiescent: bool, now_s: float) -> Instructions:
    """Begin a reset."""
    if problem := state.requests.reset_problem(reset) or state.problem(quiescent):
        return state.answer(do.Fail(problem))
    seeds = reset.seeds or [None] * state.make.num_envs
    mask = reset.mask or [True] * state.make.num_envs
    state.env_history.note_seeds(seeds, mask)
    begun = state.begin(Phase.MOVING, now_s)
    return [*begun, do.PostReset(), *state.requests.tell_reset(reset, seeds, mask)]


def on_call(state: SessionState, call: Call, quiescent: bool, now_s: float) -> Instructions:
    """Begin a call."""
    # The name of a class is only compared.
    if call.question != "wrapped" and (forbidden := state.requests.forbidden(call.name)):
        return state.answer(do.Fail(forbidden))
    return _ask(state, call.rows, state.calls.question(call), quiescent, now_s)


def on_set_attr(state: SessionState, message: SetAttr, quiescent: bool, now_s: float) -> Instructions:
    """Begin to set an attribute."""
    question = state.requests.forbidden(message.name) or state.calls.assignment(message)
    if isinstance(question, Failure):
        return state.answer(do.Fail(question))
    return _ask(state, message.rows, question, quiescent, now_s)


def _ask(
    state: SessionState, rows: list[int], question: Callable[[list[int]], Question], quiescent: bool, now_s: float
) -> Instructions:
    if problem := state.calls.rows_problem(rows) or state.problem(quiescent):
        return state.answer(do.Fail(problem))
    return [*state.begin(Phase.CALLING, now_s), *state.calls.ask(rows, question)]


def on_call_answered(state: SessionState, process: Process, answer: Answer, now_s: float) -> Instructions:
    """Note the answer of a process."""
    slot = state.slots[process.place]
    instructions = state.calls.on_answered(slot, answer)
    return [stale(slot, answer)] if instructions is None else [*instructions, *on_called(state, now_s)]


def on_called(state: SessionState, now_s: float) -> Instructions:
    """Answer the call, once every slot has answered."""
    if not state.calls.complete:
        return []
    state.phase = Phase.READY
    return [*state.answer(state.calls.result()), *state.advance_takeover(True)]


def on_collect(state: SessionState, collect: Collect, quiescent: bool, now_s: float) -> Instructions:
    """Answer with the kept infos or the failure of these rows."""
    return state.answer(state.infos.collect(collect.rows))


def on_templates(state: SessionState, request: TemplatesRequest, quiescent: bool, now_s: float) -> Instructions:
    """Answer with the examples of templates."""
    return state.answer(do.Answer(state.infos.templates(request.numbers)))


def on_send(state: SessionState, send: Send, quiescent: bool, now_s: float) -> Instructions:
    """Post a partial batch; a pending RECEIVE ends without an answer."""
    ended = state.partial_batches.end_receive()
    if problem := state.problem(quiescent, partial=True) or state.partial_batches.problem(send):
        return [*ended, *state.answer(do.Fail(problem))]
    return [*ended, *state.begin(Phase.READY, now_s), do.PostPart()]


def on_part_posted(state: SessionState, posted: stimuli.PartPosted, now_s: float) -> Instructions:
    """Answer SEND."""
    return state.answer(state.partial_batches.on_posted(posted))


def on_receive(state: SessionState, receive: Receive, quiescent: bool, now_s: float) -> Instructions:
    """Wait for rows of partial batches."""
    wanted = state.partial_batches.on_receive(receive)
    return state.answer(wanted) if isinstance(wanted, do.Fail) else [wanted]


def on_part_done(state: SessionState, done: stimuli.PartDone, now_s: float) -> Instructions:
    """Answer RECEIVE."""
    answer = state.partial_batches.on_done(done)
    return [] if answer is None else state.answer(answer)


def on_closing_request(state: SessionState, _: object, quiescent: bool, now_s: float) -> Instructions:
    """Refuse a request of a session that closes."""
    draining = state.deadlines.end_by_s != math.inf
    return state.answer(do.Fail(SHUTTING_DOWN if draining else refusal(f"the session is {state.phase.value}")))


def on_broken_request(state: SessionState, _: object, quiescent: bool, now_s: float) -> Instructions:
    """Answer with the failure that broke the session."""
    assert state.requests.failure is not None
    return state.answer(do.Fail(state.requests.failure))
