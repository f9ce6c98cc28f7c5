"""This program's own hub."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from envhub.errors import HubUnreachable, only_linux

if TYPE_CHECKING:
    from envhub_client.private_hub.process import PrivateHub


def program_hub() -> PrivateHub:
    if sys.platform == "linux":
        from envhub_client.private_hub.process import private_hub

        return private_hub()
    else:  # noqa: RET505  # for mypy, which leaves out what is for another system
        raise HubUnreachable(only_linux("a hub of the program's own"))
