"""The request of a session that was begun and is to be waited for: one at a time.

It is pending until its result is in the caller's hands: the wait keeps the result, and ``repeatable`` ends the request
last of all. So a wait that a signal has broken off is called again, and returns or raises the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub.errors import ConnectionInUse, Forked, HubTimeout
from envhub.vector_errors import NothingPending, SessionBusy, SessionClosed, SessionInUse
from envhub_client.connection.connection import NOT_BLOCKING, UserLock
from envhub_client.frames import hide_frames

Result = TypeVar("Result")
# After these a request that was begun can still be waited for, or none was.
STILL_PENDING = (HubTimeout, ConnectionInUse, NothingPending, SessionBusy)


class PendingRequest:
    """Pending requests of a session, and ways to give up what its connections have begun."""

    def __init__(self, class_name: str, *give_ups: Callable[[], None]) -> None:
        self.state = AsyncState.DEFAULT
        self.kept: Any = None  # the result of the pending request, or the error that it ended by, once it has come
        self.notified = 0  # observers
        self.part: np.ndarray | None = None  # envs whose results, or error, ``recv`` is about to return or raise
        self.leaver: int | None = None  # the thread whose wait is about to return, or raise, what is pending until then
        self.returned: np.ndarray | None = None  # envs of what it has returned or raised; the lane is to be told
        self.interrupted = False  # a wait for what is pending; ``close`` does not wait for it again
        self.closed = False  # the session is over, or left to another process
        self._class_name = class_name
        self._give_ups = give_ups

    def busy_error(self, what: str) -> SessionBusy:
        name = str(self.state.value)
        return SessionBusy(f"Calling `{what}` while waiting for a pending call to `{name}` to complete.", name)

    def closed_error(self) -> SessionClosed:
        return SessionClosed(f"Trying to operate on `{self._class_name}`, after a call to `close()`.")

    def begin(self, state: AsyncState, begin: Callable[..., None], *args: Any) -> None:
        """Begin a request, which ``state`` names; interrupted, it counts as never begun."""
        try:
            begin(*args)
            self.state, self.kept, self.notified, self.interrupted = state, None, 0, False
        except ConnectionInUse:
            raise  # nothing was sent, and what another thread sent is not ours to give up
        except BaseException:
            self.give_up()
            raise

    def wait(self, state: AsyncState, wait: Callable[..., Result], *args: Any) -> Result:
        """Wait for the pending request, which stays pending: ``repeatable`` ends it. The same again gives the same."""
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
            for give_up in self._give_ups:
                give_up()
            hide_frames(self.kept)
            raise self.kept
        result: Result = self.kept
        return result

    def give_up(self) -> None:
        """Have nothing pending: the next request waits until the hub is done with what is, and its result is dropped.

        A failed request is pending no more, unless the error is not its own: a signal handler may raise anything.
        """
        for give_up in self._give_ups:
            give_up()
        self.state, self.kept = AsyncState.DEFAULT, None

    def forget(self, error: BaseException) -> None:
        """Give up the request of a call such as ``step``, after this error; what was pending before it stays so."""
        if not isinstance(error, (SessionBusy, SessionClosed, NothingPending, ConnectionInUse)):
            self.give_up()
            hide_frames(error)

    def drop(self) -> bool:
        pending = self.state is not AsyncState.DEFAULT and not self.closed
        if pending:
            self.give_up()
        return pending


class InUse(UserLock):
    """A lock of a session, which outlives its connection. Of that, a forked child is refused the use."""

    def take(self) -> NoReturn:
        """Say why another thread has it."""
        if os.getpid() != self._pid:
            raise Forked("this vector env was made before a fork; make another in the child")
        text = "another thread is using this vector env; give each thread a vector env of its own"
        raise SessionInUse(text, "another thread's")


Parameters = ParamSpec("Parameters")
IDLE = AsyncState.DEFAULT


def exclusive(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """The method of a vector env, which holds its session's ``in_use`` from its first look at it until its end.

    So no other thread begins, receives or gives up anything in between: it is refused with ``SessionInUse``. Errors
    come out as ``hide_frames`` leaves them.
    """

    @functools.wraps(method)
    def called(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        in_use, its = self._session.in_use, self._session.pending
        taken: list[bool] = []
        try:
            taken.extend(map(in_use.acquire, NOT_BLOCKING))  # each step comes here: ``with in_use`` is one call more
            if not taken[0] or its.leaver not in (None, get_ident()):
                in_use.take()
            return method(self, *args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise
        finally:
            if taken and taken[0]:
                in_use.release()

    return called


def repeatable(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """A wait of a vector env, otherwise as ``exclusive``: its request is pending until this has returned, or raised.

    ``method`` returns, or raises, the same again where it is called again. Errors are told to ``_wait_failed``.
    """

    @functools.wraps(method)
    def called(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        in_use, its, has_begun = self._session.in_use, self._session.pending, False
        taken: list[bool] = []
        try:
            try:
                taken.extend(map(in_use.acquire, NOT_BLOCKING))
                me = get_ident()
                if not taken[0] or its.leaver not in (None, me):  # one has released the lock, and not ended its request
                    in_use.take()
                its.leaver, has_begun = me, True
                result = method(self, *args, **kwargs)
            except Exception as error:
                if has_begun:
                    self._wait_failed(error)
                raise
            finally:
                if taken and taken[0]:
                    in_use.release()
        except Exception as error:
            if has_begun and isinstance(error, STILL_PENDING):
                its.leaver = None
            elif has_begun:
                its.state, its.kept, its.returned, its.part, its.leaver = IDLE, None, its.part, None, None
            raise
        except BaseException:  # an interrupt
            if has_begun:
                its.leaver, its.interrupted = None, True
            raise
        # Last, and without a call: a signal handler runs at calls, so that none comes between this and the return.
        its.state, its.kept, its.returned, its.part, its.leaver = IDLE, None, its.part, None, None
        return result

    return called
