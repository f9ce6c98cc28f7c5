"""Several SENDs under way: on any network each is executed once, in order, and the client gets each reply once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from network import Network
from protocol_pair import TOKEN, ProtocolPair, given_up, joined, sent, step_on_its_way

from envhub.protocol import messages
from envhub.protocol.client import HEARTBEAT_S, FrameTooLarge, Reply
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Done, Failure, Op, Receive, Reset, Send, Templates, TemplatesRequest
from envhub.protocol.prelude import Prelude

WINDOW = 4  # of the pair's session


def sending(*rows: int) -> tuple[ProtocolPair, list[Incoming]]:
    """A pair whose hub runs a SEND of each of these rows, the first one with number 2."""
    pair, running = joined(), []
    for row in rows:
        pair.request(Op.SEND, Send([row], b"", 1), b"actions")
        request = pair.deliver_to_hub()
        assert request is not None
        running.append(request)
    pair.running = None
    return pair, running


def answer(pair: ProtocolPair, request: Incoming, *frames: bytes) -> None:
    pair.hub.answer(request, Done(), frames)
    pair.collect()


# --- case by case -----------------------------------------------------------------------------------------------------


def test_sends_run_together_and_each_is_answered_when_its_hub_likes() -> None:
    pair, (first, second) = sending(0, 1)
    answer(pair, second, b"rows")
    assert pair.deliver_to_client() is None and pair.client.receives
    assert pair.client.received == [Reply(Op.SEND, Done(), [b"rows"], 3)]
    pair.hub.fail(first, Failure("bad_actions", "request", "no"))
    pair.collect()
    assert pair.deliver_to_client() is None and not pair.client.receives
    assert [reply.seq for reply in pair.client.received] == [3, 2]


def test_after_a_cut_each_is_asked_after_and_answered_again_or_run() -> None:
    pair, (first, second) = sending(0, 1)
    assert pair.client.next_tick_s(pair.now_s) <= pair.now_s + HEARTBEAT_S
    pair.request(Op.SEND, Send([2], b"", 1), b"actions")  # which is lost
    pair.to_hub.clear()
    answer(pair, first, b"of the first")
    pair.disconnect()
    pair.reconnect()
    pair.advance(0)
    asked = [Prelude.unpack(packet.frames[0]) for packet in pair.to_hub]
    assert [(each.op, each.seq) for each in asked] == [(Op.HEARTBEAT, seq) for seq in (2, 3, 4)]
    pair.settle()  # the hub has only the first and second one
    pair.advance(0)
    assert [Prelude.unpack(packet.frames[0]).seq for packet in pair.to_hub] == [2, 4]
    pair.deliver_to_hub()
    third = pair.deliver_to_hub()
    assert third is not None
    pair.running = None
    for request in (third, second):
        answer(pair, request)
    pair.settle()
    assert [reply.seq for reply in pair.client.received] == [2, 4, 3] and pair.hub.replayed == 1


def test_send_that_overtakes_the_one_before_it_is_dropped_and_sent_again() -> None:
    pair = joined()
    for row in range(2):
        pair.request(Op.SEND, Send([row], b"", 1), b"actions")
    pair.to_hub.reverse()
    assert pair.deliver_to_hub() is None and pair.to_client == []
    assert pair.deliver_to_hub() is not None
    pair.running = None
    pair.advance(HEARTBEAT_S)
    pair.settle()
    pair.advance(0)
    assert [Prelude.unpack(packet.frames[0]).seq for packet in pair.to_hub] == [3]


def test_window_has_room_for_so_many_numbers_after_the_oldest_without_a_reply() -> None:
    pair, running = sending(*range(WINDOW))
    assert not pair.client.has_room
    answer(pair, running[1])
    pair.deliver_to_client()
    assert not pair.client.has_room, "the oldest has none"
    beyond = messages.pack(Send([9], b"", 1))
    assert sent(pair, Op.SEND, 2 + WINDOW, beyond, b"actions").code == "bad_seq"
    answer(pair, running[0])
    pair.deliver_to_client()
    assert pair.client.has_room
    pair.request(Op.SEND, Send([9], b"", 1), b"actions")
    assert pair.deliver_to_hub() is not None and len(pair.hub._links[TOKEN].replies) == WINDOW


def test_templates_are_asked_for_while_sends_run_and_nothing_else_is() -> None:
    pair, (first,) = sending(0)
    assert sent(pair, Op.RESET, 3, messages.pack(Reset())).code == "bad_seq"
    pair.request(Op.TEMPLATES, TemplatesRequest([1]))
    asked = pair.deliver_to_hub()
    assert asked is not None
    pair.hub.answer(asked, Templates([], []))
    pair.collect()
    assert pair.deliver_to_client() == pair.client.answer == Reply(Op.TEMPLATES, Templates([], []), [], 3)
    answer(pair, first)
    pair.deliver_to_client()
    assert [reply.seq for reply in pair.client.received] == [2]


def test_request_of_all_envs_gives_up_a_send_and_waits_until_it_has_ended() -> None:
    pair, (first,) = sending(0)
    pair.request(Op.RESET, Reset())
    assert pair.holds and not pair.client.receives and pair.to_hub == []
    answer(pair, first)
    assert pair.deliver_to_client() is None and pair.client.received == []
    pair.advance(0)
    pair.settle()
    assert [reply.op for reply in pair.replies[-1:]] == [Op.RESET]


def test_sends_behind_a_step_that_was_given_up_are_held_in_their_order() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.client.give_up()
    for row in range(2):
        assert pair.client.request(Op.SEND, Send([row], b"", 1), [b"actions"], pair.now_s) == []
    pair.finish()
    pair.deliver_to_client()
    pair.advance(0)
    assert [Prelude.unpack(packet.frames[0]).seq for packet in pair.to_hub] == [3, 4]


def test_step_runs_beside_no_send() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    assert sent(pair, Op.SEND, 3, messages.pack(Send([1], b"", 1))).code == "bad_seq"
    with pytest.raises(RuntimeError, match="STEP is pending"):
        pair.request(Op.SEND, Send([1], b"", 1))
    with pytest.raises(RuntimeError, match="RESET is pending"):
        given_up().request(Op.SEND, Send([1], b"", 1))


def test_send_that_is_too_large_leaves_the_others() -> None:
    pair, _ = sending(0)
    pair.client.frame_bytes_max = 1000
    with pytest.raises(FrameTooLarge) as caught:
        pair.request(Op.SEND, Send([1], b"", 1), bytes(1001))
    assert caught.value.nbytes == 1001 and pair.client.receives and pair.client.last_seq == 2


def test_session_that_ends_keeps_no_rows() -> None:
    pair, (first, _) = sending(0, 1)
    answer(pair, first, b"rows")
    link = pair.hub._links[TOKEN]
    pair.hub.forget(TOKEN)
    assert link.replies == {}


# --- on any network ---------------------------------------------------------------------------------------------------


class AnyNetwork(Network):
    """A client that sends while it receives, and a hub that answers any request that runs, in any order."""

    @initialize()
    def begin(self) -> None:
        self.pair = ProtocolPair(lease_s=float("inf"))
        self.pair.make()
        self.rows = 0
        self.posted: list[int] = []  # by a SEND that was executed, in the order of that
        self.done: list[int] = []  # of these, those in no reply
        self.running: list[Incoming] = []
        self.taken: list[int] = []  # by the client, each row once
        self.answered: list[int] = []  # numbers of SENDs and RECEIVEs whose replies the client has had
        self.send()
        self.send()
        self.go_on(3, fails=False)

    # --- the client ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.client.has_room and self.pair.client.pending is None)
    @rule()
    def send(self) -> None:
        self.rows += 1
        self.pair.request(Op.SEND, Send([self.rows], b"", 1), b"%d" % self.rows)

    @precondition(lambda self: self.pair.client.has_room and self.pair.client.pending is None)
    @rule(op=st.sampled_from([Op.RECEIVE, Op.TEMPLATES]))
    def ask(self, op: Op) -> None:
        self.pair.request(op, Receive(1) if op is Op.RECEIVE else TemplatesRequest([]))

    def deliver(self, index: int = 0) -> None:
        self.pair.deliver_to_client(index)
        while self.pair.client.received:
            reply = self.pair.client.received.pop(0)
            self.answered.append(reply.seq)
            if isinstance(reply.message, Failure):
                self.taken += [] if reply.message.env_index is None else [reply.message.env_index]
            elif reply.frames:
                self.taken += map(int, reply.frames[0].split())

    # --- the hub ------------------------------------------------------------------------------------------------------

    @invariant()
    def begin_what_has_come(self) -> None:
        request = self.pair.running if hasattr(self, "pair") else None
        if request is None:
            return
        self.pair.running = None
        self.running.append(request)
        if request.op is Op.SEND:
            self.posted += request.message.rows
            self.done += request.message.rows

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def finish_any(self, data: st.DataObject, fails: bool) -> None:
        self.finish(data.draw(st.integers(0, len(self.running) - 1)), fails)

    def finish(self, index: int, fails: bool) -> None:
        request, rows = self.running.pop(index), self.done
        if request.op is Op.TEMPLATES:
            self.pair.hub.answer(request, Templates([], []))
        elif fails and rows:
            self.done = rows[1:]
            self.pair.hub.fail(request, Failure("env_raised", "env", "no", rows[0]))
        else:
            self.done = []
            self.pair.hub.answer(request, Done(), [b" ".join(b"%d" % row for row in rows)] if rows else [])
        self.pair.collect()

    # --- the network --------------------------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 4), fails=st.booleans())
    def go_on(self, steps: int, fails: bool) -> None:
        """Let what is under way go on without a fault, so that most examples come far."""
        for _ in range(steps):
            if self.pair.to_hub:
                self.pair.deliver_to_hub()
                self.begin_what_has_come()
            elif self.running:
                self.finish(0, fails)
            elif self.pair.to_client:
                self.deliver()

    # --- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def each_send_runs_once_in_order_and_no_reply_comes_twice(self) -> None:
        if hasattr(self, "posted"):
            assert self.posted == sorted(set(self.posted))
            assert len(set(self.taken)) == len(self.taken) and set(self.taken) <= set(self.posted)
            assert len(set(self.answered)) == len(self.answered)
            assert len(self.pair.hub._links[TOKEN].replies) <= WINDOW

    def teardown(self) -> None:
        """Once the network works again, every request is answered, and every row has come."""
        if not hasattr(self, "answered"):
            return
        if not self.pair.connected:
            self.pair.reconnect()
        for last in (False, True):
            if last:
                self.ask(Op.RECEIVE)
            for _ in range(2 * WINDOW + 4):
                self.pair.advance(HEARTBEAT_S)
                while self.pair.to_hub or self.running or self.pair.to_client:
                    self.go_on(1, fails=False)
                    self.each_send_runs_once_in_order_and_no_reply_comes_twice()
            assert self.pair.client.pending is None and not self.pair.client.receives
        assert self.posted == [*range(1, self.rows + 1)] and set(self.taken) == set(self.posted)


TestAnyNetwork = AnyNetwork.TestCase
TestAnyNetwork.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
