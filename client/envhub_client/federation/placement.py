"""Division of a vector env's rows among hubs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from envhub import errors
from envhub.protocol.messages import Capacity
from envhub_client.connection.connection import Connection
from envhub_client.connection.known_hubs import Member


def placed(num_envs: int, rooms: Sequence[Capacity]) -> list[int]:
    """The number of envs for each hub, in the order of ``rooms``: on as few hubs as have a free CPU for each env.

    Hubs with more free CPUs are taken first. Where all of them have too few, the envs are divided by free CPUs among
    the hubs that have any, and where none is free, by all CPUs among all hubs.
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

    ``count`` is not more than ``most`` in all.
    """
    counts = [1 if weight and limit else 0 for weight, limit in zip(weights, most, strict=True)]
    for _ in range(count - sum(counts)):
        open_hubs = [index for index, each in enumerate(counts) if each < most[index]]
        best = max(open_hubs, key=lambda index: (weights[index] / (counts[index] + 1), -index))
        counts[best] += 1
    return counts


def checked_split(split: Sequence[int], num_envs: int, hubs: int) -> list[int]:
    """The numbers of envs as they were given, one for each hub; ``TypeError`` or ``ValueError`` if they are not."""
    try:
        counts = [*map(operator.index, split)]
    except TypeError:
        raise TypeError(f"split must be a list of numbers of envs, one for each hub, got {split!r}") from None
    if len(counts) != hubs:
        raise ValueError(f"split={counts} has {len(counts)} numbers of envs, and there are {hubs} hubs")
    if min(counts) < 0 or sum(counts) != num_envs:
        raise ValueError(f"split={counts} must have numbers from 0 that make num_envs={num_envs} in all")
    return counts


class OpenHub(NamedTuple):
    """A hub to which there is a connection, without a session as yet."""

    member: Member
    connection: Connection


def room_for(num_envs: int, hubs: Sequence[OpenHub]) -> list[int]:
    """The number of envs for each of these hubs, or ``RequestRefused`` where they have no room for them."""
    try:
        return placed(num_envs, [_room(hub.connection) for hub in hubs])
    except ValueError as error:
        names = ", ".join(hub.member.name for hub in hubs)
        raise errors.RequestRefused(f"{error} ({names})") from error


def roomiest(num_envs: int, hubs: Sequence[OpenHub]) -> list[int]:
    """The number of envs for each of these hubs: all on the first one that has most free CPUs, and admits any."""
    best = max(hubs, key=lambda hub: (_room(hub.connection).envs_free != 0, _room(hub.connection).cpus_free))
    return [num_envs if hub is best else 0 for hub in hubs]


def _room(connection: Connection) -> Capacity:
    return connection.welcome.capacity or Capacity(1, 1, None, None)  # of a hub in another language that does not say


def processes_of(num_workers: Any, counts: Sequence[int]) -> list[Any]:
    """The number of processes for each hub, by its envs; at least one where it has any."""
    if not isinstance(num_workers, int):
        return [num_workers] * len(counts)
    return divided(min(num_workers, sum(counts)), counts, counts)
