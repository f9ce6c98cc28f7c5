"""A hub that does not let this client in: what handshakes that failed say of that, and another key to try."""

from __future__ import annotations

import contextlib
import socket

from envhub import errors
from envhub.secret import Secret
from envhub.transport import sockets
from envhub.transport.address import Address
from envhub_client.connection import known_hubs
from envhub_client.connection.broken_handshakes import BrokenHandshakes
from envhub_client.deadline import Deadline

GREETING_S, SILENT_S = 1.0, 0.5
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0
_MECHANISM = slice(12, 32)  # in a greeting
# Rows of broken handshakes after which a hub was there. One that comes back behind a forwarder is there after one row.
PROBES = 2


class Refusals:
    """Whether the hub at an address lets this client in.

    Attributes:
        target: the address, with the keys to present there.
        denied: why it does not; empty as long as it may.
        handshakes: those in a row that were broken.
    """

    def __init__(self, address: str | Secret[str]) -> None:
        """Of the hub at this address, or of this name.

        Raises:
            AddressError: not an address, nor the name of a hub.
        """
        self.target: Address = known_hubs.resolve(address)
        self.denied = ""
        self.handshakes = BrokenHandshakes(sockets.HANDSHAKE_MS / 2000)
        self._given = address
        self._probes = 0  # after rows of broken handshakes, that have found a hub which waits for a hello

    def succeeded(self) -> None:
        """Note that a handshake succeeded."""
        self.handshakes.succeeded()
        self._probes = 0

    def unknown_key(self) -> bool:
        """Note that the hub does not know this key, or lets nobody in without one just now.

        Returns:
            Whether there is another key by now, with which new sockets are to try.
        """
        if self.target.keys is None:
            why = "lets in its own user only, and not while others are connected; serve with --keys for others"
            self._deny(why)
            return False
        if self._take_new_key():
            return True
        self._deny("does not know this key: it was removed, or never added; ask its operator for `envhub keys add`")
        return False

    def other_mechanism(self) -> None:
        """Note that the hub has keys and this client none, or the other way round."""
        if self.target.keys is None:
            self._deny("lets nobody in without a key: connect with the envhub:// address that its operator gives you")
        else:
            self._deny("takes no keys: connect to its tcp:// address")

    def broken(self, number: int, now_s: float) -> None:
        """Note that a handshake failed with this error number, without a reason."""
        if self.target.keys is None:
            return
        if self.handshakes.failed(number, now_s):
            self._probes = self._probes + 1 if self._waits_for_hello() else 0
        if self._probes >= PROBES:  # see ``broken_handshakes`` for what this proves
            self._deny("has another key than this address says: ask its operator for the address")

    def _deny(self, why: str) -> None:
        self.denied = f"the hub at {self.target.text} {why}"

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

    def _waits_for_hello(self) -> bool:
        """Whether a hub with keys is there that leaves a connection open on which nothing follows the greeting.

        So it is not ending, and no forwarder without a hub behind it: what it ended was for what was said there.
        """
        greeting, deadline = b"", Deadline(GREETING_S)
        try:
            with socket.create_connection((self.target.host.strip("[]"), self.target.port), GREETING_S) as probe:
                probe.sendall(_GREETING)
                while len(greeting) < len(_GREETING):
                    probe.settimeout(max(deadline.left_s(), 0.001))
                    if not (part := probe.recv(len(_GREETING) - len(greeting))):
                        return False
                    greeting += part
                probe.settimeout(SILENT_S)
                with contextlib.suppress(TimeoutError):
                    probe.recv(1)  # returns if it ends the connection, or says more
                    return False
        except OSError:
            return False
        return greeting[:1] == _GREETING[:1] and greeting[_MECHANISM] == _GREETING[_MECHANISM]
