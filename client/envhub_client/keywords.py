"""Keyword arguments that no function takes, and the ones that were meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Options = TypeVar("Options")

CLOSE = 0.75  # two keywords are, from this ratio of difflib on

# Keywords of gymnasium.make_vec that a program may still pass.
_GYMNASIUMS = {
    "vectorization_mode": "leave it out: envs are always hosted in processes of their own.",
    "vector_kwargs": "pass what is in it as keywords of make_vec.",
}

# How Python says it of functions written in Python, and of those written in C.
_REFUSED = re.compile(r"got an unexpected keyword argument '(\w+)'|'(\w+)' is an invalid keyword argument")


def fields_of(kind: type[Options], arguments: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options of this dataclass among these keyword arguments, and the others.

    Raises:
        ValueError, TypeError: an option makes no sense.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    options = {name: value for name, value in arguments.items() if name in names}
    return kind(**options), {name: value for name, value in arguments.items() if name not in names}


def refused_keyword(error: TypeError, given: Collection[str]) -> str:
    """The one of the given keywords that was refused by what raised this; empty where it says something else."""
    match = _REFUSED.search(str(error))
    name = match[1] or match[2] if match else ""
    return name if name in given else ""


def meant(name: str, keywords: Iterable[str]) -> str:
    """A hint for a keyword that no function takes: the known one that is close to it; empty where none is."""
    if name in _GYMNASIUMS:
        return f"; {_GYMNASIUMS[name]}"
    close = difflib.get_close_matches(name, keywords, n=1, cutoff=CLOSE)
    return f"; did you mean {close[0]!r}?" if close else ""
