"""What an operator wrote, as TOML writes it, for errors."""

from __future__ import annotations

import json
import re
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["heading", "key_text", "tomllib", "value_text"]

VALUE_CHARS_MAX = 60  # of a value in an error
BARE_KEY = re.compile(r"[A-Za-z0-9_]+")  # with dashes TOML allows more, but most write quotes


def key_text(name: str) -> str:
    """A key."""
    return name if BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def heading(name: str) -> str:
    """The heading of an environment's table."""
    return f"[envs.{key_text(name)}]"


def value_text(value: object) -> str:
    """A value, or its beginning, in one line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[: VALUE_CHARS_MAX - 3]}..."
