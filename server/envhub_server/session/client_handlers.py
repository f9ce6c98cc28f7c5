"""Handlers of a client's connection, loss and takeover, and of the end of a session."""

from __future__ import annotations

from envhub.protocol.messages import Close, Failure
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.deadlines import SAMPLE_S
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import OVER, LaneName, Phase
from envhub_server.session.state import SessionState

_TAKEN_OVER = Failure("session_lost", "session", "another client took the session over while its envs were made")


def on_side_connected(state: SessionState, connected: stimuli.SideConnected, now_s: float) -> Instructions:
    """Let the client drive, if nothing is pending."""
    if not (state.ownership.lendable and state.awaits_request and connected.quiescent):
        return [do.RefuseSide()]
    state.deadlines.sample_at_s = now_s + SAMPLE_S
    state.supervision.begin_idle()
    return state.ownership.lend(connected.process)


def on_side_closed(state: SessionState, closed: stimuli.SideClosed, now_s: float) -> Instructions:
    """Continue on the wire lane, for the client that takes over if one waits."""
    return [*state.ownership.on_side_closed(closed), *state.advance_takeover(closed.quiescent)]


def on_attached(state: SessionState, attached: stimuli.Attached, now_s: float) -> Instructions:
    """Begin a takeover, which waits until the envs are made; of several clients the last one gets the session."""
    ownership = state.ownership
    ownership.claimed = True
    if state.making:
        return [*state.answer(do.Fail(_TAKEN_OVER)), do.Transfer()]
    if state.phase in OVER:
        return [do.Transfer(), *ownership.refuse()]
    state.deadlines.plan_sample(now_s)
    if ownership.lane is LaneName.SHARED:
        return ownership.recall(now_s + state.make.faults.restart_wait_s)
    return [do.Transfer(), *state.advance_takeover(attached.quiescent)]


def on_attach_given_up(state: SessionState, _: stimuli.AttachGivenUp, now_s: float) -> Instructions:
    """Go on for the holder: the client that attaches is gone."""
    return state.keep_holder() if state.ownership.claimed else []


def on_close(state: SessionState, close: Close, quiescent: bool, now_s: float) -> Instructions:
    """End the session at its client's request."""
    if state.phase is Phase.CLOSING:  # its client waits no longer
        return state.close(now_s, close.terminate, "the program waited no longer")
    # Earlier failures and requests are not reported any more.
    state.requests.failure, state.partial_batches.receiving = None, 0
    return state.close(now_s, close.terminate)


def on_abandoned(state: SessionState, abandoned: stimuli.Abandoned, now_s: float) -> Instructions:
    """End the session at once."""
    return state.abandon(abandoned.why, now_s)


def on_lease_expired(state: SessionState, expired: stimuli.LeaseExpired, now_s: float) -> Instructions:
    """End the session whose lease has expired."""
    why = Failure("session_lost", "session", "its lease ran out")
    return state.abandon(why, now_s, terminate=False)


def on_draining(state: SessionState, draining: stimuli.Draining, now_s: float) -> Instructions:
    """Begin no further request, and end the session soon."""
    deadlines = state.deadlines
    deadlines.drain_by_s = min(deadlines.drain_by_s, draining.by_s)
    deadlines.end_by_s = min(deadlines.end_by_s, draining.end_by_s)
    state.closing.hurry()
    state.quiescent = draining.quiescent
    deadlines.plan_sample(now_s)
    wind_up: Instructions = [do.WindUp()] if state.ownership.lane is LaneName.SHARED else []
    return wind_up
