"""Descriptions of values that do not nest as their spaces do. Pure; only used after such a value."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from envhub.values.gym_api import api

spaces = api.spaces


def misfit(space: Any, value: Any, name: str) -> str:
    """Describe the first part of ``value`` that does not fit ``space``; empty if all parts do.

    The parts are named as Python does: ``observation['camera'][0]``, where ``name`` is ``observation``.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{name} is {_kind(value)}, and its space has the keys {', '.join(map(repr, space.spaces))}"
        for key, sub in space.spaces.items():
            if key not in value:
                return f"{name} has no {key!r}, which its space has"
            if why := misfit(sub, value[key], f"{name}[{key!r}]"):
                return why
        return ""
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, (tuple, list)):
            return f"{name} is {_kind(value)}, and its space a tuple of {len(space.spaces)}"
        if len(value) != len(space.spaces):
            return f"{name} has {len(value)} parts, and its space {len(space.spaces)}"
        parts = enumerate(zip(space.spaces, value))
        return next((why for at, (sub, part) in parts if (why := misfit(sub, part, f"{name}[{at}]"))), "")
    if space.shape is None or space.dtype is None or space.dtype.kind not in "biufc":
        return ""  # any object may be an element
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        return f"{name} is no array: its parts have several lengths"
    if array.shape != space.shape:
        description = _kind(value) if value is None else f"of shape {array.shape}"
        return f"{name} is {description}, and its space of shape {space.shape}"
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        too_large = array.dtype == object and isinstance(value, int)
        description = "an int of more than 64 bits" if too_large else f"of dtype {array.dtype}"
        return f"{name} is {description}, and its space of dtype {space.dtype}"
    return ""


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
