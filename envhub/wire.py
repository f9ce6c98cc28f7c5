"""The ZeroMQ sockets of both sides, with the limits and the heartbeats that they share."""

from __future__ import annotations

from typing import Any

import zmq

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, HEARTBEAT_TTL_MS, HANDSHAKE_MS = 1000, 3000, 4000, 3000


def open_socket(context: zmq.Context[Any], kind: int, message_bytes_max: int, queue_messages_max: int) -> Any:
    """A socket of this kind that takes no larger message, queues no more of them, and notices a dead peer in 4 s."""
    opened = context.socket(kind)
    opened.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
    opened.setsockopt(zmq.SNDHWM, queue_messages_max)
    opened.setsockopt(zmq.RCVHWM, queue_messages_max)
    opened.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    opened.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS)
    opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return opened
