"""Levels of this program's loggers, and its filters of warnings."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from gymnasium import logger

from envhub.values import codec

DEFAULT_LEVEL = 30  # of Python's root logger and of Gymnasium's


def message_levels() -> bytes:
    """The levels and filters as an encoded map, which a worker adopts (World)."""
    logging = sys.modules.get("logging")
    gymnasium = int(getattr(logger, "min_level", DEFAULT_LEVEL))
    return codec.encode(
        {
            "logging": {} if logging is None else _set_levels(logging.root),
            "disabled": 0 if logging is None else int(logging.root.manager.disable),
            "gymnasium": None if gymnasium == DEFAULT_LEVEL else gymnasium,
            "warnings": [_filter(*parts) for parts in warnings.filters],
        }
    )


def _set_levels(root: Any) -> dict[str, int]:
    """The levels that were set, by the names of the loggers."""
    loggers = [*root.manager.loggerDict.items()]  # in which there are placeholders without a level, too
    levels = {name: getattr(each, "level", 0) for name, each in loggers}
    levels[""] = 0 if root.level == DEFAULT_LEVEL else root.level
    return {name: level for name, level in levels.items() if level}


def _filter(action: str, message: Any, category: Any, module: Any, line: int) -> list[Any]:
    categories = category if isinstance(category, tuple) else (category,)
    return [
        action,
        _text(message),
        [f"{each.__module__}:{each.__qualname__}" for each in categories],
        _text(module),
        line,
    ]


def _text(matched: Any) -> Any:
    return [matched.pattern, matched.flags] if isinstance(matched, re.Pattern) else matched
