"""The description that a hub gives of a session: its envs and their spaces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from envhub import errors
from envhub.protocol.messages import Attach, Made, Make
from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT, Leaf
from envhub_client.session.options import ObservationMode, SessionOptions
from envhub_client.session.specs import inert_spec
from envhub_client.session.value_codec import ValueCodec

log = logging.getLogger("envhub")


class Sizing(NamedTuple):
    """Number of processes that host the envs of a session, and the reason.

    Attributes:
        num_workers: how many.
        reason: why that many, for people; empty where the hub does not say.
    """

    num_workers: int
    reason: str


@dataclass(frozen=True)
class SessionDescription:
    """Description of a session, which stays the same where it goes on with another hub.

    Attributes:
        num_envs: how many envs it has.
        vector: whether each worker's envs are one vector env.
        metadata, render_mode, env_spec, action_space, action_leaves: of one env.
        observation_spaces: of each env, or of the first one for all.
        observation_leaves: those of fixed size, of one env's observation.
        autoreset_mode, observation_mode: of a session that was taken over, as the hub reports them.
        named: the name and arguments by which a public hub makes another such env; None if they are not known.
    """

    num_envs: int
    vector: bool
    metadata: dict[str, Any]
    render_mode: str | None
    env_spec: EnvSpec | None
    action_space: Space[Any]
    action_leaves: Sequence[Leaf]
    observation_spaces: Sequence[Space[Any]]
    observation_leaves: Sequence[Leaf]
    autoreset_mode: AutoresetMode
    observation_mode: ObservationMode
    named: tuple[str, dict[str, Any]] | None


def describe(made: Made, make: Make | Attach, options: SessionOptions, values: ValueCodec) -> SessionDescription:
    """The description in a hub's reply to ``make``.

    Raises:
        UnsupportedSpace: a space is not carried, or too large.
        RemoteProtocolError: a value cannot be read.
        ValueError, TypeError: it is malformed.
    """
    if made.autoreset_mode:  # it was taken over
        mode = cast(ObservationMode, made.observation_mode)  # which the options check
        options = replace(options, autoreset_mode=AutoresetMode(made.autoreset_mode), observation_mode=mode)
    metadata = dict(values.decode(made.metadata))
    # A hub on the network is checked by them. Those for a private hub may be pickled.
    asked = codec.decode(make.kwargs) if isinstance(make, Make) and make.kwargs and not values.allow_pickle else {}
    spec = _spec(made.spec, asked, values)
    if len(made.observation_spaces) not in (1, made.num_envs):
        raise ValueError(f"{len(made.observation_spaces)} observation spaces of {made.num_envs} envs")
    action_space = space_of(made.action_space, made.num_envs, values)
    observation_spaces = [space_of(blob, made.num_envs, values) for blob in made.observation_spaces]
    return SessionDescription(
        num_envs=made.num_envs,
        vector=made.vector,
        metadata=metadata,
        render_mode=made.render_mode,
        env_spec=spec,
        action_space=action_space,
        action_leaves=spaces.leaves(action_space),
        observation_spaces=observation_spaces,
        observation_leaves=[leaf for leaf in spaces.leaves(observation_spaces[0]) if leaf != OBJECT],
        autoreset_mode=options.autoreset_mode,
        observation_mode=options.observation_mode,
        named=_named(make, asked, values),
    )


def space_of(blob: bytes, num_envs: int, values: ValueCodec) -> Space[Any]:
    """The spaces of ``num_envs`` envs; errors as for ``describe``."""
    space: Space[Any] = spaces.build(values.decode(blob), spaces.SPACE_BYTES_MAX // num_envs)
    return space


def _spec(blob: bytes, asked: dict[str, Any], values: ValueCodec) -> EnvSpec | None:
    try:
        spec: EnvSpec | None = values.decode(blob) if blob else None
        if values.allow_pickle or spec is None:
            return spec
        # ``gymnasium.make`` imports what stands before a colon; the id of a spec that a worker sends has none.
        return None if ":" in spec.id else inert_spec(spec, asked)
    except (codec.DecodeError, errors.RemoteProtocolError) as error:  # another version of Gymnasium wrote it
        log.debug("the spec of the envs cannot be read: %s", error)
        return None


def _named(make: Make | Attach, asked: dict[str, Any], values: ValueCodec) -> tuple[str, dict[str, Any]] | None:
    if values.allow_pickle or isinstance(make, Attach) or not make.name or make.kwargs_each or make.wrappers:
        return None
    return make.name, asked
