"""Handlers of the events of processes once the envs are made, and of deadlines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from envhub.env_failure import EnvFailure
from envhub.protocol.messages import Failure
from envhub_server.ipc import control
from envhub_server.processes.worker_events import ExitCause, WorkerExited
from envhub_server.session import stimuli
from envhub_server.session.failure_text import Overrun
from envhub_server.session.hang_detector import Late
from envhub_server.session.instructions import Instructions, KeepReplay
from envhub_server.session.making_handlers import go_on
from envhub_server.session.phases import Driver, LaneName, Phase
from envhub_server.session.request_handlers import on_called
from envhub_server.session.slots import Process, Slot, Stage
from envhub_server.session.state import SessionState


def on_not_started(state: SessionState, refused: stimuli.WorkersNotStarted, now_s: float) -> Instructions:
    """Continue without processes that could not be started."""
    instructions: Instructions = []
    if state.making:
        why = Failure("limit", "hub", f"a worker cannot be started: {refused.reason}")
        instructions += state.abandon(why, now_s)
    cause = ExitCause(f"cannot be started: {refused.reason}", started=False)
    for number in refused.processes:
        instructions += on_exited(state, WorkerExited(number, cause), now_s)
    return instructions


def on_exited(state: SessionState, exited: WorkerExited, now_s: float) -> Instructions:
    """Handle the end of a process."""
    process = state.slots.process(exited.process)
    if process is None:
        return []
    slot, why, was_leaving = state.slots.of(process), process.killed_for, process.stage is Stage.LEAVING
    state.slots.end(process)
    state.closing.on_ended(process, f"the process {exited.cause.how}")
    if state.phase is Phase.CLOSING:
        return [] if state.slots.alive else state.end()
    if state.phase is Phase.BROKEN:
        return state.closing.tell()
    if slot is None:
        return [*state.closing.tell(), *state.replacement.on_spare_exited(was_leaving, now_s)]
    if state.making:
        return go_on(state, state.building.on_exited(process, exited, why, now_s), now_s)
    return _lose(state, slot, exited, why, now_s)


def _lose(
    state: SessionState, slot: Slot, exited: WorkerExited, why: Late | Overrun | None, now_s: float
) -> Instructions:
    """Handle the end of a slot's process; the next process gets a call that it had not read."""
    was_serving = slot.loss is None
    instructions, broken = state.replacement.on_lost(slot, exited, why, now_s)
    if broken is not None:
        return [*instructions, *state.break_down(broken)]
    assert slot.loss is not None
    unread = exited.unread is not None and exited.unread is slot.pending and why is None
    if state.phase is Phase.CALLING and was_serving and slot.waiting and not unread:
        state.calls.on_lost(slot, slot.loss.failure)
        instructions += on_called(state, now_s)
    return [*instructions, *state.replacement.replace_lost(now_s)]


def on_faulted(state: SessionState, process: Process, fault: control.Faulted, now_s: float) -> Instructions:
    """Count a failure of an env that its worker truncated and rebuilt."""
    kept, broken = state.replacement.on_faulted(state.slots[process.place], fault, now_s)
    return kept if broken is None else [*kept, *state.break_down(broken)]


def on_built_again(state: SessionState, process: Process, _: control.Built, now_s: float) -> Instructions:
    """Hand the arena to a process, or keep it as a spare."""
    return state.replacement.on_built(process, now_s)


def on_mapped(state: SessionState, process: Process, _: control.Mapped, now_s: float) -> Instructions:
    """Have a process that has mapped the arena serve."""
    return state.replacement.on_mapped(process, now_s)


def on_left(state: SessionState, process: Process, left: control.Left, now_s: float) -> Instructions:
    """Have another process serve the rows that this one has left."""
    slot = state.slots.of(process)
    return [] if slot is None else state.replacement.on_left(slot, now_s)


def on_episodes_done(state: SessionState, process: Process, done: control.EpisodesDone, now_s: float) -> Instructions:
    """Recycle a process that has reached its number of episodes."""
    return state.replacement.recycling.on_episodes_done(state.slots[process.place], now_s)


def on_rows_waiting(state: SessionState, waiting: stimuli.RowsWaiting, now_s: float) -> Instructions:
    """Note that steps wait for the next process of a slot."""
    state.replacement.on_rows_waiting(state.slots[waiting.slot], now_s)
    return []


