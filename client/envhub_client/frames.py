"""An error that its reader can act on shows the frames of the program alone; a bug also those of the library."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from opcode import opmap
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from envhub import errors

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_OF_USE = "_envhub_of_use"  # an attribute of errors
_LIBRARY = {"envhub", "envhub_client", "envhub_server"}
# The library also passes through functions of these, as of a context manager.
_BELOW = {*_LIBRARY, *sys.stdlib_module_names, "gymnasium"}


def hide_frames(error: BaseException) -> None:
    """Take the library's frames out of an error being handled, and of its causes, if its reader can act on it."""
    # From Python 3.11 on a bare ``raise`` goes on with what is left; before, with all frames.
    if os.environ.get(errors.FULL_TRACEBACKS) or not _is_of_use(error):
        return
    cause: BaseException | None = error
    causes: list[BaseException] = []
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause.__traceback__ = _from_program(cause.__traceback__)
        cause = cause.__cause__


def _from_program(at: TracebackType | None) -> TracebackType | None:
    """The frames from the first one of the program on: of an observer or an env of its own that the library called."""
    while at is not None and _package(at.tb_frame) in _BELOW:
        at = at.tb_next
    return at


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_of_use(error: BaseException) -> bool:
    """True if an error is an env's or tells its reader what to do, and so is no bug of the library."""
    of_library = isinstance(error, (errors.LocalProtocolError, errors.RemoteProtocolError))
    if errors.raised_by_env(error) is not None:
        return True
    if isinstance(error, errors.EnvHubError):
        return not of_library
    if not isinstance(error, (TypeError, ValueError, ImportError)):
        return False
    of_use: bool = vars(error).setdefault(_OF_USE, _is_raised_by_library(error))  # its frames may be hidden already
    return of_use


def _is_raised_by_library(error: BaseException) -> bool:
    """True if a ``raise`` statement of the library raised this, whose text is for the caller then."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return False
    is_raised = at.tb_frame.f_code.co_code[at.tb_lasti] == opmap["RAISE_VARARGS"]
    return is_raised and _package(at.tb_frame) in _LIBRARY


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
