"""Failures, refusals and notices of a hub, as its program gets them.

An env's own exception comes back as its class, where that is imported here already and its arguments could be carried;
else as ``EnvRaised``. Nothing is imported and nothing unpickled for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
from typing import Any, NoReturn

from envhub import errors
from envhub.files import user_text
from envhub.protocol.client import REFUSED_S, ClientProtocol
from envhub.protocol.messages import Failure
from envhub.secret import Secret
from envhub.transport.address import Address
from envhub.transport.tcp import socket_owner
from envhub.values import codec
from envhub_client.connection import known_hubs
from envhub_client.connection.local_sockets import KEY_OR_OWN_HUB

# A session that has raised one of these is of no more use: it has ended, its hub is lost or does not let this client in
# any more, or what the hub sends makes no sense.
SESSION_ENDS = (errors.HubLost, errors.SessionLost, errors.AccessDenied, errors.RemoteProtocolError)
SESSION_FAILS = (*SESSION_ENDS, errors.RestartsExhausted)  # whose envs are under way no more

SLOW_S = 2.0
REPEAT_S = 5.0  # between counts on stderr

logger = logging.getLogger("envhub")

_CLASSES: dict[str, type[errors.EnvHubError]] = {
    "bad_actions": errors.SpaceMismatch,
    "bad_seq": errors.LocalProtocolError,
    "draining": errors.HubLost,
    "env_timeout": errors.EnvTimeout,
    "malformed": errors.LocalProtocolError,
    "restarts_exhausted": errors.RestartsExhausted,
    "session_lost": errors.SessionLost,
    "snapshot_limit": errors.SnapshotLimit,
    "snapshot_lost": errors.SnapshotLost,
    "snapshot_refused": errors.SnapshotRefused,
    "stale_hub": errors.HubLost,
    "unsupported_version": errors.VersionMismatch,
    "worker_died": errors.WorkerDied,
}


def raise_failure(failure: Failure, address: str, hub: str | None = None, row_offset: int = 0) -> NoReturn:
    index = None if failure.env_index is None else row_offset + failure.env_index
    if failure.scope != "env":
        kind = _CLASSES.get(failure.code, errors.SessionLost if failure.scope == "session" else errors.RequestRefused)
        if (failure.code, failure.scope) == ("not_permitted", "hub"):
            kind = errors.AccessDenied
        output = f"\n\nLast output of its worker:\n{failure.log_tail.rstrip()}" if failure.log_tail else ""
        again = f"\n\n{errors.replay_text(failure.replay)}" if failure.replay else ""
        error = kind(f"{failure.message} ({errors.hub_at(address).removeprefix('the ')}){output}{again}")
        error.hub = hub
        if isinstance(error, (errors.WorkerDied, errors.EnvTimeout)):
            error.env_index = index
        raise error
    worker = failure.worker
    remote = errors.EnvRaised(index, failure.type, failure.message, failure.traceback, worker, address, failure.replay)
    remote.hub = hub
    if (original := _original(failure)) is None:
        raise remote
    raise original from remote


def _original(failure: Failure) -> Exception | None:
    kind = _class(failure.type)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    if issubclass(kind, errors.EnvHubError) and kind is not errors.UnsupportedSpace:
        return None  # an env's code cannot claim that this hub was lost
    try:
        args = codec.decode(failure.args) if failure.args else [failure.message]
        attributes = errors.printable(codec.decode(failure.attributes)) if failure.attributes else {}
    except codec.DecodeError:
        return None
    return _made(kind, args, attributes, failure.message) or _made(
        kind, errors.printable(args), attributes, failure.message
    )


def _made(kind: type[Exception], args: list[Any], attributes: dict[str, Any], message: str) -> Exception | None:
    for make in (kind, functools.partial(kind.__new__, kind)):  # its constructor may want other arguments than it keeps
        try:
            error: Exception = make(*args)
            vars(error).update(attributes)
            if str(error) == message:
                return error
        except (Exception, SystemExit):  # it cannot be made, or has no text: EnvRaised has all that is known
            continue
    return None


def _class(name: str) -> Any:
    """The object of this qualified name in a module that is imported here."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:end]))
        if value is not None:
            for part in parts[end:]:
                value = vars(value).get(part) if hasattr(value, "__dict__") else None
            return value
    return None


OTHERS_CONNECTED = "it lets in its own user only, and not while others are connected; serve with --keys for others"


