"""The request of a session that was begun and is to be waited for: one at a time.

It is pending until its result is in the caller's hands: the wait keeps the result, and ``repeatable`` ends the request
last of all. So a wait that a signal has broken off is called again, and returns or raises the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub.errors import ConnectionInUse, HubTimeout
from envhub.vector_errors import NothingPending, SessionBusy, SessionClosed
from envhub_client.frames import hide_frames

Result = TypeVar("Result")
# After these a request that was begun can still be waited for, or none was.
STILL_PENDING = (HubTimeout, ConnectionInUse, NothingPending, SessionBusy)


class Carrier(Protocol):
    """Whatever carries requests to a hub: a lane, or the maker of a session."""

    def give_up(self) -> None:
        """Give up what was begun, if anything was; its results are dropped."""


class PendingRequest:
    """Pending requests of a session.

    Attributes:
        state: which request is pending.
        kept: the result of the pending request, or the error that it ended by, once it has come.
        notified: number of observers that have seen it.
        part: envs whose results, or error, ``recv`` is about to return or raise.
        leaver: the thread whose wait is about to return, or raise, what is pending until then.
        returned: envs of what it has returned or raised, which the lane is to be told of.
        closed: whether the session is over, or left to another process.
    """

    def __init__(self, class_name: str, carriers: Sequence[Carrier]) -> None:
        """Nothing pending, in an object of this class; a request is given up at each of its ``carriers``."""
        self.state = AsyncState.DEFAULT
        self.kept: Any = None
        self.notified = 0
        self.part: np.ndarray | None = None
        self.leaver: int | None = None
        self.returned: np.ndarray | None = None
        self.closed = False
        self._class_name = class_name
        self._carriers = carriers

    def busy_error(self, what: str) -> SessionBusy:
        """The error of beginning ``what`` while something is pending."""
        name = str(self.state.value)
        return SessionBusy(f"Calling `{what}` while waiting for a pending call to `{name}` to complete.", name)

    def closed_error(self) -> SessionClosed:
        """The error of any method after ``close``."""
        return SessionClosed(f"Trying to operate on `{self._class_name}`, after a call to `close()`.")

    def begin(self, state: AsyncState, begin: Callable[..., None], *args: Any) -> None:
        """Begin a request, which ``state`` names; interrupted, it counts as never begun."""
        try:
            begin(*args)
            self.state, self.kept, self.notified = state, None, 0
        except ConnectionInUse:
            raise  # nothing was sent, and what another thread sent is not ours to give up
        except BaseException:
            self.give_up()
            raise

    def wait(self, state: AsyncState, wait: Callable[..., Result], *args: Any) -> Result:
        """Wait for the pending request, which stays pending: ``repeatable`` ends it. The same again gives the same.

        Raises:
            NothingPending: ``state`` does not name the pending request.
            SessionClosed: after ``close``.
        """
        if self.closed:
            raise self.closed_error()
        if self.state is not state:
            name = str(state.value)
            raise NothingPending(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        if self.kept is None:
            try:
                self.kept = wait(*args)
            except (HubTimeout, ConnectionInUse):
                raise
            except Exception as error:
                self.kept = error
        if isinstance(self.kept, Exception):
            for carrier in self._carriers:
                carrier.give_up()
            hide_frames(self.kept)
            raise self.kept
        result: Result = self.kept
        return result

    def give_up(self) -> None:
        """Have nothing pending: the next request waits until the hub is done with what is, and its result is dropped.

        A failed request is pending no more, unless the error is not its own: a signal handler may raise anything.
        """
        for carrier in self._carriers:
            carrier.give_up()
        self.state, self.kept = AsyncState.DEFAULT, None

    def forget(self, error: BaseException) -> None:
        """Give up the request of a call that both begins it and waits, such as ``step``, after this error in there.

        Its caller knows of no request that is to be waited for. What was pending before the call stays pending.
        """
        if not isinstance(error, (SessionBusy, SessionClosed, NothingPending, ConnectionInUse)):
            self.give_up()
            hide_frames(error)

    def drop(self) -> bool:
        """Give up the request that was begun and not waited for; True if there was one."""
        pending = self.state is not AsyncState.DEFAULT and not self.closed
        if pending:
            self.give_up()
        return pending
