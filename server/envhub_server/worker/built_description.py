"""Describes to the hub the envs that a worker has built."""

from __future__ import annotations

import os
import sys
from typing import Any, Sequence

from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT
from envhub_server.ipc import control
from envhub_server.worker.env_sources import source_of, versions_of
from envhub_server.worker.exception_report import encode_or_nothing
from envhub_server.worker.hosted_envs import HostedEnvs


class BuiltDescription:
    """Describes the envs of one worker; the session takes its spaces from those of its first worker."""

    def __init__(self, envs: HostedEnvs) -> None:
        self._envs, self._build = envs, envs.build

    def describe(self, factories: Sequence[Any], libraries: list[str] | None, fit: bool) -> control.Built:
        """The message, with the sources of these pickled factories; the other arguments as in ``Built``."""
        build, groups = self._build, self._envs.groups
        first, has_first = groups[0].env, self._envs.number == 0
        own = self._spaces_of_all()
        observed, acted = (spaces.nearest(space, self._envs.allow_pickle) for space in own)
        differ = build.observation_mode == "different"
        described = [group.env.observation_space for group in groups] if differ else own[:1] if has_first else []
        leaves = spaces.leaves(observed)
        unknown = codec.as_pickle_or_repr if self._envs.allow_pickle else codec.as_repr
        # Each access to a wrapper's spec may copy it several times, which takes longer than to make a small env.
        own_spec = has_first or build.factories or build.entry or build.kwargs_each
        spec = first.spec if own_spec else None
        return control.Built(
            observation_spaces=[*map(self._described, described)],
            action_space=self._described(own[1]) if has_first else b"",
            observation_leaves=[leaf.wire() for leaf in leaves if leaf != OBJECT],
            action_leaves=[leaf.wire() for leaf in spaces.leaves(acted)],
            metadata=codec.encode(dict(first.metadata or {}), unknown) if has_first else b"",
            render_mode=first.render_mode,
            spec=encode_or_nothing(lambda: spec, self._envs.exact) if has_first and spec is not None else b"",
            loose=OBJECT in leaves,
            sources=[*map(source_of, factories)],
            versions=versions_of(first),
            sys_path=[place for place in sys.path if isinstance(place, str)],
            cwd=_folder(),
            plain_spec=(b"" if spec is None else encode_or_nothing(lambda: spec)) if own_spec else None,
            libraries=libraries,
            fit=fit,
            action_structure=_structure(acted) if build.observation_mode == "any" else "",
        )

    def _spaces_of_all(self) -> tuple[Any, Any]:
        """The observation and the action space for all envs of this worker; wider ones than the envs' in mode "any"."""
        groups = self._envs.groups
        first = groups[0].env
        if self._build.observation_mode != "any":
            return first.observation_space, first.action_space
        alike = len({_structure(group.env.action_space) for group in groups}) == 1
        return spaces.Anything(), first.action_space if alike else spaces.Anything()

    def _described(self, space: Any) -> bytes:
        return codec.encode(spaces.describe(space, self._envs.allow_pickle), self._envs.exact)


def _structure(space: Any) -> str:
    """The structure of a space as text, for a comparison with other workers' spaces."""
    return repr(spaces.structure(space))


def _folder() -> str:
    """This process's folder; empty if an env changed into a folder that is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