# Denied is only what a hub has said: that it does not know this key, or by its greeting that it has keys, or none. A
# handshake that breaks off says nothing. A hub that has another key than this client was given ends the connection, for
# it cannot read what the client says, nor say what the client could read. A hub that stops or is killed does the same,
# and so does a forwarder whose hub is away. When the client looks again, that hub may be back.
class Refusals:
    """Refusals of this client by the hub at an address."""

    def __init__(self, address: str | Secret[str]) -> None:
        self.target: Address = known_hubs.resolve(address)
        self.denied = ""  # the reason; empty as long as the hub may let this client in
        self._given = address

    def unknown_key(self) -> bool:
        """Note that the hub does not know this key; returns whether this user keeps another one for it now."""
        with contextlib.suppress(errors.AddressError, errors.KeysError):
            kept = known_hubs.kept_now(self._given)
            if kept is not None and kept.text == self.target.text and kept.keys not in (None, self.target.keys):
                self.target = kept
                return True
        location, remedy = self._kept_text()
        why = "it was removed, or never added; ask its operator for `envhub keys add`"
        self._deny(f"does not know this key{location}: {why}{remedy}")
        return False

    def _kept_text(self) -> tuple[str, str]:
        kept = known_hubs.kept_key(self.target)
        return ("", "") if kept is None else (f", which is {kept.location}", f", and {kept.remedy}")

    def other_mechanism(self) -> None:
        kept = known_hubs.kept_key(self.target)
        if self.target.keys is not None:
            remedy = f"; the one for it is {kept.location}: {kept.remedy}" if kept is not None else ""
            self._deny(f"takes no keys: connect to its tcp:// address{remedy}")
        elif kept is None or not kept.name:
            self._deny("admits no client without a key: connect with the envhub:// address that its operator gives you")
        else:
            self._deny(
                f"admits no client without a key, and one for it is {kept.location}: connect by hub={kept.name!r}"
            )

    def why_broken(self) -> str:
        there = "what accepts connections there is a hub that is stopped or overloaded, a forwarder without its hub"
        if self.target.keys is not None:
            location, remedy = self._kept_text()
            other = f"has another key than this address says{location}: ask its operator for the address{remedy}"
        elif (user := _listening_user(self.target)) is not None:
            other = f"belongs to {user_text(user)}, and without keys serves that user alone: {KEY_OR_OWN_HUB}"
        else:
            other = "serves another user alone"
        return f"{there}, or a hub that {other}"

    def _deny(self, why: str) -> None:
        self.denied = f"{errors.hub_at(self.target.text)} {why}"


def _listening_user(address: Address) -> int | None:
    """The id of the other user of this machine who listens at this address of loopback; None if there is none."""
    if sys.platform == "win32" or not address.is_loopback:
        return None
    host = {"localhost": "127.0.0.1"}.get(address.host, address.host.strip("[]"))
    family, anywhere = (socket.AF_INET6, "::") if address.is_ipv6 else (socket.AF_INET, "0.0.0.0")
    owner = socket_owner(family, (host, address.port), (anywhere, 0))
    return None if owner is None or owner[0] == os.getuid() else owner[0]


class UserReports:
    """Logs what the protocol of one connection learns: notices, how far a making is, whether the hub is reached."""

    def __init__(self, address: str, protocol: ClientProtocol) -> None:
        self.tried = ""  # for how long, or how often, a hub that is out of reach is tried
        self.warned = False  # of a hub that is out of reach
        self._hub, self._protocol = errors.hub_at(address), protocol
        self._next_s = SLOW_S  # of a making, when its count is printed

    def report(self, now_s: float, waited_s: float) -> None:
        if (progress := self._protocol.progress) is not None:
            self._protocol.progress = None
            counts = progress.phase, progress.built, progress.num_envs
            doing = f"importing {progress.importing}" if progress.importing else progress.starting
            doing = f" ({errors.printable(doing)})" if doing else ""
            text = "%s is %s: %d/%d envs ready%s"
            logger.info(text, self._hub, *counts, doing)
            # A program that has set up logging has the count in its log, or wants none.
            if waited_s >= self._next_s and not (logger.handlers or logger.level or logger.isEnabledFor(logging.INFO)):
                self._next_s = waited_s + REPEAT_S
                with contextlib.suppress(AttributeError, OSError, ValueError):  # of no stderr, or one without a reader
                    sys.stderr.write(f"envhub: {progress.built} of {progress.num_envs} envs made{doing}\n")
        while self._protocol.notices:
            logger.warning("%s: %s", self._hub, self._protocol.notices.pop(0))
        if self.warned:
            self.report_reach(now_s)

    def report_reach(self, now_s: float) -> None:
        trouble = self._protocol.trouble(now_s)
        if bool(trouble) is self.warned:
            return
        self.warned = bool(trouble)
        if trouble:
            tried = f"for {REFUSED_S:g} s" if self._protocol.is_refused else self.tried
            logger.warning("%s is out of reach: %s; it is tried %s", self._hub, trouble, tried)
        else:
            logger.warning("%s is within reach again", self._hub)
