"""Errors of the vector env's state machine; each is also the Gymnasium error that callers already catch.

They are not in ``envhub.errors`` because they import Gymnasium, which would slow down a health check.
"""

from __future__ import annotations

from typing import Any

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from envhub.errors import ConnectionInUse, EnvHubError


class SessionBusy(EnvHubError, AlreadyPendingCallError):
    """A request was made while another one is pending; ``name`` is the pending one."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Gymnasium's base keeps only the message, so the default pickle would lose the name.
        return type(self), (str(self), self.name)


class SessionInUse(ConnectionInUse, SessionBusy):
    """Another thread is using this vector env at this moment; nothing was done."""


class NothingPending(EnvHubError, NoAsyncCallError):
    """A ``*_wait`` was called without its ``*_async``; ``name`` is the name of the call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.name)


class SessionClosed(EnvHubError, ClosedEnvironmentError):
    """The vector env was used after ``close()``."""
