"""The measured cost of a step, by environment: a bounded table, and its text in a file. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from envhub.protocol.messages import Make
from envhub_server.ipc.control import StepTimes
from envhub_server.ipc.shared_libraries import shared

ENVIRONMENTS_MAX = 512  # in the table; the one used longest ago is removed for a new one
STEPS_MIN = 24  # fewer give no useful average; one env times as many between its first two reports
STEP_S_MAX = 3600.0
ENV_BYTES_MAX = 1 << 50
KEY_CHARACTERS = 32
FORMAT = 3


@dataclass(frozen=True)
class StepCost:
    """The average cost of one step of an env, its resets included.

    Attributes:
        cpu_s: seconds of CPU time, of all threads of its process.
        wait_s: seconds in which its process neither ran nor was ready to run: it slept, or waited for another process.
        env_bytes: the memory of a worker with one env.
        libraries: the libraries that its workers share; None if unknown.
        fit: True if such envs are known to share a process well.
        alone: True if a process could not make two of them; the times may be 0 then, without a measurement.
    """

    cpu_s: float
    wait_s: float
    env_bytes: int = 0
    libraries: tuple[str, ...] | None = None
    fit: bool = False
    alone: bool = False

    @property
    def waits(self) -> bool:
        """True if a step waits longer than it computes."""
        return self.wait_s > self.cpu_s

    def __str__(self) -> str:
        """Text such as ``0.01 ms of CPU and 10.1 ms of waiting``."""
        return f"{self.cpu_s * 1e3:.3g} ms of CPU and {self.wait_s * 1e3:.3g} ms of waiting"


def average(times: Iterable[StepTimes]) -> StepCost | None:
    """The cost of one step, from the times of a session's workers; None if they are of too few steps."""
    all_times = list(times)
    steps = sum(each.steps for each in all_times)
    if steps < STEPS_MIN:
        return None
    cpu_s, wait_s = (
        sum(ns) / 1e9 / steps for ns in zip(*((each.cpu_ns, each.wait_ns) for each in all_times), strict=True)
    )
    return _checked(cpu_s, wait_s, max(each.env_bytes for each in all_times))


def key(make: Make) -> str:
    """The key of a session's env in the table; empty if the env cannot be told from others."""
    if (make.factories or make.runner) and not make.factories_digest:
        return ""
    names = [make.name, make.factories_digest, *make.wrappers]
    fields = [*(name.encode() for name in names), make.kwargs, *make.wrapper_kwargs, *make.kwargs_each]
    lengths = ",".join(str(len(field)) for field in fields)
    return hashlib.sha256(b"".join([lengths.encode(), *fields])).hexdigest()[:KEY_CHARACTERS]


class StepCosts:
    """The costs of the environments that were used last."""

    def __init__(self) -> None:
        self._costs: dict[str, StepCost] = {}  # in the order of their last use

    def __len__(self) -> int:
        return len(self._costs)

    def find(self, key: str) -> StepCost | None:
        """The cost of a step of this environment, if it is known."""
        if cost := self._costs.pop(key, None):
            self._costs[key] = cost
        return cost

    def note(self, key: str, cost: StepCost) -> None:
        """Note the cost of a step of this environment."""
        self._costs.pop(key, None)
        self._costs[key] = cost
        while len(self._costs) > ENVIRONMENTS_MAX:
            del self._costs[next(iter(self._costs))]

    def text(self) -> str:
        """The table as text for a file."""
        costs = {key: [*vars(cost).values()] for key, cost in self._costs.items()}
        return json.dumps({"format": FORMAT, "costs": costs}, indent=1)

    @classmethod
    def of_text(cls, text: str) -> StepCosts:
        """The table of a text that ``text`` returned; an empty table for any other text."""
        table = cls()
        try:
            read = json.loads(text)
            costs = read["costs"] if read["format"] == FORMAT else {}
            for key, (cpu_s, wait_s, env_bytes, libraries, fit, alone) in costs.items():
                cost = _checked(cpu_s, wait_s, env_bytes, libraries)
                if cost is not None and len(key) == KEY_CHARACTERS:
                    table.note(key, replace(cost, fit=fit is True, alone=alone is True))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return cls()
        return table


def _checked(cpu_s: float, wait_s: float, env_bytes: int, libraries: Container[str] | None = None) -> StepCost | None:
    """The cost of these numbers; None if a step cannot have them."""
    if not all(math.isfinite(value) and 0 <= value <= STEP_S_MAX for value in (cpu_s, wait_s)):
        return None
    if not 0 <= env_bytes <= ENV_BYTES_MAX:
        return None
    return StepCost(
        float(cpu_s), float(wait_s), int(env_bytes), None if libraries is None else tuple(shared(libraries))
    )
