"""The description that a hub gives of a session: its envs and their spaces."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import gymnasium
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from envhub import errors
from envhub.errors import RemoteProtocolError, RequestRefused
from envhub.protocol.messages import Attach, Made, Make
from envhub.protocol.prelude import Frame
from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT, Leaf
from envhub_client.session.options import ObservationMode, SessionOptions

REMOTE = "EnvHub/Remote-v0"
NOT_RUN = "envhub_client.session.description:refuse_to_make"  # in place of an entry point that is the hub's choice
log = logging.getLogger("envhub")
HARMLESS_WRAPPER = re.compile(r"envhub\.action_chunk:ActionChunk|gymnasium\.wrappers\.\w+:(?!RecordVideo)\w+")


def refuse_to_make(**kwargs: Any) -> Any:
    """The entry point of specs that came over the network, whose own entry point the other side chose."""
    raise RequestRefused(
        "this spec came from a hub, so that nothing it names is run here: make the env there, by "
        "envhub.make(spec.id, hub=...), or here by its id, gymnasium.make(spec.id)"
    )


def inert_spec(spec: EnvSpec, asked: dict[str, Any]) -> EnvSpec:
    """The spec, which names nothing to run but what ``own_spec`` does, and Gymnasium's wrappers that write no file."""
    own = own_spec(spec, asked)
    wrappers = tuple(
        each if HARMLESS_WRAPPER.fullmatch(each.entry_point) else replace(each, entry_point=NOT_RUN)
        for each in spec.additional_wrappers
    )
    inert = replace(spec, additional_wrappers=wrappers)
    for name in ("entry_point", "vector_entry_point"):
        if getattr(inert, name) != getattr(own, name, None):
            setattr(inert, name, NOT_RUN if getattr(inert, name) else None)
    return inert


def own_spec(spec: EnvSpec, asked: dict[str, Any]) -> EnvSpec | None:
    """Spec of this program under the id of a hub's spec; None where it may not be made by that spec.

    It may not be made with arguments that are neither registered nor ``asked`` for: they are the hub's choice, such as
    the path of a file. EnvHub's own id is always refused: it makes any env of this machine, of any module, writes
    recordings, and runs ssh.
    """
    own = None if spec.id == REMOTE else gymnasium.registry.get(spec.id)
    if own is None:
        return None
    allowed = {**own.kwargs, **asked}
    try:
        given = spec.kwargs.items()
        matches = (name in allowed and codec.encode(value) == codec.encode(allowed[name]) for name, value in given)
        return own if all(matches) else None
    except codec.EncodeError:  # a registered argument is no data
        return None


class ValueCodec:
    """Encodes values for one hub, and decodes its own."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle  # the hub is this program's own, so that its values may be unpickled

    def encode(self, value: object) -> bytes:
        return codec.encode(value, codec.as_pickle if self.allow_pickle else codec.refuse)

    def decode(self, blob: Frame) -> Any:
        try:
            return codec.decode(blob, self.allow_pickle)
        except codec.DecodeError as error:
            if self.allow_pickle:
                raise
            raise RemoteProtocolError(f"a value of the hub cannot be read: {error}") from error


class Sizing(NamedTuple):
    """Number of processes that host the envs of a session, and the reason, for people."""

    num_workers: int
    reason: str  # empty where the hub does not say


@dataclass(frozen=True)
class SessionDescription:
    """Description of a session by its hub; it stays the same where the session goes on with another hub."""

    num_envs: int
    vector: bool  # whether each worker's envs are one vector env
    metadata: dict[str, Any]
    render_mode: str | None
    env_spec: EnvSpec | None
    action_space: Space[Any]
    action_leaves: Sequence[Leaf]
    observation_spaces: Sequence[Space[Any]]  # of each env, or of the first one for all
    observation_leaves: Sequence[Leaf]  # those of fixed size, of one env's observation
    autoreset_mode: AutoresetMode  # of a session that was taken over, as the hub reports it
    observation_mode: ObservationMode  # likewise
    named: tuple[str, dict[str, Any]] | None  # by which a public hub makes another such env, if that is known

    @property
    def has_object_leaves(self) -> bool:
        return OBJECT in spaces.leaves(self.observation_spaces[0])


def describe(made: Made, make: Make | Attach, options: SessionOptions, values: ValueCodec) -> SessionDescription:
    """The description in a hub's reply to ``make``."""
    if made.autoreset_mode:  # it was taken over
        mode = cast(ObservationMode, made.observation_mode)  # which the options check
        options = replace(options, autoreset_mode=AutoresetMode(made.autoreset_mode), observation_mode=mode)
    metadata = dict(values.decode(made.metadata))
    # A hub on the network is checked by them. Those for a private hub may be pickled.
    asked = codec.decode(make.kwargs) if isinstance(make, Make) and make.kwargs and not values.allow_pickle else {}
    spec = _spec(made.spec, asked, values)
    if len(made.observation_spaces) not in (1, made.num_envs):
        raise ValueError(f"{len(made.observation_spaces)} observation spaces of {made.num_envs} envs")
    blobs, bytes_max = (made.action_space, *made.observation_spaces), spaces.SPACE_BYTES_MAX // made.num_envs
    action_space, *observation_spaces = (spaces.build(values.decode(blob), bytes_max) for blob in blobs)
    named = None
    if isinstance(make, Make) and make.name and not (values.allow_pickle or make.kwargs_each or make.wrappers):
        named = make.name, asked
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
        named=named,
    )


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
