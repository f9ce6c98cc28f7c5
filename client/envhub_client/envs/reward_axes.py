"""Rewards with axes, where each is to be one number."""

from __future__ import annotations

from collections.abc import Sequence


def refuse_axes(shape: Sequence[int], who: str) -> None:
    """Refuse rewards of this shape where each is to be one number.

    Raises:
        ValueError: the shape has axes.
    """
    if shape:
        raise ValueError(
            f"rewards of shape {tuple(shape)}, and for {who} a reward is one number: wrap the envs so that it is, "
            "such as by a weighted sum"
        )
