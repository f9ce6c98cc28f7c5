"""The arguments of constructors, of ``reset``, checked with Gymnasium's texts, of ``step`` and of ``send``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from multiprocessing import get_all_start_methods
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space

from envhub.errors import SpaceMismatch
from envhub.values import spaces
from envhub.values.spaces import misfit

EnvIds = Sequence[int] | np.ndarray | None  # numbers of envs; None for all


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
        lengths = f"num_envs={num_envs} but got length={len(seed)}."
        raise ValueError(f"If seeds are passed as a list the length must match {lengths}")
    return [None if one is None else operator.index(one) for one in seed]


def options_of(options: Sequence[dict[str, Any] | None], num_envs: int) -> Sequence[dict[str, Any] | None]:
    """The options of each env.

    Raises:
        ValueError: they are those of another number of envs.
        TypeError: some are neither a dict nor None.
    """
    if len(options) != num_envs:
        raise ValueError(
            f"If options are passed as a list the length must match num_envs={num_envs}, got {len(options)}"
        )
    for row, each in enumerate(options):
        if not (each is None or isinstance(each, dict)):
            raise TypeError(f"the options of env {row} are a dict or None, got {each!r}")
    return options


def split_mask(options: dict[str, Any] | None, num_envs: int) -> tuple[list[bool], dict[str, Any] | None]:
    """The mask, empty where there is none, and the options without it.

    Raises:
        TypeError: the mask is no array, or of another dtype.
        ValueError: it has another shape, or selects no env.
    """
    if not isinstance(options, (Mapping, type(None))):
        raise TypeError(f"options must be a dict, or a list with one or None for each env, got {options!r}")
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


def checked_env_ids(env_ids: EnvIds, num_envs: int) -> np.ndarray:
    """The numbers of envs as int64; of all envs for None.

    Raises:
        ValueError: they are not different numbers of envs.
    """
    rows = np.arange(num_envs) if env_ids is None else np.asarray(env_ids)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
        raise ValueError(f"env_ids must be a sequence of numbers of envs, got {env_ids!r}")
    if rows.min() < 0 or rows.max() >= num_envs or len(np.unique(rows)) < len(rows):
        raise ValueError(f"env_ids must be different numbers from 0 to {num_envs - 1}, got {env_ids!r}")
    return rows.astype(np.int64)


def parts_of_actions(space: Space[Any], actions: Any, count: int) -> list[Any]:
    """The leaves of a batch of this many actions of a space.

    Raises:
        SpaceMismatch: they do not nest as the space does.
    """
    try:
        return spaces.flatten(space, actions)
    except (LookupError, TypeError, ValueError) as error:
        why = misfit(batch_space(space, count), actions, "actions") or error
        raise SpaceMismatch(f"actions that do not nest as their space does: {why}; no env has moved") from error


def check_start_method(name: str | None) -> None:
    """Refuse what is no start method of ``multiprocessing`` here, as it does; None is the default one.

    Raises:
        ValueError: there is no such method.
    """
    if name not in (None, *get_all_start_methods()):
        raise ValueError(f"cannot find context for {name!r}")
