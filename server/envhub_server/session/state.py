"""One session as a pure state machine: stimuli in, instructions out.

It knows no socket, process, memory or clock. ``hub.runtime`` carries out the instructions in their order and reports
what came of them as further stimuli, after the machine has returned: it is never re-entered. It decides everything that
is decided about a session: which requests are carried out, who drives, what a client learns of a process that ended and
when another serves in its place, which env hangs, how another client takes over, and when the session ends.

``SessionState`` keeps the phase, and composes the parts: each of them has one subject, and knows the slots. One request
at a time is under way (the protocol sees to that). ``TABLE`` says which stimulus is handled in which phase, and which
phases may follow; ``diagram`` draws them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from envhub.env_failure import EnvFailure
from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import (
    Call,
    Close,
    Collect,
    Failure,
    HopsRequest,
    Make,
    Receive,
    Reset,
    Send,
    SetAttr,
    Step,
    TemplatesRequest,
)
from envhub_server.catalog.registry import Recipe
from envhub_server.ipc import control
from envhub_server.ipc.journal import name_of_raised
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.processes.worker_events import WorkerExited, WorkerSaid
from envhub_server.session import instructions as do
from envhub_server.session import stimuli
from envhub_server.session.build_order import NO_RULES, WorkerRules
from envhub_server.session.building import EnvBuilding
from envhub_server.session.calls import Answer, Calls, Question
from envhub_server.session.deadlines import SAMPLE_S, Deadlines
from envhub_server.session.env_history import EnvHistory
from envhub_server.session.failure_text import Overrun
from envhub_server.session.hang_detector import Late
from envhub_server.session.infos import RowInfos
from envhub_server.session.instructions import Instructions
from envhub_server.session.launcher import Launcher
from envhub_server.session.ownership import Ownership
from envhub_server.session.parts import Parts
from envhub_server.session.phases import MAKING, OVER, SERVING, Driver, LaneName, Phase
from envhub_server.session.recycling import Recycling
from envhub_server.session.replacement import Replacement
from envhub_server.session.replay_orders import ReplayOrders
from envhub_server.session.requests import Requests, refusal
from envhub_server.session.restarts import Restarts
from envhub_server.session.sizing import WorkerSizing
from envhub_server.session.slots import Process, Slot, SlotTable, Stage
from envhub_server.session.spares import Spares
from envhub_server.session.stimuli import Requested, Stimulus
from envhub_server.session.supervision import MEMORY_S, Supervision
from envhub_server.session.worker_count import Machine, WorkerCount

HISTORY_MAX = 100  # stimuli that are logged with an internal error
# What a process says before it serves a slot; whatever else it says then is ignored.
_OF_ANY_PROCESS = (control.Building, control.Built, control.Mapped)


class SessionState:
    """One vector env, of one client at a time.

    Attributes:
        make: what the client asked for.
        recipe: of its envs, with what the operator has set for them.
        phase: the state of the session.
        slots, launcher, sizing, building, requests, calls, parts, infos: its parts.
        replacement, supervision, ownership, deadlines: others of them.
        made: what the client learns of it once it is made.
        history: the last stimuli, by their classes, for the log: what they carry may be large.
    """

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        sizing: WorkerCount | None,
        info_bytes: int,
        machine: Machine,
        restarts: Restarts,
        rules: WorkerRules = NO_RULES,
    ) -> None:
        """Of ``sizing`` workers; where that is None, of as many as suit the first envs once these are made."""
        is_vector, hosting = recipe.settings.vector, rules.hosting
        self.make = make
        self.recipe = recipe
        self.phase = Phase.BUILDING
        self.made: messages.Made | None = None
        self.history: deque[type] = deque(maxlen=HISTORY_MAX)
        self.deadlines = deadlines = Deadlines()
        self.slots = slots = SlotTable(make.num_envs, make.faults)
        self.launcher = launcher = Launcher(make, recipe, rules, machine, slots, deadlines, sizing is not None)
        self.sizing = WorkerSizing(make, recipe, machine, slots, launcher, sizing)
        self.building = EnvBuilding(make, recipe, info_bytes, machine, slots, launcher, self.sizing, restarts)
        self.requests = Requests(make, is_vector, slots)
        self.infos = RowInfos(slots)
        self.parts = Parts(make, is_vector, slots, self.infos)
        self.ownership = Ownership()
        self.supervision = Supervision(make.faults, hosting.memory_max or 0, slots, deadlines)
        self._env_history = EnvHistory(make.num_envs)
        self.calls = Calls(make, slots, self.requests, self._env_history)
        self._replays = replays = ReplayOrders(launcher, is_vector)
        spares = Spares(make, is_vector, slots, launcher, restarts, deadlines)
        recycling = Recycling(make, is_vector, slots, launcher, spares, deadlines)
        replaced = launcher, restarts, self._env_history, replays, spares, recycling
        self.replacement = Replacement(make, slots, *replaced)
        self._restarts = restarts
        self._quiescent = True  # whether every row was done, as far as was reported last while the client drove

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """The largest number of processes that it has, or, until its first envs are made, may come to have."""
        return self.sizing.workers_max(self.phase is Phase.BUILDING) + (self.launcher.rules.hosting.spares or 0)

    @property
    def recycled(self) -> int:
        """How often a process has taken over from another one that had not ended."""
        return sum(slot.recycled for slot in self.slots)

    @property
    def restarts(self) -> int:
        """How often its processes have ended, or made an env again."""
        return sum(self._restarts.count(slot.index) for slot in self.slots)

    @property
    def making(self) -> bool:
        """True if its envs do not exist yet."""
        return self.phase in MAKING

    @property
    def attachable(self) -> bool:
        """True if another client may take it over."""
        return not self.making and self.phase not in (Phase.CLOSING, Phase.ENDED)

    @property
    def progress(self) -> messages.HeartbeatReply:
        """How many of the envs are made."""
        return replace(self.building.description, phase=self.phase.value)

    def expects_end(self, number: int) -> bool:
        """True if this process ends because it was told so."""
        process = self.slots.process(number)
        return self.phase is Phase.CLOSING or (process is not None and process.stage is Stage.LEAVING)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus, now_s: float) -> Instructions:
        """Decide what is to be done about the stimulus.

        Raises:
            IllegalStimulus: it cannot come in this phase, which is a bug of the hub's.
        """
        if isinstance(stimulus, WorkerSaid):
            self.history.append(type(stimulus.message))
            instructions = self._hear(stimulus, now_s)
        else:
            kind = type(stimulus.message if isinstance(stimulus, Requested) else stimulus)
            self.history.append(kind)
            try:
                handler = TABLE[kind][self.phase][0]
            except KeyError:
                raise IllegalStimulus(f"{kind.__name__} in phase {self.phase.value}") from None
            if isinstance(stimulus, Requested):
                self.requests.asked = True
                instructions = handler(self, stimulus.message, stimulus.quiescent, now_s)
            else:
                instructions = handler(self, stimulus, now_s)
        if self.deadlines.drain_by_s != math.inf:
            instructions = [*instructions, *self._drained(now_s)]
        return instructions

    def _hear(self, said: WorkerSaid, now_s: float) -> Instructions:
        """Handle what a process says, unless it is stale or of no concern."""
        process, kind = self.slots.process(said.process), type(said.message)
        if process is None:
            return []
        slot = self.slots.of(process)
        if slot is None and kind not in _OF_ANY_PROCESS:
            return []
        if slot is not None and not said.current and slot.loss is None:
            return [_dropped(slot, said.message)]  # it is about a step that was given up
        if process.rebuild:
            return []  # it is about to be killed, and its envs are made again
        if kind not in TABLE and self.phase not in OVER:
            return self._abandon(refusal(f"worker {process.place} sent a {kind.__name__}"), now_s)
        rule = TABLE.get(kind, {}).get(self.phase)
        if rule is None:
            return []  # sent before the process learned of this phase
        instructions: Instructions = rule[0](self, process, said.message, now_s)
        return instructions

    def next_deadline_s(self) -> float:
        """When ``Elapsed`` is due; infinity where nothing happens by the passing of time."""
        if self.phase is Phase.ENDED:
            return math.inf
        if self.phase in OVER:
            return min(self.deadlines.close_by_s, self.deadlines.drain_by_s)
        return self.deadlines.next_s(self.slots, self._samples, self.replacement.recycling.next_age_s())

    @property
    def _samples(self) -> bool:
        """True if the arena is sampled: an env may hang, or a row be done of which no bell tells."""
        owner = self.ownership
        busy = self.phase is not Phase.READY or owner.driver is Driver.CLIENT or owner.claimed or self.parts.out > 0
        return busy or self.supervision.concerns_processes

    def _on_nothing(self, _: object, now_s: float) -> Instructions:
        return []

    def _ignore(self, process: Process, _: object, now_s: float) -> Instructions:
        return []

    # --- making -------------------------------------------------------------------------------------------------------

    def _on_made(self, _: stimuli.SessionMade, now_s: float) -> Instructions:
        hosting = self.launcher.rules.hosting
        if hosting.memory_max or hosting.recycle.memory_bytes:
            self.deadlines.memory_at_s = now_s + MEMORY_S
        return self.building.on_session_made(now_s)

    def _go_on_making(self, instructions: Instructions | Failure, now_s: float) -> Instructions:
        """Go on with the making of the envs, or end the session if it has failed."""
        if isinstance(instructions, Failure):
            return self._abandon(instructions, now_s)
        if self.launcher.arena is not None:
            self.phase = Phase.MAPPING
        return instructions

    def _on_building(self, process: Process, building: control.Building, now_s: float) -> Instructions:
        process.built, process.importing = building.built, building.importing
        return []

    def _on_first_built(self, process: Process, built: control.FirstBuilt, now_s: float) -> Instructions:
        return self.building.on_first_built(process, built, now_s)

    def _on_imported(self, process: Process, imported: control.Imported, now_s: float) -> Instructions:
        return self.building.on_imported(process, imported, now_s)

    def _on_built(self, process: Process, built: control.Built, now_s: float) -> Instructions:
        return self._go_on_making(self.building.on_built(process, built, now_s), now_s)

    def _on_making_failed(self, process: Process, failed: control.RowFailed, now_s: float) -> Instructions:
        return self._go_on_making(self.building.on_failed(process, failed.failure, now_s), now_s)

    def _on_arena_refused(self, refused: stimuli.ArenaRefused, now_s: float) -> Instructions:
        return self._abandon(Failure("limit", "hub", refused.reason), now_s)

    def _on_first_mapped(self, process: Process, _: control.Mapped, now_s: float) -> Instructions:
        made = self.building.on_mapped(process, now_s)
        if made is None:
            return []
        self.phase, make = Phase.READY, self.make
        self.made = replace(made, autoreset_mode=make.autoreset_mode, observation_mode=make.observation_mode)
        served, answered = self.building.serve(now_s), self._answered(do.Answer(made))
        return [*served, *answered, *self.replacement.spares.fill(now_s)]

    def _on_not_started(self, refused: stimuli.WorkersNotStarted, now_s: float) -> Instructions:
        instructions: Instructions = []
        if self.making:
            why = Failure("limit", "hub", f"a worker cannot be started: {refused.reason}")
            instructions += self._abandon(why, now_s)
        cause = ExitCause(f"cannot be started: {refused.reason}")
        for number in refused.processes:
            instructions += self._on_exited(WorkerExited(number, cause), now_s)
        return instructions

    # --- requests -----------------------------------------------------------------------------------------------------

    def _answered(self, answer: do.Answer | do.Fail | do.AnswerHops) -> Instructions:
        """Answer the request under way, if there is one; a client on the shared lane drives again."""
        requests, owner = self.requests, self.ownership
        if not requests.asked:
            return []
        requests.asked = False
        if requests.has_pending:
            requests.clear_pending()
        self.parts.receiving = 0
        if owner.lane is LaneName.SHARED and owner.driver is Driver.HUB and self._idle:
            owner.driver = Driver.CLIENT
            self.supervision.begin_idle()
            return [answer, do.GiveDrive()]
        return [answer]

    @property
    def _idle(self) -> bool:
        """True if nothing that the hub drives is under way."""
        return self.phase is Phase.READY and not self.requests.asked and not self.parts.out

    def _is_idle(self, quiescent: bool) -> bool:
        """True if no env is at work; ``quiescent`` counts while the client drives."""
        driven = self.ownership.driver is Driver.CLIENT and not quiescent
        busy = self.requests.asked or self.parts.out or driven
        return not busy and self.phase in (Phase.READY, Phase.BROKEN)

    def _problem(self, quiescent: bool, in_parts: bool = False) -> Failure | None:
        """Why no request, of the whole batch or ``in_parts``, can begin now; None if one can."""
        driven = self.ownership.driver is Driver.CLIENT and not quiescent
        return self.requests.problem(self.deadlines.draining, 0 if in_parts else self.parts.out, driven)

    def _begin(self, phase: Phase, now_s: float) -> Instructions:
        """Begin a request that the hub drives, and that was not refused."""
        self.phase = phase
        self.deadlines.plan_sample(now_s)
        if phase is not Phase.READY:
            self._forget_last()
        return self.ownership.take_drive()

    def _forget_last(self) -> None:
        self.requests.failure = None
        self.infos.forget()

    def _on_step(self, _: Step, quiescent: bool, now_s: float) -> Instructions:
        # Inlined, for every step over the wire comes this way: nothing forbids it, and the hub drives already.
        # Once the hub shuts down, a session that has nothing under way is closing.
        infos, deadlines = self.infos, self.deadlines
        if self.ownership.driver is Driver.CLIENT or self.parts.out:
            if problem := self._problem(quiescent):
                return self._answered(do.Fail(problem))
            return [*self._begin(Phase.MOVING, now_s), do.PostStep()]
        if self.requests.failure is not None or infos.failures or infos.large:
            self._forget_last()
        if not now_s < deadlines.sample_at_s < math.inf:
            deadlines.sample_at_s = now_s + SAMPLE_S
        self.phase = Phase.MOVING
        return _POST_STEP

    def _on_actions_refused(self, refused: stimuli.ActionsRefused, now_s: float) -> Instructions:
        if self.phase is Phase.MOVING:
            self.phase = Phase.READY
        return self._answered(do.Fail(Failure("bad_actions", "request", refused.problem)))

    def _on_rows_done(self, _: stimuli.RowsDone, now_s: float) -> Instructions:
        self.phase = Phase.READY
        failure = self.requests.failure
        answered = self._answered(_OUTCOME if failure is None else do.Fail(failure))
        return [*answered, *self._advance_takeover(True, now_s)] if self.ownership.claimed else answered

    def _on_reset(self, reset: Reset, quiescent: bool, now_s: float) -> Instructions:
        if problem := self.requests.reset_problem(reset) or self._problem(quiescent):
            return self._answered(do.Fail(problem))
        seeds = reset.seeds or [None] * self.make.num_envs
        mask = reset.mask or [True] * self.make.num_envs
        self._env_history.note_seeds(seeds, mask)
        begun = self._begin(Phase.MOVING, now_s)
        return [*begun, do.PostReset(), *self.requests.tell_reset(reset, seeds, mask)]

    def _on_call(self, call: Call, quiescent: bool, now_s: float) -> Instructions:
        # The name of a class is compared, and nothing else.
        if call.question != "wrapped" and (forbidden := self.requests.forbidden(call.name)):
            return self._answered(do.Fail(forbidden))
        return self._ask(call.rows, self.calls.question(call), quiescent, now_s)

    def _on_set_attr(self, message: SetAttr, quiescent: bool, now_s: float) -> Instructions:
        question = self.requests.forbidden(message.name) or self.calls.assignment(message)
        if isinstance(question, Failure):
            return self._answered(do.Fail(question))
        return self._ask(message.rows, question, quiescent, now_s)

    def _ask(
        self, rows: list[int], question: Callable[[list[int]], Question], quiescent: bool, now_s: float
    ) -> Instructions:
        if problem := self.calls.rows_problem(rows) or self._problem(quiescent):
            return self._answered(do.Fail(problem))
        return [*self._begin(Phase.CALLING, now_s), *self.calls.ask(rows, question)]

    def _on_call_answered(self, process: Process, answer: Answer, now_s: float) -> Instructions:
        slot = self.slots[process.place]
        instructions = self.calls.on_answered(slot, answer)
        return [_dropped(slot, answer)] if instructions is None else [*instructions, *self._on_called(now_s)]

    def _on_called(self, now_s: float) -> Instructions:
        if not self.calls.complete:
            return []
        self.phase = Phase.READY
        return [*self._answered(self.calls.result()), *self._advance_takeover(True, now_s)]

    def _on_collect(self, collect: Collect, quiescent: bool, now_s: float) -> Instructions:
        return self._answered(self.infos.collect(collect.rows))

    def _on_templates(self, request: TemplatesRequest, quiescent: bool, now_s: float) -> Instructions:
        return self._answered(do.Answer(self.infos.templates(request.numbers)))

    def _on_hops(self, _: HopsRequest, quiescent: bool, now_s: float) -> Instructions:
        return self._answered(do.AnswerHops())

    def _on_send(self, send: Send, quiescent: bool, now_s: float) -> Instructions:
        if problem := self._problem(quiescent, in_parts=True) or self.parts.problem(send):
            return self._answered(do.Fail(problem))
        return [*self._begin(Phase.READY, now_s), do.PostPart()]

    def _on_part_posted(self, posted: stimuli.PartPosted, now_s: float) -> Instructions:
        return self._answered(self.parts.on_posted(posted))

    def _on_receive(self, receive: Receive, quiescent: bool, now_s: float) -> Instructions:
        wanted = self.parts.on_receive(receive)
        return self._answered(wanted) if isinstance(wanted, do.Fail) else [wanted]

    def _on_part_done(self, done: stimuli.PartDone, now_s: float) -> Instructions:
        answer = self.parts.on_done(done)
        return [] if answer is None else self._answered(answer)

    def _on_closing_request(self, _: object, quiescent: bool, now_s: float) -> Instructions:
        draining = self.deadlines.end_by_s != math.inf
        return self._answered(do.Fail(SHUTTING_DOWN if draining else refusal(f"the session is {self.phase.value}")))

    def _on_broken_request(self, _: object, quiescent: bool, now_s: float) -> Instructions:
        assert self.requests.failure is not None
        return self._answered(do.Fail(self.requests.failure))

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _on_row_info(self, process: Process, said: control.RowInfo, now_s: float) -> Instructions:
        if said.row in self.slots[process.place].rows:
            self.infos.note(said.row, said.info)
        return []

    def _on_stand_in_info(self, info: stimuli.StandInInfo, now_s: float) -> Instructions:
        self.infos.note(info.row, info.info)
        return []

    def _on_template(self, process: Process, template: control.InfoTemplate, now_s: float) -> Instructions:
        self.infos.on_template(self.slots[process.place], template)
        return []

    def _on_row_failed(self, process: Process, failed: control.RowFailed, now_s: float) -> Instructions:
        failure, slot = failed.failure, self.slots[process.place]
        if slot.loss is not None and failure.code == "factory_failed":
            slot.boot_failure = failure
            return []
        row, cause = failure.env_index, "nan" if failed.invalid else "exception"
        found = EnvFailure(cause, failure.message, exception=failure.type, traceback=failure.traceback)
        kept = self._replays.of_env(slot, -1 if row is None else row, failed.number, failed.tick, found)
        name = name_of_raised(self._replays.prefix, row, failed.number) if kept and row is not None else ""
        self._note_failure(replace(failure, replay=name), slot.rows)
        return kept

    def _on_stand_in_failed(self, failed: stimuli.StandInFailed, now_s: float) -> Instructions:
        self._note_failure(failed.failure, range(self.make.num_envs))
        return []

    def _note_failure(self, failure: Failure, rows: Collection[int]) -> None:
        if self.phase in (Phase.READY, Phase.HANDING_OVER):
            self.infos.note_failure(failure, rows)
        else:
            self.requests.note_failure(failure)

    def _on_closing_failed(self, process: Process, failed: control.RowFailed, now_s: float) -> Instructions:
        if self.slots[process.place].loss is None:  # else it was about to take the place of one that ended
            self.requests.note_failure(failed.failure)
        return []

    def _on_step_times(self, process: Process, times: control.StepTimes, now_s: float) -> Instructions:
        return self.sizing.on_step_times(self.slots[process.place], times)

    def _on_shared_changed(self, process: Process, changed: control.SharedChanged, now_s: float) -> Instructions:
        return self.sizing.on_shared_changed(changed)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _on_exited(self, exited: WorkerExited, now_s: float) -> Instructions:
        process = self.slots.process(exited.process)
        if process is None:
            return []
        slot, why, was_leaving = self.slots.of(process), process.killed_for, process.stage is Stage.LEAVING
        self.slots.end(process)
        if self.phase is Phase.CLOSING:
            return [] if self.slots.alive else self._ended()
        if self.phase is Phase.BROKEN:
            return []
        if slot is None:
            return self.replacement.on_spare_exited(was_leaving, now_s)
        if self.making:
            return self._go_on_making(self.building.on_exited(process, exited, why, now_s), now_s)
        return [*self._advance_takeover(False, now_s), *self._lose(slot, exited, why, now_s)]

    def _lose(self, slot: Slot, exited: WorkerExited, why: Late | Overrun | None, now_s: float) -> Instructions:
        """Go on after the end of the process of a slot; a call that it had not read is put to the next one."""
        was_serving = slot.loss is None
        instructions, broken = self.replacement.on_lost(slot, exited, why, now_s)
        if broken is not None:
            return [*instructions, *self._break(broken)]
        assert slot.loss is not None
        unread = exited.unread is not None and exited.unread is slot.pending and why is None
        if self.phase is Phase.CALLING and was_serving and slot.waiting and not unread:
            self.calls.on_lost(slot, slot.loss.failure)
            instructions += self._on_called(now_s)
        return [*instructions, *self.replacement.replace_lost(self._hands_over, now_s)]

    @property
    def _hands_over(self) -> bool:
        return self.phase is Phase.HANDING_OVER

    def _break(self, failure: Failure) -> Instructions:
        self.requests.failure = failure
        self.phase = Phase.BROKEN
        owner, spares = self.ownership, map(do.Kill, self.slots.spares)
        return [*self._answered(do.Fail(failure)), *owner.revoke(), *owner.refuse(), *spares]

    def _on_faulted(self, process: Process, fault: control.Faulted, now_s: float) -> Instructions:
        kept, broken = self.replacement.on_faulted(self.slots[process.place], fault, now_s)
        return kept if broken is None else [*kept, *self._break(broken)]

    def _on_built_again(self, process: Process, _: control.Built, now_s: float) -> Instructions:
        return self.replacement.on_built(process, self._hands_over, now_s)

    def _on_mapped(self, process: Process, _: control.Mapped, now_s: float) -> Instructions:
        if process.moving:
            process.moving = False
            return self._advance_takeover(False, now_s)
        return self.replacement.on_mapped(process, self._hands_over, now_s)

    def _on_left(self, process: Process, left: control.Left, now_s: float) -> Instructions:
        instructions = self.replacement.on_left(self.slots[process.place], left, self._hands_over, now_s)
        return [*instructions, *(self._advance_takeover(False, now_s) if self._hands_over else ())]

    def _on_episodes_done(self, process: Process, done: control.EpisodesDone, now_s: float) -> Instructions:
        return self.replacement.recycling.on_episodes_done(self.slots[process.place], done, now_s)

    def _on_rows_waiting(self, waiting: stimuli.RowsWaiting, now_s: float) -> Instructions:
        self.replacement.on_rows_waiting(self.slots[waiting.slot], now_s)
        return []

    # --- time ---------------------------------------------------------------------------------------------------------

    def _on_elapsed(self, elapsed: stimuli.Elapsed, now_s: float) -> Instructions:
        quiescent, owner, replacement = elapsed.quiescent, self.ownership, self.replacement
        instructions = [*self.supervision.on_sampled(elapsed.progress, now_s), *replacement.finish_steps(now_s)]
        idle = owner.driver is Driver.CLIENT and quiescent and not owner.claimed
        self.supervision.plan_next_sample(self._samples, idle, now_s)
        instructions += self.supervision.on_measured(elapsed.memory, now_s)
        self._quiescent = quiescent
        if owner.lane is LaneName.WIRE and quiescent:
            instructions += owner.take_drive()
        instructions += self._advance_takeover(quiescent, now_s)
        instructions += replacement.restart(now_s)
        if now_s >= self.deadlines.spares_at_s:
            instructions += replacement.spares.fill(now_s)
        instructions += replacement.recycling.on_measured(elapsed.memory, now_s)
        return [*instructions, *replacement.recycling.recycle(now_s)]

    def _on_quota_overrun(self, found: stimuli.QuotaOverrun, now_s: float) -> Instructions:
        return self.supervision.on_quota_overrun(found)

    def _on_elapsed_over(self, elapsed: stimuli.Elapsed, now_s: float) -> Instructions:
        if self.phase is not Phase.CLOSING or now_s < self.deadlines.close_by_s:
            return []
        self.deadlines.close_by_s = math.inf
        close_s = self.make.faults.close_s
        late = f"its envs did not close within close_timeout={close_s:g} s and were killed"
        killed = do.Warn("session_killed", {"close_s": close_s})
        answered = self._answered(do.Fail(Failure("session_lost", "session", late)))
        return [killed, *answered, *self._close(now_s, terminate=True)]

    # --- who drives, and takeover -------------------------------------------------------------------------------------

    def _on_side_connected(self, connected: stimuli.SideConnected, now_s: float) -> Instructions:
        if not (self.ownership.lendable and self._idle and connected.quiescent):
            return [do.RefuseSide()]
        self.deadlines.sample_at_s = now_s + SAMPLE_S
        self.supervision.begin_idle()
        return self.ownership.lend()

    def _on_side_closed(self, closed: stimuli.SideClosed, now_s: float) -> Instructions:
        return self.ownership.on_side_closed(closed)

    def _on_attached(self, attached: stimuli.Attached, now_s: float) -> Instructions:
        owner = self.ownership
        is_first, was_shared = not owner.claimed, owner.lane is LaneName.SHARED
        owner.claimed = True
        self.deadlines.plan_sample(now_s)
        instructions = owner.lock_out()
        if self.phase in OVER:
            return [*instructions, *owner.refuse()]
        if was_shared:  # its client may have posted rows until now
            self.deadlines.sample_at_s = now_s
        elif is_first:
            instructions += self._advance_takeover(attached.quiescent, now_s)
        return instructions

    def _advance_takeover(self, quiescent: bool, now_s: float) -> Instructions:
        """Go on with a takeover, as far as it goes now."""
        owner = self.ownership
        if not owner.claimed:
            return []
        if self._hands_over and owner.other_made and not self.slots.moving:
            return self._moved(now_s)
        if self.phase is not Phase.READY or self.requests.asked or not quiescent:
            return []
        if owner.lent:
            self.phase = Phase.HANDING_OVER
            return [do.MakeOtherArena()]
        self.parts.out = 0
        return owner.grant()

    def _on_other_arena(self, _: stimuli.OtherArenaMade, now_s: float) -> Instructions:
        given = map(self.launcher.give_arena, self.ownership.begin_move(self.slots))
        return [*given, *self._advance_takeover(False, now_s)]

    def _on_other_arena_refused(self, refused: stimuli.OtherArenaRefused, now_s: float) -> Instructions:
        self.phase = Phase.READY
        why = Failure("limit", "hub", f"no memory for a takeover is available: {refused.reason}")
        return [*self.replacement.serve_mapped(now_s), *self.ownership.refuse(why)]

    def _on_other_arena_late(self, _: stimuli.OtherArenaMade, now_s: float) -> Instructions:
        return [do.DropOtherArena()]

    def _moved(self, now_s: float) -> Instructions:
        """Go on in the second arena: no process uses the first any more, whatever its client may still post there.

        The client may have posted rows while some of the processes still used it. Those that are pending are pending in
        the second arena, too, so that no batch is left half done; the takeover waits for them.
        """
        self.phase, self.deadlines.sample_at_s = Phase.READY, now_s
        return [*self.ownership.end_move(), *self.replacement.serve_moved(now_s)]

    # --- the end ------------------------------------------------------------------------------------------------------

    def _on_close(self, close: Close, quiescent: bool, now_s: float) -> Instructions:
        self.requests.failure, self.parts.receiving = None, 0  # what came before CLOSE is not reported any more
        return self._close(now_s, close.terminate)

    def _close(self, now_s: float, terminate: bool) -> Instructions:
        """End the session: close its envs in time, or kill its processes."""
        is_first = self.phase is not Phase.CLOSING
        instructions: Instructions = []
        if is_first:
            self.phase = Phase.CLOSING
            self.deadlines.close_by_s = min(now_s + self.make.faults.close_s, self.deadlines.end_by_s)
            instructions += [*self.ownership.revoke(), *self.ownership.refuse()]
        alive = self.slots.processes
        if not alive:
            return [*instructions, *self._ended()]
        if terminate:
            return [*instructions, *(do.Kill(process.number) for process in alive)]
        if not is_first:
            return instructions
        # A process that makes its envs would read that only afterwards, and nobody has used them.
        making = [process.number for process in alive if process.stage is Stage.BUILDING]
        closing = (process.number for process in alive if process.stage is not Stage.BUILDING)
        told = [do.Tell(number, control.CloseEnvs()) for number in closing]
        return [*instructions, *told, *map(do.Kill, making)]

    def _ended(self) -> Instructions:
        self.phase = Phase.ENDED
        failure = self.requests.failure
        answer = do.Answer(messages.Done()) if failure is None else do.Fail(failure)
        return [*self._answered(answer), do.End()]

    def _on_abandoned(self, abandoned: stimuli.Abandoned, now_s: float) -> Instructions:
        return self._abandon(abandoned.why, now_s)

    def _abandon(self, why: Failure, now_s: float, terminate: bool = True) -> Instructions:
        """End the session without its client's wish; the request under way, which may be MAKE, fails with ``why``."""
        return [*self._answered(do.Fail(why)), *self._close(now_s, terminate)]

    def _on_lease_expired(self, expired: stimuli.LeaseExpired, now_s: float) -> Instructions:
        why = Failure("session_lost", "session", "its lease ran out")
        # An env that is at work may hang, and then does not close, either.
        return self._abandon(why, now_s, terminate=not self._is_idle(expired.quiescent))

    def _on_draining(self, draining: stimuli.Draining, now_s: float) -> Instructions:
        deadlines = self.deadlines
        deadlines.drain_by_s = min(deadlines.drain_by_s, draining.by_s)
        deadlines.end_by_s = min(deadlines.end_by_s, draining.end_by_s)
        if self.phase is Phase.CLOSING:
            deadlines.close_by_s = min(deadlines.close_by_s, deadlines.end_by_s)
        self._quiescent = draining.quiescent
        deadlines.plan_sample(now_s)
        wind_up: Instructions = [do.WindUp()] if self.ownership.lane is LaneName.SHARED else []
        return wind_up

    def _drained(self, now_s: float) -> Instructions:
        """End the session of a hub that shuts down, as soon as nothing is under way, or the time is over."""
        if self.phase in (Phase.CLOSING, Phase.ENDED):
            self.deadlines.drain_by_s = math.inf
            return []
        idle = self._is_idle(self._quiescent)
        if not idle and now_s < self.deadlines.drain_by_s:
            return []
        self.deadlines.drain_by_s = math.inf
        answered = self._answered(do.Fail(SHUTTING_DOWN))
        return [*answered, do.Goodbye(SHUTTING_DOWN), *self._close(now_s, terminate=not idle)]


