"""A hub that does not let this client in: what it said of that, another key to try, and what its silence may mean.

Denied is only what a hub has said: that it does not know this key, or by its greeting that it has keys, or none. A
handshake that breaks off says nothing. A hub that has another key than this client was given ends the connection, for
it cannot read what the client says, nor say what the client could read. A hub that stops or is killed does the same,
and so does a forwarder whose hub is away. When the client looks again, that hub may be back.
"""

from __future__ import annotations

import os
import socket
import sys

from envhub import errors
from envhub.secret import Secret
from envhub.transport.address import Address
from envhub.transport.socket_file import socket_owner, user_text
from envhub_client.connection import known_hubs
from envhub_client.connection.local_sockets import KEY_OR_OWN_HUB

OTHERS_CONNECTED = "it lets in its own user only, and not while others are connected; serve with --keys for others"


class Refusals:
    """Refusals of this client by the hub at an address.

    Attributes:
        target: the address, with the keys to present there.
        denied: why it does not; empty as long as it may.
    """

    def __init__(self, address: str | Secret[str]) -> None:
        """Follow the hub at this address, or of this name.

        Raises:
            AddressError: not an address, nor the name of a hub.
        """
        self.target: Address = known_hubs.resolve(address)
        self.denied = ""
        self._given = address

    def unknown_key(self) -> bool:
        """Note that the hub does not know this key; returns whether there is another key by now."""
        if self._take_new_key():
            return True
        kept = known_hubs.kept_key(self.target)
        place, remedy = ("", "") if kept is None else (f", which is {kept.place}", f", and {kept.remedy}")
        why = "it was removed, or never added; ask its operator for `envhub keys add`"
        self._deny(f"does not know this key{place}: {why}{remedy}")
        return False

    def other_mechanism(self) -> None:
        """Note that the hub has keys and this client none, or the other way round."""
        kept = known_hubs.kept_key(self.target)
        if self.target.keys is not None:
            remedy = f"; the one for it is {kept.place}: {kept.remedy}" if kept is not None else ""
            self._deny(f"takes no keys: connect to its tcp:// address{remedy}")
        elif kept is None or not kept.name:
            self._deny("admits no client without a key: connect with the envhub:// address that its operator gives you")
        else:
            self._deny(f"admits no client without a key, and one for it is {kept.place}: connect by hub={kept.name!r}")

    def why_broken(self) -> str:
        """Tell the possible causes of handshakes that break off, with advice."""
        there = "what accepts connections there is a hub that is stopped or overloaded, a forwarder without its hub"
        kept, user = known_hubs.kept_key(self.target), _listening_user(self.target)
        if self.target.keys is not None:
            place, remedy = ("", "") if kept is None else (f", which is {kept.place}", f", and {kept.remedy}")
            other = f"has another key than this address says{place}: ask its operator for the address{remedy}"
        elif user is not None:
            other = f"belongs to {user_text(user)}, and without keys serves that user alone: {KEY_OR_OWN_HUB}"
        else:
            other = "serves another user alone"
        return f"{there}, or a hub that {other}"

    def _deny(self, why: str) -> None:
        self.denied = f"{errors.hub_at(self.target.text)} {why}"

    def _take_new_key(self) -> bool:
        """Use the key that this user keeps for the hub of this name by now; returns whether it is another one."""
        try:
            target = known_hubs.kept_now(self._given)
        except (errors.AddressError, errors.KeysError):
            return False
        if target is None or target.text != self.target.text or target.keys in (None, self.target.keys):
            return False
        self.target = target
        return True


def _listening_user(address: Address) -> int | None:
    """The id of the other user of this machine who listens at this address of loopback; None if there is none."""
    if sys.platform == "win32" or not address.is_loopback:
        return None
    host = {"localhost": "127.0.0.1"}.get(address.host, address.host.strip("[]"))
    family, anywhere = (socket.AF_INET6, "::") if address.is_ipv6 else (socket.AF_INET, "0.0.0.0")
    owner = socket_owner(family, (host, address.port), (anywhere, 0))
    return None if owner is None or owner[0] == os.getuid() else owner[0]
