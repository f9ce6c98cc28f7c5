"""From a ``Failure`` on the wire to the exception a caller expects.

An env's own exception comes back as the class it was raised as, where that class is a builtin or already imported here
and can be made again from plain arguments; else as ``EnvRaised``. Nothing is imported and nothing unpickled for it.
"""

from __future__ import annotations

import builtins
import sys
from typing import NoReturn

from envhub import codec
from envhub.errors import (
    EnvHubError,
    EnvRaised,
    HubLost,
    LocalProtocolError,
    RequestRefused,
    SessionLost,
    SpaceMismatch,
    UnsupportedSpace,
    VersionMismatch,
    WorkerDied,
)
from envhub.messages import Failure

_CLASSES: dict[str, type[Exception]] = {
    "bad_actions": SpaceMismatch,
    "bad_seq": LocalProtocolError,
    "draining": HubLost,
    "malformed": LocalProtocolError,
    "session_lost": SessionLost,
    "stale_hub": HubLost,
    "unsupported_version": VersionMismatch,
    "worker_died": WorkerDied,
}


def raise_failure(failure: Failure, address: str) -> NoReturn:
    """Raise what the failure means.

    Raises:
        EnvRaised: an env raised something that cannot be made again here; otherwise its own class, from ``EnvRaised``.
        EnvHubError: everything else, by the failure's code.
    """
    if failure.scope != "env":
        kind = _CLASSES.get(failure.code, RequestRefused)
        raise kind(f"{failure.message} (hub at {address})")
    remote = EnvRaised(failure.env_index, failure.type, failure.message, failure.traceback, failure.worker)
    original = _original(failure)
    if original is None:
        raise remote
    raise original from remote


def _original(failure: Failure) -> Exception | None:
    module, _, name = failure.type.rpartition(".")
    owner = builtins if module == "builtins" else sys.modules.get(module)
    kind = getattr(owner, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    if issubclass(kind, EnvHubError) and kind is not UnsupportedSpace:
        return None  # an env's code cannot claim that this hub was lost
    try:
        found = kind(*codec.decode(failure.args)) if failure.args else kind(failure.message)
        return found if str(found) == failure.message else None
    except (Exception, SystemExit):  # it wants other arguments, or has no text: EnvRaised says all there is
        return None
