"""A session's I/O: what it holds, the machine that decides about it, and the objects that report to it and obey it.

What is to be done is decided by the state machine. What comes of an instruction is put into the hub's queue of events
as another stimulus; so the state machine is never re-entered, and a session's events are handled in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub_server.hub.executor import EXECUTED, Executor
from envhub_server.hub.holdings import Attaching, Holdings
from envhub_server.hub.inputs import ROWS_STOOD_IN, Inputs
from envhub_server.hub.replies import COMPRESSED, REPLIES, Compression, Replies
from envhub_server.hub.session_observer import SessionObserver
from envhub_server.log import Logger
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.worker_events import WorkerExited, WorkerSaid, WorkerStarted
from envhub_server.session import instructions, stimuli
from envhub_server.session.instructions import Instruction
from envhub_server.session.stimuli import Requested, Stimulus

_OVERTAKEN = messages.Failure("session_lost", "session", "another client took the session over")
# From these on a client may see no more of what the rows have shown: its step failed, or it was interrupted.
_KEEPING = (stimuli.RowsDone, Requested)


class SessionRuntime:
    """One session with everything it holds.

    Attributes:
        number: the session's, which never changes; its events carry it.
        origin: from where its client made it or took it over, as in the audit.
        state: its state machine.
        heard_ns: when its last request arrived, whatever came of it.
        deadline_s: when the hub calls ``inputs.elapse``.
        inputs: what the machine is told.
        replies: what the client is told.
    """

    def __init__(self, held: Holdings) -> None:
        """Run the state machine of what is ``held``, which has handled nothing yet."""
        self.number = held.number
        self.state = held.state
        self.heard_ns = 0
        self.deadline_s = math.inf
        self._held = held
        self.inputs = Inputs(held)
        self.replies = Replies(held)
        self._executor = Executor(held, self.inputs)

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def token(self) -> bytes:
        """Its token, another one after each takeover."""
        return self._held.token

    @property
    def owner(self) -> str:
        """The name of the client that it belongs to, see ``network.rights``; empty for the hub's user."""
        return self._held.owner

    @property
    def ticket(self) -> bytes:
        """The ticket for the side socket, once; empty where there is none."""
        return self._held.ticket

    @property
    def connections(self) -> set[int]:
        """The connections by which replies were sent under an earlier token, or were before the session ended."""
        return self._held.connections

    @property
    def interpreter(self) -> InterpreterKey:
        """The interpreter of its workers."""
        return self._held.interpreter

    @property
    def log(self) -> Logger:
        """The log, with the session's name."""
        return self._held.log

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return self._held.pool.pids

    @property
    def arena_bytes(self) -> int:
        """Amount of shared memory the session holds."""
        return 0 if self._held.memory is None else self._held.memory.nbytes

    @property
    def steps(self) -> int:
        """Number of steps and resets of its envs."""
        return self._held.steps if self._held.memory is None else self._held.memory.steps

    @property
    def quiescent(self) -> bool:
        """True if every row is done."""
        return self._held.quiescent

    @property
    def observed_bytes(self) -> int:
        """The size of what ``observe`` copies."""
        memory = self._held.memory
        return 0 if memory is None else sum(leaf[0].nbytes for leaf in memory.arena.observations)

    def observe(self, described: bool) -> tuple[messages.Observed, list[np.ndarray]]:
        """Last observations of its envs, once they are made."""
        memory, made = self._held.memory, self.state.made
        assert memory is not None and made is not None
        steps, given, observations = memory.arena.last_observations()
        spaces = [] if described else made.observation_spaces
        return messages.Observed(self.state.make.num_envs, steps.tolist(), given.tolist(), spaces), observations

    def observe_by(self, observer: SessionObserver | None) -> None:
        """Have an observer, if there is one, learn of what happens from now on; of several the first learns first."""
        if observer is not None:
            self._held.observers = (*self._held.observers, observer)

    # --- what becomes a stimulus --------------------------------------------------------------------------------------

    def start(self, request: Incoming) -> None:
        """Report that the session was made, by this request, which is answered once its envs exist."""
        self._held.under_way = request
        self._held.report(stimuli.SessionMade())

    def attach(self, attaching: Attaching) -> None:
        """Report that another client is to get the session; one that waits for it already gets it no more."""
        held, waits = self._held, self._held.attaching is not None
        if waits:
            self.replies.fail_attach(instructions.FailAttach(_OVERTAKEN))
        held.attaching = attaching
        # While a reply is compressed, the event of an earlier request still waits; it is answered in this one's place.
        if not (waits and self.replies.compressing is not None):
            held.report(stimuli.Attached(held.quiescent))

    def give_up_attach(self) -> None:
        """Report that the client that is to get the session is gone."""
        self._held.report(stimuli.AttachGivenUp())

    def broke(self, error: Exception) -> None:
        """Report a bug of the hub, or what a client has written into its memory: no other session pays for it."""
        self._held.broke(error)

    # --- handling -----------------------------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus | WorkerStarted) -> None:
        """Have the state machine handle the stimulus, and carry out what it says."""
        held = self._held
        if self.replies.compressing is not None:
            self._while_compressing(self.replies.compressing, stimulus)
            return
        if stimulus is ROWS_STOOD_IN:
            self.inputs.on_bell()
            return
        if isinstance(stimulus, Requested):
            held.under_way = request = held.arrived
            heir = held.attaching and held.attaching.request.token
            if heir and request is not None and request.token == heir != held.token:
                held.transfer()  # for a CLOSE of the client that attaches, which does not wait for its answer
        elif isinstance(stimulus, WorkerStarted):
            # Event: A worker process runs.
            held.log.info("worker_started", worker=self.state.slots.worker(stimulus.process), pid=stimulus.pid)
            return
        elif isinstance(stimulus, WorkerExited):
            self._on_exited(stimulus)
            return
        elif isinstance(stimulus, WorkerSaid):
            stimulus = self.inputs.hear(stimulus)
        stand_ins = held.stand_ins
        if stand_ins is not None and stand_ins.copies is not None and isinstance(stimulus, _KEEPING):
            stand_ins.keep_objects()
        self._carry_out(self.state.handle(stimulus, held.services.clock.now_s()))

    def _on_exited(self, exited: WorkerExited) -> None:
        held, state, number = self._held, self.state, exited.process
        held.pool.remove(number)
        expected, reason = state.expects_end(number), state.supervision.reason(number)
        tell = held.log.info if expected else held.log.warning
        why = {"why": reason} if reason else {}
        tell("worker_exited", worker=state.slots.worker(number), how=exited.cause.how, **why)
        self._carry_out(state.handle(exited, held.services.clock.now_s()))
        for observer in held.observers:
            observer.process_ended(number, "" if expected else f"its worker {exited.cause.how}")

    def _carry_out(self, wanted: Sequence[Instruction]) -> None:
        for number, instruction in enumerate(wanted):
            kind = type(instruction)
            if kind in REPLIES:
                REPLIES[kind](self.replies, instruction)
            else:
                EXECUTED[kind](self._executor, instruction)
            if self.replies.compressing is not None:
                self.replies.compressing.following = wanted[number + 1 :]
                return

    def _while_compressing(self, reply: Compression, stimulus: Stimulus | WorkerStarted) -> None:
        """Keep the stimulus until the reply is sent; or send it, and go on as if that had taken no time."""
        if stimulus is not COMPRESSED:
            reply.stimuli.append(stimulus)
            return
        self.replies.compressing = None
        self._held.services.events.extendleft((self.number, each) for each in reversed(reply.stimuli))
        if reply.error is not None:
            raise reply.error
        self.replies.send_answer(reply.request, reply.answer, reply.frames)
        self._carry_out(reply.following)

    def discard(self) -> None:
        """Free everything, though the state machine cannot say so any more."""
        self._held.pool.kill_all()
        self.state.discard()
        self._executor.end(instructions.End())
