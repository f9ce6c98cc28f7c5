from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from network import Network
from protocol_pair import SESSION_REQUESTS, TOKEN, ProtocolPair

from envhub.protocol.client import HEARTBEAT_S
from envhub.protocol.messages import Failure, Make, Op


class AnyNetwork(Network):
    """Whatever the network does, what the client is told is what the hub did, once and in order."""

    @initialize()
    def begin(self) -> None:
        self.pair = ProtocolPair(lease_s=float("inf"))
        self.pair.hello()
        self.payloads: dict[int, bytes] = {}  # by the request's number
        self.given_up: set[int] = set()
        self.closing = False

    @property
    def seq(self) -> int:
        return len(self.payloads)

    @precondition(lambda self: self.pair.client.pending is None and not self.closing)
    @rule(op=st.sampled_from([Op.STEP, Op.STEP, Op.RESET, Op.CALL, Op.CLOSE]))
    def request(self, op: Op) -> None:
        payload = b"%d" % (self.seq + 1)
        self.payloads[self.seq + 1] = payload
        if self.seq == 1:
            self.pair.request(Op.MAKE, Make(2, "CartPole-v1"), payload)
            return
        self.closing = op is Op.CLOSE
        self.pair.request(op, SESSION_REQUESTS[op], payload)

    @precondition(lambda self: self.seq > 1 and self.pair.client.pending is not None and not self.closing)
    @rule()
    def give_up(self) -> None:
        self.given_up.add(self.seq)
        self.pair.client.give_up()

    @precondition(lambda self: self.pair.running)
    @rule()
    def finish(self) -> None:
        self.pair.finish()

    def deliver(self, index: int = 0) -> None:
        reply = self.pair.deliver_to_client(index)
        if reply is None:
            return
        assert not isinstance(reply.message, Failure), reply.message
        if reply.op not in (Op.MAKE, Op.CLOSE):  # their replies have no frames
            assert reply.frames == [b"did " + self.payloads[self.seq]]  # of the newest request, the only one pending

    @invariant()
    def every_request_is_carried_out_once_and_in_order(self) -> None:
        done = [request for request in self.pair.carried_out if request.token == TOKEN]
        numbers = [request.seq for request in done]
        assert numbers == sorted(set(numbers))
        assert [request.frames[0] for request in done] == [self.payloads[number] for number in numbers]
        answered = set(range(1, self.seq + (self.pair.client.pending is None))) - self.given_up
        assert answered <= set(numbers)

    def teardown(self) -> None:
        """Once the network works again, the pending request gets its reply."""
        if not hasattr(self, "pair"):
            return
        if not self.pair.connected:
            self.pair.reconnect()
        for _ in range(6):
            self.pair.advance(HEARTBEAT_S)
            while self.pair.to_hub or self.pair.running or self.pair.to_client:
                if self.pair.to_client:
                    self.deliver()
                elif self.pair.to_hub:
                    self.pair.deliver_to_hub()
                else:
                    self.pair.finish()
            self.every_request_is_carried_out_once_and_in_order()
        assert self.pair.client.pending is None


TestAnyNetwork = AnyNetwork.TestCase
TestAnyNetwork.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
