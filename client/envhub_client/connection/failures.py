"""From a ``Failure`` on the wire to the exception a caller expects.

An env's own exception comes back as the class it was raised as, where that class is a builtin or already imported here
and its arguments and attributes could be carried; else as ``EnvRaised``. Nothing is imported and nothing unpickled for
it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

from envhub import errors
from envhub.protocol.messages import Failure
from envhub.values import codec

# A session that has raised one of these is of no more use: it has ended, its hub is lost or does not let this client in
# any more, or what the hub sends makes no sense.
SESSION_ENDS = (errors.HubLost, errors.SessionLost, errors.AccessDenied, errors.RemoteProtocolError)
SESSION_FAILS = (*SESSION_ENDS, errors.RestartsExhausted)  # whose envs are under way no more

_CLASSES: dict[str, type[errors.EnvHubError]] = {
    "bad_actions": errors.SpaceMismatch,
    "bad_seq": errors.LocalProtocolError,
    "draining": errors.HubLost,
    "env_timeout": errors.EnvTimeout,
    "malformed": errors.LocalProtocolError,
    "restarts_exhausted": errors.RestartsExhausted,
    "session_lost": errors.SessionLost,
    "stale_hub": errors.HubLost,
    "unsupported_version": errors.VersionMismatch,
    "worker_died": errors.WorkerDied,
}


def raise_failure(failure: Failure, address: str, hub: str | None = None, first_env: int = 0) -> NoReturn:
    """Raise what the failure means, of the hub at this address and of this name; its envs count from ``first_env``.

    Raises:
        EnvRaised: an env raised something that cannot be made again here; otherwise its own class, from ``EnvRaised``.
        EnvHubError: everything else, by the failure's code.
    """
    index = None if failure.env_index is None else first_env + failure.env_index
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
    """The exception of these arguments, if it can be made and has this text, which has no control characters."""
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
    """Find the object of this qualified name in a module that is imported here; None if there is none."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:end]))
        if value is not None:
            for part in parts[end:]:
                value = vars(value).get(part) if hasattr(value, "__dict__") else None
            return value
    return None
