"""A contest: several ways to step the same envs, all made ready first, then timed in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from envhub_client.tools.bench.entrant import Entrant
from envhub_client.tools.bench.timing import Summary, interleave, step_times, summarize

FIRST_STEPS_S = 0.02


class Contest(contextlib.ExitStack):
    """Ways to step envs; use it in ``with``, ``add`` the ways, then ``run`` it.

    Attributes:
        entrants: by way, in the order in which they were added.
    """

    def __init__(self) -> None:
        """Begin without any way."""
        super().__init__()
        self.entrants: dict[str, Entrant] = {}

    def add(self, way: str, entrant: AbstractContextManager[Entrant]) -> None:
        """Make a way ready, and take its first steps.

        Raises:
            Exception: what the envs raise; the way does not take part then.
        """
        with contextlib.ExitStack() as stack:
            ready = stack.enter_context(entrant)
            step_times(ready.step, FIRST_STEPS_S)
            self.entrants[way] = ready
            self.push(stack.pop_all())

    def run(
        self, seconds: float, repeats: int, turn: Callable[[str], AbstractContextManager[object]] = nullcontext
    ) -> dict[str, Summary]:
        """Time every way for ``seconds`` in each of ``repeats`` turns, each within ``turn`` of its name."""
        steps = {way: entrant.step for way, entrant in self.entrants.items()}
        times = interleave(steps, seconds, repeats, turn)
        return {way: summarize(self.entrants[way].env_steps, repeated) for way, repeated in times.items()}
