"""A hub in the program's own process; see ``envhub_server.in_process``."""

from typing import Any


def in_process_hub() -> Any:
    """A new ``InProcessHub``, for one session of this program."""
    from envhub_server.in_process import InProcessHub

    return InProcessHub()
