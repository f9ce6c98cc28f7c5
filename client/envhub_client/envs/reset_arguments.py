"""The arguments of ``reset`` as Gymnasium's vector envs take them, checked with its texts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


def seeds_of(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """One seed or None per env; empty where there are none.

    Raises:
        ValueError: a sequence of another length.
    """
    if seed is None:
        return []
    if isinstance(seed, (int, np.integer)):
        return [operator.index(seed) + row for row in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    return [None if one is None else operator.index(one) for one in seed]


def split_mask(options: dict[str, Any] | None, num_envs: int) -> tuple[list[bool], dict[str, Any] | None]:
    """The mask, empty where there is none, and the options without it.

    Raises:
        TypeError: the mask is no array, or of another dtype.
        ValueError: it has another shape, or selects no env.
    """
    if options is None or "reset_mask" not in options:
        return [], options
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not np.any(mask):
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask.tolist(), {key: value for key, value in options.items() if key != "reset_mask"}
