"""The options of this program's interpreter, for the interpreters of its hub and of its workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Options by the fields of ``sys.flags``. Left out are those that would break a worker, which needs ``site`` to find
# NumPy (-S) and has no terminal (-i, -q), and those that only print what the interpreter does (-v, -d).
_OPTIONS = {"optimize": "-O", "bytes_warning": "-b", "dont_write_bytecode": "-B"}
_OF_ITS_START = {"ignore_environment": "-E", "no_user_site": "-s", "safe_path": "-P"}  # all of them are in -I


def start_flags(flags: Any) -> list[str]:
    """The options by which an interpreter of these ``sys.flags`` finds its modules."""
    if flags.isolated:
        return ["-I"]
    return [option for name, option in _OF_ITS_START.items() if getattr(flags, name, 0)]


def interpreter_flags(flags: Any, warnoptions: Sequence[str], xoptions: Mapping[str, str | bool]) -> list[str]:
    """The options that give another interpreter these ``sys.flags``, ``sys.warnoptions`` and ``sys._xoptions``."""
    repeated = [option for name, option in _OPTIONS.items() for _ in range(getattr(flags, name))]
    extended = [name if value is True else f"{name}={value}" for name, value in xoptions.items()]
    pairs = [part for option in extended for part in ("-X", option)]
    return [*start_flags(flags), *repeated, *pairs, *(part for text in warnoptions for part in ("-W", text))]
