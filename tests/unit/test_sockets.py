from __future__ import annotations

import contextlib

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from envhub.transport import sockets
from envhub.transport.address import HubKeys


def test_socket_can_be_monitored_while_an_earlier_one_of_its_identity_is_still_being_closed() -> None:
    """A client opens anew what an interrupt came in between; Python soon gives the same ``id`` out again."""
    with zmq.Context() as context:
        for _ in range(200):
            with context.socket(zmq.DEALER) as socket:
                monitor = sockets.open_monitor(socket, zmq.EVENT_DISCONNECTED)
            monitor.close()


def test_message_is_received_up_to_a_number_of_frames_and_the_rest_discarded_in_parts() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://frames")
        theirs.connect("inproc://frames")
        for count in (3, 4, 10):
            theirs.send_multipart([b"%d" % number for number in range(count)])
        theirs.send(b"next")
        assert [frame.bytes for frame in sockets.receive(ours, 4)] == [b"0", b"1", b"2"]
        assert not sockets.receive(ours, 4)[-1].more
        first = sockets.receive(ours, 4)
        assert len(first) == 4 and first[-1].more
        assert [sockets.discard(ours, 4), sockets.discard(ours, 4)] == [False, True]
        assert [frame.bytes for frame in sockets.receive(ours, 4)] == [b"next"]


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("handler", ["absent", "ended", "silent"])
def test_address_lets_nobody_in_while_nobody_answers_for_it(handler: str, keys: bool) -> None:
    public, secret = sockets.new_key_pair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.HANDSHAKE_IVL, 200)
        with contextlib.ExitStack() as answering:
            if handler != "absent":
                answering.enter_context(context.socket(zmq.REP)).bind("inproc://zeromq.zap.01")
            if handler == "ended":
                answering.close()
            sockets.ask_before_admitting(router, secret if keys else None, b"envhub")
            port = router.bind_to_random_port("tcp://127.0.0.1")
            if keys:
                sockets.present_keys(dealer, HubKeys(public, sockets.new_key_pair()[1]))
            failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            monitor = sockets.open_monitor(dealer, failed | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send(b"x")
            assert monitor.poll(5000)
            assert recv_monitor_message(monitor)["event"] & failed and not router.poll(0)
            dealer.monitor(None, 0)
            monitor.close()
