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
    return state.ownership.lend()


def on_side_closed(state: SessionState, closed: stimuli.SideClosed, now_s: float) -> Instructions:
    """Continue on the wire lane."""
    return state.ownership.on_side_closed(closed)


def on_attached(state: SessionState, attached: stimuli.Attached, now_s: float) -> Instructions:
    """Begin a takeover, which waits until the envs are made; of several clients the last one gets the session."""
    ownership = state.ownership
    is_first, was_shared = not ownership.claimed, ownership.lane is LaneName.SHARED
    ownership.claimed = True
    if state.making:
        return state.answer(do.Fail(_TAKEN_OVER))
    state.deadlines.plan_sample(now_s)
    instructions = ownership.lock_out()
    if state.phase in OVER:
        return [*instructions, *ownership.refuse()]
    if was_shared:  # the former client may have posted rows until now
        state.deadlines.sample_at_s = now_s
    elif is_first:
        instructions += state.advance_takeover(attached.quiescent, now_s)
    return instructions


def on_other_arena(state: SessionState, _: stimuli.OtherArenaMade, now_s: float) -> Instructions:
    """Have all processes change to the second arena."""
    given = map(state.launcher.give_arena, state.ownership.begin_arena_change(state.slots))
    return [*given, *state.advance_takeover(False, now_s)]


def on_other_arena_refused(state: SessionState, refused: stimuli.OtherArenaRefused, now_s: float) -> Instructions:
    """Cancel the takeover and continue."""
    state.phase = Phase.READY
    why = Failure("limit", "hub", f"no memory for a takeover is available: {refused.reason}")
    return [*state.replacement.serve_mapped(now_s), *state.ownership.refuse(why)]


def on_other_arena_late(state: SessionState, _: stimuli.OtherArenaMade, now_s: float) -> Instructions:
    """Drop the second arena of an ended session."""
    return [do.DropOtherArena()]


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
