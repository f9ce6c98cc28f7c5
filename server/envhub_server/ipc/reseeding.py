"""The seeds of envs that are made anew."""

from __future__ import annotations

import numpy as np


def reseeded(seed: int | None, incarnation: int) -> int | None:
    """The seed of an env that is made for the so-many-th time, of one that the program seeded with ``seed``.

    It follows from both, and differs, so that a run can be repeated without walking into the same crash again.
    """
    if seed is None or not incarnation:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(incarnation,)).generate_state(1, np.uint64)[0] >> np.uint64(1))
