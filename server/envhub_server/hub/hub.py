"""The hub: one loop that waits for sockets, workers, bells and time, and hands each event to whom it concerns.

::

    ROUTER ──frames──▶ HubProtocol ──requests──┐
    workers ──messages and ends────────────────┼──▶ events ──▶ SessionRuntime ──methods──▶ SessionMachine
    bells, side sockets, deadlines ────────────┘                                                │
    ROUTER ◀──frames── HubProtocol ◀──answers──┬── SessionRuntime ◀──effects────────────────────┘
    workers, arena ◀───────────────────────────┘

Everything that happens to a session goes through one queue of events, in the order in which it happened. Nothing here
blocks but the wait itself, so sessions never wait for each other's envs.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import secrets
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import envhub
from envhub.arena.spin import Spinner, spin_us
from envhub.protocol.hub import SHUTTING_DOWN, HubProtocol, Incoming
from envhub.protocol.messages import Op
from envhub.transport.sockets import Router
from envhub.values import codec
from envhub_server import loop
from envhub_server.catalog.listing import LISTING
from envhub_server.catalog.registry import EnvFactsTable
from envhub_server.config import HubConfig, has_quota, usable_cpus
from envhub_server.hub.directory import Directory
from envhub_server.hub.gateway import Gateway
from envhub_server.hub.hub_requests import HUB_OPS, HubRequests, Offers
from envhub_server.hub.replay_keeper import ReplayWriter
from envhub_server.hub.resources import ROWS_DONE, STEP_REQUESTED, Services
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.log import Logger
from envhub_server.loop import LAG_MIN_S, BackgroundThread, Clock, Loop, Ready, Schedule
from envhub_server.memory.session_memory import UnreadMemory
from envhub_server.network import descriptor_guard
from envhub_server.network.access import Access
from envhub_server.network.connections import Holder
from envhub_server.network.listener import SideSocket
from envhub_server.processes.interpreter import ZygoteProcess, clean_environment
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Events, WorkerEvent
from envhub_server.session.machine import SessionMachine
from envhub_server.session.state import Phase

UNFINISHED_SHARE = 1.5  # bytes of unfinished messages that a client may hold, in largest frames

_STEPPING = (Phase.READY, Phase.MOVING)

log = Logger("envhub.hub")


class Service(enum.Enum):
    """Progress of the hub towards its end."""

    SERVING = "serving"
    DRAINING = "draining"  # requests under way are answered, then the envs are closed
    KILLING = "killing"  # no env gets more time


class Hub:
    """One hub: ``run`` it, within ``opened``, until it is stopped.

    It owns the loop and the queue of events, and ends both. Its components own everything else.
    """

    def __init__(
        self, config: HubConfig, zygote: ZygoteProcess | None = None, listed: Callable[[Hub], None] = lambda hub: None
    ) -> None:
        """Make a hub with this configuration. ``zygote`` already runs; without one the hub starts it once it needs it.

        ``listed`` is called once, when it is known which envs are ready.

        Raises:
            DescriptorsShort: this process may open too few files to serve a client.
        """
        descriptor_guard.check_start(descriptor_guard.PER_HUB)
        self.config = config  # its settings
        self.id = secrets.randbits(64) or 1  # tells it from other hubs at its addresses
        self.addresses: list[str] = []  # at which it listens, with the real ports
        self._service = Service.SERVING
        self._clock = Clock()
        self._schedule = Schedule(self._clock)
        self._loop = Loop(self._clock, self._schedule)
        self._poller = self._loop.poller
        self._turn_ended_s = 0.0  # when the last turn had handled its events
        self._events: Events = deque()
        environ = os.environ if config.private else clean_environment(os.environ, config.worker_env)
        self._supervisor = Supervisor(self._poller, self._events, environ, config.private, zygote)
        self._make_spinners()
        self._make_network()
        self._make_sessions(partial(listed, self))

    def _make_spinners(self) -> None:
        hub_spin_us = spin_us(2, usable_cpus(self.config.cpus), has_quota())
        self._spun_ready: Ready = []  # descriptors that became ready in a spin
        self._workers_spinner, self._client_spinner = (
            Spinner(hub_spin_us, time.perf_counter_ns) if hub_spin_us else None for _ in range(2)
        )
        self._spinner: Spinner | None = None  # the one for what comes next: a step's end, or the next step
        self._next_spinner: Spinner | None = None  # the one for what comes after the step's end

    def _make_network(self) -> None:
        config, loop = self.config, self._loop
        unfinished_bytes_max = int(UNFINISHED_SHARE * config.message_bytes_max)
        access = self._access = Access(config.keys, config.insecure, unfinished_bytes_max)
        headers = codec.KNOWN if config.private else codec.STRANGERS
        lease_s = config.lease
        protocol = self._protocol = HubProtocol(self.id, lease_s, config.sessions_max, headers)
        directory = self._directory = Directory(protocol, access)
        self._unread = UnreadMemory(config.message_bytes_max)
        router = self._router = Router()
        self._gateway = Gateway(
            router, access, self._supervisor, directory, self._unread, loop, protocol, lease_s, unfinished_bytes_max
        )

    def _make_sessions(self, on_listed: Callable[[], None]) -> None:
        config, protocol, access, directory = self.config, self._protocol, self._access, self._directory
        self._compression = BackgroundThread(self._poller, "envhub-compression")
        services = Services(
            poller=self._poller,
            supervisor=self._supervisor,
            protocol=protocol,
            clock=self._clock,
            events=self._events,
            env_facts=EnvFactsTable(),
            unread=self._unread,
            transferred=directory.transferred,
            forget=directory.forget,
            compression=self._compression,
        )
        self._replays: ReplayWriter | None = None
        if config.replays is not None and config.replays_bytes_max and config.trace_bytes_max:
            self._replays = ReplayWriter(config.replays, config.replays_bytes_max, self._poller)
        # Tickets and connections of clients that the side socket has accepted.
        self._admitted: deque[tuple[bytes, socket.socket]] = deque()
        self._side_socket = SideSocket(self._poller, self._admitted)
        offers = self._offers = Offers(config, self._supervisor, protocol, self._loop, on_listed)
        self._requests = HubRequests(
            config,
            services,
            access,
            directory,
            self._gateway,
            offers,
            self._replays,
            self._side_socket,
        )
        # For the loop, which reads them at each step.
        self._sessions, self._by_token = directory.by_number, directory.by_token

    # --- opening and closing ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Bind every address and heed signals, see ``_on_signal``.

        Afterwards its sockets are closed and its processes have ended.

        Raises:
            AddressError: an address is malformed, in use, or open to other machines without keys or ``insecure``.
            KeysError: the keys cannot be used, or let strangers in.
        """
        with (
            contextlib.closing(self._poller),
            loop.handled(self._poller, self._on_signal, self._supervisor.reap_orphans, self.config.program is None),
        ):
            try:
                self._open()
                yield
            finally:
                self._close()

    def _open(self) -> None:
        self._router.open(self.config.message_bytes_max)
        self.addresses = self._gateway.open(self.config.bind)
        for bound in self.addresses:
            self._side_socket.listen(bound)
        for descriptor in (self._router.descriptor, self._router.monitor_descriptor):
            self._poller.wake_on(descriptor)
        self._gateway.update()  # libzmq signals only what comes after the socket was found to be empty
        descriptor_guard.check_start(descriptor_guard.PER_ZYGOTE if self.config.program is None else 0)
        if self.config.program is not None:
            for descriptor in self.config.program:
                self._poller.register(descriptor, self)
        else:
            # Event: The hub listens. `configuration` has the settings that differ from the defaults.
            log.info(
                "hub_started",
                name=self.config.name_of_hub,
                version=envhub.__version__,
                pid=os.getpid(),
                addresses=self.addresses,
                configuration=self.config.said(),
            )
            self._offers.start()  # also so that the first client finds a zygote; a program's has its own environment

    def _close(self) -> None:
        self._abandon_all()
        self._supervisor.close()
        self._compression.close()
        if self._replays is not None:
            self._replays.close()
        self._side_socket.close()
        if self._router.is_open:
            self._router.close()
            self._gateway.close()
            self._router.context.term()
            if self._access.proxy is not None:  # after the ROUTER, whose last messages it passes on
                self._access.proxy.close()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the hub is stopped, then drain and return.

        Raises:
            EnvNotFound: the hub is to offer what can never be made, or a required env is not ready.
        """
        self._turn_ended_s = self._clock.now_s()
        while self._service is Service.SERVING or self._sessions:
            self._turn()
        self._gateway.send()
        if self._offers.listing.refused is not None:
            raise self._offers.listing.refused

    def _turn(self) -> None:
        # Asked before each wait: a send, too, may take in what libzmq has signalled by the socket's descriptor.
        if self._router.is_readable():
            arrived, ready = True, self._poller.wait(0)
        elif self._spinner is not None and self._spinner.spin(self._poll):
            arrived, ready = False, self._spun_ready
        else:
            wake_s = self._schedule.wake_s
            arrived, ready = (
                False,
                self._poller.wait(None if wake_s == math.inf else max(0.0, wake_s - self._turn_ended_s)),
            )
        # The time is the clock's ``now_s``, written out: a turn is what every step waits for.
        began_s, has_other_events = time.monotonic() - self._clock.stopped_s, False
        wake_s = self._schedule.wake_s
        if began_s >= wake_s:  # before anything is handled: a deadline that is set then counts from now
            began_s = self._on_wake(max(wake_s, self._turn_ended_s))
        for descriptor, _ in ready:
            if descriptor == self._router.monitor_descriptor:  # first: connections may come faster than turns
                self._gateway.update()
            elif descriptor == self._router.descriptor:
                arrived = True
            else:
                has_other_events = True
        if has_other_events:  # first: a request may close a descriptor whose number is then reused
            self._poller.handle(ready)
            while self._admitted:
                self._directory.connect_side(*self._admitted.popleft())
            if self._events:
                self._pump()
        if arrived:
            self._on_message()
        self._turn_ended_s = handled_s = time.monotonic() - self._clock.stopped_s
        if handled_s - began_s >= LAG_MIN_S:
            self._clock.note(handled_s, handled_s - began_s)
        if self._schedule.wake_s <= handled_s:
            self._on_time(max(self._schedule.wake_s, began_s))  # the process may have been stopped

    def _on_wake(self, planned_s: float) -> float:
        """See for how long the process was stopped, which was to go on at ``planned_s``; returns the time."""
        if stopped_s := self._clock.woke(planned_s):
            # Event: The hub goes on after it was stopped, as by SIGSTOP. No deadline has run meanwhile.
            log.warning("hub_suspended", stopped_s=round(stopped_s, 1), note="no deadline runs meanwhile")
        return self._clock.now_s()

    def _poll(self) -> bool:
        self._spun_ready = self._poller.wait(0)
        return bool(self._spun_ready)

    def _on_time(self, planned_s: float) -> None:
        self._schedule.call_due(self._on_wake(planned_s))
        self._pump()
        self._turn_ended_s = self._clock.now_s()
        self._schedule.plan()

    def on_ready(self, descriptor: int) -> None:
        """Stop when the hub's program says so; at once when it has ended, so that no client is left to answer."""
        assert self.config.program is not None
        self._poller.unregister(descriptor)
        if descriptor == self.config.program[0]:
            self._kill("its program ended")
            return
        with contextlib.suppress(ConnectionResetError):
            if os.read(descriptor, 1):  # else the program has ended, or has given the hub up
                self.stop("its program stops it")

    # --- requests ---------------------------------------------------------------------------------------------------

    def _on_message(self) -> None:
        received = self._gateway.receive()
        if received is not None:
            self._dispatch(*received)
        if self._events or self._protocol.outgoing:
            self._pump()

    def _dispatch(self, request: Incoming, holder: Holder) -> None:
        runtime = self._by_token.get(request.token)
        if runtime is None or request.op in HUB_OPS:
            self._requests.handle(request, holder)
            return
        runtime.heard_ns = time.monotonic_ns()
        if request.op is Op.STEP:
            self._spinner = self._workers_spinner if runtime.state.sizing.driver_spin_us else None
            # Between two steps the workers need no CPU, however many they are.
            self._next_spinner = None if runtime.state.make.spin_us == 0 else self._client_spinner
        try:
            runtime.request(request)
        except Exception as error:
            runtime.broke(error)

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
                if runtime.compressing is not None:  # its next events wait until the reply is sent
                    continue
                # Between two steps the deadline is not planned again: a timer that comes too early does no harm.
                steps = (event is STEP_REQUESTED or event is ROWS_DONE) and runtime.state.phase in _STEPPING
                if not steps or runtime.deadline_s == math.inf:
                    self._after(runtime)
            except Exception as error:  # what a client wrote into its memory may raise, too
                if not isinstance(event, tuple) or event[0] is not SessionMachine.on_abandoned:
                    runtime.broke(error)
                    continue
                log.exception("internal_error", once_per=("error",))
                runtime.discard()
                self._after(runtime)
        if self._protocol.outgoing:
            self._spinner = self._next_spinner
            self._gateway.send()

    def _after(self, runtime: SessionRuntime) -> None:
        if runtime.state.phase is not Phase.ENDED:
            runtime.deadline_s = runtime.state.next_deadline_s()
            self._schedule.set(runtime.elapse, runtime.deadline_s)
            return
        self._spinner = self._next_spinner
        self._gateway.send()
        self._directory.remove(runtime)
        self._unread.release()
        self._gateway.plan_unread()
        self._schedule.set(runtime.elapse, math.inf)
        # Event: A session has ended, and all that it had is freed.
        log.info("session_ended", session=runtime.token.hex()[:8], client=runtime.owner, audit=True)
        del runtime.state  # which refers to the runtime

    def _on_listing(self, event: WorkerEvent) -> None:
        self._offers.listing.handle(event)
        if self._offers.listing.refused is not None and self._service is Service.SERVING:
            self.stop(str(self._offers.listing.refused))
        self._offers.report()

    # --- what the operator sees and does ------------------------------------------------------------------------------

    def example(self) -> str:
        return self._offers.listing.example()

    def unready(self) -> dict[str, str]:
        return dict(self._offers.listing.unready)

    def _on_signal(self, name: str) -> None:
        """SIGTERM, SIGINT and SIGHUP stop the hub; SIGUSR1 and SIGQUIT log its stacks, SIGUSR2 its counters."""
        if name in ("SIGUSR1", "SIGQUIT"):
            for identity, frame in sys._current_frames().items():
                # Event: The Python stack of a thread of the hub, after SIGUSR1 or SIGQUIT.
                log.info("stack", signal=name, thread=identity, stack="".join(traceback.format_stack(frame)))
        elif name == "SIGUSR2":
            # Event: The counters of `stats()`, after SIGUSR2.
            log.info("counters", signal=name, **self._requests.counters())
        else:
            self.stop(name)

    def stop(self, why: str) -> None:
        """Begin to drain: running requests end and are answered, then envs are closed; asked twice, kill at once."""
        if self._service is not Service.SERVING:
            self._kill(why)
            return
        self._begin_end(why, Service.DRAINING)
        by_s = self._clock.now_s() + self.config.drain_timeout
        self._directory.drain(by_s, by_s + self.config.drain_close_timeout)

    def _kill(self, why: str) -> None:
        self._begin_end(why, Service.KILLING)
        self._abandon_all()

    def _begin_end(self, why: str, service: Service) -> None:
        # Event: The hub was told to stop, by the signal or for the reason `why`; a second line is of a second signal.
        log.info("stopping", why=why, sessions=len(self._sessions))
        self._protocol.draining = True
        self._service = service

    def _abandon_all(self) -> None:
        self._directory.abandon_all(SHUTTING_DOWN)
        self._pump()
