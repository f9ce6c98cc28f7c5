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
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import envhub
from envhub.arena.spin import Spinner, spin_us
from envhub.protocol.hub import SHUTTING_DOWN, HubProtocol, Incoming
from envhub.protocol.messages import Failure, Op
from envhub.transport.sockets import Router
from envhub.values import codec
from envhub_server import loop
from envhub_server.catalog.listing import LISTING
from envhub_server.config import HubConfig, has_quota, reloaded, usable_cpus
from envhub_server.hub.biography import KILLED, Ending
from envhub_server.hub.directory import Directory
from envhub_server.hub.gateway import Gateway
from envhub_server.hub.hub_requests import HUB_OPS, HubRequests
from envhub_server.hub.operations import AT_END, Answer, Order
from envhub_server.hub.replay_keeper import ReplayWriter
from envhub_server.hub.resources import ROWS_DONE, STEP_REQUESTED, Services
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.log import log, set_level
from envhub_server.loop import LAG_MIN_S, BackgroundThread, Loop, Ready
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
from envhub_server.systemd import ServiceManager

UNFINISHED_SHARE = 1.5  # bytes of unfinished messages that a client may hold, in largest frames

_STEPPING = (Phase.READY, Phase.MOVING)


class Service(enum.Enum):
    """Progress of the hub towards its end."""

    SERVING = "serving"
    EMPTYING = "emptying"  # no session is made any more; it ends with the last one
    DRAINING = "draining"  # requests under way are answered, then the envs are closed
    KILLING = "killing"  # no env gets more time


