"""Admission to a hub: over tcp by keys, where it has keys, else by the user that runs the process.

At a tcp address libzmq asks in the handshake whom to admit (ZAP, RFC 27), and this answers. A hub with keys admits
their holders. A hub without keys, which listens on loopback, admits its own user: at the moment of the handshake no
connection may be of another user's process. An insecure hub admits everybody, but libzmq still asks: where it asks, it
refuses ZMTP 1.0 and 2.0, for which it takes what a web page can send. libzmq admits no client without an answer. So a
hub whose loop is busy lets new clients wait, and one whose handler has gone lets none in.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from envhub.errors import AddressError, KeysError
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import as_map
from envhub.protocol.prelude import FRAMES_MAX
from envhub.transport import address as addresses
from envhub.transport import sockets
from envhub.transport.address import HubKeys, key_of, text_of
from envhub_server.log import log
from envhub_server.network import connections
from envhub_server.network.connections import ANYBODY, OWN_USER, Connections, Holder, KnownConnection
from envhub_server.network.key_folder import CLIENT_REMOVED, KeyFolder
from envhub_server.network.proxy import ProxyHandle
from envhub_server.network.proxy_page import EndedHandshake, PageEntry

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"envhub"
OWN, ANYONE = "own user", "anyone"  # admitted without a key
PROVE_S = 5.0
KEYS_S = 0.5  # from one check of the folder of keys to the next
UNKNOWN_KEY_S = 0.1  # the same where a client comes with a key that is not known, which may have been added just now
REMOVED = "its key was removed"
CHANGED = "its key was removed, or has another right"
REFUSED_S = 1.0  # for a client that was refused to read why, and to go
OTHERS_S = 1.0  # for libzmq to end the connections of other users, before they are a reason to refuse a client
IPC_ORIGIN = "localhost:"  # libzmq has seen that the peer is the hub's own user, or it is the hub's proxy

Ends = list[tuple[KnownConnection, str]]  # connections that are to be ended, each with the reason


class Access:
    """Client of each connection of one hub, and the connections to end."""

    def __init__(self, keys: Path | None, insecure: bool, unread_bytes_max: int) -> None:
        self.unread_bytes_max = unread_bytes_max
        self._keys = KeyFolder(keys) if keys is not None else None
        self._insecure = insecure
        self.zap: zmq.Socket[bytes] | None = None  # by which libzmq asks; None while there are no tcp addresses
        # By which the connections to tcp addresses come that strangers may use; None where there is none.
        self.proxy: ProxyHandle | None = None
        # By the peer of each connection of which a message was read, what the proxy has of it; None where it came by
        # itself.
        self.entries: dict[bytes, PageEntry | None] = {}
        self._asked: list[bytes] | None = None  # by libzmq, which asks nothing more until it is answered
        self._refuse_s = math.inf  # when it is answered though others are connected
        self._server_key = b""  # the hub's public key, once its tcp addresses are guarded by it
        self._proofs = 0  # that clients with unknown keys are denied, of which the proxy has not told yet
        self.connections_ended = 0  # by the hub
        self.handshakes_refused = 0  # of clients without a known key, or while others' connections did not end
        self.handshakes_unfinished = 0  # of clients that left before they had shown, or failed to show, a key
        self.connections = Connections()  # those that there are
        self._check_keys_s = math.inf
        self._unknown_key_s = 0.0  # when an unknown key is a reason to look again
        self._keys_changed = False
        self.removed: list[str] = []  # clients that were removed; the caller ends their sessions, and empties it

    @property
    def open_to_all(self) -> bool:
        return self._insecure or self._keys is not None

    def guard(self, context: Any, router: Any) -> None:
        """Have the addresses that this socket binds from now on admit whom they are to admit."""
        if not self.open_to_all and not connections.kernel_tells():
            text = "this kernel does not tell whose process connects by tcp (sock_diag): serve with --keys, or by ipc"
            raise AddressError(text)
        secret = None
        if self._keys is not None:
            self._keys.load()  # before a new key is made in a folder with a misspelt name, which would lock all out
            secret = self._keys.make_secret()
            self._server_key = sockets.public_key(secret)
            self._check_keys_s = 0.0
        self._context, self.zap = context, context.socket(zmq.REP)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind(ZAP_ADDRESS)
        self._receive()  # libzmq signals only what comes after the socket was found to be empty
        sockets.ask_before_admitting(router, secret, DOMAIN)

    @property
    def encrypted(self) -> bool:
        return self._keys is not None

    def close(self) -> None:
        if self.zap is not None:
            self.zap.close()

    def asked(self) -> bool:
        if self._asked is None:
            self._receive()
        elif self.zap is not None:
            self.zap.getsockopt(zmq.EVENTS)  # takes in what libzmq has signalled; else the descriptor stays ready
        return self._asked is not None

    def _receive(self) -> None:
        if self.zap is not None:
            with contextlib.suppress(zmq.Again):
                self._asked = self.zap.recv_multipart(zmq.NOBLOCK)

    def answer(self, now_s: float) -> bool:
        """Answer libzmq, with all accepted connections noted; False if nothing was asked, or others are there."""
        if self._asked is None:
            return False
        others = self.connections.others
        if others and now_s < self._refuse_s:
            self._refuse_s = min(self._refuse_s, now_s + OTHERS_S)
            return False
        key = self._asked[6] if len(self._asked) == 7 else b""
        if now_s >= self._unknown_key_s and self._keys is not None and key and key not in self._keys.holders:
            self._unknown_key_s = now_s + UNKNOWN_KEY_S
            self.read_keys()
        self._send_answer(self._asked, others)
        return True

    def _send_answer(self, frames: list[bytes], others: bool) -> None:
        assert self.zap is not None
        user = self._admitted(frames, others)
        status, text = (b"200", b"OK") if user else (b"400", b"unknown key")
        request = frames[1] if len(frames) > 1 else b""
        self.zap.send_multipart([ZAP_VERSION, request, status, text, user.encode(), b""])
        self._asked, self._refuse_s = None, math.inf

    def _admitted(self, frames: list[bytes], others: bool) -> str:
        if len(frames) < 6 or frames[0] != ZAP_VERSION or frames[2] != DOMAIN:
            return ""
        if self._keys is None:
            if self._insecure and frames[5] == b"NULL":
                return ANYONE
            if frames[5] == b"NULL" and not others:
                return OWN
            why = "another user is connected; serve with --keys to admit others"
            self._handshake_failed(frames[3].decode("ascii", "replace"), why)
            return ""
        if len(frames) != 7 or frames[5] != b"CURVE":
            return ""
        # The proxy tells later whose connection was denied.
        return text_of(frames[6]) if frames[6] in self._keys.holders else ""

    def _handshake_failed(self, host: str, why: str = "no key, or one for another hub") -> None:
        """Note that a client from there was refused; by libzmq itself, if it has no key or not this hub's."""
        self.handshakes_refused += 1
        # Event: A client was not let in: it has no known key, or one for another hub.
        log.warning("client_refused", host=host, why=why, audit=True)

    def prove(self, address: str) -> None:
        """See that a client with an unknown key is refused at this address, which the hub has bound."""
        if self._keys is None or self.zap is None:
            return
        self._proofs += 1
        _, secret = sockets.new_key_pair()
        with self._context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            sockets.present_keys(stranger, HubKeys(self._server_key, secret))
            monitor = sockets.open_monitor(stranger, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            try:
                target = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
                sockets.choose_family(stranger, addresses.parse(target))
                stranger.connect(target)
                until_s = time.monotonic() + PROVE_S
                while time.monotonic() < until_s:
                    self.zap.poll(10)
                    while self.asked() and self._asked is not None:
                        self._send_answer(self._asked, others=False)
                    if monitor.poll(0):
                        if sockets.read_monitor(monitor)[0] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                            return
                        raise KeysError(f"a client with an unknown key got in at {address}: no hub is run like this")
                raise KeysError(f"a client with an unknown key was not refused at {address} within {PROVE_S:g} s")
            finally:
                stranger.monitor(None, 0)
                monitor.close()

    def read_keys(self) -> list[tuple[str, str]]:
        """Read the files of keys that have changed; return each client, and how what it may changed."""
        changes = [] if self._keys is None else self._keys.refresh()
        for name, change in changes:
            # Event: The file of a client's keys has changed; `why` says how.
            log.info("keys_read", client=name, why=change, audit=True)
            self._keys_changed = True
            if change == CLIENT_REMOVED:
                self.removed.append(name)
        return changes

    def who(self, holder: Holder, peer: bytes) -> dict[str, str]:
        return {"client": holder.name, "host": self.connections.origin(peer)}

    def owner(self, holder: Holder, request: Incoming) -> dict[str, Any]:
        """The client that makes a session or takes one over, for people; ``said`` names what it says of itself."""
        account, address = as_map(request.message.origin), self.connections.origin(request.peer)
        del account["label"]
        seen: dict[str, Any] = {}
        if address.startswith(IPC_ORIGIN):  # its user, group and process, which the kernel has told libzmq
            uid, _, pid = map(int, address.split(":")[1:])
            seen = {"user": connections.user_name(uid), "host": os.uname().nodename, **({"pid": pid} if pid else {})}
        own = {"key": holder.name, "address": "" if seen else address, "said": sorted(account.keys() - seen.keys())}
        return {**account, **seen, **own}

    def accepted(self, descriptor: int, now_s: float) -> Ends:
        """Note a new connection; one of another user to an address that wants no key keeps the own user out."""
        is_others = not self.open_to_all and connections.is_others(descriptor)
        connection = self.connections.accepted(descriptor, now_s, is_others)
        if self.proxy is not None and (entry := self.proxy.entry(descriptor)) is not None:
            connection.entry, connection.origin = entry, entry.host
        if is_others:
            return [(connection, "its process is another user's, or has gone; serve with --keys to admit others")]
        return []

    def handshake_ended(self, ended: EndedHandshake) -> None:
        if ended.denied and self._proofs:  # of the hub itself
            self._proofs -= 1
        elif ended.denied:
            self._handshake_failed(ended.host, "unknown key")
        elif why := ended.why_unfinished:
            self.handshakes_unfinished += 1
            # Event: A connection ended before its client had shown a key: it may look whether its hub is back.
            log.info("handshake_unfinished", host=ended.host, why=why, audit=True)
        else:
            self._handshake_failed(ended.host)

    def ended(self, descriptor: int, now_s: float) -> None:
        connection = self.connections.get(descriptor)
        self.connections.ended(descriptor, now_s)
        if connection is None:
            return
        self.entries.pop(connection.peer, None)
        if connection.holder is not None and not self.connections.has(connection.client, connection.origin):
            # Event: The last connection of a client has ended.
            log.info("disconnected", client=connection.client, host=connection.origin, audit=True)

    def read(self, peer: bytes, frames: Sequence[Any], now_s: float) -> bool:
        """Tell the proxy that these frames of a message were read; False if its connection is not known yet."""
        descriptor = sockets.connection_of(frames)
        connection = self.connections.of(peer, descriptor, now_s)
        if connection is None:
            return self.connections.get(descriptor) is not None
        self.entries[peer] = connection.entry
        if connection.entry is not None:
            connection.entry.read(len(frames), sum(map(len, frames)))
        return True

    def silence_s(self, descriptor: int) -> float:
        connection = self.connections.get(descriptor)
        if connection is None or connection.entry is None:
            return connections.silent_s(descriptor)
        received_ns = connection.entry.received_ns
        return (time.monotonic_ns() - received_ns) / 1e9 if received_ns else 0.0

    def holder(self, peer: bytes, frames: Sequence[Any], now_s: float) -> tuple[Holder, str]:
        connection = self.connections.of(peer, sockets.connection_of(frames), now_s)
        key, origin = b"", str(sockets.property_of(frames, "Peer-Address"))
        user = str(sockets.property_of(frames, "User-Id"))
        # The proxy connects by ipc, too. But at its address libzmq asks who is admitted, so its clients have a user.
        if (origin.startswith(IPC_ORIGIN) and not user) or user == OWN:
            holder: Holder | None = OWN_USER
        elif self._keys is None:
            holder = ANYBODY
        else:
            key = key_of(user) if user else b""
            holder = self._keys.holders.get(key)
        if holder is None:
            return ANYBODY, REMOVED
        if connection is None:  # it has ended, or its peer has chosen the routing id of an ended one
            return holder, self.connections.why_refused(holder)
        if connection.entry is not None:
            origin = connection.origin
        if connection.holder is None:
            # Event: A client was let in, and has sent its first message.
            log.info("connected", client=holder.name, host=origin, audit=True)
            connection.silent_until_s, connection.key, connection.origin = math.inf, key, origin
            connection.client = holder.name
            if why := self.connections.why_refused(holder):
                return holder, why
            connection.holder = holder
        return holder, ""

    def refused(self, peer: bytes, descriptor: int, why: str, now_s: float) -> Ends:
        """Note that a message is refused: its client is told so once, and then its connection is ended."""
        ends = self.ends(peer, descriptor, why, now_s)
        for connection, _ in ends:
            if not connection.refused and why != REMOVED:
                connection.refused, connection.silent_until_s = True, now_s + REFUSED_S
                return []
        return ends

    def ends(self, peer: bytes, descriptor: int, why: str, now_s: float) -> Ends:
        connection = self.connections.of(peer, descriptor, now_s)
        return [] if connection is None else [(connection, why)]

    def malformed(self, peer: bytes, descriptor: int, now_s: float) -> Ends:
        why = f"{connections.MALFORMED_MAX} of its messages cannot be read"
        for connection, _ in (ends := self.ends(peer, descriptor, why, now_s)):
            connection.malformed += 1
        return [each for each in ends if each[0].malformed == connections.MALFORMED_MAX]

    def check(self, now_s: float) -> Ends:
        """Read the keys again if they have changed; returns the connections to be ended now."""
        late = f"it has sent nothing within {connections.HELLO_S:g} s"
        ends = [(connection, late) for connection in self.connections.silent(now_s)]
        much = f"its client has sent over {self.unread_bytes_max} bytes of messages that do not end"
        ends += [(connection, much) for connection in self.connections.unread(self.unread_bytes_max, now_s)]
        ends += self.connections.unfinished(FRAMES_MAX, now_s)
        if self._keys is not None and now_s >= self._check_keys_s:
            self._check_keys_s = now_s + KEYS_S
            self.read_keys()
            if self._keys_changed:
                self._keys_changed = False
                ends += [(connection, CHANGED) for connection in self.connections.changed(self._keys.holders)]
        return ends

    def next_s(self) -> float:
        if self._asked is not None and not self.connections.others:
            return 0.0  # the client that waits can be answered
        return min(self.connections.next_s(), self._check_keys_s, self._refuse_s)
