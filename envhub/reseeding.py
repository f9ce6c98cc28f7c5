"""The seeds of envs that are built again."""

from __future__ import annotations

import numpy as np


def reseeded(seed: int | None, incarnation: int, losses: int = 0) -> int | None:
    """The seed of an env that is built again, for the ``incarnation``-th time, after the program gave ``seed``.

    ``losses`` is how often its session was lost; the hub of the next session gets the seed for no incarnation there.

    The seed follows from these numbers, so that a run can be repeated. It differs from ``seed``, so that the env does
    not run into the same crash again. It has 31 bits: ``np.random.RandomState``, ALE and EnvPool take no more than 32
    or 31.
    """
    if seed is None or not (incarnation or losses):
        return seed
    key = (incarnation, losses) if losses else (incarnation,)
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint32)[0] >> np.uint32(1))
