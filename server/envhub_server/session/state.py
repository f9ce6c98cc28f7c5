"""The state of one session: its phase, and objects of one subject each, which know the slots.

The handlers read and change it; ``machine.SessionMachine`` calls the one that decides about a stimulus. At most one
request is pending, as the protocol guarantees.
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
from envhub_server.session import instructions as do
from envhub_server.session.build_order import NO_RULES, WorkerRules
from envhub_server.session.building import EnvBuilding
from envhub_server.session.calls import Calls
from envhub_server.session.closing import EnvClosing
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
from envhub_server.session.requests import Requests
from envhub_server.session.restarts import Restarts
from envhub_server.session.sizing import WorkerSizing
from envhub_server.session.slots import SlotTable, Stage
from envhub_server.session.spares import Spares
from envhub_server.session.supervision import Supervision
from envhub_server.session.worker_count import Machine, WorkerCount

HISTORY_MAX = 100  # last stimuli that are logged with an internal error


class SessionState:
    """One vector env, of one client at a time.

    Attributes:
        make: the client's MAKE.
        recipe: the recipe of its envs, with the operator's settings.
        phase: the state of the session.
        slots, launcher, sizing, building, requests, calls, infos: objects of one subject each, see their classes.
        replacement, supervision, ownership, deadlines, env_history, replays, closing: the same.
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
        self.launcher = launcher = Launcher(make, recipe, rules, machine, slots, deadlines, restarts, count is not None)
        self.sizing = WorkerSizing(make, recipe, machine, slots, launcher, count)
        self.building = EnvBuilding(make, recipe, info_bytes, machine, slots, launcher, self.sizing, restarts)
        self.requests = Requests(make, is_vector, slots)
        self.infos = RowInfos(slots)
        self.partial_batches = PartialBatches(make, is_vector, slots, self.infos)
        self.ownership = Ownership()
        self.supervision = Supervision(make.faults, hosting.memory_max or 0, slots, deadlines)
        self.env_history = EnvHistory(make)
        self.closing = closing = EnvClosing(make, slots, deadlines)
        self.calls = Calls(make, slots, self.requests, self.env_history)
        self.replays = replays = ReplayOrders(launcher)
        spares = Spares(make, is_vector, slots, launcher, restarts, deadlines)
        recycling = Recycling(make, slots, launcher, spares, deadlines)
        self.replacement = Replacement(
            make, slots, launcher, restarts, self.env_history, replays, spares, recycling, closing
        )
        self._restarts = restarts
        self.quiescent = True  # True if every row was done, by the last report while the client drove

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """The largest number of processes of the session; an upper bound until its first envs are made."""
        return self.sizing.workers_max(self.phase is Phase.BUILDING) + (self.launcher.rules.hosting.spares or 0)

    @property
    def recycled(self) -> int:
        """Number of processes that were recycled."""
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

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float:
        """Time at which ``Elapsed`` is due; infinity if there is no deadline."""
        if self.phase is Phase.ENDED:
            return math.inf
        if self.phase in OVER:
            return min(self.closing.next_s(), self.deadlines.drain_by_s)
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

    def answer(self, answer: do.Answer | do.Fail) -> Instructions:
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

    def break_down(self, failure: Failure) -> Instructions:
        """Break the session: no slot gets another process."""
        self.requests.failure = failure
        self.phase = Phase.BROKEN
        ownership, spares = self.ownership, self.slots.spares.items()
        killed = [do.Kill(number) for number, spare in spares if spare.stage is not Stage.LEAVING]
        return [*self.answer(do.Fail(failure)), *ownership.revoke(), *ownership.refuse(), *killed]

    # --- who drives, and takeover -------------------------------------------------------------------------------------

    def advance_takeover(self, quiescent: bool) -> Instructions:
        """Give the session to the client that attaches, if no other has the arena and nothing is pending."""
        ownership = self.ownership
        waits = ownership.lane is LaneName.SHARED or self.phase is not Phase.READY or self.requests.asked
        if not ownership.claimed or waits or not quiescent:
            return []
        self.partial_batches.rows_out = 0
        return ownership.grant()

    def end_recall(self, now_s: float) -> Instructions:
        """End a takeover for which the holder has not let go in time."""
        return self.keep_holder() if self.ownership.claimed and now_s >= self.ownership.let_go_by_s else []

    def keep_holder(self) -> Instructions:
        """Refuse the client that attaches; its holder goes on."""
        kept = self.ownership.keep_holder(self.make.faults.restart_wait_s)
        return [*kept, do.WindUp()] if self.deadlines.draining else kept

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, now_s: float, terminate: bool, why: str = "") -> Instructions:
        """End the session: have its envs closed, or kill its processes, for the reason that is told."""
        is_first = self.phase is not Phase.CLOSING
        instructions: Instructions = []
        if is_first:
            self.phase = Phase.CLOSING
            instructions += [*self.ownership.revoke(), *self.ownership.refuse()]
        alive = self.slots.processes
        if not alive:
            return [*instructions, *self.end()]
        if terminate:
            return [*instructions, *self.closing.kill(alive, why)]
        return [*instructions, *self.closing.ask_all(now_s)] if is_first else instructions

    def end(self) -> Instructions:
        """Answer CLOSE, because no process is left."""
        self.phase = Phase.ENDED
        return [*self.answer_close(), do.End()]

    def answer_close(self) -> Instructions:
        """Tell which envs were cut short, and answer CLOSE."""
        failure = self.requests.failure
        answer = do.Answer(messages.Done()) if failure is None else do.Fail(failure)
        return [*self.closing.tell(), *self.answer(answer)]

    def abandon(self, why: Failure, now_s: float, terminate: bool = True) -> Instructions:
        """End the session without a CLOSE; the pending request, which may be MAKE, fails with ``why``.

        A CLOSE that is pending is answered at the end, after its client was told which envs were cut short.
        """
        failed = [] if self.phase is Phase.CLOSING else self.answer(do.Fail(why))
        return [*failed, *self.close(now_s, terminate, why.message)]

    def discard(self) -> None:
        """Drop the session at once, after a bug that keeps it from ending by itself."""
        self.phase = Phase.ENDED

    def drained(self, now_s: float) -> Instructions:
        """End the session of a draining hub, once no request is pending or the time is up."""
        if self.phase in (Phase.CLOSING, Phase.ENDED):
            self.deadlines.drain_by_s = math.inf
            return []
        idle = self.is_idle(self.quiescent)
        if not idle and now_s < self.deadlines.drain_by_s:
            return []
        self.deadlines.drain_by_s = math.inf
        answered = self.answer(do.Fail(SHUTTING_DOWN))
        return [*answered, do.Goodbye(SHUTTING_DOWN), *self.close(now_s, terminate=False)]
