"""Functions of a user's own modules, which commands are given by name."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from envhub.errors import RequestRefused


def named_function(text: str, kind: str) -> Any:
    """Import what ``module:function`` names; modules in the working directory come after those installed.

    Args:
        text: the name.
        kind: what it is of, for the error.

    Raises:
        RequestRefused: the text is of another form, or the function does not exist.
    """
    module, _, name = text.partition(":")
    if not (module and name):
        raise RequestRefused(f"a {kind} is written module:function, got {text!r}")
    if "" not in sys.path:
        sys.path.append("")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestRefused(f"there is no {kind} {text!r}: {error}") from error
