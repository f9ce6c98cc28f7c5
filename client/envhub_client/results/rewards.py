"""Rewards with axes, such as one per agent or per objective, which travel in the infos of their step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envhub_client.results.infos import Infos
from envhub_client.results.observations import UnreadableRow


class Rewards:
    """The rewards of one vector env.

    Attributes:
        shape: of one env's reward; empty until an env has given one with axes.
        refused_for: the name of what takes no rewards with axes; empty for nothing.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.refused_for = ""

    def check(self, shape: Sequence[int]) -> None:
        """Refuse rewards of this shape if it has axes, and these are refused.

        Raises:
            ValueError: they are.
        """
        if shape and self.refused_for:
            raise ValueError(
                f"rewards of shape {tuple(shape)}, and for {self.refused_for} a reward is one number: wrap the envs so "
                "that it is, such as by a weighted sum"
            )

    def of(self, rewards: np.ndarray, infos: Infos | None, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """The rewards of all envs or of ``env_ids``: as they are, or ``(envs, *shape)`` where an env gave axes.

        An env that was reset or truncated by the hub has zeros.

        Raises:
            UnreadableRow: a reward is no array of float64.
            ValueError: two envs have rewards of different shapes, or a reward has axes, which are refused.
        """
        with_axes = [] if infos is None else infos.take_rewards()
        if not with_axes and not self.shape:
            return rewards
        shape = self.shape or with_axes[0][1].shape[1:]
        self.check(shape)
        places = None if env_ids is None else {row: place for place, row in enumerate(env_ids)}
        filled = np.zeros((len(rewards), *shape))
        for rows, values in with_axes:
            if values.dtype != np.float64:
                raise UnreadableRow(rows[0], f"a reward of {values.dtype}")
            if values.shape[1:] != shape:
                text = f"envs {rows} have rewards of shape {values.shape[1:]}, others of {shape}"
                raise ValueError(f"{text}: envs that step together have rewards of one shape")
            filled[rows if places is None else [places[row] for row in rows]] = values
        self.shape = shape
        return filled
