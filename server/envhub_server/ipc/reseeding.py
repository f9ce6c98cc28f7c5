"""The seeds of envs that are built again."""

from __future__ import annotations

import numpy as np


def reseeded(seed: int | None, incarnation: int) -> int | None:
    """The seed of an env that is built again, for the ``incarnation``-th time, after the program gave ``seed``.

    The seed follows from both numbers, so that a run can be repeated. It differs from ``seed``, so that the env does
    not run into the same crash again. It has 31 bits: ``np.random.RandomState``, ALE and EnvPool take no more than 32
    or 31.
    """
    if seed is None or not incarnation:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(incarnation,)).generate_state(1, np.uint32)[0] >> np.uint32(1))
