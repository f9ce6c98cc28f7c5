"""Parameters and consoles that several commands have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, get_args

import cyclopts
from cyclopts import Parameter
from rich.console import Console

from envhub.options import no_path


def _positive(type_: object, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"it takes a positive number of seconds, got {seconds:g}")


Seconds = Annotated[float, Parameter(validator=_positive)]
KeyText = Annotated[str, Parameter(allow_leading_hyphen=True)]  # base64 with ``-``, which may be its first character


def shown_default(value: object) -> str | None:
    """Text of a default in the help; None for a flag that is off, and where nothing is given by default."""
    return str(value) if value or (value == 0 and value is not False) else None


def no_empty_path(arguments: cyclopts.ArgumentCollection) -> None:
    """Refuse a path that is empty, as of a variable that is not set: it would be the current folder; and a URL.

    Raises ``ValueError``.
    """
    for argument in arguments:
        if Path in (argument.hint, *get_args(argument.hint)):
            for token in argument.tokens:
                if why := no_path(token.value):
                    raise ValueError(f"{argument.name}: {why}")


console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
