"""Shares of the vector envs of several hubs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envhub_client.federation.part import HubPart
from envhub_client.session.session import Begin, Shares


class JointShares:
    """A ``RowShares`` where each hub's workers have shares of its own rows.

    Attributes:
        held: as in ``RowShares``.
    """

    def __init__(self, parts: Sequence[HubPart]) -> None:
        """Make the shares of the workers that these hubs have."""
        self._shares = [(part.rows, Shares(len(part.rows), max(1, part.maker.sizing.num_workers))) for part in parts]
        self.held: list[int] = []

    @property
    def missing(self) -> list[int]:
        """The envs that those that are held wait for, ascending."""
        return [rows[row] for rows, shares in self._shares for row in shares.missing]

    def give_up(self) -> None:
        """Forget what is held."""
        for _, shares in self._shares:
            shares.give_up()
        self.held = []

    def send(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray], begin: Begin) -> None:
        """Have ``begin`` step the complete shares, and hold the others; as ``RowShares.send``, hub by hub."""
        if again := [row for row in env_ids.tolist() if row in self.held]:
            raise ValueError(f"envs {again} are sent already, and wait for envs {self.missing} of their share")
        try:
            for rows, shares in self._shares:
                places = np.flatnonzero((rows.start <= env_ids) & (env_ids < rows.stop))
                if places.size:
                    own = [array[places] for array in arrays]
                    shares.send(env_ids[places] - rows.start, codes, own, _of_all(begin, rows.start))
        finally:
            self.held = [rows[row] for rows, shares in self._shares for row in shares.held]


def _of_all(begin: Begin, first: int) -> Begin:
    """``begin`` for rows that are numbered from ``first`` there."""
    return lambda env_ids, codes, arrays: begin(env_ids + first, codes, arrays)
