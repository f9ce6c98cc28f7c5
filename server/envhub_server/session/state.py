"""The state of one session: its phase, and objects of one subject each, which know the slots.

What the session is told, see ``client_events`` and ``machine``, reads and changes it. At most one request is
pending, as the protocol guarantees.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import Failure
from envhub_server.session.building import EnvBuilding
from envhub_server.session.effects import RowBlobs
from envhub_server.session.launcher import Launcher, WorkerCount
from envhub_server.session.replacement import Replacement
from envhub_server.session.requests import Requests, RowInfos, refusal
from envhub_server.session.slots import Stage
from envhub_server.session.snapshots import Snapshots
from envhub_server.session.supervision import EnvClosing, Supervision

LOST = Failure("session_lost", "session", "the session has broken; make another")
HISTORY_MAX = 100  # last events that are logged with an internal error


class Phase(enum.Enum):
    """The state of a session."""

    __hash__ = object.__hash__  # Enum's own is a slow Python function, and every event is looked up by its phase

    BUILDING = "building"  # its workers build the envs
    MAPPING = "mapping"  # its workers map the arena
    READY = "ready"  # no request of the whole batch is pending
    MOVING = "moving"  # a reset, a step or a call is pending
    BROKEN = "broken"  # a worker has ended too often
    CLOSING = "closing"  # its workers close the envs and end
    ENDED = "ended"


MAKING = (Phase.BUILDING, Phase.MAPPING)
SERVING = (Phase.READY, Phase.MOVING)
LIVE = (*MAKING, *SERVING, Phase.BROKEN, Phase.CLOSING)
OVER = (Phase.BROKEN, Phase.CLOSING, Phase.ENDED)


class LaneName(enum.Enum):
    """The client's lane to this session."""

    WIRE = "wire"  # the hub drives, for each step
    SHARED = "shared"  # the client drives, except while a request that the hub drives is pending


class Driver(enum.Enum):
    """The process that posts rows."""

    HUB = "hub"
    CLIENT = "client"


Method = TypeVar("Method", bound=Callable[..., None])
# What a session is told: a method, and its arguments after the time.
Event = tuple[Callable[..., None], tuple[Any, ...]]

# By a method's name, the phases in which it may be called, each with the other phases that may follow. In a draining
# hub, CLOSING or ENDED may follow everything that leaves the session idle.
TRANSITIONS: dict[str, dict[Phase, tuple[Phase, ...]]] = {}
# By the type of a client's request or a process's message, the method that handles it in each phase.
HANDLERS: dict[type, dict[Phase, Callable[..., None]]] = {}


class IllegalEvent(Exception):
    """An event that cannot come in its session's phase: a bug of the hub."""


def allowed_in(*phases: Phase, then: tuple[Phase, ...] = ()) -> Callable[[Method], Method]:
    """Allow a method of a session in these phases, after which one of the phases ``then`` may follow."""
    # The method's arguments begin with the time. A draining hub's session may end after it.

    def mark(method: Method) -> Method:
        name = method.__name__
        is_first, following = name not in TRANSITIONS, TRANSITIONS.setdefault(name, {})
        following.update(dict.fromkeys(phases, then))
        return _guarded(method, name, following) if is_first else method

    return mark


def _guarded(method: Method, name: str, following: dict[Phase, tuple[Phase, ...]]) -> Method:
    @functools.wraps(method)
    def guarded(session: Any, now_s: float, *facts: Any) -> None:
        session.history.append(name)
        if session.phase not in following:
            raise IllegalEvent(f"{name} in phase {session.phase.value}")
        method(session, now_s, *facts)
        if session.deadlines.drain_by_s != math.inf:
            session.drained(now_s)

    return cast("Method", guarded)


def handles(kinds: type | tuple[type, ...], *phases: Phase, then: tuple[Phase, ...] = ()) -> Callable[[Method], Method]:
    """Have a method handle messages of these types, in these phases as of ``allowed_in`` and where it is allowed."""

    def mark(method: Method) -> Method:
        method = allowed_in(*phases, then=then)(method)
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            HANDLERS.setdefault(kind, {}).update(dict.fromkeys(TRANSITIONS[method.__name__], method))
        return method

    return mark


