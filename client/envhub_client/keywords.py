"""Keyword arguments that nobody takes, and the ones that were meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

# How Python says it of functions written in Python, and of those written in C.
_REFUSED = re.compile(r"got an unexpected keyword argument '(\w+)'|'(\w+)' is an invalid keyword argument")


def refused_keyword(error: TypeError, given: Collection[str]) -> str:
    """The one of the given keywords that was refused by what raised this; empty where it says something else."""
    found = _REFUSED.search(str(error))
    name = found[1] or found[2] if found else ""
    return name if name in given else ""


def meant(name: str, known: Iterable[str]) -> str:
    """A question after the known keyword that is closest to this one; empty where none is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