class Hub:
    """One hub: ``run`` it, within ``opened``, until it is stopped.

    It owns the loop and the queue of events, and ends both. Its components own everything else.
    """

    def __init__(
        self,
        config: HubConfig,
        zygote: ZygoteProcess | None = None,
        listed: Callable[[Hub], None] = lambda hub: None,
        manager: ServiceManager | None = None,
        reread: Callable[[], HubConfig] | None = None,
    ) -> None:
        """Make a hub with this configuration. ``zygote`` already runs; without one the hub starts it once it needs it.

        ``listed`` is called once, when it is known which envs are ready. ``manager`` is told what the hub does.
        ``reread`` reads the configuration again, and raises ``ValueError``; without it the hub's own cannot change.

        Raises:
            DescriptorsShort: this process may open too few files to serve a client.
        """
        descriptor_guard.check_start(descriptor_guard.PER_HUB)
        self.config = config  # its settings, which are others after ``reload``
        self._reread, self._reloads, self._reload_refused = reread, 0, ""
        self.id = secrets.randbits(64) or 1  # tells it from other hubs at its addresses
        self.addresses: list[str] = []  # at which it listens, with the real ports
        self._service = Service.SERVING
        self._manager = manager or ServiceManager({})
        self._shutdown, self._drained_by = SHUTTING_DOWN, "hub"  # what clients of its last sessions are told
        self._cut = 0  # sessions that did not end by themselves
        self._loop = loop = Loop()
        self._clock, self._schedule, self._poller = loop.clock, loop.schedule, loop.poller
        self._iteration_ended_s = 0.0  # when the last iteration had handled its events
        self._events: Events = deque()
        environ = os.environ if config.private else clean_environment(os.environ, config.worker_env)
        self.supervisor = Supervisor(self._loop, self._events, environ, config.private, zygote)
        self._has_terminal = os.isatty(0)
        hub_spin_us = spin_us(2, usable_cpus(config.cpus), has_quota())
        self._spun_ready: Ready = []  # descriptors that became ready in a spin
        self._workers_spinner, self._client_spinner = (
            Spinner(hub_spin_us, time.perf_counter_ns) if hub_spin_us else None for _ in range(2)
        )
        self._spinner: Spinner | None = None  # the one for what comes next: a step's end, or the next step
        self._next_spinner: Spinner | None = None  # the one for what comes after the step's end
        self._make_network()
        self._make_sessions(partial(listed, self))

    def _make_network(self) -> None:
        config = self.config
        access = self._access = Access(config.keys, config.insecure, int(UNFINISHED_SHARE * config.message_bytes_max))
        headers = codec.KNOWN if config.private else codec.STRANGERS
        protocol = self._protocol = HubProtocol(self.id, config.lease, config.sessions_max, headers)
        directory = self._directory = Directory(protocol, access)
        self._unread = UnreadMemory(config.message_bytes_max)
        router = self._router = Router()
        self._gateway = Gateway(router, self.supervisor, directory, self._unread)

    def _make_sessions(self, on_listed: Callable[[], None]) -> None:
        config, protocol, directory = self.config, self._protocol, self._directory
        self._compression = BackgroundThread(self._poller, "envhub-compression")
        self._replays: ReplayWriter | None = None
        if config.replays is not None:
            self._replays = ReplayWriter(config.replays, config.replays_bytes_max, self._poller)
        self._side_socket = SideSocket(self._poller, directory.connect_side)
        services = Services(
            loop=self._loop,
            supervisor=self.supervisor,
            protocol=protocol,
            events=self._events,
            unread=self._unread,
            side_socket=self._side_socket,
            transferred=directory.transferred,
            forget=directory.forget,
            compression=self._compression,
            replays=self._replays,
        )
        self._requests = HubRequests(config, services, directory, self._gateway, on_listed)
        actions = self._requests.operations.actions
        actions.update({AT_END: self._drain}, drain=self._drain, reload=lambda order: self.reload(order.holder.actor))
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
            loop.handled(self._poller, self._on_signal, self.supervisor.reap_orphans, self.config.program is None),
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
                self._poller.register(descriptor, self.on_ready)
        else:
            own = {"name": self.config.name_of_hub, "version": envhub.__version__, "pid": os.getpid()}
            # Event: The hub listens. `configuration` has the settings that differ from the defaults.
            log.info("hub_started", **own, addresses=self.addresses, configuration=self.config.to_builtins())
            self._requests.start_listing()  # and the first client finds a zygote; a program's has its own environment

    def _close(self) -> None:
        self._abandon_all()
        self.supervisor.close()
        self._compression.close()
        if self._replays is not None:
            self._replays.close()
        self._side_socket.close()
        if self._router.is_open:
            self._requests.operations.hub_ended({"cut": self._cut})
            self._gateway.send()
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
        self._iteration_ended_s = self._clock.now_s()
        self._manager.ready(self._loop, self._status)
        while self._service is Service.SERVING or self._sessions:
            self._iterate()
        self._gateway.send()
        self._manager.tell("STOPPING=1")  # not before, by a drain: from then on systemd waits for TimeoutStopSec
        if self._requests.listing.refused is not None:
            raise self._requests.listing.refused

    def _iterate(self) -> None:
        # Asked before each wait: a send, too, may take in what libzmq has signalled by the socket's descriptor.
        if self._router.is_readable():
            arrived, ready = True, self._poller.wait(0)
        elif self._spinner is not None and self._spinner.spin(self._poll):
            arrived, ready = False, self._spun_ready
        else:
            wake_s = self._schedule.wake_s
            wait_s = None if wake_s == math.inf else max(0.0, wake_s - self._iteration_ended_s)
            arrived, ready = False, self._poller.wait(wait_s)
        # The time is the clock's ``now_s``, written out: an iteration is what every step waits for.
        began_s, has_other_events = time.monotonic() - self._clock.stopped_s, False
        wake_s = self._schedule.wake_s
        if began_s >= wake_s:  # before anything is handled: a deadline that is set then counts from now
            began_s = self._on_wake(max(wake_s, self._iteration_ended_s))
        for descriptor, _ in ready:
            if descriptor == self._router.monitor_descriptor:  # first: connections may come faster than turns
                self._gateway.update()
            elif descriptor == self._router.descriptor:
                arrived = True
            else:
                has_other_events = True
        if has_other_events:  # first: a request may close a descriptor whose number is then reused
            self._poller.handle(ready)
            if self._events:
                self._pump()
        if arrived:
            self._on_message()
        self._iteration_ended_s = handled_s = time.monotonic() - self._clock.stopped_s
        if handled_s - began_s >= LAG_MIN_S:
            self._clock.add_lag(handled_s, handled_s - began_s)
        if self._schedule.wake_s <= handled_s:
            # The process may have been stopped.
            self._schedule.call_expired(self._on_wake(max(self._schedule.wake_s, began_s)))
            self._pump()
            self._iteration_ended_s = self._clock.now_s()

    def _on_wake(self, planned_s: float) -> float:
        """See for how long the process was stopped, which was to go on at ``planned_s``; returns the time."""
        if stopped_s := self._clock.woke(planned_s):
            # Event: The hub goes on after it was stopped, as by SIGSTOP. No deadline has run meanwhile.
            log.warning("hub_suspended", stopped_s=round(stopped_s, 1), note="no deadline runs meanwhile")
        return self._clock.now_s()

    def _poll(self) -> bool:
        self._spun_ready = self._poller.wait(0)
        return bool(self._spun_ready)

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
        runtime.last_request_ns = time.monotonic_ns()
        if request.op is Op.STEP:
            self._spinner = self._workers_spinner if runtime.state.building.driver_spin_us else None
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
        self._requests.operations.ended(runtime, self._requests.table.ended(runtime))
        self._unread.release()
        self._gateway.plan_unread()
        self._schedule.set(runtime.elapse, math.inf)
        del runtime.state  # which refers to the runtime

    def _on_listing(self, event: WorkerEvent) -> None:
        self._requests.listing.handle(event)
        if self._requests.listing.refused is not None and self._service is Service.SERVING:
            self.stop(str(self._requests.listing.refused))
        self._requests.report_names()

    # --- what the operator sees and does ------------------------------------------------------------------------------

    def example(self) -> str:
        return self._requests.listing.example()

    def unready(self) -> dict[str, str]:
        return dict(self._requests.listing.unready)

    def _status(self) -> str:
        sessions, unready = self._sessions.values(), self.unready()
        envs = sum(each.state.make.num_envs for each in sessions)
        text = f"{self._service.value} on {' '.join(self.addresses)}: {len(sessions)} sessions, {envs} envs"
        text += f"; unready: {', '.join(unready)}" if unready else ""
        return f"{text}; reload refused: {self._reload_refused}" if self._reload_refused else text

    def _on_signal(self, name: str) -> None:
        """SIGTERM and SIGINT stop the hub, SIGHUP has it read its configuration again, the others log what it is at."""
        if name in ("SIGUSR1", "SIGQUIT"):
            for identity, frame in sys._current_frames().items():
                # Event: The Python stack of a thread of the hub, after SIGUSR1 or SIGQUIT.
                log.info("stack", signal=name, thread=identity, stack="".join(traceback.format_stack(frame)))
        elif name == "SIGUSR2":
            # Event: The counters of `stats()`, after SIGUSR2.
            log.info("counters", signal=name, **self._requests.counters())
        elif name == "SIGHUP" and os.isatty(0) == self._has_terminal:
            self._manager.reloading()
            self.reload(name)
            self._manager.tell("READY=1")
        else:  # also SIGHUP of a terminal that was closed
            self.stop(name)

    def reload(self, by: str) -> list[dict[str, Any]] | Failure:
        """Read the configuration again; return a row of what changes. What cannot be used is refused whole."""
        self._reloads += 1  # which is in the log's lines, since equal ones are written once
        try:
            if self._reread is None:
                raise ValueError("a private hub has no file: its settings are those of its program")
            config, changed, waiting = reloaded(self.config, self._reread())
        except (ValueError, OSError) as error:  # such as of a working directory that was removed
            # Event: The configuration was not read again, for the reason `why`: the hub goes on with the former one.
            log.error("reload_refused", by=by, reloads=self._reloads, why=str(error), audit=True)
            self._reload_refused = str(error)
            return Failure("refused", "request", f"{error}; the hub goes on with the configuration that it has")
        self.config, self._reload_refused = config, ""
        self._requests.use(config)
        changed |= {f"key {name}": [None, change] for name, change in self._access.read_keys()}
        tell = log.warning if waiting else log.info
        names = {"changed": [*changed], "needs_restart": [*waiting]}
        # Event: The configuration was read again. `changed` holds from now on, `needs_restart` from a restart on.
        tell("reloaded", by=by, reloads=self._reloads, **names, audit=True)
        set_level(config.log_level)
        return [{"changed": changed, "needs_restart": waiting}]

    def stop(self, why: str) -> None:
        """Begin to drain: running requests end and are answered, then envs are closed; asked twice, kill at once."""
        if self._service in (Service.DRAINING, Service.KILLING):
            self._kill(why)
            return
        self._begin_end(why, Service.DRAINING)
        by_s = self._clock.now_s() + self.config.drain_timeout
        self._directory.drain(by_s, by_s + self.config.drain_close_timeout, self._shutdown, self._drained_by)

    def _kill(self, why: str) -> None:
        self._begin_end(why, Service.KILLING)
        self._abandon_all()

    def _begin_end(self, why: str, service: Service) -> None:
        # Event: The hub was told to stop, by the signal or for the reason `why`; a second line is of a second signal.
        log.info("stopping", why=why, sessions=len(self._sessions))
        self._protocol.draining, self._protocol.stopping = self._shutdown, True
        self._service, self._cut = service, max(self._cut, len(self._sessions))
        self._manager.tell("STOPPING=1")

    def _abandon_all(self) -> None:
        for runtime in self._directory.sessions:
            runtime.abandon(Ending(self._drained_by, self._shutdown.message, KILLED), self._shutdown)
        self._pump()

    def _drain(self, order: Order) -> Answer | None:
        """Make no session any more, and end with the last one, or as by SIGTERM at the deadline of the last order."""
        if self._service not in (Service.SERVING, Service.EMPTYING):
            return self._shutdown
        self._service = Service.EMPTYING
        by, why = order.holder.actor, order.why or "no reason was given"
        deadline_s = order.message.deadline_s or None
        end = "ends with its last one" if deadline_s is None else f"ends with its last one, or in {deadline_s:g} s"
        self._drained_by = by
        self._shutdown = Failure("draining", "hub", f"the hub is shutting down, drained by {by}: {why}")
        text = f"the hub drains, by {by}: {why}; it makes no session any more, and {end}"
        self._protocol.draining = Failure("draining", "hub", f"{text}: use another hub, or this one once it is back")
        # Event: The hub drains by an order of `by`: it makes no session any more, and ends with the last one.
        log.warning("draining", by=by, why=why, deadline_s=deadline_s, sessions=len(self._sessions), audit=True)
        for runtime in self._sessions.values():
            self._protocol.notice(runtime.token, text)
        at_s = math.inf if deadline_s is None else self._clock.now_s() + deadline_s
        self._schedule.set(self._end_drain, at_s)
        self._manager.tell()
        row = {"sessions": len(self._sessions), "deadline_s": deadline_s, "by": by, "why": why}
        return None if order.message.action == AT_END else [row]

    def _end_drain(self) -> None:
        if self._service is Service.EMPTYING:
            self.stop("the deadline of its drain has come")
