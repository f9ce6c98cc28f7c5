"""The hub: one loop that polls sockets, workers and doorbells, and lets the protocol and the sessions decide.

::

    ROUTER ──frames──▶ HubProtocol ──request──▶ SessionRuntime/SessionState ──instructions──▶ arena, doorbells, channels
       ▲                    │                        ▲
       └───────frames───────┘                        └── doorbells, channels, pidfds of the workers

Nothing here blocks but the poll itself, so sessions never wait for each other's envs.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

import envhub
from envhub.arena.spin import Spinner, spin_us
from envhub.protocol import messages, prelude
from envhub.protocol.hub import FIRST_OPS, HubProtocol, Incoming
from envhub.protocol.messages import SESSION_OPS, Failure, Make, Op
from envhub.protocol.prelude import Prelude
from envhub.transport import sockets
from envhub.values import codec, compression
from envhub_server.catalog.admission import admitted
from envhub_server.catalog.listing import Listing
from envhub_server.catalog.registry import FactoryNotFound, Registry
from envhub_server.catalog.step_cost_file import StepCostFile
from envhub_server.catalog.step_costs import StepCost, key
from envhub_server.config import HubConfig, has_quota, memory_available_bytes, processes_left, usable_cpus
from envhub_server.hub import stats
from envhub_server.hub.outcomes import Outcomes
from envhub_server.hub.runtime import ASIDE, SessionRuntime
from envhub_server.loop import signals
from envhub_server.loop.clock import LAG_MIN_S, Clock
from envhub_server.loop.poller import Poller, Ready
from envhub_server.network import descriptor_guard
from envhub_server.network.client_liveness import ClientLiveness
from envhub_server.network.descriptor_guard import DescriptorGuard
from envhub_server.network.listener import Listener, seed_routing_ids
from envhub_server.network.side_socket import TICKET_BYTES, SideSocket
from envhub_server.processes.supervisor import Supervisor
from envhub_server.session.restarts import RestartPolicy, Restarts
from envhub_server.session.state import SessionState
from envhub_server.session.worker_count import SHARE, Machine, WorkerCount, known, told

RECEIVE_QUEUE_MESSAGES_MAX = 16  # of one client, which sends a request at a time
LINGER_MS = 2000
DISCARDED_FRAMES_MAX = 1000  # in one turn, some milliseconds, so that workers and deadlines do not wait
STEP_FRAME_BYTES_MAX = 1024  # of a first frame that may be the one that a session waits for
LOOK_S = 0.1  # how often sessions are looked after while there are any

_POLLIN = int(zmq.POLLIN)  # a plain number, as in ``envhub.transport.sockets``
_BUFFER = attrgetter("buffer")
_HUB_OPS = (frozenset(Op) - SESSION_OPS) | FIRST_OPS

log = structlog.get_logger("envhub.hub")


class Hub:
    """One hub: ``run`` it, within ``opened``, until it is told to stop."""

    def __init__(self, config: HubConfig) -> None:
        self.config = config
        self.id = secrets.randbits(64) or 1
        self.addresses: list[str] = []
        self._registry = Registry(config.envs)
        headers = codec.KNOWN if config.private else codec.STRANGERS
        self._protocol = HubProtocol(self.id, config.timing.lease_s, config.limits.sessions_max, self._running, headers)
        self._presence = ClientLiveness(self._protocol, self._reaches, config.timing.lease_s)
        self._hosts: dict[bytes, SessionRuntime] = {}
        self._step_cost_file = StepCostFile(config.step_costs)
        self._step_costs = self._step_cost_file.read()
        self._unwritten: dict[str, StepCost] = {}  # what is known since the file was written last
        self._clock = Clock()
        self._wake_s = math.inf  # when something happens by the passing of time alone
        self._handled_s = 0.0  # when the last turn had handled what it found
        self._poller = Poller()
        self._ready: Ready = []  # what was found by looking
        hub_spin_us = spin_us(2, usable_cpus(), has_quota())
        self._workers_spinner, self._client_spinner = (
            Spinner(hub_spin_us, time.perf_counter_ns) if hub_spin_us else None for _ in range(2)
        )
        self._spinner: Spinner | None = None  # the one for what comes next: a step's end, or the next step
        self._next_spinner: Spinner | None = None  # the one for what comes after the step's end
        self._supervisor = Supervisor(self._poller, config.python)
        self._lister = Listing(self._supervisor, self._registry, self._refuse_entry)
        self._refused: FactoryNotFound | None = None
        self._outcomes = Outcomes(
            self._answer,
            self._fail,
            self._worker_started,
            self._worker_exited,
            self._ended,
            self._broke,
            self._learned,
            self._notify,
            self._memory_left,
            self._clock.now_s,
        )
        self._started_s = time.monotonic()
        self._stops = 0
        self._stop_by_s = 0.0
        self._end_by_s = math.inf  # when, once it is told to stop, no env gets more time to close
        self._requests = 0
        self._discarding = False  # whether what comes next is the rest of a message that has too many frames
        self._binding: Listener | None = None
        self._side_door = SideSocket(self._poller, self._admit)
        self._closing: set[bytes] = set()  # sessions whose time for closing runs

    # --- opening and closing ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Bind every address and heed signals: SIGTERM, SIGINT and SIGHUP stop the hub. Afterwards nothing is left.

        Raises:
            AddressError: an address is malformed, in use, or open to other machines without ``insecure``.
        """
        with contextlib.closing(self._poller), signals.watched(self._poller, self.stop, self._supervisor.reap_orphans):
            try:
                self._open()
                yield
            finally:
                self._close()

    def _open(self) -> None:
        self._context = zmq.Context()
        sockets.begin_zero_copy(self._context)
        limit = self.config.limits.message_bytes_max
        seed_routing_ids()
        self._router = router = sockets.open_socket(self._context, zmq.ROUTER, limit, RECEIVE_QUEUE_MESSAGES_MAX)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, LINGER_MS)
        # No heartbeats of its own: libzmq (4.3.5) aborts at one of a connection that ended while its queue was full.
        # Those of the clients say for how long they may be silent; the kernel asks after a client that sends none.
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self._monitor = sockets.open_monitor(router, zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._binding = Listener(router, self.config.insecure)
        self._gate = DescriptorGuard(self._binding)
        self.addresses = [self._binding.bind(address) for address in self.config.binds]
        for address in self.addresses:
            self._side_door.listen(address)
        self._router_poll = [(router, _POLLIN)]
        self._router_descriptor, self._monitor_descriptor = router.FD, self._monitor.FD
        for descriptor in (self._router_descriptor, self._monitor_descriptor):
            self._poller.wake_on(descriptor)
        self._on_monitor()  # libzmq signals only what comes after the socket was found to be empty
        if self.config.owner is not None:
            self._poller.register(self.config.owner, self._on_owner_gone)
        else:
            self._lister.start()  # also so that the first client finds a zygote; a program's has a world of its own

    def _close(self) -> None:
        for host in list(self._hosts.values()):
            host.abandon(_STOPPING, terminate=True)
        self._supervisor.close()
        self._side_door.close()
        if self._binding is not None:
            self._router.monitor(None, 0)
            self._monitor.close()
            self._router.close()
            self._gate.close()
            self._binding.close()
            self._context.term()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop, then drain and return.

        Raises:
            FactoryNotFound: it was told to offer a factory that does not exist.
        """
        self._handled_s = self._clock.now_s()
        while not (self._stops and not self._hosts):
            self._turn()
        self._flush()
        if self._refused is not None:
            raise self._refused

    def _turn(self) -> None:
        # Asked before each wait: a send, too, may take in what libzmq has signalled by the socket's descriptor.
        # ``getsockopt(zmq.EVENTS)`` would take twice the time to say it: pyzmq makes an enum of the option.
        if zmq.zmq_poll(self._router_poll, 0):
            arrived, ready = True, self._poller.wait(0)
        elif self._spinner is not None and self._spinner.spin(self._look):
            arrived, ready = False, self._ready
        else:
            wait_s = None if self._wake_s == math.inf else max(0.0, self._wake_s - self._handled_s)
            arrived, ready = False, self._poller.wait(wait_s)
        # The time is the clock's ``now_s``, written out: a turn is what every step waits for.
        began_s, others = time.monotonic() - self._clock.stopped_s, False
        if began_s >= self._wake_s:  # before anything is handled: what that sets a deadline for is to have all of it
            began_s = self._on_wake()
        for descriptor, _ in ready:
            if descriptor == self._monitor_descriptor:  # first of all: connections may come faster than turns
                self._on_monitor()
            elif descriptor == self._router_descriptor:
                arrived = True
            else:
                others = True
        if others:  # before a request can end what is ready, and begin something else by the same number
            self._poller.handle(ready)
        if arrived:
            self._on_router()
        self._handled_s = handled_s = time.monotonic() - self._clock.stopped_s
        if handled_s - began_s >= LAG_MIN_S:
            self._clock.note(handled_s, handled_s - began_s)
        if self._wake_s <= handled_s:
            self._on_clock()

    def _on_wake(self) -> float:
        """See for how long the process was stopped; returns the time."""
        if stopped_s := self._clock.woke(self._wake_s):
            log.warning("hub_was_stopped", stopped_s=round(stopped_s, 1), note="no deadline runs meanwhile")
        return self._clock.now_s()

    def _look(self) -> bool:
        self._ready = self._poller.wait(0)
        return bool(self._ready)

    def _wake_by(self, at_s: float) -> None:
        """See what has come by the passing of time at this time, at the latest."""
        self._wake_s = min(self._wake_s, at_s)

    def _on_clock(self) -> None:
        now_s = self._on_wake()  # it may have been stopped since the turn began
        self._wake_s = math.inf
        self._on_time(now_s)
        times = [self._hosts[token].close_by_s for token in self._closing]
        times += [self._presence.next_s, self._gate.look_s]
        times += [self._stop_by_s if self._stops else None, self._protocol.next_expiry_s()]
        times += [now_s + LOOK_S if self._hosts else None]
        self._wake_by(min((at_s for at_s in times if at_s is not None), default=math.inf))
        self._handled_s = self._clock.now_s()

    def _on_time(self, now_s: float) -> None:
        self._gate.look(now_s)
        self._presence.look(now_s, {token: host.session.make.beat_s for token, host in self._hosts.items()})
        for host in list(self._hosts.values()):
            host.tick(now_s)
        for token in self._protocol.expired(now_s):
            log.info("session_expired", session=token.hex()[:8], lease_s=self.config.timing.lease_s)
            self._protocol.forget(token)
            if token in self._hosts:
                host = self._hosts[token]
                # An env that hangs does not close, either.
                self._abandon(host, Failure("session_lost", "session", "its lease ran out"), terminate=not host.idle)
        for token in list(self._closing):
            host = self._hosts[token]
            if host.close_by_s is not None and host.close_by_s <= now_s:
                close_s = host.session.make.faults.close_s
                log.warning("session_killed", session=token.hex()[:8], close_s=close_s)
                self._closing.discard(token)
                late = f"its envs did not close within close_timeout={close_s:g} s and were killed"
                host.abandon(Failure("session_lost", "session", late), terminate=True)
        if self._stops:
            self._drain(now_s)

    # --- stopping ---------------------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Begin to drain: running requests end and are answered, then envs are closed; asked twice, kill at once."""
        self._stops += 1
        self._protocol.draining = True
        timing, now_s = self.config.timing, self._clock.now_s()
        self._wake_by(now_s)
        for host in self._hosts.values():
            host.wind_up()
        self._stop_by_s = now_s + (timing.drain_s if self._stops == 1 else 0.0)
        self._end_by_s = min(self._end_by_s, now_s + timing.drain_s + timing.close_after_drain_s)
        log.info("stopping", why=why, sessions=len(self._hosts))

    def _refuse_entry(self, error: FactoryNotFound) -> None:
        if not self._stops:
            self._refused = error
            self.stop(str(error))

    def _drain(self, now_s: float) -> None:
        late = now_s >= self._stop_by_s
        for host in list(self._hosts.values()):
            if late and self._stops > 1:
                host.abandon(_STOPPING, terminate=True)
            elif host.close_by_s is None and (late or host.idle):
                # An env that did not finish its step in time does not close in time, either.
                self._abandon(host, _STOPPING, terminate=not host.idle)
        if late:
            self._stop_by_s = now_s + 1.0

    def _on_owner_gone(self) -> None:
        assert self.config.owner is not None
        self._poller.unregister(self.config.owner)
        self._stops = 1  # nobody is left to answer, so there is nothing to drain
        self.stop("its program ended")

    def _set_deadline(self, host: SessionRuntime) -> None:
        host.close_by_s = min(self._clock.now_s() + host.session.make.faults.close_s, self._end_by_s)
        self._closing.add(host.token)

    def _abandon(self, host: SessionRuntime, why: Failure, terminate: bool = False) -> None:
        self._set_deadline(host)
        host.abandon(why, terminate)
        self._protocol.goodbye(host.token, why)
        self._flush()

    # --- sockets ----------------------------------------------------------------------------------------------------

    def _on_router(self) -> None:
        heard_ns = time.monotonic_ns()
        if self._discarding:
            with contextlib.suppress(zmq.Again):
                self._discarding = not sockets.discard(self._router, DISCARDED_FRAMES_MAX)
            return
        try:
            peer = sockets.receive_peer(self._router)
        except zmq.Again:  # what was signalled was no message
            return
        frames = sockets.receive(self._router, prelude.FRAMES_MAX)
        if frames[-1].more:
            self._refuse_frames(frames)
            return
        first, *others = map(_BUFFER, frames)
        incoming = None
        if len(first) <= STEP_FRAME_BYTES_MAX:
            incoming = self._protocol.receive_step(peer, bytes(first), others)
        if incoming is None:
            incoming = self._receive(peer, sockets.connection_of(frames), [first, *others])
        if incoming is not None:
            self._requests += 1
            try:
                self._dispatch(incoming, heard_ns)
            except Exception as error:
                self._on_bug(incoming, error)
        if self._protocol.outgoing:
            self._flush()

    def _receive(self, peer: bytes, connection: int, frames: Sequence[Any]) -> Incoming | None:
        incoming = self._protocol.receive(peer, connection, [*frames])
        for token in self._protocol.returned:
            log.info("client_back", session=token.hex()[:8])
        self._protocol.returned.clear()
        return incoming

    def _refuse_frames(self, frames: Sequence[zmq.Frame]) -> None:
        """End the connection that sends more frames than a message may have; those that libzmq has are thrown away."""
        log.warning("frames_too_many", frames_max=prelude.FRAMES_MAX, note="its connection is ended")
        self._discarding = True
        self._protocol.malformed += 1
        self._gate.end(sockets.connection_of(frames))

    def _on_monitor(self) -> None:
        now_s = self._clock.now_s()
        while self._monitor.poll(0):
            found = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            match found["event"]:
                case zmq.Event.LISTENING:
                    self._gate.listens(found["value"])
                case zmq.Event.ACCEPTED:
                    self._gate.accepted(found["value"], now_s)
                case _:
                    self._presence.ended(found["value"], now_s)
        self._wake_by(min(self._presence.next_s, self._gate.look_s))

    def _reaches(self, peer: bytes) -> bool:
        try:
            push = Prelude(Op.PING, self.id, prelude.NO_SESSION, 0).pack()
            sockets.send(self._router, [peer, push])
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def _flush(self) -> None:
        outgoing = self._protocol.outgoing
        for peer, frames in outgoing:
            try:
                sockets.send(self._router, [peer, *frames])
            except zmq.ZMQError as error:
                # The peer is gone or does not read. Its reply is kept, and sent when it asks after it.
                for token in self._protocol.sessions_of(peer):
                    self._presence.suspect(token, peer, self._clock.now_s())
                self._wake_by(self._presence.next_s)
                log.debug("reply_parked", error=str(error))
        outgoing.clear()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _on_bug(self, request: Incoming, error: Exception) -> None:
        """A request has found a bug of the hub: its session pays for it and no other."""
        if request.token in self._hosts:  # nobody knows in what state it is
            self._broke(self._hosts[request.token], error)
            return
        log.exception("internal_error", op=request.op.name)
        self._protocol.forget(request.token)  # of a session that was never made
        self._fail(request, Failure("internal", "hub", f"a bug in the hub, which logged it: {error!r}"))

    def _dispatch(self, request: Incoming, heard_ns: int) -> None:
        """Carry out a request, which arrived at ``heard_ns``."""
        host = self._hosts.get(request.token)
        if host is None or request.op in _HUB_OPS:
            self._on_request(request)
            return
        host.heard_ns = heard_ns
        if request.op == Op.STEP:
            self._spinner = self._workers_spinner if host.session.spin_us else None
            # Between two steps the workers need no CPU, however many they are.
            self._next_spinner = None if host.session.make.spin_us == 0 else self._client_spinner
        if isinstance(request.message, messages.Close):
            self._set_deadline(host)
        elif self._stops and not isinstance(request.message, (messages.Receive, *ASIDE)):
            self._fail(request, _STOPPING)
            return
        host.request(request)

    def _on_request(self, request: Incoming) -> None:
        """Carry out a request to the hub itself, or one that makes a session or takes one over."""
        match request.op:
            case Op.MAKE:
                self._make(request)
            case Op.HELLO:
                self._answer(request, self._welcome(), ())
            case Op.LIST:
                self._list(request)
            case Op.STATS:
                counters = stats.stats(self._hosts.values(), self._protocol, self._requests)
                self._answer(request, messages.Table([{**self._health(), **counters}]), ())
            case Op.HEALTH:
                self._answer(request, messages.Table([self._health()]), ())
            case Op.SESSIONS:
                found = [stats.described(host, self._protocol.leased(token)) for token, host in self._hosts.items()]
                self._answer(request, messages.Table(found), ())
            case Op.OBSERVE:
                self._observe(request)
            case Op.ATTACH:
                self._attach(request)
            case _:  # the protocol admits it only where there is a session
                raise KeyError(request.op.name)

    def _list(self, request: Incoming) -> None:
        try:
            self._lister.ask(lambda names: self._answer(request, messages.EnvNames(names), ()))
        except OSError as error:
            self._fail(request, Failure("limit", "hub", f"a worker cannot be started: {error}"))

    def _make(self, request: Incoming) -> None:
        make: Make = request.message
        if request.token in self._hosts:
            self._refuse_make(request, Failure("session_lost", "session", "the session of this token is still closing"))
            return
        envs = sum(host.session.make.num_envs for host in self._hosts.values())
        found = admitted(make, self.config, self._registry, envs)
        if isinstance(found, Failure):
            self._refuse_make(request, found)
            return
        machine = self._machine()
        sizing = self._sizing(make, machine)
        if why := descriptor_guard.lack(min(machine.cpus, make.num_envs) if sizing is None else sizing.workers):
            self._refuse_make(request, Failure("limit", "hub", why))
            return
        policy = RestartPolicy(make.faults.restarts_max, all_max=max(10, make.num_envs))
        restarts = Restarts(policy, random.Random())
        session = SessionState(make, found, sizing, self.config.limits.info_bytes, machine, restarts)
        ticket = secrets.token_bytes(TICKET_BYTES) if self._side_door.open else b""
        try:
            host = SessionRuntime(request.token, session, self._poller, self._supervisor, self._outcomes, ticket)
        except OSError as error:
            self._refuse_make(request, Failure("limit", "hub", f"a session cannot be made: {error}"))
            return
        self._hosts[request.token] = host
        self._wake_by(self._clock.now_s() + LOOK_S)
        log.info(
            "session_made",
            session=request.token.hex()[:8],
            env=make.name or "factories",
            num_envs=make.num_envs,
        )
        host.start(request, make)

    def _machine(self) -> Machine:
        affinity = tuple(sorted(os.sched_getaffinity(0)))
        workers_max = int(SHARE * min(descriptor_guard.workers_left(), processes_left()))
        return Machine(affinity, usable_cpus(), has_quota(), workers_max, memory_available_bytes())

    def _sizing(self, make: Make, machine: Machine) -> WorkerCount | None:
        """How many workers a session gets; None where that is to be seen of its first envs."""
        if make.num_workers:
            return told(make.num_envs, make.num_workers, f"num_workers={make.num_workers}")
        if self.config.workers:
            return told(make.num_envs, self.config.workers, f"the hub's --workers {self.config.workers}")
        return known(make.num_envs, self._step_costs.find(key(make)), machine)

    def _attach(self, request: Incoming) -> None:
        host = self._hosts.get(request.message.session)
        if host is None or host.session.making or host.close_by_s is not None:
            why = "this hub has no such session to take over: its lease ran out, it was closed or taken over"
            self._refuse_make(request, Failure("session_lost", "session", why))
            return
        log.info("session_taken_over", session=host.token.hex()[:8], by=request.token.hex()[:8])
        self._protocol.forget(host.token)
        self._hosts[request.token] = self._hosts.pop(host.token)
        host.attach(request)

    def _observe(self, request: Incoming) -> None:
        host = self._hosts.get(request.message.session)
        found = None if host is None else host.observe(request.message.described)
        if found is None:
            self._fail(request, Failure("session_lost", "session", "this hub has no such session to observe"))
        else:
            self._answer(request, *found)

    def _admit(self, ticket: bytes, side: socket.socket) -> None:
        for host in self._hosts.values():
            if secrets.compare_digest(host.ticket, ticket) and host.share(side):
                return
        side.close()

    def _refuse_make(self, request: Incoming, failure: Failure) -> None:
        self._fail(request, failure)
        self._protocol.forget(request.token)

    def _running(self, token: bytes) -> messages.HeartbeatReply:
        """How far a request is, for its client; of one that makes envs, the log says so, too."""
        host = self._hosts.get(token)
        if host is None or not host.session.making:
            return messages.HeartbeatReply("running")
        found = host.session.building
        log.info(
            "session_making", session=token.hex()[:8], phase=found.phase, built=found.built, num_envs=found.num_envs
        )
        return found

    # --- what hosts tell --------------------------------------------------------------------------------------------

    def _answer(self, request: Incoming, message: Any, frames: Sequence[Any]) -> None:
        if isinstance(message, messages.Made):
            log.info(
                "session_ready", session=request.token.hex()[:8], num_workers=message.num_workers, why=message.sizing
            )
        if request.op == Op.STEP:
            self._spinner = self._next_spinner
        self._protocol.answer(request, message, frames)
        self._flush()

    def _fail(self, request: Incoming, failure: Failure) -> None:
        if failure.scope in ("env", "session"):
            log.warning("request_failed", session=request.token.hex()[:8], code=failure.code, why=failure.message[:200])
        self._protocol.fail(request, failure)
        self._flush()

    def _worker_started(self, host: SessionRuntime, number: int, pid: int) -> None:
        log.info("worker_started", session=host.token.hex()[:8], worker=number, pid=pid)

    def _worker_exited(self, host: SessionRuntime, number: int, how: str, expected: bool) -> None:
        tell = log.info if expected else log.warning
        tell("worker_exited", session=host.token.hex()[:8], worker=number, how=how)

    def _ended(self, host: SessionRuntime) -> None:
        self._flush()
        self._protocol.forget(host.token)
        del self._hosts[host.token]
        self._closing.discard(host.token)
        self._write_step_costs()
        log.info("session_ended", session=host.token.hex()[:8])

    def _broke(self, host: SessionRuntime, error: Exception) -> None:
        log.error("internal_error", session=host.token.hex()[:8], error=repr(error), exc_info=error)
        host.abandon(Failure("internal", "session", f"a bug in the hub or a worker: {error!r}"), terminate=True)

    def _learned(self, host: SessionRuntime, cost: StepCost) -> None:
        """Know what a step of these envs takes; a session's first such news is kept at once, its last when it ends."""
        known_as = key(host.session.make)
        if not known_as:
            return
        self._step_costs.note(known_as, cost)
        first = known_as not in self._unwritten
        self._unwritten[known_as] = cost
        if first:
            self._step_cost_file.write({known_as: cost})

    def _write_step_costs(self) -> None:
        self._step_cost_file.write(self._unwritten)
        self._unwritten.clear()

    def _notify(self, host: SessionRuntime, text: str) -> None:
        log.warning("worker_count_wrong", session=host.token.hex()[:8], note=text)
        self._protocol.notice(host.token, text)
        self._flush()

    def _memory_left(self) -> int:
        return self.config.limits.arena_bytes_max - sum(host.arena_bytes for host in self._hosts.values())

    # --- descriptions -----------------------------------------------------------------------------------------------

    def _welcome(self) -> messages.Welcome:
        limits = self.config.limits
        return messages.Welcome(
            hub=envhub.__version__,
            version=f"{prelude.VERSION[0]}.{prelude.VERSION[1]}",
            private=self.config.private,
            limits={"envs_per_session_max": limits.envs_per_session_max, "message_bytes_max": limits.message_bytes_max},
            host=socket.gethostname(),
            pid=os.getpid(),
            compressions=compression.available(),
        )

    def _health(self) -> dict[str, Any]:
        up_s = time.monotonic() - self._started_s
        return stats.health(self.id, bool(self._stops), up_s, len(self._hosts), self._clock.lag_s())


_STOPPING = Failure("draining", "hub", "the hub is shutting down")
