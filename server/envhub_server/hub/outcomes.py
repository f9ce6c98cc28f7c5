"""What the host of a session tells its hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure
from envhub_server.catalog.step_costs import StepCost

if TYPE_CHECKING:
    from envhub_server.hub.runtime import SessionRuntime


@dataclass(frozen=True)
class Outcomes:
    """Whom it tells: of a request's one answer, of workers, of the session's end; and what it asks."""

    answer: Callable[[Incoming, Any, Sequence[Any]], None]
    fail: Callable[[Incoming, Failure], None]
    worker_started: Callable[[SessionRuntime, int, int], None]
    worker_exited: Callable[[SessionRuntime, int, str, bool], None]
    ended: Callable[[SessionRuntime], None]
    broke: Callable[[SessionRuntime, Exception], None]
    learned: Callable[[SessionRuntime, StepCost], None]
    notify: Callable[[SessionRuntime, str], None]
    memory_left: Callable[[], int]
    now_s: Callable[[], float]
