"""The number of workers of a session: its decision, and the notices that follow from it."""

from __future__ import annotations

from envhub.arena.spin import spin_us
from envhub.protocol.messages import Make
from envhub_server.catalog.registry import Recipe
from envhub_server.ipc import control
from envhub_server.session.effects import Effects
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot, SlotTable
from envhub_server.session.worker_count import (
    Machine,
    WorkerCount,
    crowded_text,
    first_workers,
    of_first_envs,
    separate,
    shared_text,
)

SECOND_FAILED = "a second env could not be made in its process"


class WorkerSizing:
    """The number of workers of one session.

    Attributes:
        count: the number and the reason for it; None until it is decided.
        worker_spin_us: the microseconds that each worker spins before it parks.
        driver_spin_us: the microseconds that the driver spins before it parks.
        separated: True if each env has its own process because a second env could not be made in one.
    """

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        machine: Machine,
        slots: SlotTable,
        launcher: Launcher,
        effects: Effects,
        count: WorkerCount | None,
    ) -> None:
        """Size the session for ``count`` workers; if it is None, by the first envs once these are made."""
        self._make, self._recipe, self._machine = make, recipe, machine
        self._slots, self._launcher, self._effects = slots, launcher, effects
        self.count = count
        self.worker_spin_us = self.driver_spin_us = 0
        self.separated = self._shared_notified = False
        first = first_workers(make.name, make.num_envs, machine.cpus)
        self._resize(first if count is None else count.workers)

    def _resize(self, workers: int) -> None:
        workers = max(1, min(workers, self._make.num_envs))
        self._slots.resize(workers)
        # Other sessions do not count: most are idle, and next to busy ones spins fail and so become rare.
        self.worker_spin_us, self.driver_spin_us = self._spin_us(workers), self._spin_us(workers + 1)

    def _spin_us(self, processes: int) -> int:
        machine, wanted_us = self._machine, self._make.spin_us
        return spin_us(processes, machine.cpus, machine.quota) if wanted_us is None else wanted_us

    def workers_max(self, making: bool) -> int:
        """The number of workers; until the envs are made, the largest possible number."""
        grows = self.count is None or (making and not self.count.chosen)
        later = min(self._make.num_envs, self._machine.workers_max) if grows else 0
        return max(len(self._slots), later)

    # --- the decision -------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Decide by the first envs, which must all be made."""
        first = [slot.process.first for slot in self._slots if slot.process is not None]
        shares = bool(self._launcher.rules.hosting.shares_process)
        made = [each for each in first if each is not None]
        self._decided(of_first_envs(self._make.num_envs, made, self._machine, shares))

    def separate(self, why: str) -> None:
        """Give each env its own process."""
        self.separated = why == SECOND_FAILED
        self._decided(separate(self._make.num_envs, why, alone=self.separated))

    def _decided(self, count: WorkerCount) -> None:
        self.count, self._launcher.decided = count, True
        self._resize(count.workers)

    def separable(self, slot: Slot) -> bool:
        """True if the process of this slot must make more than one env, and no user asked for that."""
        decided = self.count is None or self.count.chosen or self.count.crowded or self._recipe.settings.vector
        enough = self._make.num_envs <= max(self._machine.workers_max, self._machine.cpus)
        return not decided and len(slot.rows) > 1 and enough

    # --- what others learn --------------------------------------------------------------------------------------------

    def notify_if_crowded(self) -> None:
        """Notify the client if envs share processes for lack of room."""
        if self.count is not None and self.count.crowded:
            # Event: There is no room for a process per env: envs share processes.
            self._effects.notify("processes_shared", crowded_text(self._make.num_envs, len(self._slots)))

    def on_shared_changed(self, changed: control.SharedChanged) -> None:
        """Notify the client, once, that its envs change state that a process shares."""
        what = [each for each in control.SHARED if each in changed.what]
        if what and not self._shared_notified:
            self._shared_notified = True
            # Event: Envs that share a process change what they have in common.
            self._effects.notify("process_state_shared", shared_text(what))
