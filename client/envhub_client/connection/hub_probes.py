"""Short connections that find out what listens at a tcp address where handshakes fail."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from envhub.transport.address import Address
from envhub.transport.socket_owner import socket_owner
from envhub_client.deadline import Deadline

GREETING_S, SILENT_S = 1.0, 0.5
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0
_SIGNATURE_BYTES = 10  # with which a greeting begins
_MECHANISM = slice(12, 32)  # in a greeting


def waits_for_hello(address: Address) -> bool:
    """True if a hub with keys is there that leaves a connection open on which nothing follows the greeting.

    So it is not ending, and no forwarder without a hub behind it: what it ended was for what was said there.
    """
    try:
        with _connected(address) as probe:
            probe.sendall(_GREETING)
            greeting = _received(probe, len(_GREETING))
            probe.settimeout(SILENT_S)
            with contextlib.suppress(TimeoutError):
                probe.recv(1)  # returns if it ends the connection, or says more
                return False
    except OSError:
        return False
    return greeting[:1] == _GREETING[:1] and greeting[_MECHANISM] == _GREETING[_MECHANISM]


def other_user(address: Address) -> int | None:
    """The id of the other user of this machine whose hub is at this address of loopback.

    Returns:
        None where it is no address of loopback, where this user or no process listens, where the listener sends no
        greeting, and on other systems than Linux, which do not say whose a socket is.
    """
    if sys.platform != "linux" or not address.is_loopback:
        return None
    try:
        with _connected(address) as probe:
            anywhere = "::" if probe.family == socket.AF_INET6 else "0.0.0.0"
            owner = socket_owner(probe.family, probe.getpeername()[:2], (anywhere, 0))
            signature = _received(probe, _SIGNATURE_BYTES)
    except OSError:
        return None
    if owner is None or owner[0] == os.getuid() or (signature[:1], signature[-1:]) != (b"\xff", b"\x7f"):
        return None
    return owner[0]


def _connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host.strip("[]"), address.port), GREETING_S)


def _received(probe: socket.socket, nbytes: int) -> bytes:
    """Receive ``nbytes`` bytes, or fewer where the connection ends before.

    Raises:
        OSError: the connection fails, or they do not come within ``GREETING_S``.
    """
    received, deadline = b"", Deadline(GREETING_S)
    while len(received) < nbytes:
        probe.settimeout(max(deadline.left_s(), 0.001))
        if not (part := probe.recv(nbytes - len(received))):
            break
        received += part
    return received
