"""An error that its reader can act on shows the caller's own frames, and not those that it has passed in the library.

It is an env's, or tells of a hub, an address, a key or a request. A breach of the protocol shows all frames.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from envhub import errors

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def hide_frames(error: BaseException) -> None:
    """Take the library's frames out of an error that is being handled, and of its causes, if its reader can act on it.

    From Python 3.11 on a bare ``raise`` goes on with what is left; before, with all frames.
    """
    if os.environ.get(errors.FULL_TRACEBACKS) or not _is_of_use(error):
        return
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__


def _is_of_use(error: BaseException) -> bool:
    """True if an error is an env's or tells its reader what to do, and so is no bug of the library."""
    of_library = isinstance(error, (errors.LocalProtocolError, errors.RemoteProtocolError))
    return errors.raised_by_env(error) is not None or (isinstance(error, errors.EnvHubError) and not of_library)


def hiding_frames(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, out of which errors come as ``hide_frames`` leaves them."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return called
