"""The infos of a vector env, taken apart: undoes ``gymnasium.vector.VectorEnv._add_info``.

Gymnasium batches infos by key, with an array per key and a mask ``_key`` that says which envs have it. A key without a
mask, as in the infos of ALE and EnvPool, is one that all envs have.
"""

from __future__ import annotations

from itertools import compress
from typing import Any, Dict

import numpy as np

Infos = Dict[str, Any]


def joined(infos: Any) -> Infos:
    """The infos with an array per key, also of a vector env that gives a list of one dict per env."""
    if not isinstance(infos, (list, tuple)):
        return infos  # type: ignore[no-any-return]
    found: Infos = {}
    for number, info in enumerate(infos):
        for key, value in info.items():
            values = found.setdefault(key, np.full(len(infos), None, object))
            values[number : number + 1] = _one(value)
            found.setdefault(f"_{key}", np.zeros(len(infos), bool))[number] = True
    return found


def _one(value: Any) -> np.ndarray:
    """An array of this one object, whatever it is."""
    array = np.empty(1, object)
    array[0] = value
    return array


def columns(infos: Infos, num_envs: int) -> Infos | None:
    """The infos as arrays of numbers with an entry per env, nested as they are; None if an env lacks some of them."""
    found: Infos = {}
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
            found[key] = nested
            continue
        if isinstance(value, (list, tuple)) and len({*map(type, value)}) > 1:
            return None  # in an array they would all have one type
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.dtype.kind not in "biuf" or array.ndim == 0 or len(array) != num_envs:
            return None
        found[key] = array
    return found


def by_env(infos: Infos, num_envs: int) -> list[Infos]:
    """The info of each env. A value that is no sequence with an entry per env is every env's."""
    found: list[Infos] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        mask = infos.get(f"_{key}")
        entries = _entries(value, num_envs)
        for number, info in enumerate(found):
            if mask is None or mask[number]:
                info[key] = entries[number]
    return found


def some(infos: Infos, chosen: np.ndarray) -> Infos:
    """The infos of the envs that ``chosen``, a mask, names."""
    num_envs = len(chosen)
    found: Infos = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            found[key] = some(value, chosen)
        elif _is_per_env(value, num_envs):
            is_array = hasattr(value, "__array__")
            found[key] = np.asarray(value)[chosen] if is_array else [*compress(value, chosen)]
        else:
            found[key] = value
    return found


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
    # A single env's truth value makes an array of them in its client only if it is Python's.
    return array.tolist() if array.dtype == np.bool_ and array.ndim == 1 else list(array)
