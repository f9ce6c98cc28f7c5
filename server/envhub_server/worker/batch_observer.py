"""The interface of a worker's journal, which observes the calls and results of its envs."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence

Seeds = Mapping[int, Optional[int]]  # by row


class BatchObserver:
    """Observes the batches of steps and resets of a worker's envs; a method does nothing unless it is overridden.

    A batch begins with ``begin`` or ``begin_reset``, before its first env is called, and ends with ``end`` or
    ``end_reset``, once the driver was woken. What the driver overwrites after that is copied at the beginning.
    A group is a ``Row`` or an ``EnvBatch``. ``ArenaMapper`` makes observers, with the arena.
    """

    @property
    def tick(self) -> int:
        """The number under which this observer keeps the batch that began last; -1 if it keeps none."""
        return -1

    def begin(self, groups: Sequence[Any], out_of_band: Mapping[int, bytes]) -> None:
        """Note that these groups are about to be stepped; ``out_of_band`` has, by row, actions that are not there."""

    def end(self) -> None:
        """Note that the steps are done."""

    def begin_reset(self, seeds: Seeds, options_of: Callable[[int], bytes]) -> None:
        """Note that the rows of ``seeds`` are about to be reset by request, with these encoded options."""

    def end_reset(self, seeds: Seeds) -> None:
        """Note that the resets are done, which began with these seeds."""

    def built(self, group: Any) -> None:
        """Note that the group has a new env."""

    def first_reset(self, group: Any, seeds: Sequence[int | None]) -> None:
        """Note that the new env of this group is about to be reset by these seeds, one per row."""

    def autoreset(self, group: Any) -> None:
        """Note that the group is about to be reset because its episode has ended."""

    def called(self, target: Any, name: str) -> None:
        """Note that an env is about to be called by this name, or to have this attribute set."""
