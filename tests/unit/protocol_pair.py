"""A client's and a hub's half of the protocol, joined by a network that a test controls message by message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envhub.protocol import messages
from envhub.protocol.client import ClientProtocol, Reply
from envhub.protocol.hub import LEASE_S, SESSIONS_MAX, HubProtocol, Incoming
from envhub.protocol.messages import (
    Call,
    Close,
    Done,
    EnvNames,
    Failure,
    HeartbeatReply,
    Hello,
    Made,
    Make,
    Op,
    Reset,
    Step,
    Welcome,
)
from envhub.protocol.prelude import Prelude

TOKEN = bytes(range(16))
HUB_ID = 0x0123456789ABCDEF

MADE = Made(2, 1, [b"observations"], b"actions", window=4)


@dataclass(frozen=True)
class Packet:
    """One message on its way, with the connection it travels on."""

    peer: bytes
    connection: int
    frames: list[bytes]


class ProtocolPair:
    """Both halves and what is on the wire between them; nothing moves unless the test moves it.

    Attributes:
        to_hub, to_client: packets under way, oldest first; a test may drop, double and reorder them.
        carried_out: the hub's requests that were new, in order.
        running: the request that the hub is carrying out.
        replies: what the client was given, in order.
    """

    def __init__(self, token: bytes = TOKEN, lease_s: float = LEASE_S, sessions_max: int = SESSIONS_MAX) -> None:
        self.now_s = 1000.0
        self.hub = HubProtocol(HUB_ID, lease_s, sessions_max)
        self.client = ClientProtocol(token)
        self.to_hub: list[Packet] = []
        self.to_client: list[Packet] = []
        self.carried_out: list[Incoming] = []
        self.running: Incoming | None = None
        self.replies: list[Reply] = []
        self.connection = 1
        self.connected = True

    @property
    def peer(self) -> bytes:
        """The client's routing id, another one on every connection."""
        return b"peer-%d" % self.connection

    @property
    def pending(self) -> Op | None:
        return self.client.pending and self.client.pending.op

    @property
    def holds(self) -> bool:
        """Whether the client has a request that it does not send yet."""
        return self.client.pending is not None and self.client.pending.held

    def request(self, op: Op, message: Any, *frames: bytes) -> None:
        sent = self.client.request(op, message, frames, self.now_s)
        if sent:
            self._post(sent)

    def advance(self, seconds: float) -> None:
        """Let time pass, and the client say what it then has to say."""
        self.now_s += seconds
        for frames in self.client.tick(self.now_s):
            self._post(frames)

    def _post(self, frames: list[Any]) -> None:
        if self.connected:  # without a connection libzmq may queue it; that it is lost is the harder case
            self.to_hub.append(Packet(self.peer, self.connection, [bytes(frame) for frame in frames]))

    def deliver_to_hub(self, index: int = 0) -> Incoming | None:
        """Hand one packet to the hub; returns the request in it if it is new, which is running from now on."""
        packet = self.to_hub.pop(index)
        first, *others = packet.frames
        incoming = self.hub.receive_step(packet.peer, first, others)
        if incoming is None:
            incoming = self.hub.receive(packet.peer, packet.connection, [first, *others])
        if incoming is not None and incoming.op is Op.HEARTBEAT:
            self.hub.answer(incoming, HeartbeatReply("running"))
        elif incoming is not None:
            self.carried_out.append(incoming)
            self.running = incoming
        self.collect()
        return None if incoming is None or incoming.op is Op.HEARTBEAT else incoming

    def deliver_to_client(self, index: int = 0) -> Reply | None:
        """Hand one packet to the client; returns the pending request's reply if it is that."""
        packet = self.to_client.pop(index)
        reply = self.client.receive(list(packet.frames), self.now_s)
        if reply is not None:
            self.replies.append(reply)
        return reply

    def collect(self) -> None:
        """Put on the wire what the hub has to send; what goes to a connection that ended is lost."""
        for peer, frames in self.hub.outgoing:
            if self.connected and peer == self.peer:
                self.to_client.append(Packet(peer, self.connection, [bytes(frame) for frame in frames]))
        self.hub.outgoing.clear()

    def disconnect(self) -> None:
        """End the connection on both sides; replies under way are lost, requests may still arrive."""
        self.connected = False
        self.to_client.clear()
        self.client.disconnected(self.now_s)
        for token, _ in self.hub.connection_ended(self.connection):
            self.hub.connection_lost(token, self.now_s)

    def reconnect(self) -> None:
        """Connect anew: another connection with another routing id."""
        self.connection += 1
        self.connected = True
        self.client.connected()

    def finish(self) -> None:
        """Carry out the running request and answer it."""
        assert self.running is not None
        request, self.running = self.running, None
        self.hub.answer(request, *outcome(request))
        if request.op == Op.CLOSE:
            self.hub.forget(request.token)
        self.collect()

    def settle(self) -> None:
        """Deliver everything in order and carry out every request, until nothing is under way."""
        while self.to_hub or self.to_client or self.running:
            if self.running:
                self.finish()
            elif self.to_hub:
                self.deliver_to_hub()
            else:
                self.deliver_to_client()

    def ask(self, op: Op, message: Any, *frames: bytes) -> Reply:
        """Begin a request on a faultless network and return its reply."""
        self.request(op, message, *frames)
        self.settle()
        for _ in range(2 * self.holds):  # it asks after what was given up, and then sends this one
            self.advance(0)
            self.settle()
        assert self.client.pending is None, "no reply came"
        return self.replies[-1]

    def hello(self) -> None:
        self.ask(Op.HELLO, Hello("test"))

    def make(self) -> None:
        self.hello()
        self.ask(Op.MAKE, Make(2, "CartPole-v1"))

    def step(self, actions: bytes) -> Reply:
        return self.ask(Op.STEP, Step(b"\x04"), actions)


def joined() -> ProtocolPair:
    pair = ProtocolPair()
    pair.make()
    return pair


def outcome(request: Incoming) -> tuple[Any, list[bytes]]:
    """What this fake hub answers: of a step, frames that say which actions it was given."""
    if request.op == Op.HELLO:
        return Welcome("0.1.0", "1", False, {}), []
    if request.op == Op.LIST:
        return EnvNames(["CartPole-v1"]), []
    if request.op == Op.MAKE:
        return MADE, []
    if request.op == Op.CLOSE:
        return Done(), []
    return Done(), [b"did " + bytes(frame) for frame in request.frames]


SESSION_REQUESTS = {Op.RESET: Reset(), Op.STEP: Step(b"\x04"), Op.CALL: Call("render", b""), Op.CLOSE: Close()}


def failure_in(packet: Packet) -> messages.Failure:
    return messages.unpack(messages.Failure, packet.frames[0][40:])


def sent(pair: ProtocolPair, op: int, seq: int, body: bytes = b"", *frames: bytes, token: bytes = TOKEN) -> Failure:
    """Send raw frames to the hub and return the failure it answers at once."""
    head = Prelude(op, HUB_ID, token, seq).pack() + body
    pair.to_hub.append(Packet(pair.peer, pair.connection, [head, *frames]))
    assert pair.deliver_to_hub() is None
    return failure_in(pair.to_client.pop())


def step_on_its_way(pair: ProtocolPair, actions: bytes = b"left") -> None:
    pair.request(Op.STEP, Step(b"\x04"), actions)


def given_up() -> ProtocolPair:
    """A pair whose hub carries out a step that nobody waits for, and whose client wants a reset."""
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.client.give_up()
    assert pair.client.pending is None
    pair.request(Op.RESET, Reset())
    return pair
