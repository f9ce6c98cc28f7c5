"""The infos of a vector env, split by env: the inverse of ``gymnasium.vector.VectorEnv._add_info``.

Gymnasium batches infos by key, with an array per key and a mask ``_key`` that says which envs have it. All envs have a
key without a mask, as in the infos of ALE and EnvPool.
"""

from __future__ import annotations

from itertools import compress
from typing import Any, Dict

import numpy as np

Infos = Dict[str, Any]


def joined(infos: Any) -> Infos:
    """The infos with an array per key, also for a vector env that returns a list of one dict per env."""
    if not isinstance(infos, (list, tuple)):
        return infos  # type: ignore[no-any-return]
    columns_by_key: Infos = {}
    for number, info in enumerate(infos):
        for key, value in info.items():
            values = columns_by_key.setdefault(key, np.full(len(infos), None, object))
            values[number : number + 1] = _one(value)
            columns_by_key.setdefault(f"_{key}", np.zeros(len(infos), bool))[number] = True
    return columns_by_key


def _one(value: Any) -> np.ndarray:
    array = np.empty(1, object)
    array[0] = value
    return array


def columns(infos: Infos, num_envs: int) -> Infos | None:
    """The infos as nested arrays of numbers with an entry per env; None if an env does not have all of them."""
    columns_by_key: Infos = {}
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and not np.all(mask):
            return None
        if isinstance(value, dict):
            nested = columns(value, num_envs)
            if nested is None:
                return None
            columns_by_key[key] = nested
            continue
        if isinstance(value, (list, tuple)) and len({*map(type, value)}) > 1:
            return None  # an array would give them all one type
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.dtype.kind not in "biuf" or array.ndim == 0 or len(array) != num_envs:
            return None
        columns_by_key[key] = array
    return columns_by_key


def by_env(infos: Infos, num_envs: int) -> list[Infos]:
    """The info of each env. A value that is not a sequence with an entry per env belongs to every env."""
    infos_by_env: list[Infos] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        mask = infos.get(f"_{key}")
        entries = _entries(value, num_envs)
        for number, info in enumerate(infos_by_env):
            if mask is None or mask[number]:
                info[key] = entries[number]
    return infos_by_env


def chosen_rows(infos: Infos, chosen: np.ndarray) -> Infos:
    """The infos of the envs in the mask ``chosen``."""
    num_envs = len(chosen)
    chosen_infos: Infos = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            chosen_infos[key] = chosen_rows(value, chosen)
        elif _is_per_env(value, num_envs):
            is_array = hasattr(value, "__array__")
            chosen_infos[key] = np.asarray(value)[chosen] if is_array else [*compress(value, chosen)]
        else:
            chosen_infos[key] = value
    return chosen_infos


def _is_mask(key: Any, infos: Infos) -> bool:
    return isinstance(key, str) and key[:1] == "_" and key[1:] in infos


def _is_per_env(value: Any, num_envs: int) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) == num_envs
    return np.ndim(value) > 0 and len(value) == num_envs


def _entries(value: Any, num_envs: int) -> list[Any]:
    if isinstance(value, dict):
        return list(by_env(value, num_envs))
    if not _is_per_env(value, num_envs):
        return [value] * num_envs
    if isinstance(value, (list, tuple)):
        return list(value)
    array = np.asarray(value)
    # Gymnasium makes an array of bools only from Python's bool, not from NumPy's.
    return array.tolist() if array.dtype == np.bool_ and array.ndim == 1 else list(array)
