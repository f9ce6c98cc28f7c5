"""Admission of connections to a tcp address: libzmq asks (ZAP, RFC 27) in the handshake, and this answers.

A hub with keys admits their holders. A hub without keys, which listens on loopback, admits its own user: at the moment
of the handshake no connection may be of another user's process. An insecure hub admits everybody, but libzmq still
asks: where it asks, it refuses ZMTP 1.0 and 2.0, for which it takes what a web page can send. libzmq admits no client
without an answer. So a hub whose loop is busy lets new clients wait, and one whose handler has gone lets none in.
"""

from __future__ import annotations

import time

import zmq

from envhub.errors import KeysError
from envhub.transport import address as addresses
from envhub.transport import sockets
from envhub.transport.address import HubKeys, text_of
from envhub_server.log import Logger
from envhub_server.network.key_folder import KeyFolder

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"envhub"
OWN = "own user"
ANYONE = "anyone"
PROVE_S = 5.0

log = Logger("envhub.hub")


class Authenticator:
    """The ZAP handler of one hub's context; ``descriptor`` is ready when libzmq asks."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], folder: KeyFolder | None, insecure: bool = False
    ) -> None:
        self.refused = 0  # handshakes
        self._insecure = insecure
        self._context = context
        self._folder = folder
        self._asked = context.socket(zmq.REP)
        self._asked.setsockopt(zmq.LINGER, 0)
        self._asked.bind(ZAP_ADDRESS)
        self.descriptor = int(self._asked.FD)
        self.asked()  # libzmq signals only what comes after the socket was found to be empty

    def asked(self) -> list[bytes] | None:
        """Request of libzmq, to be answered before it asks again; None for nothing."""
        try:
            return self._asked.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def take_in_signals(self) -> None:
        """Take in what libzmq has signalled while an ask waits for its answer; else ``descriptor`` stays ready."""
        self._asked.getsockopt(zmq.EVENTS)

    def is_unknown(self, frames: list[bytes]) -> bool:
        return self._folder is not None and len(frames) == 7 and frames[6] not in self._folder.holders

    def answer(self, frames: list[bytes], others_connected: bool) -> None:
        user = self._admitted(frames, others_connected)
        status, text = (b"200", b"OK") if user else (b"400", b"unknown key")
        request = frames[1] if len(frames) > 1 else b""
        self._asked.send_multipart([ZAP_VERSION, request, status, text, user.encode(), b""])

    def _admitted(self, frames: list[bytes], others_connected: bool) -> str:
        if len(frames) < 6 or frames[0] != ZAP_VERSION or frames[2] != DOMAIN:
            return ""
        if self._folder is None:
            if self._insecure and frames[5] == b"NULL":
                return ANYONE
            if frames[5] == b"NULL" and not others_connected:
                return OWN
            why = "another user is connected; serve with --keys to admit others"
            self.handshake_failed(frames[3].decode("ascii", "replace"), why)
            return ""
        if len(frames) != 7 or frames[5] != b"CURVE":
            return ""
        # The proxy tells later whose connection was denied.
        return text_of(frames[6]) if frames[6] in self._folder.holders else ""

    def handshake_failed(self, host: str, why: str = "no key, or one for another hub") -> None:
        """Note that a client from there was refused; by libzmq itself, if it has no key or not this hub's."""
        self.refused += 1
        # Event: A client was not let in: it has no known key, or one for another hub.
        log.warning("client_refused", host=host, why=why, audit=True)

    def prove(self, address: str, server_key: bytes) -> None:
        """See that a client with an unknown key is refused at this address, which the hub has bound."""
        _, secret = sockets.new_key_pair()
        with self._context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            sockets.present_keys(stranger, HubKeys(server_key, secret))
            monitor = sockets.open_monitor(stranger, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            try:
                target = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
                sockets.choose_family(stranger, addresses.parse(target))
                stranger.connect(target)
                until_s = time.monotonic() + PROVE_S
                while time.monotonic() < until_s:
                    self._asked.poll(10)
                    while (asked := self.asked()) is not None:
                        self.answer(asked, others_connected=False)
                    if monitor.poll(0):
                        if sockets.read_monitor(monitor)[0] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                            return
                        raise KeysError(f"a client with an unknown key got in at {address}: no hub is run like this")
                raise KeysError(f"a client with an unknown key was not refused at {address} within {PROVE_S:g} s")
            finally:
                stranger.monitor(None, 0)
                monitor.close()

    def close(self) -> None:
        self._asked.close()
