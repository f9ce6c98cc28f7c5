"""One thread at a time: what a method looks at before it does something must still be so when it does it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from envhub_client.frames import hide_frames

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """The method of a vector env, which holds its session's ``in_use`` from its first look at it until its end.

    So no other thread begins, receives or gives up anything in between: it is refused with ``SessionInUse``. Errors
    come out as ``hide_frames`` leaves them.
    """

    @functools.wraps(method)
    def called(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        in_use = self._session.in_use
        if not in_use.acquire(False):  # each step comes here: ``with in_use`` is one call more, a keyword 0.2 us
            in_use.refuse()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise
        finally:
            in_use.release()

    return called
