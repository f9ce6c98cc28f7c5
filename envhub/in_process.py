"""A hub in the program's own process; see ``envhub_server.in_process``."""

import sys
from typing import Any

from envhub.errors import HubUnreachable
from envhub.systems import only_linux


def in_process_hub() -> Any:
    """A new ``InProcessHub``, for one session of this program.

    Raises:
        HubUnreachable: this system cannot have one.
    """
    if sys.platform == "linux":
        from envhub_server.in_process import InProcessHub

        return InProcessHub()
    else:  # noqa: RET505  # for mypy, which leaves out what is for another system
        raise HubUnreachable(only_linux("num_workers=0"))
