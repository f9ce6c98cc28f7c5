"""Who may use a hub: over tcp by keys, where it has keys, else by the user that runs the process."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envhub.transport import sockets
from envhub.transport.keys import key_of
from envhub_server.network import network_peer
from envhub_server.network.audit import Audit
from envhub_server.network.authenticator import DOMAIN, Authenticator
from envhub_server.network.connections import HELLO_S, MALFORMED_MAX, Connections
from envhub_server.network.key_folder import KeyFolder
from envhub_server.network.rights import ANYBODY, OWN_USER, Holder

KEYS_S = 0.5  # from one check of the folder of keys to the next
REMOVED = "its key was removed"
IPC_ORIGIN = "localhost:"  # libzmq has seen that the peer is the hub's own user

Ends = list[tuple[int, str]]  # descriptors of connections that are to be ended, each with the reason


class Access:
    """Who is behind each connection of one hub, and which connections are to be ended.

    Attributes:
        authenticator: answers libzmq for addresses that want a key; None while there are none.
    """

    def __init__(self, keys: Path | None, insecure: bool, audit: Audit) -> None:
        """By the keys in this folder, if one is given; ``insecure`` admits everybody where there are no keys."""
        self._audit = audit
        self._keys = KeyFolder(keys) if keys is not None else None
        self._insecure = insecure
        self.authenticator: Authenticator | None = None
        self._server_key = b""
        self._connections = Connections()
        self._check_keys_s = math.inf

    @property
    def open_to_all(self) -> bool:
        """Whether other machines may reach an address: they need a key, or are let in on purpose."""
        return self._insecure or self._keys is not None

    def require_keys(self, context: Any, router: Any) -> None:
        """Have the addresses that this socket binds from now on want a key, if there are keys.

        Raises:
            KeysError: they cannot be used.
        """
        if self._keys is None:
            return
        secret = self._keys.make_secret()
        self._keys.load()
        self._server_key = sockets.public_key(secret)
        self.authenticator = Authenticator(context, self._keys, self._audit)
        sockets.require_keys(router, secret, DOMAIN)
        self._check_keys_s = 0.0

    def prove(self, address: str) -> None:
        """See that this tcp address refuses strangers, if there are keys.

        Raises:
            KeysError: it does not.
        """
        if self.authenticator is not None:
            self.authenticator.prove(address, self._server_key)

    def close(self) -> None:
        """Let nobody in any more who needs a key."""
        if self.authenticator is not None:
            self.authenticator.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def accepted(self, descriptor: int, now_s: float) -> Ends:
        """Note a new connection; one of another user to an address that wants no key is to be ended."""
        own = network_peer.uid(descriptor) in (network_peer.LOCAL, os.getuid())
        self._connections.accepted(descriptor, own, now_s)
        if self.open_to_all or own:
            return []
        return [(descriptor, "its process is another user's; serve with --keys to admit others")]

    def who(self, descriptor: int) -> tuple[str, str]:
        """The name of a connection's client, and where that is, as far as is known."""
        return self._connections.who(descriptor)

    def ended(self, descriptor: int, now_s: float) -> None:
        """Forget a connection."""
        self._connections.ended(descriptor, now_s)

    def holder(self, peer: bytes, frames: Sequence[Any], now_s: float) -> tuple[Holder, str]:
        """The client that sent this message, and why it is refused, if it is."""
        known = self._connections.of(peer, sockets.connection_of(frames), now_s)
        key, origin = b"", sockets.origin_of(frames)
        holder: Holder | None
        if origin.startswith(IPC_ORIGIN):
            holder = OWN_USER
        elif self._keys is None:
            holder = OWN_USER if known is not None and known.own else ANYBODY
        else:
            user = sockets.user_of(frames)
            key = key_of(user) if user else b""
            holder = self._keys.holders.get(key)
        if holder is None:
            return ANYBODY, REMOVED
        if known is not None and known.holder is None:
            self._audit.write("connected", holder.name, origin)
            known.silent_until_s = math.inf
            if why := self._connections.lack(holder):
                return holder, why
            known.key, known.holder, known.origin = key, holder, origin
        return holder, ""

    def refused(self, peer: bytes, descriptor: int, why: str, now_s: float) -> Ends:
        """Note that a message is refused: its client is told so once, and then its connection is ended."""
        known = self._connections.of(peer, descriptor, now_s)
        if known is None or not (known.refused or why == REMOVED):
            if known is not None:
                known.refused = True
            return []
        return [(descriptor, why)]

    def malformed(self, peer: bytes, descriptor: int, now_s: float) -> Ends:
        """Note that a message cannot be read."""
        known = self._connections.of(peer, descriptor, now_s)
        if known is None:
            return []
        known.malformed += 1
        enough = known.malformed == MALFORMED_MAX
        return [(descriptor, f"{MALFORMED_MAX} of its messages cannot be read")] if enough else []

    # --- time ---------------------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> Ends:
        """Read the keys again if they have changed; returns the connections to be ended now."""
        late = f"it has sent nothing within {HELLO_S:g} s"
        ends = [(descriptor, late) for descriptor in self._connections.silent(now_s)]
        if self._keys is not None and now_s >= self._check_keys_s:
            self._check_keys_s = now_s + KEYS_S
            if self._keys.refresh():
                names = sorted({holder.name for holder in self._keys.holders.values()})
                self._audit.write("keys_read", "", clients=" ".join(names))
                ends += [(descriptor, REMOVED) for descriptor in self._connections.removed(self._keys.holders)]
        return ends

    def next_s(self) -> float:
        """When ``check`` is to be called next; infinity where nothing depends on time."""
        return min(self._connections.next_s(), self._check_keys_s)