class SessionState:
    """One vector env, of one client at a time."""

    def __init__(self, launcher: Launcher, count: WorkerCount | None, info_bytes: int) -> None:
        """Make a session of ``count`` workers; if it is None, the first envs decide the number."""
        self.launcher, self.effects, self.make = launcher, launcher.effects, launcher.make
        self.phase = Phase.BUILDING
        self.shutdown = SHUTTING_DOWN  # the failure of requests once the hub shuts down
        self.abandoned: Failure | None = None  # why the session is ended without a CLOSE
        self.made: messages.Made | None = None  # the description for the client, once the session is made
        self.history: deque[str] = deque(maxlen=HISTORY_MAX)  # the names of the last methods that were called
        self.slots, self.deadlines = launcher.slots, launcher.deadlines
        self.building = EnvBuilding(launcher, count, info_bytes)
        self.requests = Requests(launcher)
        self.infos = RowInfos(launcher.slots)
        # A client on the shared lane has the arena until it lets go: a closed side socket is the sign of that. A client
        # that attaches meanwhile waits for it; the hub asks the holder to let go. Only then the session changes hands.
        self.lane = LaneName.WIRE  # how the client steps it; on the shared lane the client has the arena
        self.driver = Driver.HUB  # the process that posts rows
        self.holder = 0  # the process id of the client on the shared lane; 0 if it is not known here
        # True if a client that takes over waits for its answer, also while the envs are made.
        self.takeover_pending = False
        self.let_go_by_s = math.inf  # time until which the client that attaches waits for the holder
        self.supervision = Supervision(launcher)
        self.closing = closing = EnvClosing(launcher)
        self.replacement = Replacement(launcher, self.requests, closing)
        self.snapshots = Snapshots(launcher, self.replacement, closing)
        self.quiescent = True  # True if every row was done, by the last report while the client drove

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """The largest number of processes of the session; an upper bound until its first envs are made."""
        return self.building.workers_max(self.phase is Phase.BUILDING) + (self.launcher.rules.hosting.spares or 0)

    @property
    def recycled(self) -> int:
        return sum(slot.recycled for slot in self.slots)

    @property
    def restarts(self) -> int:
        return sum(self.launcher.restarts.count(slot.index) for slot in self.slots)

    @property
    def making(self) -> bool:
        return self.phase in MAKING

    @property
    def attachable(self) -> bool:
        return self.phase not in (Phase.CLOSING, Phase.ENDED)

    @property
    def progress(self) -> messages.HeartbeatReply:
        processes = [slot.process for slot in self.slots if slot.process is not None]
        importing = next((process.importing for process in processes if process.importing), "")
        made = sum(process.built for process in processes)
        return messages.HeartbeatReply("running", self.phase.value, made, self.make.num_envs, importing)

    def expects_end(self, number: int) -> bool:
        process = self.slots.process(number)
        return self.phase is Phase.CLOSING or (process is not None and process.stage is Stage.LEAVING)

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float:
        """Time at which ``on_elapsed`` is due; infinity if there is no deadline."""
        if self.phase is Phase.ENDED:
            return math.inf
        if self.phase in OVER:
            return min(self.closing.next_s(), self.deadlines.drain_by_s)
        planned_s = self.deadlines.next_s(self.slots, self.samples, self.replacement.next_age_s())
        return min(planned_s, self.snapshots.next_s())

    @property
    def samples(self) -> bool:
        """True if the arena is sampled: an env may hang, or a row may be done without a bell."""
        busy = (
            self.phase is not Phase.READY
            or self.driver is Driver.CLIENT
            or self.takeover_pending
            or self.requests.rows_out > 0
        )
        return busy or self.supervision.concerns_processes

    # --- requests -----------------------------------------------------------------------------------------------------

    def answer(self, message: Any, arrays: bool = False, rows: RowBlobs = ()) -> None:
        self.reply(self.effects.answer, message, arrays, rows)

    def answer_rows(self, result: RowBlobs | Failure) -> None:
        if isinstance(result, Failure):
            self.fail(result)
        else:
            self.answer(messages.Done(), rows=result)

    def fail(self, failure: Failure) -> None:
        self.reply(self.effects.fail, failure)

    def fail_all(self, failure: Failure) -> None:
        """Fail what is pending: a request, or the SENDs and RECEIVEs that wait."""
        self.fail(failure)
        while self.requests.waiting:
            self.reply_part(self.effects.fail_part, failure)

    def reply_part(self, effect: Callable[..., None], *reply: Any) -> None:
        """Have an effect answer the oldest request that waits for results."""
        self.requests.waiting -= 1
        self.requests.pending_reply = True
        self.reply(effect, *reply)

    def reply(self, effect: Callable[..., None], *reply: Any) -> None:
        """Have an effect answer the pending request, if there is one; a client on the shared lane drives again."""
        requests = self.requests
        if not requests.pending_reply:
            return
        requests.pending_reply = False
        drives = self.lane is LaneName.SHARED and self.driver is Driver.HUB and self.awaits_request
        if drives:
            self.driver = Driver.CLIENT
            self.supervision.idle_samples = 0
        effect(*reply)
        if drives:
            self.effects.give_drive()

    @property
    def awaits_request(self) -> bool:
        """True if the session is ready and no request that the hub drives is pending."""
        requests = self.requests
        return self.phase is Phase.READY and not (requests.pending_reply or requests.rows_out or requests.waiting)

    def is_idle(self, quiescent: bool) -> bool:
        """True if no env runs; while the client drives, ``quiescent`` decides."""
        driven = self.driver is Driver.CLIENT and not quiescent
        busy = self.requests.pending_reply or self.requests.rows_out or driven
        return not busy and self.phase in (Phase.READY, Phase.BROKEN)

    def problem(self, quiescent: bool, partial: bool = False) -> Failure | None:
        """The reason why a request of the whole batch, or of a ``partial`` one, cannot begin now; None if it can."""
        if self.deadlines.draining:
            return self.shutdown
        if self.requests.rows_out and not partial:
            return refusal("envs are under way that RECEIVE has not returned")
        if self.driver is Driver.CLIENT and not quiescent:
            return refusal("a step that the client drives has not ended; wait for it")
        return None

    def begin(self, phase: Phase, now_s: float) -> None:
        """Begin a request that the hub drives, and that was not refused."""
        self.phase = phase
        self.deadlines.plan_sample(now_s)
        if phase is not Phase.READY:
            self.forget_last()
        self.take_drive()

    def forget_last(self) -> None:
        self.requests.failure = None
        self.infos.forget()

    # --- processes ----------------------------------------------------------------------------------------------------

    def break_down(self, failure: Failure) -> None:
        self.requests.failure = failure
        self.phase = Phase.BROKEN
        self.fail_all(failure)
        self._dismiss_client()
        for number, spare in self.slots.spares.items():
            if spare.stage is not Stage.LEAVING:
                self.effects.kill(number)

    # --- who drives, and takeover -------------------------------------------------------------------------------------

    def take_drive(self) -> None:
        if self.driver is Driver.CLIENT:
            self.driver = Driver.HUB
            self.effects.take_drive()

    def _dismiss_client(self) -> None:
        """Revoke the session of a client that drives, which then asks the hub why, and refuse one that takes over."""
        if self.lane is LaneName.SHARED:
            self.effects.revoke()
        self.refuse_takeover(self.abandoned or LOST)

    def refuse_takeover(self, why: Failure) -> None:
        """Refuse a client that takes over, if there is one, with the reason."""
        if self.takeover_pending:
            self.takeover_pending, self.let_go_by_s = False, math.inf
            self.effects.fail_attach(why)

    def advance_takeover(self, quiescent: bool) -> None:
        """Give the session to the client that attaches, if no other has the arena and nothing is pending."""
        is_pending = self.phase is not Phase.READY or self.requests.pending_reply or self.requests.waiting
        waits = self.lane is LaneName.SHARED or is_pending
        if self.takeover_pending and quiescent and not waits:
            self.requests.rows_out = 0
            self.takeover_pending, self.driver = False, Driver.HUB
            self.effects.take_drive()
            self.effects.answer_attach()

    def keep_holder(self) -> None:
        """Refuse the client that attaches; its holder, which has not let go, goes on."""
        holder, waited_s = self.holder, self.make.faults.restart_wait_s
        by = f"process {holder}" if holder else "a process of another container"
        text = f"{by} has this session on the shared lane, and has not let go of it within restart_wait={waited_s:g} s"
        self.effects.end_recall()
        self.refuse_takeover(refusal(f"{text}: it is stopped, or too busy; attach again, or end the session"))
        if self.deadlines.draining:
            self.effects.wind_up()

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, now_s: float, terminate: bool, why: str = "") -> None:
        """End the session: have its envs closed, or kill its processes, for the reason that is told."""
        is_first = self.phase is not Phase.CLOSING
        if is_first:
            self.phase = Phase.CLOSING
            self._dismiss_client()
        alive = self.slots.processes
        if not alive:
            self.end()
        elif terminate:
            self.closing.kill(alive, why)
        elif is_first:
            self.closing.ask_all(now_s)

    def end(self) -> None:
        """Answer CLOSE, because no process is left."""
        self.phase = Phase.ENDED
        self.answer_close()
        self.effects.end()

    def answer_close(self) -> None:
        """Tell which envs were cut short, and answer CLOSE."""
        self.closing.tell()
        self.answer_rows(self.requests.failure or ())

    def abandon(self, why: Failure, now_s: float, terminate: bool = True) -> None:
        """End the session without a CLOSE; the pending request, which may be MAKE, fails with ``why``."""
        # A CLOSE that is pending is answered at the end, after its client was told which envs were cut short.
        self.abandoned = self.abandoned or why
        if self.phase is not Phase.CLOSING:
            self.fail_all(why)
        self.close(now_s, terminate, why.message)

    def discard(self) -> None:
        """Drop the session at once, after a bug that keeps it from ending by itself."""
        self.phase = Phase.ENDED

    def drained(self, now_s: float) -> None:
        """End the session of a draining hub, once no request is pending or the time is up."""
        is_over = self.phase in (Phase.CLOSING, Phase.ENDED)
        if not is_over and not self.is_idle(self.quiescent) and now_s < self.deadlines.drain_by_s:
            return
        self.deadlines.drain_by_s = math.inf
        if not is_over:
            self.abandoned = self.shutdown
            self.fail_all(self.shutdown)
            self.effects.goodbye(self.shutdown)
            self.close(now_s, terminate=False)
