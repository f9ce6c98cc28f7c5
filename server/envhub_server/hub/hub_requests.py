"""The requests to a hub itself, and those that make a session or take one over."""

from __future__ import annotations

from envhub.errors import shortened
from envhub.protocol import messages
from envhub.protocol.hub import FIRST_OPS, HubProtocol, Incoming
from envhub.protocol.messages import SESSION_OPS, Failure, Op
from envhub_server.hub.directory import Directory
from envhub_server.hub.leases import Leases
from envhub_server.hub.offers import Offers
from envhub_server.hub.session_starter import SessionStarter
from envhub_server.hub.status import Status
from envhub_server.log import Logger
from envhub_server.memory.session_memory import UnreadObservations
from envhub_server.network.access import Access
from envhub_server.network.rights import Holder
from envhub_server.session.failure_text import logged

HUB_OPS = (frozenset(Op) - SESSION_OPS) | FIRST_OPS

log = Logger("envhub.hub")


class HubRequests:
    """Carries out the requests to one hub. It owns the observations that its clients have not read."""

    def __init__(
        self,
        protocol: HubProtocol,
        access: Access,
        directory: Directory,
        starter: SessionStarter,
        leases: Leases,
        offers: Offers,
        status: Status,
        observations_bytes_max: int,
    ) -> None:
        """Keep copies of observations that a client has not read, up to this many bytes."""
        self._protocol, self._access, self._directory = protocol, access, directory
        self._starter, self._leases, self._offers, self._status = starter, leases, offers, status
        self._observations = UnreadObservations(observations_bytes_max)

    def handle(self, request: Incoming, holder: Holder) -> None:
        """Carry out a request of this client; a bug in that is logged, and answered as a failure."""
        try:
            self._handle(request, holder)
        except Exception as error:
            log.exception("internal_error", once_per=("error",), op=request.op.name)
            self._protocol.forget(request.token)  # of a session that was never made
            self.fail(request, Failure("internal", "hub", f"a bug in the hub, which logged it: {error!r}"))

    def fail(self, request: Incoming, failure: Failure) -> None:
        """Answer with a failure, which is logged if it concerns a session or an env."""
        if failure.scope in ("env", "session"):
            # A token of no session is any that the client chooses, and would have a line each.
            session = {"session": request.token.hex()[:8]} if request.token in self._directory.by_token else {}
            # Event: A request failed; where an env raised, with the `env`, the class of the exception and its `replay`.
            log.warning("request_failed", once_per=("session", "code"), **session, **logged(failure))
        self._protocol.fail(request, failure)

    def _handle(self, request: Incoming, holder: Holder) -> None:
        answer, status = self._protocol.answer, self._status
        match request.op:
            case Op.MAKE | Op.ATTACH:
                self._begin(request, holder)
            case Op.HEARTBEAT:
                answer(request, status.progress(request.token))
            case Op.HELLO:
                answer(request, status.welcome(holder))
            case Op.LIST:
                if (failure := self._offers.answer(request)) is not None:
                    self.fail(request, failure)
            case Op.STATS:
                capacity = messages.as_map(status.capacity(holder))
                counters = {**status.health(holder), **status.counters(), "capacity": capacity}
                answer(request, messages.Table([counters]))
            case Op.HEALTH:
                answer(request, messages.Table([status.health(holder)]))
            case Op.SESSIONS:
                answer(request, messages.Table(status.sessions(holder)))
            case Op.OBSERVE:
                self._observe(request, holder)
            case _:  # the protocol admits it only where there is a session
                raise KeyError(request.op.name)

    def _begin(self, request: Incoming, holder: Holder) -> None:
        """Make a session, or give one to the client."""
        begin = self._starter.make if request.op is Op.MAKE else self._starter.attach
        if (failure := begin(request, holder)) is not None:
            self._refuse(request, holder, failure)
            self._protocol.forget(request.token)
        elif request.op is Op.MAKE:
            self._leases.check_soon()

    def _observe(self, request: Incoming, holder: Holder) -> None:
        runtime = self._directory.find(request, holder)
        if runtime is None or runtime.state.made is None or not runtime.arena_bytes:
            self._refuse(request, holder, Failure("session_lost", "session", "this hub has no such session to observe"))
            return
        client: object = request.peer if holder.quotas is None else holder.name
        if why := self._observations.refusal(client, runtime.observed_bytes):
            self.fail(request, Failure("limit", "hub", why))
            return
        observed, arrays = runtime.observe(request.message.described)
        self._observations.add(client, arrays)
        self._protocol.answer(request, observed, arrays)

    def _refuse(self, request: Incoming, holder: Holder, failure: Failure) -> None:
        """Refuse a request to make, take over or observe a session; one that is unknown may have been before."""
        session = b"" if request.op is Op.MAKE else request.message.session
        missing = failure.code == "session_lost" and self._directory.named(session, holder) is None
        unknown = bool(session) and missing
        if unknown:
            self._directory.note_unknown(request.peer, session, holder, failure.message)
            self._protocol.fail(request, failure)
            return
        self.fail(request, failure)
        if request.op is not Op.OBSERVE:
            why = shortened(failure.message, 200)
            log.warning(
                "request_refused", **self._access.who(holder, request.peer), op=request.op.name, why=why, audit=True
            )
