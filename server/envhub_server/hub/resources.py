"""Resources of a session on this machine: its processes, its shared memory, its bells and its client's requests."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from envhub.protocol import messages
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Attach, Failure, Make, Op, Step
from envhub.protocol.prelude import FRAME_BYTES_MAX, Frames
from envhub.transport.address import TICKET_BYTES
from envhub_server.catalog.registry import ForkedImports, Recipe
from envhub_server.hub.biography import CLOSED, KILLED, NOT_MADE, Biography, Ending, SlowRequests, Subject
from envhub_server.hub.replay_keeper import ReplayKeeper, ReplayWriter
from envhub_server.log import Logger, log
from envhub_server.loop import BackgroundThread, Loop, Ringer
from envhub_server.memory.lost_rows import LostWorkerRows
from envhub_server.memory.session_memory import (
    ArenaBudget,
    Blob,
    LeafCompressors,
    SessionMemory,
    SharedLaneGrant,
    UnreadMemory,
    new_bell,
    row_frames,
)
from envhub_server.network.connections import Holder
from envhub_server.network.listener import SideSocket
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Events, SessionZygote, SnapshotProcess, WorkerHandle
from envhub_server.session.launcher import interpreter_of
from envhub_server.session.machine import SessionMachine
from envhub_server.session.state import Driver, Event, Phase
from envhub_server.session.supervision import logged, slow_to_close

NAME_BYTES = 4  # of a session's first token, which are its name
FORMER_TOKENS_MAX = 8  # of a session, whose clients are told how it ended
INLINE_BYTES_MAX = 1 << 20  # of observations that the loop compresses itself, in about a millisecond
COMPRESSED = object()  # the event of the end of a compression


class Attaching(NamedTuple):
    """A client that is to get a session: its request, who it is, and its budget of shared memory."""

    request: Incoming
    client: Holder
    budget: ArenaBudget

    @property
    def taker(self) -> str:
        """The administrator that takes a session over by its name; empty for who was given the session's token."""
        return self.client.actor if len(self.request.message.session) == NAME_BYTES else ""


@dataclass(frozen=True)
class Services:
    """Resources that all sessions of a hub have in common."""

    loop: Loop
    supervisor: Supervisor
    protocol: HubProtocol
    events: Events
    unread: UnreadMemory
    side_socket: SideSocket
    transferred: Callable[[int, Attaching], None]  # when the session of a number is about to be another client's
    forget: Callable[[bytes], None]  # when a token is of no session any more
    compression: BackgroundThread
    replays: ReplayWriter | None  # None where none are kept
    forked_imports: ForkedImports = field(default_factory=ForkedImports)
    slow: SlowRequests = field(default_factory=SlowRequests)


@dataclass
class Compression:
    """A reply whose observations a thread compresses; until it is sent, the session is told nothing."""

    send: Callable[[], None]
    following: list[Callable[[], None]] = field(default_factory=list)  # messages that are sent after it
    events: list[Any] = field(default_factory=list)  # that have come meanwhile
    error: Exception | None = None


def _compressors(asked: Make | Attach) -> LeafCompressors | None:
    return LeafCompressors(asked.compression, asked.compression_ns) if asked.compression else None


# Events of a step, and one in place of a ring: the words in the arena say whether all rows are done.
STEP_REQUESTED = SessionMachine.on_request, (Step(b""), True)  # the state machine does not look at the codes
ROWS_DONE = SessionMachine.on_rows_done, ()
LOST_ROWS_COMPLETED = object()