class IllegalStimulus(Exception):
    """A stimulus that cannot come in its session's phase."""


def _dropped(slot: Slot, message: Any) -> do.Warn:
    """Report a stale answer."""
    fields = {"worker": slot.index, "message": type(message).__name__, "of": message.number}
    return do.Warn("answer_dropped", fields)


_POST_STEP: Instructions = [do.PostStep()]
_OUTCOME = do.Answer(messages.Done(), arrays=True)  # of a reset or a step

# --- which stimulus is handled in which phase -------------------------------------------------------------------------

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
Following = Mapping[Phase, tuple[Phase, ...]]  # by the phase of the stimulus, the others that may follow
Rule = tuple[Any, ...]  # the handler, and the phases that may follow besides the one in which the stimulus comes


class Rules(Generic[M_contra]):
    """What handles a kind of stimulus in some phases."""

    def __init__(self, handler: Callable[..., Instructions], following: Following) -> None:
        self.by_phase = {phase: (handler, *others) for phase, others in following.items()}


def _to(phases: Collection[Phase], *following: Phase) -> Following:
    return dict.fromkeys(phases, following)


def _by(handler: Callable[[SessionState, M, float], Instructions], following: Following) -> Rules[M]:
    return Rules(handler, following)


def _asked(handler: Callable[[SessionState, M, bool, float], Instructions], following: Following) -> Rules[M]:
    """Rules of a request; the handler is told whether every row is done."""
    return Rules(handler, following)


