"""The hub: one loop that waits for sockets, workers, bells and time, and hands each event to whom it concerns.

::

    ROUTER ──frames──▶ HubProtocol ──request──▶ SessionRuntime ──stimulus──▶ events ──▶ SessionState
       ▲                    ▲                        ▲                                       │
       └───────frames───────┴────────answer──────────┴─────────────instructions─────────────┘

Everything that happens to a session goes through one queue of events, in the order in which it happened. Nothing here
blocks but the wait itself, so sessions never wait for each other's envs.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import random
import secrets
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import zmq

import envhub
from envhub.arena.spin import Spinner, spin_us
from envhub.errors import shortened, without_folders
from envhub.protocol import messages, prelude
from envhub.protocol.hub import FIRST_OPS, SHUTTING_DOWN, HubProtocol, Incoming
from envhub.protocol.messages import SESSION_OPS, Failure, HeartbeatReply, Make, Op
from envhub.protocol.prelude import Prelude
from envhub.transport import address, sockets
from envhub.values import codec, compression
from envhub_server import log as log_file
from envhub_server.catalog.admission import admitted
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.catalog.hosting import hosting_of_session
from envhub_server.catalog.listing import LISTING, LOOK_S, Listing
from envhub_server.catalog.registry import Recipe
from envhub_server.catalog.replay_shares import name_beginning
from envhub_server.catalog.step_cost_file import KnownCosts
from envhub_server.catalog.step_costs import StepCost
from envhub_server.config import HubConfig, has_quota, memory_available_bytes, processes_left, usable_cpus
from envhub_server.hub import stats
from envhub_server.hub.client_usage import ClientUsage
from envhub_server.hub.compression_thread import CompressionThread
from envhub_server.hub.holdings import Holdings, Services
from envhub_server.hub.inputs import ROWS_DONE, STEP_REQUESTED
from envhub_server.hub.recordings import WRITE_AT_ONCE_S, WRITE_S, Recordings
from envhub_server.hub.replay_keeper import ReplayKeeper
from envhub_server.hub.replay_writer import ReplayWriter
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.ipc.factories_memory import held
from envhub_server.log import Logger
from envhub_server.loop import signals
from envhub_server.loop.clock import LAG_MIN_S, Clock
from envhub_server.loop.poller import Poller, Ready
from envhub_server.loop.timers import Timers
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.memory.unread_memory import UNREAD_S, UnreadMemory, UnreadObservations
from envhub_server.network import descriptor_guard, network_peer
from envhub_server.network.access import Access, Ends
from envhub_server.network.audit import Audit
from envhub_server.network.client_liveness import ClientLiveness
from envhub_server.network.descriptor_guard import DescriptorGuard
from envhub_server.network.listener import Listener, seed_routing_ids
from envhub_server.network.proxy import ProxyHandle
from envhub_server.network.rights import OWN_USER, Holder
from envhub_server.network.side_socket import SideSocket
from envhub_server.processes.interpreter import InterpreterKey, clean_environment
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_events import Events
from envhub_server.processes.zygote_process import ZygoteProcess
from envhub_server.repeats import REPEAT_S
from envhub_server.session import stimuli
from envhub_server.session.build_order import WorkerRules
from envhub_server.session.failure_text import logged
from envhub_server.session.phases import Phase
from envhub_server.session.restarts import Restarts
from envhub_server.session.state import SessionState
from envhub_server.session.worker_count import (
    SHARE,
    Machine,
    WorkerCount,
    chosen_count,
    count_in_advance,
    lacking,
    separate,
)

RECEIVE_QUEUE_MESSAGES_MAX = 16  # of one client, which sends a request at a time
LINGER_MS = 2000
DISCARDED_FRAMES_MAX = 1000  # in one turn, some milliseconds, so that workers and deadlines do not wait
UNREAD_SHARE = 1.5  # of the largest frame, which one client may have sent of messages that are not whole
MEMORY_S = 0.2  # from one measurement of the workers of a client to that of the next client's
WAKE_S = 1.0  # at the latest, while there is a deadline; less than ``clock.STOPPED_S``
STEP_FRAME_BYTES_MAX = 1024  # of a first frame that may be the one that a session waits for

_POLLIN = int(zmq.POLLIN)  # a plain number, as in ``envhub.transport.sockets``
_BUFFER = attrgetter("buffer")
_MONITORED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_HUB_OPS = (frozenset(Op) - SESSION_OPS) | FIRST_OPS

# Timers besides those of the sessions, whose keys are their numbers.
_GUARD, _LIVENESS, _LEASES, _ACCESS = "descriptor guard", "client liveness", "leases", "access"
_UNREAD, _LISTING, _LEFT_OUT = "unread memory", "listing", "lines left out"
_MEMORY, _PROXY = "memory of clients", "proxy"
_UNKNOWN = object()  # a peer of which no message was read

log = Logger("envhub.hub")


class Service(enum.Enum):
    """Health of the hub."""

    SERVING = "serving"
    DRAINING = "draining"  # requests under way are answered, then the envs are closed
    KILLING = "killing"  # no env gets more time


class Hub:
    """One hub: ``run`` it, within ``opened``, until it is told to stop."""

    _is_measuring = False  # the memory of clients' workers, at the time that is set
    _measured = ""  # the client whose workers were measured last
    _is_listed = False  # whether it is known which envs are ready
    _is_telling = False  # of lines left out, at the time that is set
    _restarts_before = 0  # of workers of sessions that have ended

    def __init__(
        self, config: HubConfig, zygote: ZygoteProcess | None = None, listed: Callable[[Hub], None] = lambda hub: None
    ) -> None:
        """Make a hub with this configuration; it has a zygote already, or starts one when it first needs one.

        ``listed`` is called once, when it is known which envs are ready.
        """
        self.config, self._on_listed = config, listed
        self.id = secrets.randbits(64) or 1
        self.addresses: list[str] = []
        self._registry = config.registry()
        headers = codec.KNOWN if config.private else codec.STRANGERS
        self._protocol = HubProtocol(self.id, config.timing.lease_s, config.limits.sessions_max, headers)
        self._sessions: dict[int, SessionRuntime] = {}
        self._by_token: dict[bytes, SessionRuntime] = {}
        self._last_number = 0  # of a session
        self._clock = Clock()
        self._timers = Timers()
        self._wake_s = math.inf  # the first of the timers
        self._handled_s = 0.0  # when the last turn had handled what it found
        self._poller = Poller()
        self._ready: Ready = []  # what was found while spinning
        hub_spin_us = spin_us(2, usable_cpus(), has_quota())
        self._workers_spinner, self._client_spinner = (
            Spinner(hub_spin_us, time.perf_counter_ns) if hub_spin_us else None for _ in range(2)
        )
        self._spinner: Spinner | None = None  # the one for what comes next: a step's end, or the next step
        self._next_spinner: Spinner | None = None  # the one for what comes after the step's end
        self._events: Events = deque()
        environ = os.environ if config.private else clean_environment(os.environ, config.worker_variables)
        self._supervisor = Supervisor(self._poller, self._events, environ, config.private, zygote)
        self._listing = Listing(self._supervisor, self._registry)
        self._listed_for: list[Incoming] = []  # LIST requests that wait for the listing
        self._costs = KnownCosts(config.step_costs)
        self._usage = ClientUsage(ArenaBudget(config.limits.arena_bytes_max))
        self._unread = UnreadMemory(config.limits.message_bytes_max)
        self._observations = UnreadObservations(2 * config.limits.message_bytes_max)
        parts = self._poller, self._supervisor, self._protocol, self._clock, self._events, self._costs, self._unread
        folder = config.replay_folder()
        self._recordings = Recordings(self._poller, config.limits.recordings_memory_bytes_max)
        self._replays = None if folder is None else ReplayWriter(folder, self._poller)
        self._compression = CompressionThread(self._poller)
        self._services = Services(*parts, self._compression)
        self._started_s = time.monotonic()
        self._service = Service.SERVING
        self._requests = 0
        log_file.on_left_out(self._plan_telling)
        self._discarding_s: float | None = None  # since when what comes next is a message with too many frames
        self._listener: Listener | None = None
        self._audit = Audit(config.audit, self._plan_telling)
        self._unread_bytes_max = int(UNREAD_SHARE * config.limits.message_bytes_max)
        self._access = Access(config.keys, config.insecure, self._audit, self._unread_bytes_max)
        self._entries: dict[bytes, Any] | None = None  # of the peers of the proxy, once there is one
        self._cut_off = self._access.connections.cut_off
        self._liveness = ClientLiveness(self._protocol, config.timing.lease_s, self._access.silence_s)
        self._heard_ns = 0  # when it was last asked which sessions have taken a request
        self._admitted: deque[tuple[bytes, socket.socket]] = deque()  # by the side socket, with their tickets
        self._side_socket = SideSocket(self._poller, self._admitted)

    # --- opening and closing ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Bind every address and heed signals, see ``_on_signal``. Afterwards nothing is left.

        Raises:
            AddressError: an address is malformed, in use, or open to other machines without keys or ``insecure``.
            KeysError: the keys cannot be used, or let strangers in.
        """
        with (
            contextlib.closing(self._poller),
            signals.handled(self._poller, self._on_signal, self._supervisor.reap_orphans) as heard,
        ):
            try:
                self._open()
                yield
            finally:
                self._close(heard)

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
        self._monitor = sockets.open_monitor(router, _MONITORED)
        self._listener = Listener(router, self._access.open_to_all)
        self._guard = DescriptorGuard(self._listener)
        self._bind(self._listener)
        for bound in self.addresses:
            self._side_socket.listen(bound)
        self._router_poll = [(router, _POLLIN)]
        self._router_descriptor, self._monitor_descriptor = router.FD, self._monitor.FD
        for descriptor in (self._router_descriptor, self._monitor_descriptor):
            self._poller.wake_on(descriptor)
        self._on_monitor()  # libzmq signals only what comes after the socket was found to be empty
        if self._replays is not None:
            self._replays.begin()
        if self.config.owner is not None:
            self._poller.register(self.config.owner, self)
        else:
            told = {"version": envhub.__version__, "pid": os.getpid(), "addresses": self.addresses}
            log.info("hub_started", **told, configuration=self.config.said())
            self._start_listing()  # also so that the first client finds a zygote; a program's has its own environment

    def _bind(self, listener: Listener) -> None:
        """Bind every address: those of ipc first, since only what is bound later wants a key."""
        is_ipc = {text: address.parse_bind(text).is_ipc for text in self.config.binds}
        bound = {text: listener.bind(text) for text in self.config.binds if is_ipc[text]}
        if len(bound) < len(is_ipc):
            self._access.guard(self._context, self._router)
        if self._access.authenticator is not None:
            self._poller.register(self._access.authenticator.descriptor, self)
        for text in self.config.binds:
            if not is_ipc[text]:
                bound[text] = listener.bind(text)
        if listener.proxied:
            self._start_proxy(listener)
        for text in self.config.binds:
            if not is_ipc[text]:
                self._access.bound(bound[text])
        self.addresses = [bound[text] for text in self.config.binds]
        self._set_timer(_ACCESS, self._access.next_s())

    def _start_proxy(self, listener: Listener) -> None:
        """Have a process accept the connections of strangers: libzmq bounds no message before it is whole."""
        hub, curve = listener.bind_unnamed(), self._access.encrypted
        proxy = ProxyHandle(self._supervisor, hub, curve, prelude.FRAMES_MAX, self._unread_bytes_max)
        self._access.proxy, self._entries = proxy, self._access.entries
        for listening in listener.proxied:
            self._guard.listens(listening.fileno())
        proxy.start(listener.proxied, self._clock.now_s())
        self._poll_proxy(proxy)

    def _poll_proxy(self, proxy: ProxyHandle) -> None:
        self._poller.register(proxy.pidfd, self)
        self._poller.register(proxy.reporting, self)

    def _check_proxy(self, now_s: float) -> None:
        proxy = self._access.proxy
        if proxy is not None:
            proxy.check(now_s)
            if proxy.pidfd >= 0:
                self._poll_proxy(proxy)
            self._timers.set(_PROXY, proxy.restart_s)

    def _close(self, heard: signals.Signals) -> None:
        self._abandon_all()
        # Before the supervisor, which ends all children.
        self._recordings.close(lambda: self._write_s(heard))
        self._supervisor.close()
        self._compression.close()
        if self._replays is not None:
            self._replays.close()
        self._side_socket.close()
        if self._listener is not None:
            self._router.monitor(None, 0)
            self._monitor.close()
            self._router.close()
            self._guard.close()
            self._listener.close()
            self._access.close()
            self._audit.close()
            self._context.term()
            if self._access.proxy is not None:
                self._access.proxy.close()
        log_file.on_left_out(lambda: None)
        log_file.tell_left_out(ends=True)

    def _write_s(self, heard: signals.Signals) -> float:
        """For how many seconds recordings may write from the end of the loop on, also if it is told to stop again."""
        heard.look()
        return WRITE_AT_ONCE_S if self._service is Service.KILLING else WRITE_S

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop, then drain and return.

        Raises:
            EnvNotFound: it was told to offer what can never be made, or a required env is not ready.
        """
        self._handled_s = self._clock.now_s()
        while self._service is Service.SERVING or self._sessions:
            self._turn()
        self._flush()
        if self._listing.refused is not None:
            raise self._listing.refused

    def _turn(self) -> None:
        # Asked before each wait: a send, too, may take in what libzmq has signalled by the socket's descriptor.
        # ``getsockopt(zmq.EVENTS)`` would take twice the time to say it: pyzmq makes an enum of the option.
        if zmq.zmq_poll(self._router_poll, 0):
            arrived, ready = True, self._poller.wait(0)
        elif self._spinner is not None and self._spinner.spin(self._poll):
            arrived, ready = False, self._ready
        else:
            wait_s = None if self._wake_s == math.inf else max(0.0, self._wake_s - self._handled_s)
            arrived, ready = False, self._poller.wait(wait_s)
        # The time is the clock's ``now_s``, written out: a turn is what every step waits for.
        began_s, others = time.monotonic() - self._clock.stopped_s, False
        if began_s >= self._wake_s:  # before anything is handled: what that sets a deadline for is to have all of it
            began_s = self._on_wake(max(self._wake_s, self._handled_s))
        for descriptor, _ in ready:
            if descriptor == self._monitor_descriptor:  # first of all: connections may come faster than turns
                self._on_monitor()
            elif descriptor == self._router_descriptor:
                arrived = True
            else:
                others = True
        if others:  # before a request can end what is ready, and begin something else by the same number
            self._poller.handle(ready)
            if self._admitted:
                self._admit()
            if self._events:
                self._pump()
        if arrived:
            self._on_router()
        self._handled_s = handled_s = time.monotonic() - self._clock.stopped_s
        if handled_s - began_s >= LAG_MIN_S:
            self._clock.note(handled_s, handled_s - began_s)
        if self._wake_s <= handled_s:
            self._on_clock(max(self._wake_s, began_s))  # it may have been stopped since the turn began

    def _on_wake(self, planned_s: float) -> float:
        """See for how long the process was stopped, which was to go on at ``planned_s``; returns the time."""
        if stopped_s := self._clock.woke(planned_s):
            log.warning("hub_suspended", stopped_s=round(stopped_s, 1), note="no deadline runs meanwhile")
        return self._clock.now_s()

    def _poll(self) -> bool:
        self._ready = self._poller.wait(0)
        return bool(self._ready)

    def _set_timer(self, key: int | str, at_s: float) -> None:
        self._timers.set(key, at_s)
        self._plan_wake()

    def _plan_wake(self) -> None:
        """Wake for the first timer; earlier, while there is one, to see whether the process was stopped meanwhile."""
        next_s = self._timers.next_s
        self._wake_s = math.inf if next_s == math.inf else min(next_s, self._clock.now_s() + WAKE_S)

    def _on_clock(self, planned_s: float) -> None:
        now_s = self._on_wake(planned_s)
        for key in self._timers.due(now_s):
            if key == _GUARD:
                self._guard.check(now_s)
                self._timers.set(_GUARD, self._guard.check_s)
            elif key == _LIVENESS:
                self._check_clients(now_s)
            elif key == _LEASES:
                self._expire(now_s)
            elif key == _ACCESS:
                self._end_connections(self._access.check(now_s, self._heard_since()))
                self._end_sessions_of_removed()
                self._admit_clients()
                self._timers.set(_ACCESS, self._access.next_s())
            elif key == _UNREAD:
                why = f"it has not read the replies of a session that ended {UNREAD_S:g} s ago"
                late = map(self._access.connections.get, self._unread.check(now_s))
                self._end_connections([(known, why) for known in late if known is not None])
                self._timers.set(_UNREAD, self._unread.next_s)
            elif key == _MEMORY:
                self._measure_memory()
            elif key == _LEFT_OUT:
                self._is_telling = False
                if any([log_file.tell_left_out(), self._audit.tell_left_out()]):
                    self._plan_telling()
            elif key == _PROXY:
                self._check_proxy(now_s)
            elif key == _LISTING:
                self._listing.look(now_s)
                self._plan_look()
            elif key in self._sessions:
                self._sessions[key].inputs.elapse()
        self._pump()
        self._handled_s = self._clock.now_s()
        self._plan_wake()

    def _check_clients(self, now_s: float) -> None:
        for token, peer in self._liveness.suspects(now_s):
            if not self._reaches(peer):
                self._liveness.lost(token, now_s)
        self._liveness.check(now_s, self._beats_s())
        self._timers.set(_LIVENESS, self._liveness.next_s)
        self._timers.set(_LEASES, self._protocol.next_expiry_s())

    def _heard_since(self) -> set[bytes | None]:
        """The peers whose sessions have taken a request since the last call."""
        since_ns, self._heard_ns = self._heard_ns, time.monotonic_ns()
        return {self._protocol.peer_of(token) for token, each in self._by_token.items() if each.heard_ns >= since_ns}

    def _beats_s(self) -> dict[bytes, float]:
        """The heartbeat interval of each session's client."""
        return {token: each.state.make.beat_s for token, each in self._by_token.items()}

    def _end_sessions_of_removed(self) -> None:
        """End the sessions of clients that were removed: they have no lease."""
        removed, self._access.removed = self._access.removed, []
        for runtime in self._sessions.values():
            if runtime.owner and runtime.owner in removed:
                runtime.log.warning("session_revoked", client=runtime.owner, why=_KEY_REMOVED.message)
                self._events.append((runtime.number, stimuli.Abandoned(_KEY_REMOVED)))

    def _expire(self, now_s: float) -> None:
        # A client that has come back since the last check keeps its session.
        self._liveness.check(now_s, self._beats_s(), at_once=True)
        for token in self._protocol.expired(now_s):
            log.info("session_expired", session=token.hex()[:8], lease_s=self.config.timing.lease_s)
            self._forget(token)
            if token in self._by_token:
                runtime = self._by_token[token]
                self._events.append((runtime.number, stimuli.LeaseExpired(runtime.quiescent)))
        self._timers.set(_LEASES, self._protocol.next_expiry_s())

    # --- events of sessions -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Hand every event to its session, and those that come of it, until there are none; then send the replies."""
        events, sessions = self._events, self._sessions
        while events:
            number, event = events.popleft()
            if number == LISTING:
                self._on_listing(event)
                continue
            runtime = sessions.get(number)
            if runtime is None:
                continue  # it has ended
            try:
                runtime.handle(event)
                if runtime.replies.compressing is not None:
                    continue
                # Between two steps a timer that comes too early does no harm.
                steps = (event is STEP_REQUESTED or event is ROWS_DONE) and runtime.state.phase in _STEPPING
                if not steps or runtime.deadline_s == math.inf:
                    self._after(runtime)
            except Exception as error:  # what a client wrote into its memory may do that, too
                if not isinstance(event, stimuli.Abandoned):
                    runtime.broke(error)
                    continue
                log.exception("internal_error")
                runtime.discard()
                self._after(runtime)
        if self._protocol.outgoing:
            self._flush()

    def _after(self, runtime: SessionRuntime) -> None:
        """Know when the session's next deadline is, or that it has ended."""
        if runtime.state.phase is not Phase.ENDED:
            runtime.deadline_s = runtime.state.next_deadline_s()
            self._set_timer(runtime.number, runtime.deadline_s)
            return
        self._flush()
        self._audit.write("session_ended", runtime.owner, runtime.origin, session=runtime.token.hex()[:8])
        self._forget(runtime.token)
        self._unread.release()
        self._set_timer(_UNREAD, self._unread.next_s)
        self._restarts_before += runtime.state.restarts
        del self._sessions[runtime.number], self._by_token[runtime.token]
        self._set_timer(runtime.number, math.inf)
        self._costs.write()
        log.info("session_ended", session=runtime.token.hex()[:8])

    def _measure_memory(self) -> None:
        """Measure the workers of the next client with a quota of memory, and end the largest if it has too much."""
        self._is_measuring = False
        limits = {name: quotas.worker_memory_bytes_max for name, quotas in self._access.quotas.items()}
        owners = sorted({each.owner for each in self._sessions.values() if limits.get(each.owner)})
        self._usage.forget_memory(owners)
        if not owners:
            return
        self._measured = name = next((each for each in owners if each > self._measured), owners[0])
        own = [each for each in self._sessions.values() if each.owner == name]
        for runtime, worker, overrun in self._usage.overruns(name, limits[name], own):
            runtime.overrun(worker, overrun)
        self._plan_measuring()

    def _plan_measuring(self) -> None:
        if not self._is_measuring:  # a client that makes sessions puts nothing off
            self._is_measuring = True
            self._set_timer(_MEMORY, self._clock.now_s() + MEMORY_S)

    def _plan_telling(self) -> None:
        """Tell after a while how many lines were left out in the log and the audit file."""
        if not self._is_telling:
            self._is_telling = True
            self._set_timer(_LEFT_OUT, self._clock.now_s() + REPEAT_S)

    def example(self) -> str:
        """The name of an env that is ready; empty if none is."""
        return self._listing.example()

    def unready(self) -> dict[str, str]:
        """Reasons why envs cannot be made, by their names."""
        return dict(self._listing.unready)

    def _start_listing(self) -> None:
        self._listing.start()
        self._plan_look()

    def _try_again(self, key: InterpreterKey) -> None:
        self._listing.try_again(key)
        self._plan_look()

    def _plan_look(self) -> None:
        self._set_timer(_LISTING, self._clock.now_s() + LOOK_S if self._listing.running else math.inf)

    def _on_listing(self, event: Any) -> None:
        self._listing.handle(event)
        if self._listing.refused is not None and self._service is Service.SERVING:
            self.stop(str(self._listing.refused))
        if self._listing.done and not self._is_listed:
            self._is_listed = True
            self._on_listed(self)
        if not self._listing.asking:
            waiting, self._listed_for = self._listed_for, []
            for request in waiting:
                self._protocol.answer(request, messages.EnvNames(self._listing.names or []))

    def _on_signal(self, name: str) -> None:
        """SIGTERM, SIGINT and SIGHUP stop the hub; SIGUSR1 and SIGQUIT log its stacks, SIGUSR2 its counters."""
        if name in ("SIGUSR1", "SIGQUIT"):
            for identity, frame in sys._current_frames().items():
                log.info("stack", signal=name, thread=identity, stack="".join(traceback.format_stack(frame)))
        elif name == "SIGUSR2":
            log.info("counters", signal=name, **self._counters())
        else:
            self.stop(name)

    # --- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Begin to drain: running requests end and are answered, then envs are closed; asked twice, kill at once."""
        log.info("stopping", why=why, sessions=len(self._sessions))
        self._protocol.draining = True
        if self._service is not Service.SERVING:
            self._service = Service.KILLING
            self._abandon_all()
            return
        self._service = Service.DRAINING
        timing, now_s = self.config.timing, self._clock.now_s()
        by_s = now_s + timing.drain_s
        for runtime in self._sessions.values():
            draining = stimuli.Draining(by_s, by_s + timing.close_after_drain_s, runtime.quiescent)
            self._events.append((runtime.number, draining))

    def _abandon_all(self) -> None:
        for number in self._sessions:
            self._events.append((number, stimuli.Abandoned(SHUTTING_DOWN)))
        self._pump()

    def on_ready(self, descriptor: int) -> None:
        """Answer whether a connection is admitted; or the proxy, or the program that the hub belongs to, has ended."""
        authenticator, proxy = self._access.authenticator, self._access.proxy
        if authenticator is not None and descriptor == authenticator.descriptor:
            self._admit_clients()
            return
        if proxy is not None and descriptor == proxy.reporting:
            self._read_reports(proxy)
            return
        if proxy is not None and descriptor == proxy.pidfd:
            self._read_reports(proxy)
            self._poller.unregister(descriptor)
            proxy.ended(self._clock.now_s())
            self._set_timer(_PROXY, proxy.restart_s)
            return
        self._poller.unregister(descriptor)  # no client is left to answer, so there is nothing to drain
        self._service = Service.DRAINING
        self.stop("its program ended")

    def _read_reports(self, proxy: ProxyHandle) -> None:
        """Note the handshakes that have ended by the proxy."""
        reporting = proxy.reporting
        for ended in proxy.reports():
            self._access.handshake_ended(ended)
        if proxy.reporting < 0:
            self._poller.unregister(reporting)

    # --- sockets ----------------------------------------------------------------------------------------------------

    def _on_router(self) -> None:
        heard_ns = time.monotonic_ns()
        if self._discarding_s is not None:
            self._discard(self._discarding_s)
            return
        try:
            peer = sockets.receive_peer(self._router)
        except zmq.Again:  # what was signalled was no message
            return
        frames = sockets.receive(self._router, prelude.FRAMES_MAX)
        if self._entries is not None:
            entry = self._entries.get(peer, _UNKNOWN)
            if entry is _UNKNOWN:
                self._tell_proxy(peer, frames)
            elif entry is not None:
                entry.read(len(frames), sum(map(len, frames)))
        if frames[-1].more:
            self._refuse_frames(peer, frames)
            return
        if self._cut_off and self._cut_off.get(peer, 0.0) > self._handled_s:
            return  # libzmq had it before the hub ended the connection
        first, *others = map(_BUFFER, frames)
        incoming, holder = None, OWN_USER
        if len(first) <= STEP_FRAME_BYTES_MAX:
            incoming = self._protocol.receive_step(peer, bytes(first), others)
        if incoming is None:
            holder, why = self._access.holder(peer, frames, self._handled_s)
            connection = sockets.connection_of(frames)
            if why:
                self._on_monitor()
                self._end_connections(self._access.refused(peer, connection, why, self._handled_s))
                self._set_timer(_ACCESS, self._access.next_s())
                self._protocol.refuse(peer, [first], Failure("limit", "hub", why))
                self._pump()
                return
            incoming = self._receive(peer, connection, [first, *others], holder)
        if incoming is not None:
            self._dispatch(incoming, heard_ns, holder)
        if self._events or self._protocol.outgoing:
            self._pump()

    def _tell_proxy(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Tell the proxy that a message was read, of a peer that may be one of its clients."""
        if not self._access.read(peer, frames, self._handled_s):
            self._on_monitor()  # the message came before it was read that its connection was accepted
            self._access.read(peer, frames, self._handled_s)

    def _end_connections(self, ends: Ends) -> None:
        """End those of these connections that are there still, and plan the next check; peers may connect again.

        libzmq may close one at any time, and its descriptor is another's then; the monitor has reported the end by
        then. So what the monitor has reported is read once the descriptor is held.
        """
        waiting = deque(ends)
        while waiting:
            known, why = waiting.popleft()
            try:
                connection = network_peer.copied(known.descriptor)
            except OSError:  # libzmq has closed it
                continue
            with connection:
                waiting.extend(self._read_monitor())
                if self._access.connections.get(known.descriptor) is not known:
                    continue
                with contextlib.suppress(OSError):  # its peer has ended it
                    connection.shutdown(socket.SHUT_RDWR)
            self._access.connections.cut(known, self._clock.now_s())
            self._access.connections_ended += 1
            log.warning("connection_ended", client=known.client, host=known.origin, why=why)
            self._audit.write("connection_ended", known.client, known.origin, why=why)
        # Once for all of them, because each of these looks at every connection.
        self._set_timer(_ACCESS, self._access.next_s())
        self._set_timer(_LIVENESS, self._liveness.next_s)
        self._set_timer(_GUARD, self._guard.check_s)

    def _receive(self, peer: bytes, connection: int, frames: Sequence[Any], holder: Holder) -> Incoming | None:
        malformed, not_permitted = self._protocol.malformed, self._protocol.failures["not_permitted"]
        incoming = self._protocol.receive(peer, connection, [*frames], holder.name, holder.may(Op.STEP))
        if self._protocol.malformed > malformed:
            self._on_monitor()
            self._end_connections(self._access.malformed(peer, connection, self._handled_s))
        if self._protocol.failures["not_permitted"] > not_permitted:
            origin = self._access.connections.origin(peer)
            self._audit.write("refused", holder.name, origin, why="its key lets it observe only")
        for op, token in self._protocol.foreign:
            self._audit_foreign(peer, holder, op, token)
        self._protocol.foreign.clear()
        for token in self._protocol.stale:
            self._note_unknown(token, holder, _OF_EARLIER_HUB)
        self._protocol.stale.clear()
        for token in self._protocol.returned:
            log.info("client_back", session=token.hex()[:8])
        self._protocol.returned.clear()
        if self._access.connections.of(peer, connection, self._handled_s) is None:
            self._liveness.heard_late(peer, self._handled_s)
            self._set_timer(_LIVENESS, self._liveness.next_s)
        return incoming

    def _refuse_frames(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        """End the connection that sends more frames than a message may have; those that libzmq has are thrown away."""
        self._discarding_s = self._clock.now_s()
        self._protocol.malformed += 1
        self._on_monitor()
        why = f"one of its messages has more than {prelude.FRAMES_MAX} frames"
        self._end_connections(self._access.ends(peer, sockets.connection_of(frames), why, self._handled_s))

    def _discard(self, since_s: float) -> None:
        """Throw away more of the message that came at ``since_s``; until it ends, no other is read."""
        with contextlib.suppress(zmq.Again):
            if sockets.discard(self._router, DISCARDED_FRAMES_MAX):
                self._discarding_s = None
        now_s = self._clock.now_s()
        self._clock.note(now_s, now_s - since_s)

    def _admit_clients(self) -> None:
        """Answer libzmq whether clients are admitted, who wait in their handshakes."""
        while self._access.asked():
            self._end_connections(self._read_monitor())
            if not self._access.answer(self._clock.now_s()):
                break
        self._set_timer(_ACCESS, self._access.next_s())

    def _on_monitor(self) -> None:
        self._end_connections(self._read_monitor())
        self._admit_clients()

    def _read_monitor(self) -> Ends:
        """Note the connections that have come and gone; returns those that are to be ended."""
        now_s, ends = self._clock.now_s(), Ends()
        while self._monitor.poll(0):
            event, value = sockets.read_monitor(self._monitor, zmq.NOBLOCK)
            match event:
                case zmq.Event.LISTENING:
                    self._guard.listens(value)
                case zmq.Event.ACCEPTED:
                    self._guard.accepted(value, now_s)
                    ends += self._access.accepted(value, now_s)
                case _:
                    self._access.ended(value, now_s)
                    self._unread.connection_ended(value)
                    self._liveness.ended(value, now_s)
        return ends

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
        self._spinner = self._next_spinner
        for peer, frames in outgoing:
            try:
                sockets.send(self._router, [peer, *frames])
            except zmq.ZMQError as error:
                # The peer is gone or does not read. Its reply is kept, and sent when it asks after it.
                for token in self._protocol.sessions_of(peer):
                    self._liveness.suspect(token, peer, self._clock.now_s())
                self._set_timer(_LIVENESS, self._liveness.next_s)
                log.debug("reply_parked", error=str(error))
        outgoing.clear()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _dispatch(self, request: Incoming, heard_ns: int, holder: Holder) -> None:
        """Have a request of this client carried out, which arrived at ``heard_ns``."""
        self._requests += 1
        runtime = self._by_token.get(request.token)
        if runtime is None or request.op in _HUB_OPS:
            try:
                self._on_request(request, holder)
            except Exception as error:
                log.exception("internal_error", op=request.op.name)
                self._protocol.forget(request.token)  # of a session that was never made
                self._fail(request, Failure("internal", "hub", f"a bug in the hub, which logged it: {error!r}"))
            return
        runtime.heard_ns = heard_ns
        if request.op is Op.SET_ATTR and (why := self._usage.memory_lack(runtime.owner)):
            self._fail(request, Failure("limit", "hub", why))
            return
        if request.op == Op.STEP:
            self._spinner = self._workers_spinner if runtime.state.sizing.driver_spin_us else None
            # Between two steps the workers need no CPU, however many they are.
            self._next_spinner = None if runtime.state.make.spin_us == 0 else self._client_spinner
        try:
            runtime.inputs.request(request, heard_ns)
        except Exception as error:
            runtime.broke(error)

    def _on_request(self, request: Incoming, holder: Holder) -> None:
        """Carry out a request to the hub itself, or one that makes a session or takes one over."""
        match request.op:
            case Op.MAKE | Op.ATTACH:
                enter = self._make if request.op is Op.MAKE else self._attach
                if (failure := enter(request, holder)) is not None:
                    self._refuse(request, holder, failure)
                    self._protocol.forget(request.token)
            case Op.HEARTBEAT:
                self._requests -= 1  # which only asks after a request
                self._protocol.answer(request, self._progress(request.token))
            case Op.HELLO:
                self._protocol.answer(request, self._welcome())
            case Op.LIST:
                self._list(request)
            case Op.STATS:
                self._protocol.answer(request, messages.Table([{**self._health(holder), **self._counters()}]))
            case Op.HEALTH:
                self._protocol.answer(request, messages.Table([self._health(holder)]))
            case Op.SESSIONS:
                seen = [each for each in self._sessions.values() if holder.owns(each.owner)]
                found = [stats.described(each, each.token in self._protocol.leases) for each in seen]
                self._protocol.answer(request, messages.Table(found))
            case Op.OBSERVE:
                self._observe(request, holder)
            case _:  # the protocol admits it only where there is a session
                raise KeyError(request.op.name)

    def _refuse(self, request: Incoming, holder: Holder, failure: Failure) -> None:
        """Refuse a request to make, take over or observe a session; one that is unknown may have been before."""
        session = b"" if request.op is Op.MAKE else request.message.session
        unknown = bool(session) and failure.code == "session_lost" and self._named(session, holder) is None
        if unknown:
            self._note_unknown(session, holder, failure.message)
            self._protocol.fail(request, failure)
        else:
            self._fail(request, failure)
        if request.op is not Op.OBSERVE:
            named: dict[str, str | int] = {"op": request.op.name, "why": shortened(failure.message, 200)}
            origin = self._access.connections.origin(request.peer)
            self._audit.write("session_unknown" if unknown else "refused", holder.name, origin, **named)

    def _note_unknown(self, session: bytes, holder: Holder, why: str) -> None:
        """Log that a client names a session that this hub has not, as after the hub was started again."""
        log.info("session_unknown", client=holder.name, session=session.hex()[:8], why=why)

    def _counters(self) -> dict[str, Any]:
        found = stats.stats(self._sessions.values(), self._protocol, self._access, self._requests)
        return {**found, "restarts": found["restarts"] + self._restarts_before}

    def _list(self, request: Incoming) -> None:
        if self._listing.names is not None:
            self._protocol.answer(request, messages.EnvNames(self._listing.names))
            return
        try:
            if not self._listing.asking:
                self._start_listing()
        except OSError as error:
            self._fail(request, Failure("limit", "hub", f"a worker cannot be started: {error.strerror}"))
        else:
            self._listed_for.append(request)

    def _make(self, request: Incoming, holder: Holder) -> Failure | None:
        """Make a session, or say why not."""
        make: Make = request.message
        # Before anything else is done for it: each name that is not offered costs a search.
        if why := self._usage.count_make(holder, self._clock.now_s()):
            return Failure("limit", "hub", why)
        if request.token in self._by_token:
            return Failure("session_lost", "session", _STILL_CLOSING)
        envs = sum(each.state.make.num_envs for each in self._sessions.values())
        found = admitted(make, self.config, self._registry, envs, holder.deploys, self._listing.names)
        if isinstance(found, Failure):
            return found
        number, name = self._last_number + 1, request.token.hex()[:8]
        hosting = hosting_of_session(make.hosting, found.settings.hosting(self.config.hosting), number)
        spares = hosting.spares or 0
        if why := self._usage.refusal(holder, make, spares, self._sessions.values()):
            return Failure("limit", "hub", why)
        if make.name in self._listing.unready:
            self._try_again(found.settings.interpreter)
        if why := self._listing.undrawn.get(found.settings.interpreter, ""):
            self._try_again(found.settings.interpreter)
            why = without_folders(why) if self._hides_folders(holder) else why
            return Failure("env_unready", "hub", f"{make.name!r} is not ready: {why}")
        self._unread.release()
        if why := found.settings.unrecordable:
            return Failure("env_unready", "hub", f"{make.name!r} is not ready: {why}")
        machine = self._machine(holder, spares)
        recycled = hosting.recycle != messages.Recycle()
        cost = self._costs.find(make)
        sizing = self._sizing(make, found, machine, cost, hosting)
        alone = hosting.shares_process is False or (sizing is not None and sizing.alone)
        if (
            alone
            and sizing is not None
            and not found.settings.vector
            and (why := lacking(make.num_envs, sizing, machine))
        ):
            return Failure("refused", "request", why)
        workers = min(machine.cpus, make.num_envs) if sizing is None else sizing.workers
        if recycled and make.autoreset_mode == "SameStep" and workers < make.num_envs:
            why = "recycle with SameStep needs a process per env: num_workers=num_envs"
            return Failure("refused", "request", why)
        if why := descriptor_guard.lack(workers + spares):
            return Failure("limit", "hub", why)
        restarts = Restarts(make.faults.restarts_max, make.num_envs, random.Random())
        limits = self.config.limits
        kept = self._replays is not None
        replays = name_beginning(make.name, holder.name, secrets.token_hex(8)) if kept else ""
        memory_max, hides_folders = limits.worker_memory_bytes_max, self._hides_folders(holder)
        libraries = None if cost is None else cost.libraries
        rules = WorkerRules(
            memory_max,
            hides_folders,
            name,
            hosting,
            replays,
            libraries,
            cost_known=cost is not None,
            alone=cost is not None and cost.alone,
            info_bytes_max=limits.info_bytes_max,
        )
        factories = -1
        try:
            make, factories = held(make)
            request = request._replace(message=make)
            state = SessionState(make, found, sizing, limits.info_bytes, machine, restarts, rules)
            tickets, budget = self._side_socket.open, self._usage.budget(holder)
            runtime = SessionRuntime(
                Holdings(number, request.token, state, self._services, tickets, holder.name, budget, factories)
            )
        except OSError as error:
            if factories >= 0:
                os.close(factories)
            return Failure("limit", "hub", f"a session cannot be made: {error.strerror}")
        self._last_number = number
        self._add_observers(runtime, make, found.settings, name)
        self._begin(runtime, request, holder)
        return None

    def _add_observers(self, runtime: SessionRuntime, make: Make, settings: EnvSettings, name: str) -> None:
        """Have replays of a session of this name kept and its episodes recorded, as the operator wishes."""
        if self._replays is not None:
            runtime.observe_by(ReplayKeeper(self._replays, runtime.number, runtime.interpreter, make.faults))
        if settings.recorded is not None:
            runtime.observe_by(self._recordings.begin(settings, make, name))

    def _begin(self, runtime: SessionRuntime, request: Incoming, holder: Holder) -> None:
        """Enter a session that was just made into the hub's tables and start its workers."""
        make: Make = request.message
        self._sessions[self._last_number] = self._by_token[request.token] = runtime
        self._liveness.check_soon(self._clock.now_s())
        self._set_timer(_LIVENESS, self._liveness.next_s)
        factories = {"factories": make.factories.hex()} if make.factories else {}
        runtime.log.info("session_made", env=make.name[:200] or "factories", num_envs=make.num_envs, **factories)
        runtime.origin = self._access.connections.origin(request.peer)
        made: dict[str, str | int] = {"env": make.name[:200], "num_envs": make.num_envs, **factories}
        self._audit.write("session_made", holder.name, runtime.origin, session=request.token.hex()[:8], **made)
        runtime.start(request)
        if holder.quotas is not None:
            self._plan_measuring()

    def _machine(self, holder: Holder, spares: int) -> Machine:
        affinity = tuple(sorted(os.sched_getaffinity(0)))
        left = self._usage.workers_left(holder, spares, self._sessions.values())
        workers_max = int(min(SHARE * min(descriptor_guard.workers_left(), processes_left()), left))
        cpus = int(min(usable_cpus(), left))  # since a session may always have a worker for each
        return Machine(affinity, cpus, has_quota(), workers_max, memory_available_bytes())

    def _sizing(
        self, make: Make, recipe: Recipe, machine: Machine, cost: StepCost | None, hosting: messages.Hosting
    ) -> WorkerCount | None:
        """Number of workers a session gets; None where that is to be seen of its first envs."""
        if make.num_workers:
            return chosen_count(make.num_envs, make.num_workers, f"num_workers={make.num_workers}")
        if recipe.settings.vector:
            return WorkerCount(1, "a vector env, which one worker steps in one call", chosen=True)
        if hosting.shares_process is False:
            return separate(make.num_envs, "one_per_process")
        if self.config.workers:
            workers = min(self.config.workers, max(1, machine.workers_max))
            return chosen_count(make.num_envs, workers, f"the hub's --workers {self.config.workers}")
        if hosting.recycle != messages.Recycle():
            workers = min(make.num_envs, max(1, machine.workers_max))
            return chosen_count(make.num_envs, workers, "a process per env, which is recycled by itself")
        return count_in_advance(make.num_envs, cost, machine, bool(hosting.shares_process))

    def _attach(self, request: Incoming, holder: Holder) -> Failure | None:
        """Give a session to this client, or say why not."""
        if why := self._usage.count_make(holder, self._clock.now_s()):
            return Failure("limit", "hub", why)
        if request.token in self._by_token:
            return Failure("session_lost", "session", _STILL_CLOSING)
        runtime = self._found(request, holder)
        if runtime is None or not runtime.state.attachable:
            why = "this hub has no such session to take over: its lease ran out, it was closed or taken over"
            return Failure("session_lost", "session", why)
        session, by = runtime.token.hex()[:8], request.token.hex()[:8]
        runtime.log.info("session_taken_over", by=by)
        self._forget(runtime.token)
        self._by_token[request.token] = self._by_token.pop(runtime.token)
        origin = self._access.connections.origin(request.peer)
        self._audit.write("session_taken_over", holder.name, origin, session=session, owner=runtime.owner, by=by)
        runtime.origin = origin
        runtime.attach(request, holder.name, self._usage.budget(holder))
        if holder.quotas is not None:
            self._plan_measuring()
        return None

    def _forget(self, token: bytes) -> None:
        """Have the protocol forget the session's token; its connections may have views of the memory to read."""
        if token in self._by_token:
            self._by_token[token].connections.update(self._protocol.connections_of(token))
        self._protocol.forget(token)

    def _found(self, request: Incoming, holder: Holder) -> SessionRuntime | None:
        """The session that the request names, if the client may see it; that it may not is noted."""
        runtime = self._named(request.message.session, holder)
        if runtime is None or holder.owns(runtime.owner):
            return runtime
        self._audit_foreign(request.peer, holder, request.op, request.message.session)
        return None

    def _named(self, session: bytes, holder: Holder) -> SessionRuntime | None:
        """The session of this token; an administrator may call it by its name, the beginning of its token."""
        if not holder.administers or len(session) != stats.SESSION_NAME_BYTES:
            return self._by_token.get(session)
        found = [each for token, each in self._by_token.items() if token.startswith(session)]
        return found[0] if len(found) == 1 else None

    def _observe(self, request: Incoming, holder: Holder) -> None:
        runtime = self._found(request, holder)
        if runtime is None or runtime.state.made is None or not runtime.arena_bytes:
            self._refuse(request, holder, Failure("session_lost", "session", "this hub has no such session to observe"))
            return
        client: object = request.peer if holder.quotas is None else holder.name
        if why := self._observations.refusal(client, runtime.observed_bytes):
            self._fail(request, Failure("limit", "hub", why))
            return
        observed, arrays = runtime.observe(request.message.described)
        self._observations.add(client, arrays)
        self._protocol.answer(request, observed, arrays)

    def _admit(self) -> None:
        while self._admitted:
            ticket, side = self._admitted.popleft()
            for runtime in self._sessions.values():
                if secrets.compare_digest(runtime.ticket, ticket):
                    runtime.inputs.connect_side(side)
                    break
            else:
                side.close()

    def _audit_foreign(self, peer: bytes, holder: Holder, op: Op, token: bytes) -> None:
        """Note a request that was refused since the session is another client's; that client is told of no session."""
        runtime, origin = self._by_token.get(token), self._access.connections.origin(peer)
        owner = "" if runtime is None else runtime.owner
        named = {"op": op.name, "session": token.hex()[:8], "owner": owner}
        self._audit.write("refused", holder.name, origin, **named, why="another client's session")

    def _progress(self, token: bytes) -> HeartbeatReply:
        """Progress of a request, for its client; of one that makes envs, the log says so, too."""
        runtime = self._by_token.get(token)
        if runtime is None or not runtime.state.making:
            return HeartbeatReply("running")
        found = runtime.state.progress
        starting = self._supervisor.starting(runtime.interpreter)
        doing = f"importing {found.importing}" if found.importing else starting
        told = {"doing": doing} if doing else {}
        runtime.log.info("session_making", phase=found.phase, built=found.built, num_envs=found.num_envs, **told)
        hides_folders = runtime.state.launcher.rules.hide_folders
        return replace(found, starting=without_folders(starting) if hides_folders else starting)

    def _fail(self, request: Incoming, failure: Failure) -> None:
        if failure.scope in ("env", "session"):
            # A token of no session is any that the client chooses, and would have a line each.
            session = {"session": request.token.hex()[:8]} if request.token in self._by_token else {}
            log.warning("request_failed", **session, **logged(failure))
        self._protocol.fail(request, failure)

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

    def _hides_folders(self, holder: Holder) -> bool:
        """True if this client is told of no folder of this machine."""
        return holder is not OWN_USER and not self.config.verbose_errors

    def _health(self, holder: Holder) -> dict[str, Any]:
        """Health of the hub, and the envs that it cannot make now, with the reasons."""
        unready = {**self._listing.unready, **self._listing.starting}
        return {
            "status": "ok" if self._service is Service.SERVING else "draining",
            "hub": f"{self.id:016x}",
            "uptime_s": time.monotonic() - self._started_s,
            "sessions": len(self._sessions),
            "loop_lag_s": self._clock.lag_s(),
            "unready": without_folders(unready) if self._hides_folders(holder) else unready,
        }


_KEY_REMOVED = Failure("session_lost", "session", "the key of its client was removed")
_OF_EARLIER_HUB = "it is of the hub that was at this address before"
_STILL_CLOSING = "the session of this token is still closing"
_STEPPING = (Phase.READY, Phase.MOVING)
