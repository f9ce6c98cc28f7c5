from __future__ import annotations

import zmq

from envhub import wire


def test_socket_can_be_monitored_while_an_earlier_one_of_its_identity_is_still_being_closed() -> None:
    """A client opens anew what an interrupt came in between; Python soon gives the same ``id`` out again."""
    with zmq.Context() as context:
        for _ in range(200):
            with context.socket(zmq.DEALER) as socket:
                monitor = wire.open_monitor(socket, zmq.EVENT_DISCONNECTED)
            monitor.close()
