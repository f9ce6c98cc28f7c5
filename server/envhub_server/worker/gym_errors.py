"""Packages to install where an env of gym fails because of the installed gym or NumPy."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Iterator

_VALUES = re.compile(r"(?:not enough|too many) values to unpack \(expected ([45])")
_NUMPY = re.compile(r"module 'numpy' has no attribute '(\w+)'")
_REMOVED_IN_1_24 = ("bool", "int", "float", "complex", "object", "str")


def pins(error: BaseException) -> str:
    """Arguments of ``pip install`` that prevent this error of an env; empty where none are known."""
    numpy = _NUMPY.search(str(error))
    if numpy:
        return "numpy<1.24" if numpy[1] in _REMOVED_IN_1_24 else "numpy<2"
    values = _VALUES.search(str(error))
    if values and "gym" in sys.modules:
        return "gym==0.26.2" if values[1] == "5" else "gym<0.26"
    return ""


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Within the context, an error of a package that does not fit the env says what to install."""
    try:
        yield
    except (AttributeError, ValueError) as error:
        needed = pins(error)
        if not needed:
            raise
        kind = AttributeError if isinstance(error, AttributeError) else ValueError
        text = f"{error}: the env, or a wrapper of it, is written for another version"
        raise kind(f"{text}; run: {sys.executable} -m pip install '{needed}'") from error
