"""When a wait has taken long enough."""

from __future__ import annotations

import time


class Deadline:
    """The end of ``timeout`` seconds from now, on the monotonic clock."""

    def __init__(self, timeout: float) -> None:
        self._end_s = time.monotonic() + timeout

    def left_s(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._end_s - time.monotonic())
