"""What a hub's loop does for those whose descriptors it watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Watch(Protocol):
    """The hub's loop, as far as what it watches needs it."""

    def watch(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call ``handler`` whenever the descriptor is readable."""

    def watch_writable(self, descriptor: int, wanted: bool) -> None:
        """Call the descriptor's handler when it is writable, too."""

    def unwatch(self, descriptor: int) -> None:
        """Stop calling."""
