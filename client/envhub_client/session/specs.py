"""The spec that a hub sends of its envs: what of it may be run in this program."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from envhub.registration import REMOTE
from envhub.values import codec

NOT_RUN = "envhub.registration:refuse_to_make"  # in place of an entry point that is the hub's choice
GYMNASIUM_WRAPPER = re.compile(r"gymnasium\.wrappers\.\w+:(?!RecordVideo)\w+")


def inert_spec(spec: EnvSpec, asked: dict[str, Any]) -> EnvSpec:
    """The spec of a hub on the network, which names nothing to run but what is registered here under its id.

    It names that only where ``own_spec`` does. Of wrappers, Gymnasium's own are kept, without those that write files.
    """
    own = own_spec(spec, asked)
    wrappers = tuple(
        each if GYMNASIUM_WRAPPER.fullmatch(each.entry_point) else replace(each, entry_point=NOT_RUN)
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
    return own if own is not None and _is_part(spec.kwargs, {**own.kwargs, **asked}) else None


def _is_part(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    """True if all of ``some`` is in ``whole``, with equal values."""
    try:
        return all(name in whole and codec.encode(part[name]) == codec.encode(whole[name]) for name in part)
    except codec.EncodeError:  # a registered argument is no data
        return False
