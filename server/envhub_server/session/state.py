"""One session as a pure state machine: stimuli in, instructions out.

It knows no socket, process, memory or clock. ``hub.runtime`` carries out the instructions in their order and reports
what came of them as further stimuli, after the machine has returned: it is never re-entered. It makes every
decision about a session: which requests are executed, what a client learns of an ended process and when it is
replaced, which env hangs, how another client takes over, and when the session ends. It also decides who drives: the hub
or the client, which posts the rows' requests in the arena.

``SessionState`` keeps the phase, and composes objects of one subject each, which know the slots. The
handlers decide about a stimulus; ``table.TABLE`` says which of them handles it in which phase, and which
phases may follow. At most one request is pending, as the protocol guarantees.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import (
    Failure,
    Make,
)
from envhub_server.catalog.registry import Recipe
from envhub_server.ipc import control
from envhub_server.processes.worker_events import WorkerSaid
from envhub_server.session import instructions as do
from envhub_server.session.build_order import NO_RULES, WorkerRules
from envhub_server.session.building import EnvBuilding
from envhub_server.session.calls import Calls
from envhub_server.session.deadlines import Deadlines
from envhub_server.session.env_history import EnvHistory
from envhub_server.session.infos import RowInfos
from envhub_server.session.instructions import Instructions
from envhub_server.session.launcher import Launcher
from envhub_server.session.ownership import Ownership
from envhub_server.session.partial_batches import PartialBatches
from envhub_server.session.phases import MAKING, OVER, Driver, LaneName, Phase
from envhub_server.session.recycling import Recycling
from envhub_server.session.replacement import Replacement
from envhub_server.session.replay_orders import ReplayOrders
from envhub_server.session.requests import Requests, refusal, stale
from envhub_server.session.restarts import Restarts
from envhub_server.session.sizing import WorkerSizing
from envhub_server.session.slots import SlotTable, Stage
from envhub_server.session.spares import Spares
from envhub_server.session.stimuli import Requested, Stimulus
from envhub_server.session.supervision import Supervision
from envhub_server.session.table import TABLE
from envhub_server.session.worker_count import Machine, WorkerCount

HISTORY_MAX = 100  # last stimuli that are logged with an internal error
# Messages of a process that are handled before it serves a slot; its other messages are ignored.
_BEFORE_SERVING = (control.Building, control.Built, control.Mapped)


class SessionState:
    """One vector env, of one client at a time.

    Attributes:
        make: the client's MAKE.
        recipe: the recipe of its envs, with the operator's settings.
        phase: the state of the session.
        slots, launcher, sizing, building, requests, calls, infos: objects of one subject each, see their classes.
        replacement, supervision, ownership, deadlines, env_history, replays: the same.
        partial_batches: rows that were posted without the others.
        made: the description for the client, once the session is made.
        history: the classes of the last stimuli, for the log; their contents may be large.
    """

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        count: WorkerCount | None,
        info_bytes: int,
        machine: Machine,
        restarts: Restarts,
        rules: WorkerRules = NO_RULES,
    ) -> None:
        """Make a session of ``count`` workers; if it is None, the first envs decide the number."""
        is_vector, hosting = recipe.settings.vector, rules.hosting
        self.make = make
        self.recipe = recipe
        self.phase = Phase.BUILDING
        self.made: messages.Made | None = None
        self.history: deque[type] = deque(maxlen=HISTORY_MAX)
        self.deadlines = deadlines = Deadlines()
        self.slots = slots = SlotTable(make.num_envs, make.faults)
        self.launcher = launcher = Launcher(make, recipe, rules, machine, slots, deadlines, count is not None)
        self.sizing = WorkerSizing(make, recipe, machine, slots, launcher, count)
        self.building = EnvBuilding(make, recipe, info_bytes, machine, slots, launcher, self.sizing, restarts)
        self.requests = Requests(make, is_vector, slots)
        self.infos = RowInfos(slots)
        self.partial_batches = PartialBatches(make, is_vector, slots, self.infos)
        self.ownership = Ownership()
        self.supervision = Supervision(make.faults, hosting.memory_max or 0, slots, deadlines)
        self.env_history = EnvHistory(make.num_envs)
        self.calls = Calls(make, slots, self.requests, self.env_history)
        self.replays = replays = ReplayOrders(launcher, is_vector)
        spares = Spares(make, is_vector, slots, launcher, restarts, deadlines)
        recycling = Recycling(make, is_vector, slots, launcher, spares, deadlines)
        replaced = launcher, restarts, self.env_history, replays, spares, recycling
        self.replacement = Replacement(make, slots, *replaced)
        self._restarts = restarts
        self.quiescent = True  # True if every row was done, by the last report while the client drove

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """The largest number of processes of the session; an upper bound until its first envs are made."""
        return self.sizing.workers_max(self.phase is Phase.BUILDING) + (self.launcher.rules.hosting.spares or 0)

    @property
    def recycled(self) -> int:
        """Number of successors that took over from a process that had not ended."""
        return sum(slot.recycled for slot in self.slots)

    @property
    def restarts(self) -> int:
        """Number of times that its processes have ended or rebuilt an env."""
        return sum(self._restarts.count(slot.index) for slot in self.slots)

    @property
    def making(self) -> bool:
        """True if its envs do not exist yet."""
        return self.phase in MAKING

    @property
    def attachable(self) -> bool:
        """True if another client may take it over."""
        return self.phase not in (Phase.CLOSING, Phase.ENDED)

    @property
    def progress(self) -> messages.HeartbeatReply:
        """The reply to HEARTBEAT: the description of the building envs, with the phase."""
        return replace(self.building.description, phase=self.phase.value)

    def expects_end(self, number: int) -> bool:
        """True if the hub told this process to end."""
        process = self.slots.process(number)
        return self.phase is Phase.CLOSING or (process is not None and process.stage is Stage.LEAVING)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus, now_s: float) -> Instructions:
        """Return the instructions that follow from the stimulus.

        Raises:
            IllegalStimulus: it cannot come in this phase: a bug of the hub.
        """
        if isinstance(stimulus, WorkerSaid):
            self.history.append(type(stimulus.message))
            instructions = self._hear(stimulus, now_s)
        else:
            kind = type(stimulus.message if isinstance(stimulus, Requested) else stimulus)
            self.history.append(kind)
            try:
                handler = TABLE[kind][self.phase].handler
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
        """Handle a message of a process, unless it is stale or irrelevant."""
        process, kind = self.slots.process(said.process), type(said.message)
        if process is None:
            return []
        slot = self.slots.of(process)
        if slot is None and kind not in _BEFORE_SERVING:
            return []
        if slot is not None and not said.current and slot.loss is None:
            return [stale(slot, said.message)]  # a message about an abandoned step
        if process.rebuild:
            return []  # the process is about to be killed, and its envs are made again
        if kind not in TABLE and self.phase not in OVER:
            return self.abandon(refusal(f"worker {process.place} sent a {kind.__name__}"), now_s)
        rule = TABLE.get(kind, {}).get(self.phase)
        if rule is None:
            return []  # sent before the process learned of this phase
        return rule.handler(self, process, said.message, now_s)

    def next_deadline_s(self) -> float:
        """Time at which ``Elapsed`` is due; infinity if there is no deadline."""
        if self.phase is Phase.ENDED:
            return math.inf
        if self.phase in OVER:
            return min(self.deadlines.close_by_s, self.deadlines.drain_by_s)
        return self.deadlines.next_s(self.slots, self.samples, self.replacement.recycling.next_age_s())

    @property
    def samples(self) -> bool:
        """True if the arena is sampled: an env may hang, or a row may be done without a bell."""
        ownership = self.ownership
        busy = (
            self.phase is not Phase.READY
            or ownership.driver is Driver.CLIENT
            or ownership.claimed
            or self.partial_batches.rows_out > 0
        )
        return busy or self.supervision.concerns_processes

    # --- requests -----------------------------------------------------------------------------------------------------

    def answer(self, answer: do.Answer | do.Fail | do.AnswerHops) -> Instructions:
        """Answer the pending request, if there is one; a client on the shared lane drives again."""
        requests, ownership = self.requests, self.ownership
        if not requests.asked:
            return []
        requests.asked = False
        if requests.has_pending:
            requests.clear_pending()
        self.partial_batches.receiving = 0
        if ownership.lane is LaneName.SHARED and ownership.driver is Driver.HUB and self.awaits_request:
            ownership.driver = Driver.CLIENT
            self.supervision.begin_idle()
            return [answer, do.GiveDrive()]
        return [answer]

    @property
    def awaits_request(self) -> bool:
        """True if the session is ready and no request that the hub drives is pending."""
        return self.phase is Phase.READY and not self.requests.asked and not self.partial_batches.rows_out

    def is_idle(self, quiescent: bool) -> bool:
        """True if no env runs; while the client drives, ``quiescent`` decides."""
        driven = self.ownership.driver is Driver.CLIENT and not quiescent
        busy = self.requests.asked or self.partial_batches.rows_out or driven
        return not busy and self.phase in (Phase.READY, Phase.BROKEN)

    def problem(self, quiescent: bool, partial: bool = False) -> Failure | None:
        """The reason why a request of the whole batch, or of a ``partial`` one, cannot begin now; None if it can."""
        driven = self.ownership.driver is Driver.CLIENT and not quiescent
        return self.requests.problem(self.deadlines.draining, 0 if partial else self.partial_batches.rows_out, driven)

    def begin(self, phase: Phase, now_s: float) -> Instructions:
        """Begin a request that the hub drives, and that was not refused."""
        self.phase = phase
        self.deadlines.plan_sample(now_s)
        if phase is not Phase.READY:
            self.forget_last()
        return self.ownership.take_drive()

    def forget_last(self) -> None:
        """Forget the infos and failures of the last request."""
        self.requests.failure = None
        self.infos.forget()

    # --- processes ----------------------------------------------------------------------------------------------------

    @property
    def changing_arena(self) -> bool:
        """True while its processes change to another arena."""
        return self.phase is Phase.HANDING_OVER

    def break_down(self, failure: Failure) -> Instructions:
        """Break the session: no slot gets another process."""
        self.requests.failure = failure
        self.phase = Phase.BROKEN
        ownership, spares = self.ownership, map(do.Kill, self.slots.spares)
        return [*self.answer(do.Fail(failure)), *ownership.revoke(), *ownership.refuse(), *spares]

    # --- who drives, and takeover -------------------------------------------------------------------------------------

    def advance_takeover(self, quiescent: bool, now_s: float) -> Instructions:
        """Advance a takeover as far as possible now."""
        ownership = self.ownership
        if not ownership.claimed:
            return []
        if self.changing_arena and ownership.other_made and not self.slots.changing_arena:
            return self._continue_in_other_arena(now_s)
        if self.phase is not Phase.READY or self.requests.asked or not quiescent:
            return []
        if ownership.lent:
            self.phase = Phase.HANDING_OVER
            return [do.MakeOtherArena()]
        self.partial_batches.rows_out = 0
        return ownership.grant()

    def _continue_in_other_arena(self, now_s: float) -> Instructions:
        """Continue in the second arena; no process reads rows that the former client still posts in the first.

        The former client may have posted rows while processes still used the first arena. Rows that are pending there
        stay pending in the second arena, so that no batch is left half done; the takeover waits for them.
        """
        self.phase, self.deadlines.sample_at_s = Phase.READY, now_s
        return [*self.ownership.end_arena_change(), *self.replacement.serve_in_other_arena(now_s)]

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, now_s: float, terminate: bool) -> Instructions:
        """End the session: close its envs in time, or kill its processes."""
        is_first = self.phase is not Phase.CLOSING
        instructions: Instructions = []
        if is_first:
            self.phase = Phase.CLOSING
            self.deadlines.close_by_s = min(now_s + self.make.faults.close_s, self.deadlines.end_by_s)
            instructions += [*self.ownership.revoke(), *self.ownership.refuse()]
        alive = self.slots.processes
        if not alive:
            return [*instructions, *self.end()]
        if terminate:
            return [*instructions, *(do.Kill(process.number) for process in alive)]
        if not is_first:
            return instructions
        # A process that builds its envs would read CloseEnvs only afterwards, and its envs are unused.
        making = [process.number for process in alive if process.stage is Stage.BUILDING]
        closing = (process.number for process in alive if process.stage is not Stage.BUILDING)
        orders = [do.Tell(number, control.CloseEnvs()) for number in closing]
        return [*instructions, *orders, *map(do.Kill, making)]

    def end(self) -> Instructions:
        """Answer CLOSE, because no process is left."""
        self.phase = Phase.ENDED
        failure = self.requests.failure
        answer = do.Answer(messages.Done()) if failure is None else do.Fail(failure)
        return [*self.answer(answer), do.End()]

    def abandon(self, why: Failure, now_s: float, terminate: bool = True) -> Instructions:
        """End the session without a CLOSE; the pending request, which may be MAKE, fails with ``why``."""
        return [*self.answer(do.Fail(why)), *self.close(now_s, terminate)]

    def discard(self) -> None:
        """Drop the session at once, after a bug that keeps it from ending by itself."""
        self.phase = Phase.ENDED

    def _drained(self, now_s: float) -> Instructions:
        """End the session of a draining hub, once no request is pending or the time is up."""
        if self.phase in (Phase.CLOSING, Phase.ENDED):
            self.deadlines.drain_by_s = math.inf
            return []
        idle = self.is_idle(self.quiescent)
        if not idle and now_s < self.deadlines.drain_by_s:
            return []
        self.deadlines.drain_by_s = math.inf
        answered = self.answer(do.Fail(SHUTTING_DOWN))
        return [*answered, do.Goodbye(SHUTTING_DOWN), *self.close(now_s, terminate=not idle)]


class IllegalStimulus(Exception):
    """A stimulus that cannot come in its session's phase."""
