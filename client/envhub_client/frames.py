"""An env's error shows the caller's own frames, and not those that it has passed in the library."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from envhub import errors

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def hide_frames(error: BaseException) -> None:
    """Take out of an env's error, which is being handled, the frames that it has passed in the library.

    From Python 3.11 on a bare ``raise`` goes on with what is left; before, with all frames.
    """
    if errors.raised_by_env(error) is not None and not os.environ.get(errors.FULL_TRACEBACKS):
        error.__traceback__ = None


def hiding_frames(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, out of which an env's error comes without the frames of the library."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return called
