"""A SEND that ends a RECEIVE: on any network the client gets the rows of each RECEIVE exactly once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from network import Network
from protocol_pair import HUB_ID, TOKEN, ProtocolPair, joined, sent, step_on_its_way

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages, prelude
from envhub.protocol.client import FrameTooLarge, Reply
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import REPLY, Done, Failure, Op, Receive, Send
from envhub.protocol.prelude import Prelude

NO_ROWS = Failure("refused", "request", "no env is under way")


def receiving() -> ProtocolPair:
    """A pair whose hub runs RECEIVE 2."""
    pair = joined()
    pair.request(Op.RECEIVE, Receive(1))
    pair.deliver_to_hub()
    return pair


def end_receive(pair: ProtocolPair) -> None:
    pair.request(Op.SEND, Send([1], b"", ends_receive=True), b"actions")


def answer(pair: ProtocolPair, request: Incoming | None, *frames: bytes) -> None:
    """Have the hub answer this request."""
    assert request is not None
    pair.hub.answer(request, Done(), frames)
    pair.collect()


# --- case by case -----------------------------------------------------------------------------------------------------


def test_reply_of_a_compression_that_ends_after_send_has_arrived_comes_with_its_reply() -> None:
    pair = receiving()
    received = pair.running
    end_receive(pair)
    pair.deliver_to_hub()
    answer(pair, received, b"rows")
    assert pair.to_client == []
    answer(pair, pair.running)
    reply = pair.deliver_to_client()
    assert reply is not None and reply.received == Reply(Op.RECEIVE, Done(), [b"rows"])


def test_refused_send_has_the_rows_too_and_so_has_its_copy() -> None:
    pair = receiving()
    answer(pair, pair.running, b"rows")
    pair.to_client.clear()
    end_receive(pair)
    pair.to_hub *= 2
    request = pair.deliver_to_hub()
    assert request is not None
    pair.hub.fail(request, Failure("bad_actions", "request", "no"))
    pair.collect()
    pair.to_client.clear()  # this reply is lost
    assert pair.deliver_to_hub() is None
    reply = pair.deliver_to_client()
    assert reply is not None and isinstance(reply.message, Failure) and reply.frames == ()
    assert reply.received == Reply(Op.RECEIVE, Done(), [b"rows"])


def test_failure_of_an_env_comes_as_the_reply_to_receive() -> None:
    pair = receiving()
    assert pair.running is not None
    failure = Failure("env_raised", "env", "no", 1)
    pair.hub.fail(pair.running, failure)
    pair.collect()
    pair.to_client.clear()
    end_receive(pair)
    answer(pair, pair.deliver_to_hub())
    reply = pair.deliver_to_client()
    assert reply is not None and reply.message == Done() and reply.received == Reply(Op.RECEIVE, failure, [])


def test_send_of_an_earlier_version_ends_nothing() -> None:
    pair = receiving()
    body = messages.pack(Send([1], b""))
    assert sent(pair, Op.SEND, 3, body, b"actions").code == "bad_seq"
    answer(pair, pair.running, b"rows")
    pair.to_client.clear()
    old = {name: value for name, value in vars(Send([1], b"")).items() if name != "ends_receive"}
    head = Prelude(Op.SEND, HUB_ID, TOKEN, 3).pack() + messages.codec.encode(old)
    incoming = pair.hub.receive(pair.peer, pair.connection, [head, b"actions"])
    answer(pair, incoming)
    assert pair.to_client[0].frames == [Prelude(REPLY | Op.SEND, HUB_ID, TOKEN, 3).pack()]


@pytest.mark.parametrize("seq", [1, 2, 4])
def test_send_that_does_not_follow_the_receive_does_not_end_it(seq: int) -> None:
    pair = receiving()
    failure = sent(pair, Op.SEND, seq, messages.pack(Send([1], b"", True))) if seq != 2 else None
    if failure is None:  # a copy of the running request, whatever its op
        pair.hub.receive(pair.peer, pair.connection, [Prelude(Op.SEND, HUB_ID, TOKEN, 2).pack()])
        assert pair.hub.outgoing == []
    else:
        assert failure.code == "bad_seq"
    answer(pair, pair.running, b"rows")
    assert pair.deliver_to_client() == Reply(Op.RECEIVE, Done(), [b"rows"])


def test_send_that_cannot_be_read_does_not_end_a_receive_that_runs() -> None:
    pair = receiving()
    assert sent(pair, Op.SEND, 3, b"\x80").code == "malformed"
    answer(pair, pair.running, b"rows")
    assert pair.deliver_to_client() == Reply(Op.RECEIVE, Done(), [b"rows"])


def test_step_is_ended_by_no_send() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    assert sent(pair, Op.SEND, 3, messages.pack(Send([1], b"", True))).code == "bad_seq"
    with pytest.raises(RuntimeError, match="STEP is pending"):
        end_receive(pair)


def test_session_that_ends_keeps_no_rows() -> None:
    pair = receiving()
    answer(pair, pair.running, b"rows")
    end_receive(pair)
    pair.deliver_to_hub()
    link = pair.hub._links[TOKEN]
    pair.hub.forget(TOKEN)
    assert link.carried is None and link.reply is None


def test_receive_that_was_not_sent_yet_is_replaced_by_a_send_that_is_not_sent_yet() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.client.give_up()
    pair.request(Op.RECEIVE, Receive(1))
    end_receive(pair)
    assert pair.client.held and pair.to_hub == []
    pair.finish()
    pair.deliver_to_client()
    pair.advance(0)
    assert [Prelude.unpack(packet.frames[0]).op for packet in pair.to_hub] == [Op.SEND]
    answer(pair, pair.deliver_to_hub())
    assert pair.deliver_to_client() == Reply(Op.SEND, Done(), [])


def test_send_that_is_too_large_leaves_the_receive_pending() -> None:
    pair = receiving()
    pair.client.frame_bytes_max = 1000
    with pytest.raises(FrameTooLarge) as caught:
        pair.request(Op.SEND, Send([1], b"", True), bytes(1001))
    assert caught.value.nbytes == 1001 and pair.client.pending is Op.RECEIVE
    answer(pair, pair.running, b"rows")
    assert pair.deliver_to_client() == Reply(Op.RECEIVE, Done(), [b"rows"])


@pytest.mark.parametrize(
    "head",
    [
        Prelude(REPLY | Op.STEP, HUB_ID, TOKEN, 2),
        Prelude(Op.RECEIVE, HUB_ID, TOKEN, 2),
        Prelude(REPLY | Op.RECEIVE, HUB_ID, TOKEN, 1),
        Prelude(REPLY | Op.RECEIVE, HUB_ID, bytes(16), 2),
    ],
    ids=["another op", "a push", "another number", "another session"],
)
def test_frames_behind_a_reply_to_send_that_are_no_reply_to_the_receive_break_the_protocol(head: Prelude) -> None:
    pair = receiving()
    end_receive(pair)
    with pytest.raises(RemoteProtocolError, match="SEND"):
        pair.client.receive([Prelude(REPLY | Op.SEND, HUB_ID, TOKEN, 3).pack(), head.pack(), b"rows"], pair.now_s)


# --- on any network ---------------------------------------------------------------------------------------------------


class AnyNetwork(Network):
    """A client that sends while it receives, and a hub whose rows are done at any time."""

    @initialize()
    def begin(self) -> None:
        self.pair = ProtocolPair(lease_s=float("inf"))
        self.pair.make()
        self.rows = 0
        self.posted: list[int] = []  # by a SEND that was executed
        self.done: list[int] = []  # of these, those that no RECEIVE has taken
        self.received: list[int] = []
        self.late: tuple[Incoming, list[int]] | None = None  # a reply to RECEIVE that the hub still compresses
        self.send()
        self.go_on(3, fails=False)
        self.receive()

    # --- the client ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.client.pending in (None, Op.RECEIVE))
    @rule()
    def send(self) -> None:
        self.rows += 1
        ends = self.pair.client.pending is Op.RECEIVE
        self.pair.request(Op.SEND, Send([self.rows], b"", ends), b"%d" % self.rows)

    @precondition(lambda self: self.pair.client.pending is None)
    @rule()
    def receive(self) -> None:
        self.pair.request(Op.RECEIVE, Receive(1))

    def deliver(self, index: int = 0) -> None:
        reply = self.pair.deliver_to_client(index)
        if reply is not None:
            self.take(reply)
            if reply.received is not None:
                self.take(reply.received)

    def take(self, reply: Reply) -> None:
        if isinstance(reply.message, Failure):
            self.received += [] if reply.message.env_index is None else [reply.message.env_index]
        elif reply.op is Op.RECEIVE:
            self.received += map(int, reply.frames[0].split())

    # --- the hub ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.running is not None and self.late is None)
    @rule(fails=st.booleans())
    def finish(self, fails: bool) -> None:
        request, self.pair.running = self.pair.running, None
        assert request is not None
        if request.op is Op.RECEIVE:
            self.answer_receive(request, self.done, fails)
            self.done = self.done[1:] if fails else []
        elif fails:
            self.pair.hub.fail(request, Failure("bad_actions", "request", "no"))
        else:
            self.posted += request.message.rows
            self.done += request.message.rows
            self.pair.hub.answer(request, Done())
        self.pair.collect()

    def answer_receive(self, request: Incoming, rows: list[int], fails: bool) -> None:
        if not rows:
            self.pair.hub.fail(request, NO_ROWS)
        elif fails:
            self.pair.hub.fail(request, Failure("env_raised", "env", "no", rows[0]))
        else:
            self.pair.hub.answer(request, Done(), [b" ".join(b"%d" % row for row in rows)])

    @precondition(lambda self: self.late is None and self.done)
    @precondition(lambda self: self.pair.running is not None and self.pair.running.op is Op.RECEIVE)
    @rule()
    def begin_compression(self) -> None:
        assert self.pair.running is not None
        self.late, self.done = (self.pair.running, self.done), []

    @precondition(lambda self: self.late is not None)
    @rule()
    def end_compression(self) -> None:
        assert self.late is not None
        (request, rows), self.late = self.late, None
        if self.pair.running is request:
            self.pair.running = None
        self.answer_receive(request, rows, False)
        self.pair.collect()

    # --- the network --------------------------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 4), fails=st.booleans())
    def go_on(self, steps: int, fails: bool) -> None:
        """Let what is under way go on without a fault, so that most examples come far."""
        for _ in range(steps):
            if self.pair.to_hub:
                self.pair.deliver_to_hub()
            elif self.pair.running is not None and self.late is None and (self.done or self.pair.running.op is Op.SEND):
                self.finish(fails)
            elif self.pair.to_client:
                self.deliver()

    # --- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def no_row_is_received_twice_or_without_being_posted(self) -> None:
        assert len(set(self.received)) == len(self.received)
        assert set(self.received) <= set(self.posted)

    def settle(self) -> None:
        """Let the network work until the pending request has its reply."""
        for _ in range(6):
            self.pair.advance(prelude.HEARTBEAT_S)
            while self.pair.to_hub or self.pair.running or self.pair.to_client:
                if self.late is not None:
                    self.end_compression()
                elif self.pair.to_client:
                    self.deliver()
                elif self.pair.to_hub:
                    self.pair.deliver_to_hub()
                else:
                    self.finish(fails=False)
                self.no_row_is_received_twice_or_without_being_posted()
        assert self.pair.client.pending is None

    def teardown(self) -> None:
        """Once the network works again, the next RECEIVE brings every row that is left."""
        if not hasattr(self, "pair"):
            return
        if not self.pair.connected:
            self.pair.reconnect()
        self.settle()
        self.receive()
        self.settle()
        assert set(self.received) == set(self.posted)


TestAnyNetwork = AnyNetwork.TestCase
TestAnyNetwork.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
