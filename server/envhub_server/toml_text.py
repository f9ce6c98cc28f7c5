"""The TOML of an operator: its reading, and its text in errors."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_DIGITS = re.compile(r"[0-9][0-9_]*")
_KEY = re.compile(r"^[ \t]*([^\s=#\[][^=\n#]*?)[ \t]*=", re.MULTILINE)
BARE_KEY = re.compile(r"[A-Za-z0-9_]+")  # with dashes TOML allows more, but most write quotes


class TomlError(ValueError):
    """A text is not valid TOML; the message begins with the file's name, and says the problem and its place."""


def read_toml(text: str) -> dict[str, Any]:
    """Read the table in a text; raises ``TomlError``."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
        return table
    except RecursionError as error:
        raise TomlError("cannot be read: its values are nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        quotes = " (a name such as ALE/* is written in quotes)" if "table declaration" in str(error) else ""
        raise TomlError(f"is no TOML: {error}{quotes}") from error
    except ValueError as error:  # of ``int``, which knows no place
        longest = max(_DIGITS.finditer(text), key=lambda table: len(table[0]))
        keys = _KEY.findall(text[: longest.start()])
        line = text.count("\n", 0, longest.start()) + 1
        why = f"a number has {len(longest[0])} digits, more than Python reads"
        raise TomlError(f"cannot be read: {keys[-1] if keys else 'a key'} (at line {line}): {why}") from error


def key_text(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def heading(name: str) -> str:
    return f"[envs.{key_text(name)}]"