class SessionResources(Subject):
    """Resources of one session on this machine, and the rows in its arena."""

    def __init__(
        self, number: int, token: bytes, make: Make, recipe: Recipe, services: Services, owner: str, budget: ArenaBudget
    ) -> None:
        self.number, self.services = number, services  # its events carry its number, which never changes
        self.token, self.name = token, token[:NAME_BYTES].hex()  # a takeover changes the token, and not the name
        self.former_tokens: deque[bytes] = deque(maxlen=FORMER_TOKENS_MAX)  # of clients that it was taken over from
        self.life = Biography(services.loop.clock.now_s())
        self.state: SessionMachine  # refers to this; deleted with the session, so that all of it goes at once
        # The name of its client, empty for the hub's user, and the budget of that client's shared memory.
        self.owner, self.budget = owner, budget
        self.connections: set[int] = set()  # by which replies were sent under an earlier token, or before its end
        program_environment = None if recipe.settings.python else make.program_environment
        self.environ = None if program_environment is None else program_environment.environ
        self.interpreter: InterpreterKey = interpreter_of(recipe.settings.interpreter, program_environment)
        # By number; a number without a process hears nothing, for its slot's next process is told.
        self.workers: dict[int, WorkerHandle] = {}
        self.serving: dict[int, WorkerHandle] = {}  # those that serve, by slot, which are rung
        self.replays: ReplayKeeper | None = None  # what keeps its replays; None for nothing
        self.zygote: SessionZygote | None = None  # which forks its further workers
        self.snapshots: dict[int, SnapshotProcess] = {}  # by serial number
        self.snapshot_measured_s = -math.inf  # when the memory of one was read last
        self.imports_key = ""  # by which other sessions use it, too; empty if none may
        self.factories = -1  # the memory of pickled factories, which the session closes; -1 for none
        self.memory: SessionMemory | None = None  # its arena, once there is one
        self.lost_rows: LostWorkerRows | None = None  # completes rows in place of processes, once there is an arena
        self.lane = SharedLaneGrant(services.loop.poller)  # of the client that may drive
        self.side: socket.socket | None = None  # the socket of a client that has shown the ticket
        self.ticket = self.new_ticket()  # for the side socket, once; empty where there is none
        self.arrived = deque[Incoming]()  # requests that wait in the queue
        self.under_way: Incoming  # the last one that was handled; the first is MAKE
        self.attaching: Attaching | None = None  # the client that takes the session over, until it is answered
        self.waiting = deque[Incoming]()  # SENDs and RECEIVEs that wait for results, the oldest first
        self.part_rows = 0  # for how many of the rows of SENDs the oldest of them waits
        self.part_reported = False  # whether rows were taken for it, in an event that is not handled yet
        self._steps = 0  # that its rows had done when its memory was freed
        self.has_infos = False  # True if a row of the last move has something to say besides its arrays
        self.last_request_ns = 0  # when its last request arrived, answered or not
        self._compressors = _compressors(make)
        self.compressing: Compression | None = None  # the reply that a thread compresses; later messages follow it
        self._client_ringer = Ringer()
        self.done_bell = new_bell()  # by which the processes wake the hub
        # The bell is never read. By edges each ring is reported once, with a system call less.
        services.loop.poller.register(self.done_bell, self.on_ready, edges=True)

    def new_ticket(self) -> bytes:
        return secrets.token_bytes(TICKET_BYTES) if self.services.side_socket.open else b""

    def refuse_side(self) -> None:
        if self.side is not None:
            self.side.close()
            self.side = None

    def transfer(self) -> None:
        attaching = self.attaching
        assert attaching is not None
        if self.memory is not None:
            self.budget.use(-self.memory.nbytes)
            attaching.budget.use(self.memory.nbytes)
        self.services.transferred(self.number, attaching)
        self.former_tokens.append(self.token)
        self.life.taken_by = attaching.taker
        self.token, self.ticket = attaching.request.token, self.new_ticket()
        self.owner, self.budget = attaching.client.name, attaching.budget
        self._compressors = _compressors(attaching.request.message)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers.values() if worker.pid is not None]

    @property
    def arena_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    @property
    def steps(self) -> int:
        return self._steps if self.memory is None else self.memory.steps

    @property
    def observed_bytes(self) -> int:
        return 0 if self.memory is None else sum(leaf[0].nbytes for leaf in self.memory.arena.observations)

    def observe(self, described: bool) -> tuple[messages.Observed, list[np.ndarray]]:
        memory, made = self.memory, self.state.made
        assert memory is not None and made is not None
        steps, given, observations = memory.arena.last_observations()
        spaces = [] if described else made.observation_spaces
        return messages.Observed(self.state.make.num_envs, steps.tolist(), given.tolist(), spaces), observations

    @property
    def quiescent(self) -> bool:
        return self.memory is None or self.memory.arena.quiescent()

    @property
    def log(self) -> Logger:
        return log.bind(session=self.name)

    def abandon(self, ending: Ending, failure: Failure | None = None) -> None:
        """End the session at once, with this failure or one that says the reason to its client."""
        self.life.end(ending)
        self.report(SessionMachine.on_abandoned, failure or ending.failure(self.name))

    @property
    def ended(self) -> Ending:
        """The end of the session, which is over; without a reason from outside its machine ended it."""
        if self.life.ending is not None:
            return self.life.ending
        why = "a bug" if self.state.abandoned is None else self.state.abandoned.message
        return Ending("hub", why, NOT_MADE if self.state.made is None else KILLED)

    def report(self, method: Callable[..., None], *facts: Any) -> None:
        """Have the machine told by this method, with these facts, once it has handled all earlier events."""
        self.services.events.append((self.number, (method, facts)))

    def broke(self, error: Exception) -> None:
        """Report a bug of the hub, or what a client has written into its memory: no other session pays for it."""
        history = [*self.state.history]
        # Event: A bug in the hub: please report the line. A session that it concerns is ended.
        self.log.error("internal_error", once_per=("error",), error=repr(error), history=history, exc_info=error)
        why = Failure("internal", "session", f"a bug in the hub or a worker: {error!r}")
        self.abandon(Ending("hub", why.message, KILLED), why)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def on_ready(self, descriptor: int) -> None:
        """A bell has rung, or the client has left its side socket."""
        try:
            if descriptor == self.done_bell:
                self.on_bell()
            elif self.lane.has(descriptor):
                self.report(SessionMachine.on_side_closed, self.quiescent)
            elif self.memory is not None and self.lost_rows is not None and descriptor in self.memory.slot_bells:
                self.report_completed(self.lost_rows.posted(self.memory.slot_bells.index(descriptor)))
        except Exception as error:
            self.broke(error)

    def on_bell(self) -> None:
        """Report that rows are done if the words in the arena say so: a bell only wakes."""
        memory = self.memory
        if memory is None:
            return
        if self.part_rows:
            self.report_part()
        if self.state.phase is not Phase.MOVING or not memory.arena.quiescent():
            return
        self.has_infos = memory.arena.has_infos()
        if self.has_infos and memory.arena.sent_by_channel():
            self.read_workers()  # it was sent before the rows were done, so it has arrived
        self.services.events.append((self.number, ROWS_DONE))

    def report_part(self) -> None:
        assert self.memory is not None
        driver = self.memory.driver
        if self.part_reported or driver.done() < self.part_rows:
            return
        self.part_rows, self.part_reported = 0, True
        rows, raised = driver.ready()
        driver.taken(rows if raised is None else raised)
        small, large = driver.infos(rows)
        if large or raised is not None:
            self.read_workers()  # it was sent before the rows were done, so it has arrived
        done = tuple(rows.tolist()), tuple(small.items()), tuple(large), raised
        self.report(SessionMachine.on_part_done, *done)

    def read_workers(self) -> None:
        for worker in [*self.workers.values()]:
            worker.receive_all()

    def ring(self, workers: Iterable[WorkerHandle]) -> None:
        for worker in workers:
            try:  # costs nothing, which ``suppress`` would
                worker.ring()
            except BlockingIOError:
                pass  # it has not listened for thousands of rings

    def ring_client(self) -> None:
        assert self.memory is not None
        self._client_ringer.ring(self.memory.client_bell)

    def complete_posted_rows(self) -> None:
        """Complete the steps that were posted to slots without a process, as far as they are to be."""
        assert self.lost_rows is not None
        for slot in [*self.lost_rows.losses]:
            self.report_completed(self.lost_rows.posted(slot))

    def report_completed(self, reports: list[Event]) -> None:
        """Report what was done in place of a worker, and wake the driver if there are rows done."""
        for method, facts in reports:
            self.report(method, *facts)
        assert self.memory is not None and self.lost_rows is not None
        if not self.lost_rows.unrung:
            return
        self.lost_rows.unrung = False
        if self.state.driver is Driver.CLIENT:
            self.ring_client()
        else:
            # Not by the bell, which a worker may have filled.
            self.services.events.append((self.number, LOST_ROWS_COMPLETED))

    # --- replies and notices, as ``Effects`` describes them -----------------------------------------------------------

    def after_reply(self, act: Callable[..., None], *arguments: Any) -> None:
        """Do this at once or, while a reply is compressed, after it."""
        if self.compressing is None:
            act(*arguments)
        else:
            self.compressing.following.append(partial(act, *arguments))

    def send_compressed(self) -> None:
        """Send the reply that was compressed, and then the messages that wait for it."""
        reply, self.compressing = self.compressing, None
        assert reply is not None
        self.services.events.extendleft((self.number, each) for each in reversed(reply.events))
        if reply.error is not None:
            raise reply.error
        reply.send()
        for effect in reply.following:
            effect()

    def answer(self, message: Any, arrays: bool = False, rows: Sequence[Blob] = ()) -> None:
        request = self.under_way
        frames: list[Any] = []
        if self.memory is not None:
            if request.op is Op.CALL:
                blobs = self.memory.frames.results(request.message.rows, self.state.infos.large)
                frames, why = self.services.unread.results(blobs, request.message.separate_frames, self.budget)
                if why:
                    self.fail_request(request, Failure("limit", "hub", why))
                    return
            elif arrays and request.op is not Op.SET_ATTR:
                infos = self.state.infos.large if self.has_infos else None
                frames = self.memory.frames.batch(request.op is Op.STEP, infos, self.last_request_ns)
                if self._compressors is not None and self._compresses(request, message, frames, first=0):
                    return
            else:
                frames = row_frames(rows if request.op is not Op.COLLECT else self._collected(rows))
        self._send(request, message, frames)

    def keep_waiting(self) -> None:
        self.waiting.append(self.under_way)

    def answer_part(self, rows: Sequence[Blob] = (), part: tuple[int, ...] = ()) -> None:
        request, message, frames = self.waiting.popleft(), messages.Done(), Frames()
        if part and self.memory is not None:
            frames = self.memory.frames.rows(np.array(part, np.int64), rows)
            if self._compressors is not None and self._compresses(request, message, frames, first=1):
                return
        self.after_reply(self._send, request, message, frames)

    def fail_part(self, failure: Failure) -> None:
        self.after_reply(self.fail_request, self.waiting.popleft(), failure)

    def _collected(self, sent: Sequence[Blob]) -> Sequence[Blob]:
        """These infos that workers have sent, and the wanted ones that are in places which the client cannot read."""
        assert self.memory is not None
        arena, infos = self.memory.arena, dict(sent)
        for row in self.under_way.message.rows:
            if row < arena.layout.rows and arena.info_template[row]:
                infos[row] = bytes(arena.info(row) or b"")  # what was sent is of an earlier step
        return sorted(infos.items())

    def _compresses(self, request: Incoming, message: Any, frames: Frames, first: int) -> bool:
        """Compress the observations, which begin at the frame ``first``; whether a thread does it, and they are late.

        The session's rows are not written meanwhile: a reply of views is given to its client until the next request.
        """
        assert self.memory is not None and self._compressors is not None
        compressors, own = self._compressors, slice(first, first + len(self.memory.arena.layout.observations))
        if sum(memoryview(frame).nbytes for frame in frames[own]) > INLINE_BYTES_MAX:
            reply = Compression(partial(self._send, request, message, frames))

            def work() -> None:
                try:
                    frames[own] = compressors.compress(frames[own])
                except Exception as error:
                    reply.error = error

            with contextlib.suppress(RuntimeError):  # no thread is left
                self.services.compression.do(work, lambda: self.services.events.append((self.number, COMPRESSED)))
                self.compressing = reply
                return True
        frames[own] = compressors.compress(frames[own])
        return False

    def _send(self, request: Incoming, message: Any, frames: Frames) -> None:
        if frames and max(map(len, frames)) > FRAME_BYTES_MAX:
            text = f"infos or results of {max(map(len, frames))} bytes; a reply carries at most {FRAME_BYTES_MAX}"
            self.fail_request(request, Failure("limit", "hub", text))
            return
        if type(message) is messages.Made:
            message = replace(message, ticket=self.ticket)
            # Event: The envs of a session are made, or were taken over; `why` is the reason for the number of workers.
            self.log.info("session_ready", num_workers=message.num_workers, why=message.sizing)
        self.services.protocol.answer(request, message, frames)

    def fail(self, failure: Failure) -> None:
        self.fail_request(self.under_way, failure)

    def fail_request(self, request: Incoming, failure: Failure) -> None:
        """Answer this request with a failure, which is logged if it concerns the session or an env."""
        if failure.scope in ("env", "session"):
            # Event: A request failed; where an env raised, with the `env`, the class of the exception and its `replay`.
            self.log.warning("request_failed", once_per=("session", "code"), **logged(failure))
        self.services.protocol.fail(request, failure)

    def answer_attach(self) -> None:
        if self.compressing is not None:
            self.after_reply(self.answer_attach)
            return
        memory, attaching, made = self.memory, self.attaching, self.state.made
        assert memory is not None and attaching is not None and made is not None
        request = attaching.request
        self.under_way, self.attaching = request, None  # its request is the one under way
        memory.arena.restore()
        self._send(request, replace(made, steps=memory.arena.steps.tolist()), [])

    def fail_attach(self, failure: Failure) -> None:
        self.after_reply(self.refuse_attach, failure)

    def refuse_attach(self, failure: Failure) -> None:
        """Refuse the client that attaches, even while a reply is compressed."""
        attaching, self.attaching = self.attaching, None
        assert attaching is not None
        self.fail_request(attaching.request, failure)
        if self.token != attaching.request.token:
            self.services.forget(attaching.request.token)

    def goodbye(self, why: Failure) -> None:
        self.life.end(Ending(self.life.drained_by, why.message, CLOSED))
        self.after_reply(lambda: self.services.protocol.goodbye(self.token, why))

    def report_closing(self, slow: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        by_stack = dict[str, list[int]]()
        for process, rows in slow:  # envs that execute the same are told together
            stacks = self.workers[process].stacks if process in self.workers else ""
            by_stack.setdefault(stacks, []).extend(rows)
        text = slow_to_close(self.state.make, by_stack, self.state.launcher.rules.hide_folders)
        # Event: Envs are slow to close; `note` says which, and what they execute. Their client is told.
        self.notify("envs_closing", text)

    def notify(self, event: str, text: str) -> None:
        self.log.warning(event, note=text)
        self.after_reply(lambda: self.services.protocol.notice(self.token, text))
