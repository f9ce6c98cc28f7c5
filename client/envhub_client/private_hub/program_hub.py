"""The private hub, as a session needs it; only Linux has one."""

from __future__ import annotations

import sys
from typing import Protocol

from envhub.errors import HubUnreachable, only_linux
from envhub_client.connection.local_sockets import OwnHub


class ProgramHub(Protocol):
    """A hub that serves this program only."""

    @property
    def address(self) -> str:
        """Address for processes of this user, as long as this program lets them look into it."""

    @property
    def own(self) -> OwnHub:
        """Its descriptors, for connections; they stay this object's."""

    @property
    def alive(self) -> bool:
        """True if the process runs and belongs to this process, not to one that this was forked from."""


def program_hub() -> ProgramHub:
    """This process's private hub, started if none runs.

    Raises:
        HubUnreachable: no hub can run here, or it did not start.
    """
    if sys.platform == "linux":
        from envhub_client.private_hub.process import private_hub

        return private_hub()
    else:  # noqa: RET505  # for mypy, which leaves out what is for another system
        raise HubUnreachable(only_linux("a hub of the program's own"))
