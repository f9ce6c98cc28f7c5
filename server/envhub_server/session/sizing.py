"""The number of workers of a session: its decision, and the notices and the step cost that follow from it."""

from __future__ import annotations

from dataclasses import replace

from envhub.arena.spin import spin_us
from envhub.protocol.messages import Make
from envhub_server.catalog.registry import Recipe
from envhub_server.catalog.step_costs import average, key
from envhub_server.ipc import control
from envhub_server.session import instructions as do
from envhub_server.session.instructions import Instructions
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot, SlotTable
from envhub_server.session.worker_count import (
    Machine,
    WorkerCount,
    better_count,
    better_count_text,
    crowded_text,
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
        fit: True if the envs are known to share a process well.
        waits: True if a step of the envs is known to wait longer than it computes.
    """

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        machine: Machine,
        slots: SlotTable,
        launcher: Launcher,
        count: WorkerCount | None,
    ) -> None:
        """Size the session for ``count`` workers; if it is None, by the first envs once these are made."""
        self._make, self._recipe, self._machine = make, recipe, machine
        self._slots, self._launcher = slots, launcher
        self.count = count
        self.worker_spin_us = self.driver_spin_us = 0
        self.separated = self.fit = False
        self.waits = launcher.rules.waits
        self._better_notified = self._shared_notified = False
        self._resize(machine.cpus if count is None else count.workers)

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

    def notify_if_crowded(self) -> Instructions:
        """Notify the client if envs share processes for lack of room."""
        if self.count is None or not self.count.crowded:
            return []
        # Event: There is no room for a process per env: envs share processes.
        return [do.Notify("processes_shared", crowded_text(self._make.num_envs, len(self._slots)))]

    def on_step_times(self, slot: Slot, times: control.StepTimes) -> Instructions:
        """Report the duration of the env's steps, and, once, a better number of workers."""
        slot.times = times
        if self._recipe.settings.vector:  # the steps are not of single envs, and do not decide a number of workers
            return []
        cost = average(each.times for each in self._slots if each.times is not None)
        if cost is None or self.count is None:
            return []
        rules = self._launcher.rules
        self.waits = cost.waits
        cost = replace(cost, libraries=rules.libraries, fit=self.fit, alone=self._is_alone(self.count))
        learned: Instructions = [do.LearnCost(cost)]
        workers, num_envs = len(self._slots), self._make.num_envs
        by_itself = self.fit or bool(rules.hosting.shares_process)
        # The advice to share processes is given once, not in each session of the env.
        decided = self._better_notified or self.count.chosen or (rules.cost_known and not by_itself)
        better = None if decided else better_count(num_envs, workers, cost, self._machine)
        if better is None:
            return learned
        self._better_notified = True
        text = better_count_text(num_envs, workers, *better, cost, bool(key(self._make)) and by_itself)
        # Event: The session would be faster with another number of workers.
        return [*learned, do.Notify("worker_count_unsuitable", text)]

    def _is_alone(self, count: WorkerCount) -> bool:
        """True if a process could not make two envs, here or, if no process here has two, in an earlier session."""
        return count.alone or (self._launcher.rules.alone and len(self._slots) == self._make.num_envs)

    def on_shared_changed(self, changed: control.SharedChanged) -> Instructions:
        """Notify the client, once, that its envs change state that a process shares."""
        what = [each for each in control.SHARED if each in changed.what]
        if self._shared_notified or not what:
            return []
        self._shared_notified = True
        # Event: Envs that share a process change what they have in common.
        return [do.Notify("process_state_shared", shared_text(what))]