def _said(handler: Callable[[SessionState, Process, M, float], Instructions], following: Following) -> Rules[M]:
    """Rules of a message of a process, which serves a slot unless the message is one of ``_OF_ANY_PROCESS``."""
    return Rules(handler, following)


def _row(kind: type[M], *rules: Rules[M]) -> tuple[type, dict[Phase, Rule]]:
    by_phase: dict[Phase, Rule] = {}
    for each in rules:
        by_phase |= each.by_phase
    return kind, by_phase


def _request(
    kind: type[M], handler: Callable[[SessionState, M, bool, float], Instructions], *following: Phase
) -> tuple[type, dict[Phase, Rule]]:
    """A request that is carried out in READY; the protocol admits none but CLOSE while another is under way."""
    broken, closing = _to([_P.BROKEN]), _to([_P.CLOSING])
    refused = _asked(_S._on_broken_request, broken), _asked(_S._on_closing_request, closing)
    return _row(kind, _asked(handler, _to([_P.READY], *following)), *refused)


_S, _P = SessionState, Phase
_LIVE = (*MAKING, *SERVING, _P.BROKEN, _P.CLOSING)
_GONE = (_P.BROKEN, _P.CLOSING)
_ENDING = {  # at once where no process is left
    **_to(MAKING, _P.CLOSING),
    **_to([*SERVING, _P.BROKEN], _P.CLOSING, _P.ENDED),
    **_to([_P.CLOSING]),
}
_CALLED = {**_to(SERVING), **_to([_P.CALLING], _P.READY, _P.HANDING_OVER)}
_EXITED = {
    **_to(MAKING, _P.CLOSING, _P.ENDED),
    **_to([_P.READY, _P.MOVING], _P.BROKEN),
    **_to([_P.CALLING], _P.READY, _P.HANDING_OVER, _P.BROKEN),
    **_to([_P.HANDING_OVER], _P.READY, _P.BROKEN),
    **_to([_P.BROKEN]),
    **_to([_P.CLOSING], _P.ENDED),
}
_NOT_STARTED = {
    **_to(MAKING, _P.CLOSING, _P.ENDED),
    **_to(SERVING, _P.BROKEN),
    **_to([_P.BROKEN]),
    **_to([_P.CLOSING], _P.ENDED),
}
_MOVED = {**_to(SERVING), **_to([_P.HANDING_OVER], _P.READY)}

