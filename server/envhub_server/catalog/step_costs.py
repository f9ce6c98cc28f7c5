"""What steps of an env took, per environment: a bounded table, and its form in a file. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from envhub.protocol.messages import Make
from envhub_server.ipc.control import StepTimes

ENVIRONMENTS_MAX = 512  # whose costs are kept; the one that was used longest ago makes room
STEPS_MIN = 24  # one env has timed as many between its first telling and its second; fewer say too little of an env
STEP_S_MAX = 3600.0
ENV_BYTES_MAX = 1 << 50
KEY_CHARACTERS = 32
FORMAT = 1


@dataclass(frozen=True)
class StepCost:
    """What one step of an env takes on average, its resets included.

    Attributes:
        cpu_s: seconds of CPU time, of all threads of its process.
        wait_s: seconds in which its process neither ran nor wanted to run: it slept, or waited for somebody else.
        env_bytes: how much memory a worker takes for one env, its own part included.
    """

    cpu_s: float
    wait_s: float
    env_bytes: int = 0

    def __str__(self) -> str:
        """As it is told: ``0.01 ms of CPU and 10.1 ms of waiting``."""
        return f"{self.cpu_s * 1e3:.3g} ms of CPU and {self.wait_s * 1e3:.3g} ms of waiting"


def average(times: Iterable[StepTimes]) -> StepCost | None:
    """The cost of one step, from what each worker of a session has timed; None where that is too little."""
    found = list(times)
    steps = sum(each.steps for each in found)
    if steps < STEPS_MIN:
        return None
    cpu_s, wait_s = (sum(ns) / 1e9 / steps for ns in zip(*((each.cpu_ns, each.wait_ns) for each in found), strict=True))
    return _checked(cpu_s, wait_s, max(each.env_bytes for each in found))


def key(make: Make) -> str:
    """What the cost of a session's env is kept under; empty where nothing tells the env from others."""
    if (make.factories or make.runner) and not make.factories_digest:
        return ""
    names = [make.name, make.factories_digest, *make.wrappers]
    parts = [*(name.encode() for name in names), make.kwargs, *make.wrapper_kwargs]
    lengths = ",".join(str(len(part)) for part in parts)
    return hashlib.sha256(b"".join([lengths.encode(), *parts])).hexdigest()[:KEY_CHARACTERS]


class StepCosts:
    """The costs of the environments that were stepped last."""

    def __init__(self) -> None:
        self._costs: dict[str, StepCost] = {}  # the one that was used last comes last

    def __len__(self) -> int:
        return len(self._costs)

    def find(self, key: str) -> StepCost | None:
        """What steps of this environment took before, if that is known."""
        cost = self._costs.pop(key, None)
        if cost is not None:
            self._costs[key] = cost
        return cost

    def note(self, key: str, cost: StepCost) -> None:
        """Know what steps of this environment took last."""
        if not key:
            return
        self._costs.pop(key, None)
        self._costs[key] = cost
        while len(self._costs) > ENVIRONMENTS_MAX:
            del self._costs[next(iter(self._costs))]

    def text(self) -> str:
        """The table as text for a file: seconds of CPU and of waiting, by key."""
        costs = {key: [cost.cpu_s, cost.wait_s, cost.env_bytes] for key, cost in self._costs.items()}
        return json.dumps({"format": FORMAT, "costs": costs}, indent=1)

    @classmethod
    def of_text(cls, text: str) -> StepCosts:
        """The table that ``text`` wrote; whatever else stands there counts as nothing known."""
        found = cls()
        try:
            read = json.loads(text)
            costs = read["costs"] if read["format"] == FORMAT else {}
            for key, (cpu_s, wait_s, env_bytes) in costs.items():
                cost = _checked(cpu_s, wait_s, env_bytes)
                if cost is not None and len(key) == KEY_CHARACTERS:
                    found.note(key, cost)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return cls()
        return found


def _checked(cpu_s: float, wait_s: float, env_bytes: int) -> StepCost | None:
    """A cost of these numbers, unless they are none that a step can have."""
    if not all(math.isfinite(value) and 0 <= value <= STEP_S_MAX for value in (cpu_s, wait_s)):
        return None
    if not 0 <= env_bytes <= ENV_BYTES_MAX:
        return None
    return StepCost(float(cpu_s), float(wait_s), int(env_bytes))
