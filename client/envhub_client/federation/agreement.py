"""Checks that hubs agree, so that they can have rows of one vector env."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envhub import errors
from envhub.values import spaces
from envhub_client.connection.connection import Connection
from envhub_client.session.description import SessionDescription
from envhub_client.session.options import SessionOptions


def check_distinct(hubs: Mapping[Connection, str]) -> None:
    """Check that no two names stand for the same hub, of the hubs that have answered on these connections.

    Raises:
        AddressError: two do; the message has both.
    """
    names: dict[int, str] = {}
    for connection, name in hubs.items():
        hub_id = connection.protocol.hub_id
        if hub_id and (first := names.setdefault(hub_id, name)) != name:
            text = f"the same hub is named twice, as {first!r} and as {name!r}"
            raise errors.AddressError(f"{text}; name it once: each hub has its rows in one session")


def check_agreement(hubs: Sequence[tuple[Connection, SessionDescription]], options: SessionOptions) -> None:
    """Check that these hubs have made the same envs.

    Raises:
        RequestRefused: two of them disagree; the message has both addresses.
    """
    (first, wanted), *others = hubs
    for connection, description in others:
        for what, mine, theirs in _compared(wanted, description, options):
            _check_same(first, connection, what, mine, theirs)


def _check_same(first: Connection, second: Connection, what: str, mine: Any, theirs: Any) -> None:
    if mine != theirs:
        raise errors.RequestRefused(
            f"the hubs at {first.address} and {second.address} cannot share a vector env: their {what} differ, "
            f"{errors.shown(mine, 200)} and {errors.shown(theirs, 200)}"
        )


def _compared(
    wanted: SessionDescription, made: SessionDescription, options: SessionOptions
) -> list[tuple[str, Any, Any]]:
    bounds = options.observation_mode in ("same", "different")
    observations: Any = [wanted.observation_spaces[0], made.observation_spaces[0]]
    actions: Any = [wanted.action_space, made.action_space]
    if options.observation_mode != "same":
        observations = [spaces.structure(space) for space in observations]
    if not bounds:
        actions = [spaces.structure(space) for space in actions]
    return [
        ("observation spaces", *observations),
        ("action spaces", *actions),
        ("render modes", wanted.render_mode, made.render_mode),
        ("metadata", wanted.metadata, made.metadata),
        ("kinds of envs", wanted.vector, made.vector),
    ]


def joint_description(descriptions: Sequence[SessionDescription]) -> SessionDescription:
    """The description of a session that has the rows of all of these."""
    counts = [each.num_envs if len(each.observation_spaces) == 1 else 1 for each in descriptions]
    each_own = [
        space for each, count in zip(descriptions, counts, strict=True) for space in [*each.observation_spaces] * count
    ]
    alike = all(len(each.observation_spaces) == 1 for each in descriptions)
    observation_spaces = descriptions[0].observation_spaces if alike else each_own
    return replace(
        descriptions[0],
        num_envs=sum(each.num_envs for each in descriptions),
        observation_spaces=observation_spaces,
    )
