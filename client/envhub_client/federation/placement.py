"""Division of a vector env's rows among hubs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple


class Room(NamedTuple):
    """Room of a hub for envs.

    Attributes:
        cpus: CPUs that the hub may use.
        cpus_free: those that no worker of a session uses.
        envs_free: how many envs it admits; None for any number.
    """

    cpus: float
    cpus_free: float
    envs_free: int | None


def placed(num_envs: int, rooms: Sequence[Room]) -> list[int]:
    """The number of envs for each hub, in the order of ``rooms``: on as few hubs as have a free CPU for each env.

    Hubs with more free CPUs are taken first. Where all of them have too few, the envs are divided by free CPUs among
    the hubs that have any, and where none is free, by all CPUs among all hubs.

    Raises:
        ValueError: the hubs do not admit as many envs.
    """
    weights = [max(0.0, room.cpus_free) for room in rooms]
    is_free = any(weights)
    if not is_free:
        weights = [max(1.0, room.cpus) for room in rooms]
    most = [num_envs if room.envs_free is None else min(num_envs, room.envs_free) for room in rooms]
    if sum(most) < num_envs:
        raise ValueError(f"{num_envs} envs are wanted, and the hubs admit {sum(most)} more")
    chosen: list[int] = []
    for hub in sorted(range(len(rooms)), key=lambda hub: -weights[hub]):
        admitted = sum(most[each] for each in chosen) >= num_envs
        enough = is_free and admitted and sum(weights[each] for each in chosen) >= num_envs
        useful = most[hub] and (weights[hub] or not admitted)
        if not enough and useful and len(chosen) < num_envs:
            chosen.append(hub)
    return divided(num_envs, [weights[hub] if hub in chosen else 0.0 for hub in range(len(rooms))], most)


def divided(count: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """``count`` things divided by these weights: at least one where there is a weight, and never more than ``most``.

    ``count`` is neither less than there are weights nor more than ``most`` in all.
    """
    counts = [1 if weight and limit else 0 for weight, limit in zip(weights, most, strict=True)]
    for _ in range(count - sum(counts)):
        open_places = [place for place, each in enumerate(counts) if each < most[place]]
        best = max(open_places, key=lambda place: (weights[place] / (counts[place] + 1), -place))
        counts[best] += 1
    return counts


def checked_split(split: Sequence[int], num_envs: int, hubs: int) -> list[int]:
    """The numbers of envs as they were given, one for each hub.

    Raises:
        TypeError: they are not whole numbers in a list.
        ValueError: they are not as many as hubs, or not ``num_envs`` in all.
    """
    try:
        counts = [*map(operator.index, split)]
    except TypeError:
        raise TypeError(f"split must be a list of numbers of envs, one for each hub, got {split!r}") from None
    if len(counts) != hubs:
        raise ValueError(f"split={counts} has {len(counts)} numbers of envs, and there are {hubs} hubs")
    if min(counts) < 0 or sum(counts) != num_envs:
        raise ValueError(f"split={counts} must have numbers from 0 that make num_envs={num_envs} in all")
    return counts
