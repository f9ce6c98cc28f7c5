"""What the operator says of one environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EnvSettings:
    """The table ``[envs.NAME]`` of a hub's file.

    A field is a key of the table; its annotation says what is allowed, in msgspec's terms. A recipe has the settings of
    its environment.

    Attributes:
        env: what is offered under the table's name: a Gymnasium id, ``module:id``, or ``module:factory``. Empty for the
            name itself, which then may be a pattern of ids.
    """

    env: str = ""


NO_SETTINGS = EnvSettings()
