"""An env in trouble, as operators find them: stuck, leaking, crash-looping or slow."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
from sims import Counter

STEP_S = 0.01


class Troubled(Counter):
    """Takes 10 ms a step, unless it is in trouble; one is stuck, and makes the temporary file ``mark`` then."""

    def __init__(self, trouble: str = "", mark: str = "") -> None:
        super().__init__()
        self.trouble, self.mark = trouble, Path(tempfile.gettempdir(), mark)
        self.kept: list[np.ndarray] = []

    def act(self, action: int) -> None:
        time.sleep(STEP_S * 10 if self.trouble == "slow" else STEP_S)
        if self.trouble == "leaking":
            self.kept.append(np.ones(1 << 17, np.uint8))
        if self.trouble == "crash-looping" and self.count > 20:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.trouble == "stuck" and self.count > 20 and not self.mark.exists():
            self.mark.touch()
            time.sleep(3600)
