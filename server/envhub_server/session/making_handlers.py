"""Handlers of stimuli while the envs of a session are made."""

from __future__ import annotations

from dataclasses import replace

from envhub.protocol.messages import Failure
from envhub_server.ipc import control
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import Phase
from envhub_server.session.slots import Process
from envhub_server.session.state import SessionState
from envhub_server.session.supervision import MEMORY_S


def on_made(state: SessionState, _: stimuli.SessionMade, now_s: float) -> Instructions:
    """Start the first processes."""
    hosting = state.launcher.rules.hosting
    if hosting.memory_max or hosting.recycle.memory_bytes:
        state.deadlines.memory_at_s = now_s + MEMORY_S
    return state.building.on_session_made(now_s)


def go_on(state: SessionState, instructions: Instructions | Failure, now_s: float) -> Instructions:
    """Continue to build the envs, or end the session if that failed."""
    if isinstance(instructions, Failure):
        return state.abandon(instructions, now_s)
    if state.launcher.arena is not None:
        state.phase = Phase.MAPPING
    return instructions


def on_building(state: SessionState, process: Process, building: control.Building, now_s: float) -> Instructions:
    """Note how many envs a process has made."""
    process.built, process.importing = building.built, building.importing
    return []


def on_first_built(state: SessionState, process: Process, built: control.FirstBuilt, now_s: float) -> Instructions:
    """Decide on the number of workers, once the first envs are made."""
    return state.building.on_first_built(process, built, now_s)


def on_imported(state: SessionState, process: Process, imported: control.Imported, now_s: float) -> Instructions:
    """Start the other workers, once the first have loaded the code that makes their envs."""
    return state.building.on_imported(process, imported, now_s)


def on_built(state: SessionState, process: Process, built: control.Built, now_s: float) -> Instructions:
    """Make the arena, once all envs are made."""
    return go_on(state, state.building.on_built(process, built, now_s), now_s)


def on_making_failed(state: SessionState, process: Process, failed: control.RowFailed, now_s: float) -> Instructions:
    """Make the envs in another way, or end the session."""
    return go_on(state, state.building.on_failed(process, failed.failure, now_s), now_s)


def on_arena_refused(state: SessionState, refused: stimuli.ArenaRefused, now_s: float) -> Instructions:
    """End the session."""
    return state.abandon(Failure("limit", "hub", refused.reason), now_s)


def on_first_mapped(state: SessionState, process: Process, _: control.Mapped, now_s: float) -> Instructions:
    """Have all processes serve, once they have mapped the arena."""
    made = state.building.on_mapped(process, now_s)
    if made is None:
        return []
    state.phase, make = Phase.READY, state.make
    state.made = replace(made, autoreset_mode=make.autoreset_mode, observation_mode=make.observation_mode)
    served, answered = state.building.serve(now_s), state.answer(do.Answer(made))
    taken_over = state.advance_takeover(True)
    return [*served, *answered, *taken_over, *state.replacement.spares.fill(now_s)]
