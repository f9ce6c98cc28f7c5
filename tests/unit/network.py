"""A network between both halves of the protocol that delays, doubles, reorders and loses what it carries."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from protocol_pair import ProtocolPair


class Network(RuleBasedStateMachine):
    """The rules of the network alone; what both halves do is the test's."""

    pair: ProtocolPair

    def deliver(self, index: int = 0) -> None:
        """Hand a packet to the client."""
        raise NotImplementedError

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @precondition(lambda self: self.pair.to_hub)
    @rule(data=st.data(), copies=st.integers(0, 2))
    def move_to_hub(self, data: st.DataObject, copies: int) -> None:
        index = data.draw(st.integers(0, len(self.pair.to_hub) - 1))
        self.pair.to_hub += [self.pair.to_hub[index]] * copies
        self.pair.deliver_to_hub(index)

    @precondition(lambda self: self.pair.to_client)
    @rule(data=st.data(), copies=st.integers(0, 2))
    def move_to_client(self, data: st.DataObject, copies: int) -> None:
        index = data.draw(st.integers(0, len(self.pair.to_client) - 1))
        self.pair.to_client += [self.pair.to_client[index]] * copies
        self.deliver(index)

    @precondition(lambda self: self.pair.to_hub)
    @rule(data=st.data())
    def lose_a_request(self, data: st.DataObject) -> None:
        self.pair.to_hub.pop(data.draw(st.integers(0, len(self.pair.to_hub) - 1)))

    @precondition(lambda self: self.pair.to_client)
    @rule(data=st.data())
    def lose_a_reply(self, data: st.DataObject) -> None:
        self.pair.to_client.pop(data.draw(st.integers(0, len(self.pair.to_client) - 1)))

    @precondition(lambda self: self.pair.connected)
    @rule()
    def disconnect(self) -> None:
        self.pair.disconnect()

    @precondition(lambda self: not self.pair.connected)
    @rule()
    def reconnect(self) -> None:
        self.pair.reconnect()
