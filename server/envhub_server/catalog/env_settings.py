"""What the operator says of one environment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from envhub.protocol.messages import Hosting


@dataclass(frozen=True)
class EnvSettings:
    """The table ``[envs.NAME]`` of a hub's file.

    A field is a key of the table; its annotation says what is allowed, in msgspec's terms. A recipe has the settings of
    its environment.

    Attributes:
        env: what is offered under the table's name: a Gymnasium id, ``module:id``, or ``module:factory``. Empty for the
            name itself, which then may be a pattern of ids.
        gpus: devices that are dealt to its workers.
        memory_max: bytes of memory that each of its workers may have; 0 for no limit.

    None is what the hub's options say.
    """

    env: str = ""
    gpus: tuple[int, ...] | None = None
    memory_max: int | None = None

    def hosting(self, of_hub: Hosting | None = None) -> Hosting:
        """What the operator says of the workers of this env, and where the table is silent, of all."""
        said: dict[str, Any] = {"gpus": None if self.gpus is None else [*self.gpus], "memory_max": self.memory_max}
        return replace(of_hub or Hosting(), **{name: value for name, value in said.items() if value is not None})


NO_SETTINGS = EnvSettings()
