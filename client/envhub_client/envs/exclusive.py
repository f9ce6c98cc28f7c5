"""One thread at a time: what a method looks at before it does something must still be so when it does it.

And a wait that a signal breaks off is repeated: its request is pending until its result is in the caller's hands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

from gymnasium.vector.async_vector_env import AsyncState

from envhub_client.frames import hide_frames
from envhub_client.session.pending import STILL_PENDING

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
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
        if not in_use.acquire(False):  # each step comes here: ``with in_use`` is one call more, a keyword 0.2 us
            in_use.refuse()
        if its.leaver is not None and its.leaver != get_ident():
            in_use.release()
            in_use.refuse()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise
        finally:
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
        in_use, its = self._session.in_use, self._session.pending
        if not in_use.acquire(False):
            in_use.refuse()
        if its.leaver not in (None, me := get_ident()):  # it has released the lock, and not ended its request yet
            in_use.release()
            in_use.refuse()
        its.leaver = me
        try:
            try:
                result = method(self, *args, **kwargs)
            except Exception as error:
                self._wait_failed(error)
                raise
            finally:
                in_use.release()
        except Exception as error:
            if isinstance(error, STILL_PENDING):
                its.leaver = None
                raise
            its.state, its.kept, its.returned, its.part, its.leaver = IDLE, None, its.part, None, None
            raise
        except BaseException:  # an interrupt
            its.leaver = None
            raise
        # Last, and without a call: a signal handler runs at calls, so that none comes between this and the return.
        its.state, its.kept, its.returned, its.part, its.leaver = IDLE, None, its.part, None, None
        return result

    return called
