"""A session in the program's own process, whose envs run in the calling thread: for debuggers and profilers.

The session's state machine, memory and worker are those of a hub. The worker has no process: it executes
messages at once, and its messages go into the queue of events as in a hub.

Ctrl-C interrupts an env. Anywhere else it is held back until the request is executed, because work that a hub does in
other processes must not be interrupted halfway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import envhub
from envhub.protocol import prelude
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure, HeartbeatReply, Op, Welcome
from envhub.protocol.prelude import FRAME_BYTES_MAX, Frames
from envhub.values import codec
from envhub_server import log
from envhub_server.catalog.env_facts import EnvFactsTable
from envhub_server.catalog.registry import of_program
from envhub_server.hub.holdings import Holdings, Services
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel
from envhub_server.ipc.factories_memory import held
from envhub_server.loop.clock import Clock
from envhub_server.loop.poller import Poller
from envhub_server.memory.session_memory import INFO_BYTES, ArenaBudget, new_bell
from envhub_server.memory.unread_memory import UnreadMemory
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.worker_events import Events, WorkerExited, WorkerSaid
from envhub_server.session.machine import SessionMachine
from envhub_server.session.phases import Phase
from envhub_server.session.restarts import Restarts
from envhub_server.session.worker_count import Machine, WorkerCount
from envhub_server.worker.bells import WorkerPoller
from envhub_server.worker.host import Host
from envhub_server.worker.process import Worker

PEER, CONNECTION = b"program", 1  # the one client
ARENA_BYTES_MAX = 1 << 50
SIZING = WorkerCount(1, "in the program's own process, by num_workers=0", chosen=True)


class _Interrupts:
    """Holds SIGINT back in the program's main thread, if it has a handler of Python's there."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = (
            None  # the program's handler, while SIGINT is held back
        )
        self._came = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the context it is held back; afterwards the program's handler is called, if one came."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            handler, self._handler = self._handler, None  # an env may have set another
            signal.signal(signal.SIGINT, handler)
            self._tell(handler)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Within the context, in which an env runs, it is not held back."""
        if self._handler is None or signal.getsignal(signal.SIGINT) != self._note:  # as within such a context
            yield
            return
        signal.signal(signal.SIGINT, self._handler)
        try:
            self._tell(self._handler)
            yield
        finally:
            previous = signal.signal(signal.SIGINT, self._note)
            self._handler = previous if callable(previous) else signal.default_int_handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def _tell(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        if self._came:
            self._came = False
            handler(signal.SIGINT, sys._getframe())


class InProcessHub:
    """A hub of one session and one client, without a process, a socket or a thread.

    Attributes:
        protocol: the hub's half of the protocol, whose ``outgoing`` the caller takes.
    """

    def __init__(self) -> None:
        if not log.configured_by_program():
            log.configure(logging.ERROR)  # the terminal is the program's
        self.protocol = HubProtocol(secrets.randbits(63) or 1, header_limits=codec.KNOWN)
        self._events: Events = deque()
        self._clock = Clock()
        self._runtime: SessionRuntime | None = None
        self._interrupts = _Interrupts()
        self._services = Services(
            poller=cast("Poller", _Unpolled()),
            supervisor=_InProcessWorkers(self._events, self._interrupts),
            protocol=self.protocol,
            clock=self._clock,
            events=self._events,
            env_facts=EnvFactsTable(),
            unread=UnreadMemory(FRAME_BYTES_MAX),
            transferred=lambda number, attaching: None,
            forget=lambda token: None,
        )

    def receive(self, frames: Frames) -> None:
        """Execute the request in a message; afterwards its reply is in ``outgoing``.

        Ctrl-C within an env is an exception of the env. At any other time it comes after the request.
        """
        with self._interrupts.held():
            self._receive(frames)

    def _receive(self, frames: Frames) -> None:
        self._run()
        request = self.protocol.receive(PEER, CONNECTION, frames)
        if request is None:
            return
        if request.op is Op.HELLO:
            self.protocol.answer(request, Welcome(envhub.__version__, str(prelude.VERSION), True, {}, pid=os.getpid()))
        elif request.op is Op.HEARTBEAT:
            self.protocol.answer(request, HeartbeatReply("running"))
        elif request.op is Op.MAKE and self._runtime is None:
            self._runtime = self._made(request)
            self._runtime.start(request._replace(message=self._runtime.state.make))
        elif self._runtime is not None:
            if self._runtime.state.next_deadline_s() <= self._clock.now_s():
                self._runtime.inputs.elapse()
                self._handle_events()
            self._runtime.inputs.request(request)
        else:
            text = f"a hub in the program's own process does not carry out {request.op.name}"
            self.protocol.fail(request, Failure("refused", "request", text))
        self._run()

    def _made(self, request: Incoming) -> SessionRuntime:
        make, factories = held(request.message)
        recipe = of_program(make)
        cpus = _cpus()
        machine = Machine(cpus, len(cpus), False, 1, 0)
        restarts = Restarts(make.faults.restarts_max, make.num_envs, random.Random())
        state = SessionMachine(make, recipe, SIZING, INFO_BYTES, machine, restarts)
        budget = ArenaBudget(ARENA_BYTES_MAX)
        return SessionRuntime(Holdings(1, request.token, state, self._services, False, "", budget, factories))

    def _run(self) -> None:
        """Handle events until the pending request is answered."""
        self._handle_events()
        while self._runtime is not None and self._runtime.state.requests.asked:
            left_s = self._runtime.state.next_deadline_s() - self._clock.now_s()
            with self._interrupts.let_through():  # the request goes on when the next message is received
                time.sleep(max(0.0, left_s))  # a worker that crashed is started again then
            self._runtime.inputs.elapse()
            self._handle_events()

    def _handle_events(self) -> None:
        while self._runtime is not None:
            while self._events:
                _, event = self._events.popleft()
                self._runtime.handle(event)
            if self._runtime.state.phase is Phase.ENDED:
                self.protocol.forget(self._runtime.token)
                self._runtime = None
                return
            self._runtime.inputs.on_bell()  # the worker has rung, or has not: the words in the arena say so
            if not self._events:
                return

    def close(self) -> None:
        """Free the resources of a session that was not closed."""
        if self._runtime is not None:
            self._runtime.discard()
            self._runtime = None


def _cpus() -> tuple[int, ...]:
    """The CPUs of this process."""
    if sys.platform != "linux":
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


class _Crashed(Exception):
    """The worker must end as if its process had crashed."""


class _Unpolled:
    """A poller that nothing waits for: all in this process looks for itself."""

    def register(self, descriptor: int, source: object = None, edges: bool = False) -> None:
        """Do nothing."""

    def unregister(self, descriptor: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _ProgramHost(Host):
    """The program's own process, in whose thread the worker runs."""

    never_truncated = (*Host.never_truncated, KeyboardInterrupt)  # which is the program's
    calls_directly = False

    def __init__(self, interrupts: _Interrupts) -> None:
        super().__init__()
        self._interrupts = interrupts

    def call(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Call code of an env, which Ctrl-C interrupts."""
        with self._interrupts.let_through():
            return run(*arguments)

    def new_poller(self) -> WorkerPoller:
        """A poller that nothing waits for."""
        return cast("WorkerPoller", _Unpolled())

    def pin(self, cpu: int | None) -> None:
        """Leave the program on the CPUs that it has."""

    def reseed(self, numbers: Sequence[int], *place: int, unless_seeded: bool = False) -> None:
        """Leave the program's generators as they are."""

    def crash(self) -> None:
        """End, so that the session starts another one."""
        raise _Crashed


class _EventChannel:
    """The worker's end of a channel whose messages are events at once."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        self.send = report
        self.sent_bytes_max = 0  # nothing is encoded
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """The number of no descriptor: nothing comes by one."""
        return -1

    def give_descriptors(self, descriptors: Collection[int]) -> None:
        """Have the worker take copies of these."""
        self._descriptors = [os.dup(each) for each in descriptors]

    def take_descriptors(self, count: int) -> list[int]:
        """The descriptors that came with the message; the caller owns them."""
        taken, self._descriptors = self._descriptors, []
        assert len(taken) == count
        return taken

    def close(self) -> None:
        """Free the descriptors."""
        for descriptor in self._descriptors:
            os.close(descriptor)


class _WorkerInThread:
    """Worker as a session sees it: it gets messages and rings, and executes at once."""

    pid = None
    log_tail = ""

    def __init__(self, session: int, number: int, events: Events, interrupts: _Interrupts) -> None:
        self._session, self._number, self._events = session, number, events
        self.label: dict[str, Any] = {}  # of what it prints, which is the program's own output
        self._channel = _EventChannel(lambda message: self._report(WorkerSaid(number, message)))
        self._worker = Worker(cast("Channel", self._channel), _ProgramHost(interrupts))
        self._bell = new_bell()  # for the arena's descriptors: ``ring`` needs none
        self._ended = False

    def _report(self, event: WorkerSaid | WorkerExited) -> None:
        self._events.append((self._session, event))

    @contextlib.contextmanager
    def _executing(self) -> Iterator[None]:
        try:
            yield
        except _Crashed:
            self._end("cannot build an env again")
        except Exception as error:  # a defect, which the program is told; what is waited for would never come
            if not self._ended:
                self._end(f"failed: {error!r}")
            raise

    def _end(self, how: str) -> None:
        self._ended = True
        self._worker.close()
        del self._worker  # and with it the arena's memory
        self._channel.close()
        os.close(self._bell)
        self._report(WorkerExited(self._number, ExitCause(how)))

    def send(self, message: Any, *descriptors: int) -> None:
        """Have the worker execute a message of the hub, with copies of these descriptors."""
        if descriptors and not self._ended:
            self._channel.give_descriptors(descriptors)
        with self._executing():
            if not self._ended and not self._worker.handle(message):
                self._end("has ended")

    def map_arena(self, message: control.MapArena, descriptors: control.ArenaDescriptors) -> None:
        """Have the worker map an arena."""
        self.send(message, *descriptors._replace(hub_bell=self._bell).sent)

    def ring(self) -> None:
        """Have the worker step the rows that are posted."""
        with self._executing():
            if not self._ended:
                self._worker.serve_rows()

    def receive_all(self) -> None:
        """Do nothing: all messages are events already."""

    def dump_stacks(self) -> None:
        """Do nothing: the program's own stack is where the env is."""

    def kill(self) -> None:
        """End the worker without closing its envs."""
        if not self._ended:
            self._end("was ended")


class _InProcessWorkers:
    """Starts workers in this thread, in place of a hub's supervisor."""

    def __init__(self, events: Events, interrupts: _Interrupts) -> None:
        self._events, self._interrupts = events, interrupts

    def start(
        self,
        session: int,
        numbers: Collection[int],
        key: InterpreterKey,
        environ: Mapping[str, str] | None,
        libraries: Sequence[str],
    ) -> list[_WorkerInThread]:
        """The workers of these numbers."""
        return [_WorkerInThread(session, number, self._events, self._interrupts) for number in numbers]

    def orphans(self) -> Mapping[int, Sequence[int]]:
        """An empty map: processes that the envs start belong to the program."""
        return {}
