"""A hub that does not let this client in: what handshakes that failed say of that, and another key to try."""

from __future__ import annotations

from envhub import errors
from envhub.secret import Secret
from envhub.transport import sockets
from envhub.transport.address import Address
from envhub.transport.socket_owner import user_text
from envhub_client.connection import hub_probes, known_hubs
from envhub_client.connection.broken_handshakes import BrokenHandshakes
from envhub_client.connection.local_sockets import KEY_OR_OWN_HUB

# Rows of broken handshakes after which a hub was there. One that comes back behind a forwarder is there after one row.
PROBES = 2


class Refusals:
    """Refusals of this client by the hub at an address.

    Attributes:
        target: the address, with the keys to present there.
        denied: why it does not; empty as long as it may.
        handshakes: those in a row that were broken.
    """

    def __init__(self, address: str | Secret[str]) -> None:
        """Follow the hub at this address, or of this name.

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
        """Note that the hub does not know this key, or admits no client without one just now.

        Returns:
            Whether there is another key by now, with which new sockets are to try.
        """
        if self.target.keys is None:
            self._deny("lets in its own user only, and not while others are connected; serve with --keys for others")
            return False
        if self._take_new_key():
            return True
        why, ask = "it was removed, or never added", "ask its operator for `envhub keys add`"
        if (kept := known_hubs.kept_key(self.target)) is None:
            self._deny(f"does not know this key: {why}; {ask}")
        else:
            self._deny(f"does not know this key, which is {kept.place}: {why}; {ask}, and {kept.remedy}")
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

    def broken(self, number: int, now_s: float) -> None:
        """Note that a handshake failed with this error number, without a reason."""
        if not self.handshakes.failed(number, now_s):
            return
        if self.target.keys is None:
            if (user := hub_probes.other_user(self.target)) is not None:
                whose = f"belongs to {user_text(user)}, and without keys it serves that user alone"
                self._deny(f"{whose}: {KEY_OR_OWN_HUB}")
            return
        self._probes = self._probes + 1 if hub_probes.waits_for_hello(self.target) else 0
        if self._probes < PROBES:  # see ``broken_handshakes`` for what this proves
            return
        why, ask = "has another key than this address says", "ask its operator for the address"
        if (kept := known_hubs.kept_key(self.target)) is None:
            self._deny(f"{why}: {ask}")
        else:
            self._deny(f"{why}, which is {kept.place}: {ask}, and {kept.remedy}")

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