def on_row_info(state: SessionState, process: Process, said: control.RowInfo, now_s: float) -> Instructions:
    """Keep an info that was too large for the arena."""
    if said.row in state.slots[process.place].rows:
        state.infos.note(said.row, said.info)
    return []


def on_stand_in_info(state: SessionState, info: stimuli.StandInInfo, now_s: float) -> Instructions:
    """Keep a large info of a row that the hub completed."""
    state.infos.note(info.row, info.info)
    return []


def on_template(state: SessionState, process: Process, template: control.InfoTemplate, now_s: float) -> Instructions:
    """Keep the example of a template."""
    state.infos.on_template(state.slots[process.place], template)
    return []


def on_row_failed(state: SessionState, process: Process, failed: control.RowFailed, now_s: float) -> Instructions:
    """Note that an env raised, or could not be rebuilt."""
    failure, slot = failed.failure, state.slots[process.place]
    if slot.loss is not None and failure.code == "factory_failed":
        slot.boot_failure = failure
        return []
    row, cause = failure.env_index, "nan" if failed.invalid else "exception"
    env_failure = EnvFailure(cause, failure.message, exception=failure.type, traceback=failure.traceback)
    kept = state.replays.of_env(slot, row, failed.number, failed.trace, env_failure)
    name = next((order.failure.replay for order in kept if isinstance(order, KeepReplay)), "")
    _note_failure(state, replace(failure, replay=name), slot.rows)
    return kept


def on_stand_in_failed(state: SessionState, failed: stimuli.StandInFailed, now_s: float) -> Instructions:
    """Note the failure of a row that the hub completed."""
    _note_failure(state, failed.failure, range(state.make.num_envs))
    return []


def _note_failure(state: SessionState, failure: Failure, rows: Collection[int]) -> None:
    if state.phase is Phase.READY:
        state.infos.note_failure(failure, rows)
    else:
        state.requests.note_failure(failure)


def on_closing_failed(state: SessionState, process: Process, failed: control.RowFailed, now_s: float) -> Instructions:
    """Note that an env could not be closed."""
    if state.slots[process.place].loss is None:  # else the process was about to replace an ended one
        state.requests.note_failure(failed.failure)
    return []


def on_shared_changed(
    state: SessionState, process: Process, changed: control.SharedChanged, now_s: float
) -> Instructions:
    """Tell the client that its envs change state that a process shares."""
    return state.sizing.on_shared_changed(changed)


def on_closing(state: SessionState, process: Process, said: control.Closing, now_s: float) -> Instructions:
    """Note which envs a process closes."""
    state.closing.on_closing(process, said, now_s)
    return []


def on_elapsed(state: SessionState, elapsed: stimuli.Elapsed, now_s: float) -> Instructions:
    """Do what is due, and supervise the processes."""
    quiescent, ownership, replacement = elapsed.quiescent, state.ownership, state.replacement
    instructions = [*state.supervision.on_sampled(elapsed.progress, now_s), *replacement.finish_steps(now_s)]
    idle = ownership.driver is Driver.CLIENT and quiescent and not ownership.claimed
    state.supervision.plan_next_sample(state.samples, idle, now_s)
    instructions += state.supervision.on_measured(elapsed.memory, now_s)
    state.quiescent = quiescent
    if ownership.lane is LaneName.WIRE and quiescent:
        instructions += ownership.take_drive()
    instructions += [*state.advance_takeover(quiescent), *state.end_recall(now_s)]
    instructions += [*state.closing.on_elapsed(elapsed.progress, now_s), *replacement.restart(now_s)]
    if now_s >= state.deadlines.spares_at_s:
        instructions += replacement.spares.fill(now_s)
    replacement.recycling.on_measured(elapsed.memory, now_s)
    return [*instructions, *replacement.recycling.recycle(now_s)]


def on_elapsed_over(state: SessionState, elapsed: stimuli.Elapsed, now_s: float) -> Instructions:
    """Kill the processes that do not close in time; once all are killed, CLOSE is answered, though one may not end."""
    waited, instructions = state.closing.waits, state.closing.on_elapsed(elapsed.progress, now_s)
    answered = state.phase is Phase.CLOSING and waited and not state.closing.waits
    return [*instructions, *(state.answer_close() if answered else ())]


def on_nothing(state: SessionState, _: object, now_s: float) -> Instructions:
    """Do nothing: the stimulus changes nothing in this phase."""
    return []


def ignore(state: SessionState, process: Process, _: object, now_s: float) -> Instructions:
    """Ignore a message of a process."""
    return []
