"""Actions of operators on sessions and on the hub: who may carry them out, and one answer to each, now or later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from envhub.errors import brief
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure, HeartbeatReply, Op, Operate, Table
from envhub.protocol.prelude import Frame
from envhub_server.hub.biography import KILLED, Ending, in_one_line
from envhub_server.hub.directory import Directory
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.hub.status import Row, SessionTable
from envhub_server.log import Logger
from envhub_server.network.access import Access
from envhub_server.network.connections import Holder

ORDERS_MAX = 32  # of one client, whose copies are known
LOOKS = frozenset(["stack", "frame"])  # change nothing
AT_END = "drain_wait"  # a drain that is answered when the hub has ended
HUB_ACTIONS = frozenset(["drain", AT_END, "reload"])  # on the hub itself, for its own user and for administrators

log = Logger("envhub.hub")


class Order(NamedTuple):
    """An order of a client, which may act on the session."""

    request: Incoming
    message: Operate  # of the request
    holder: Holder
    runtime: SessionRuntime | None  # None for an action on the hub

    @property
    def why(self) -> str:
        return in_one_line(self.message.why)

    @property
    def session(self) -> SessionRuntime:
        assert self.runtime is not None
        return self.runtime


Answer = list[Row] | Failure
Action = Callable[[Order], Answer | None]  # None: ``Operations.answer`` is called later


class Operations:
    """The actions of one hub, by name; ``actions`` may be added to."""

    def __init__(self, protocol: HubProtocol, directory: Directory, access: Access, table: SessionTable) -> None:
        self._protocol, self._directory, self._access, self._table = protocol, directory, access, table
        self.actions: dict[str, Action] = {"end": self._end}
        self._orders: dict[tuple[str, bytes], tuple[Incoming, Answer | None]] = {}  # the last ones, and their answers
        self._ending: dict[int, list[Order]] = {}  # by the number of a session, those that wait for its end
        self.on_ended: Callable[[SessionRuntime], None] = lambda runtime: None  # answers what else waits for a session

    # --- orders -------------------------------------------------------------------------------------------------------

    def handle(self, request: Incoming, holder: Holder) -> None:
        """Carry an order out, unless it is a copy; its client sends it again each second until it is answered."""
        key = holder.name, request.message.id
        if key in self._orders:
            _, answer = self._orders[key]
            self._orders[key] = request, answer
            self._send(request, answer)
            return
        order = self._admit(request, holder)
        if isinstance(order, Failure):  # and so are its copies
            self._send(request, order)
            return
        own = [each for each in self._orders if each[0] == holder.name]
        if len(own) >= ORDERS_MAX:
            del self._orders[own[0]]
        self._orders[key] = request, None
        if (answer := self.actions[request.message.action](order)) is not None:
            self.answer(order, answer)

    def answer(self, order: Order, answer: Answer, frames: Sequence[Frame] = ()) -> None:
        """Answer an order, also after its action has returned None; ``frames`` come with an answer that is not kept."""
        key = order.holder.name, order.message.id
        last, _ = self._orders.get(key, (order.request, None))  # its client may have connected again
        self._orders[key] = last, answer
        if order.message.action in LOOKS:  # which may be large, and may be done again
            del self._orders[key]
        self._send(last, answer, frames)

    def _send(self, request: Incoming, answer: Answer | None, frames: Sequence[Frame] = ()) -> None:
        if isinstance(answer, Failure):
            self._protocol.fail(request, answer)
        elif answer is not None:
            self._protocol.answer(request, Table(answer), frames)
        else:  # so that its client knows that it was not lost
            self._protocol.answer(request._replace(op=Op.HEARTBEAT), HeartbeatReply("running"))

    # --- rights -------------------------------------------------------------------------------------------------------

    def _admit(self, request: Incoming, holder: Holder) -> Order | Failure:
        """The order, if there is such an action and this client may do it; else why not. The only check of rights."""
        message: Operate = request.message
        runtime, refusal = None, None
        if message.action not in self.actions:
            text = f"this hub knows no action {brief(message.action)}; it has {', '.join(sorted(self.actions))}"
            refusal = Failure("refused", "request", text)
        elif not holder.may(Op.OPERATE):
            refusal = Failure("not_permitted", "hub", "this key lets its client observe, not use, the hub")
        elif message.action in HUB_ACTIONS and not holder.administers:
            text = f"{message.action} takes the hub's own user, by ipc, or a key with the right admin"
            refusal = Failure("not_permitted", "hub", text)
        elif message.action not in HUB_ACTIONS:
            runtime = self._directory.operated(message.session, holder)
            refusal = self._missing(message, holder) if runtime is None else None
        if refusal is None:
            return Order(request, message, holder, runtime)
        who, op = self._access.who(holder, request.peer), message.action if message.action in self.actions else ""
        fields = {"op": op, "session": message.session[:8], "why": refusal.message}
        log.warning("request_refused", **who, **fields, audit=True)
        return refusal

    def _missing(self, message: Operate, holder: Holder) -> Failure:
        """The refusal of a session that is not there for this client, which learns nothing of others' sessions."""
        name = message.session[:8]
        text = f"this hub has no session {brief(name)} of yours; sessions() shows those that it has"
        for row in self._table.ended_rows(holder, name):
            text = f"session {name} has ended {row['ended_s']:.0f} s ago, by {row['by']}: {row['why']}"
        return Failure("session_lost", "session", text)

    # --- actions ------------------------------------------------------------------------------------------------------

    def _end(self, order: Order) -> None:
        """End a session at once, whatever it is at; it is answered when the session has ended."""
        runtime = order.session
        self._ending.setdefault(runtime.number, []).append(order)
        runtime.abandon(Ending(order.holder.actor, order.why or "no reason was given", KILLED))

    def ended(self, runtime: SessionRuntime, row: Row) -> None:
        """Answer those who have ended this session."""
        for order in self._ending.pop(runtime.number, ()):
            self.answer(order, [row])
        self.on_ended(runtime)

    def hub_ended(self, row: Row) -> None:
        """Answer those who wait for the end of the hub."""
        for request, answer in self._orders.values():
            if answer is None and request.message.action == AT_END:
                self._send(request, [row])
