"""Actions of Dict and Tuple spaces, which frameworks give for each env, as Gymnasium batches them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gymnasium.spaces import Dict, Space, Tuple
from gymnasium.vector.utils import concatenate, create_empty_array


def is_composed(space: Space[Any]) -> bool:
    """True if actions of this space have parts."""
    return isinstance(space, (Dict, Tuple))


def batched(space: Space[Any], actions: Iterable[Any]) -> Any:
    """One batch of these actions, which are one for each env."""
    each = list(actions)
    empty: Any = create_empty_array(space, len(each))
    return concatenate(space, each, empty)