# Once the hub drains, CLOSING or ENDED may follow every stimulus that finds the session idle.
TABLE: Mapping[type, Mapping[Phase, Rule]] = dict(
    [
        # Of the client and the hub.
        _row(stimuli.SessionMade, _by(_S._on_made, _to([_P.BUILDING]))),
        _request(Step, _S._on_step, _P.MOVING),
        _request(Reset, _S._on_reset, _P.MOVING),
        _request(Call, _S._on_call, _P.CALLING),
        _request(SetAttr, _S._on_set_attr, _P.CALLING),
        _request(Send, _S._on_send),
        _request(Receive, _S._on_receive),
        _request(Collect, _S._on_collect),
        _request(TemplatesRequest, _S._on_templates),
        _row(HopsRequest, _asked(_S._on_hops, _to([_P.READY, *_GONE]))),
        _row(Close, _asked(_S._on_close, _ENDING)),
        _row(stimuli.Attached, _by(_S._on_attached, {**_to([*SERVING, *_GONE]), **_to([_P.READY], _P.HANDING_OVER)})),
        _row(stimuli.SideConnected, _by(_S._on_side_connected, _to(_LIVE))),
        _row(stimuli.SideClosed, _by(_S._on_side_closed, _to(_LIVE))),
        _row(stimuli.LeaseExpired, _by(_S._on_lease_expired, _ENDING)),
        _row(stimuli.Draining, _by(_S._on_draining, _ENDING)),
        _row(stimuli.Abandoned, _by(_S._on_abandoned, _ENDING)),
        _row(stimuli.QuotaOverrun, _by(_S._on_quota_overrun, _to(_LIVE))),
        # What came of an instruction.
        _row(stimuli.WorkersNotStarted, _by(_S._on_not_started, _NOT_STARTED)),
        _row(
            stimuli.ArenaRefused,
            _by(_S._on_arena_refused, _to([_P.MAPPING], _P.CLOSING)),
            _by(_S._on_nothing, _to([_P.CLOSING])),
        ),
        _row(
            stimuli.OtherArenaMade,
            _by(_S._on_other_arena, _to([_P.HANDING_OVER], _P.READY)),
            _by(_S._on_other_arena_late, _to(_GONE)),
        ),
        _row(
            stimuli.OtherArenaRefused,
            _by(_S._on_other_arena_refused, _to([_P.HANDING_OVER], _P.READY)),
            _by(_S._on_nothing, _to(_GONE)),
        ),
        _row(stimuli.ActionsRefused, _by(_S._on_actions_refused, {**_to(_LIVE), **_to([_P.MOVING], _P.READY)})),
        _row(stimuli.PartPosted, _by(_S._on_part_posted, _to(_LIVE))),
        _row(stimuli.PartDone, _by(_S._on_part_done, _to(_LIVE))),
        _row(
            stimuli.StandInFailed,
            _by(_S._on_stand_in_failed, _to(SERVING)),
            _by(_S._on_nothing, _to(_GONE)),
        ),
        _row(stimuli.StandInInfo, _by(_S._on_stand_in_info, _to(_LIVE))),
        _row(stimuli.RowsWaiting, _by(_S._on_rows_waiting, _to(_LIVE))),
        # Of the arena and of time.
        _row(
            stimuli.RowsDone,
            _by(_S._on_nothing, _to(_LIVE)),
            _by(_S._on_rows_done, _to([_P.MOVING], _P.READY, _P.HANDING_OVER)),
        ),
        _row(
            stimuli.Elapsed,
            _by(_S._on_elapsed, {**_to([*MAKING, *SERVING]), **_to([_P.READY], _P.HANDING_OVER)}),
            _by(_S._on_elapsed_over, _to(_GONE)),
        ),
        # Of processes. What is missing here is ignored: it was sent before the process learned of the phase.
        _row(WorkerExited, _by(_S._on_exited, _EXITED)),
        _row(control.Building, _said(_S._on_building, _to([_P.BUILDING, *SERVING]))),
        _row(control.Imported, _said(_S._on_imported, _to([_P.BUILDING]))),
        _row(control.FirstBuilt, _said(_S._on_first_built, _to([_P.BUILDING]))),
        _row(
            control.Built,
            _said(_S._on_built_again, _to(SERVING)),
            _said(_S._on_built, _to([_P.BUILDING], _P.MAPPING, _P.CLOSING)),
        ),
        _row(
            control.Mapped,
            _said(_S._on_mapped, _MOVED),
            _said(_S._on_first_mapped, _to([_P.MAPPING], _P.READY)),
        ),
        _row(control.RowInfo, _said(_S._on_row_info, _to(SERVING))),
        _row(control.InfoTemplate, _said(_S._on_template, _to(SERVING))),
        _row(
            control.RowFailed,
            _said(_S._on_making_failed, _to(MAKING, _P.CLOSING)),
            _said(_S._on_row_failed, _to(SERVING)),
            _said(_S._on_closing_failed, _to([_P.CLOSING])),
        ),
        _row(control.CallResults, _said(_S._on_call_answered, _CALLED)),
        _row(control.CallFailed, _said(_S._on_call_answered, _CALLED)),
        _row(control.StepTimes, _said(_S._on_step_times, _to(_LIVE))),
        _row(control.SharedChanged, _said(_S._on_shared_changed, _to(_LIVE))),
        _row(control.Faulted, _said(_S._on_faulted, _to(SERVING, _P.BROKEN))),
        _row(control.EpisodesDone, _said(_S._on_episodes_done, _to(SERVING))),
        _row(control.Left, _said(_S._on_left, _MOVED)),
        _row(control.Suspicious, _said(_S._ignore, _to(_LIVE))),
    ]
)


def diagram() -> str:
    """The transitions between two phases and the stimuli that may cause them, as a Mermaid state diagram."""
    edges: dict[tuple[str, str], list[str]] = {}
    for kind, rules in TABLE.items():
        for phase, (_, *following) in rules.items():
            for other in following:
                if other is not phase:
                    edges.setdefault((phase.name, other.name), []).append(kind.__name__)
    lines = [f"    {before} --> {after}: {', '.join(kinds)}" for (before, after), kinds in sorted(edges.items())]
    return "\n".join(["stateDiagram-v2", "    [*] --> BUILDING", *lines, "    ENDED --> [*]"])
