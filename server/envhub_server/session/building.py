"""The number of a session's workers, and the building of its envs until all have mapped the arena.

Of the number of workers, which follows from facts about the env and the machine, the first row that applies decides:

=======================  ==============================================================================================
fact                     workers
=======================  ==============================================================================================
a chosen number          that number: ``num_workers``, or the hub's ``--workers``
one env per process      a process per env: ``one_per_process``
envs may share           one per CPU
.. and are very cheap    fewer: the root of their number, and a CPU is left to the driver below 8 envs per worker
nothing                  a process per env, within a share of the memory, descriptors and processes
=======================  ==============================================================================================

Envs of a session may share a process if a user says so (``shared_process``), or if the env and its wrappers are of
packages that keep no state per process, see ``worker.shared_process``; it also knows the very cheap envs. If there
are no more envs than CPUs, there is a process per env, unless their id is that of a very cheap env.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from envhub.arena.spin import spin_us
from envhub.protocol import messages
from envhub.protocol.messages import Failure
from envhub.protocol.prelude import REPLIES_BYTES_MAX, WINDOW, WINDOW_MIN
from envhub.values import codec
from envhub.values.leaf import ANYTHING, OBJECT
from envhub_server.ipc import control
from envhub_server.ipc.control import FirstBuilt
from envhub_server.processes.worker_handle import WorkerExited
from envhub_server.session.launcher import Launcher, Machine, WorkerCount
from envhub_server.session.slots import KilledFor, Late, Process, Slot, Stage
from envhub_server.session.supervision import exit_failure, unready_failure

# Gymnasium's envs of which a step takes less than the wake-up of a worker, without their versions.
CHEAP = frozenset(
    [
        *("CartPole", "Acrobot", "MountainCar", "MountainCarContinuous", "Pendulum"),
        *("Blackjack", "CliffWalking", "FrozenLake", "FrozenLake8x8", "Taxi"),
    ]
)
CHEAP_ROWS = 8  # of a worker, from which on one more worker is worth the driver's own CPU
SHARE = 0.5  # of the available memory, descriptors and processes, for a session without a chosen number of workers


def chosen_count(num_envs: int, wanted: int, by: str) -> WorkerCount:
    return WorkerCount(min(wanted, num_envs), f"told by {by}", chosen=True)


def separate(num_envs: int, why: str) -> WorkerCount:
    return WorkerCount(num_envs, f"a process per env: {why}", chosen=True)


def lacking(num_envs: int, count: WorkerCount, machine: Machine) -> str:
    """The reason why envs that need their own processes cannot have them; empty if they can."""
    need = f"{num_envs} envs need a process each (one_per_process, snapshots)"
    if count.workers < num_envs:
        return f"{need}, and there are to be {count.workers}, {count.reason}"
    room = max(machine.workers_max, machine.cpus)
    return f"{need}, and there is room for {room}; num_workers={room} has them share" if count.workers > room else ""


def count_in_advance(name: str, num_envs: int, cpus: int) -> WorkerCount | None:
    """The number before any env is made, of envs of this id; None if the first envs decide."""
    if num_envs <= cpus and first_workers(name, num_envs, cpus) == num_envs:
        return WorkerCount(num_envs, "a process per env: there are no more envs than CPUs")
    return None


def first_workers(name: str, num_envs: int, cpus: int) -> int:
    """The number of workers that make the first envs, of this id: the least that these can decide on."""
    cheap = name.rpartition("/")[2].partition("-")[0] in CHEAP
    return _cheap_workers(num_envs, cpus) if cheap else min(num_envs, cpus)


def _cheap_workers(num_envs: int, cpus: int) -> int:
    """The number of workers for very cheap envs: each more of them costs the driver, and the last one its own CPU."""
    workers = min(math.isqrt(num_envs), cpus)
    return max(1, cpus - 1) if workers == cpus and num_envs < CHEAP_ROWS * cpus else workers


def count_workers(num_envs: int, built: Sequence[FirstBuilt], machine: Machine, may_share: bool = False) -> WorkerCount:
    """The number of workers, once the first envs are made, each by one of them."""
    if may_share:
        return WorkerCount(machine.cpus, "one per CPU: shared_process")
    if all(each.cheap for each in built):
        count = max(len(built), _cheap_workers(num_envs, machine.cpus))
        return WorkerCount(count, "few: the env is known to share a process well, and its steps to be very cheap")
    if all(each.may_share_process for each in built):
        return WorkerCount(machine.cpus, "one per CPU: the env and its wrappers are known to share a process well")
    each_bytes = max(each.private_bytes for each in built)
    room = min(machine.workers_max, int(SHARE * machine.memory_bytes) // max(1, each_bytes))
    workers = min(num_envs, max(machine.cpus, room))  # at least one per CPU
    reason, is_crowded = "a process per env: nothing is known of this env", workers < num_envs
    if is_crowded:
        reason += f"; {num_envs} are more than the memory, descriptors and processes that are to be had allow"
    return WorkerCount(workers, reason, crowded=is_crowded)


def crowded_text(num_envs: int, workers: int) -> str:
    return (
        f"{num_envs} envs in {workers} processes, which is all that there is room for: envs that keep something per "
        "process may differ from envs with one each; pass fewer envs, or shared_process=True if they may share"
    )


class EnvBuilding:
    """Makes the envs of one session, by a number of workers. A method returns a ``Failure`` if they cannot be made."""

    def __init__(self, launcher: Launcher, count: WorkerCount | None, info_bytes: int) -> None:
        """Make the envs by ``count`` workers; if it is None, the first envs decide once these are made."""
        self._make, self._recipe, self._slots = launcher.make, launcher.recipe, launcher.slots
        self._launcher, self._info_bytes, self._effects = launcher, info_bytes, launcher.effects
        launcher.count = count
        self.worker_spin_us = self.driver_spin_us = 0  # for which each worker, and the driver, spins before it parks
        self._shared_notified = False
        first = first_workers(self._make.name, self._make.num_envs, launcher.machine.cpus)
        self._resize(first if count is None else count.workers)

    # --- the number of workers ----------------------------------------------------------------------------------------

    def _resize(self, workers: int) -> None:
        workers = max(1, min(workers, self._make.num_envs))
        self._slots.resize(workers)
        # Other sessions do not count: most are idle, and next to busy ones spins fail and so become rare.
        self.worker_spin_us, self.driver_spin_us = self._spin_us(workers), self._spin_us(workers + 1)

    def _spin_us(self, processes: int) -> int:
        machine, wanted_us = self._launcher.machine, self._make.spin_us
        return spin_us(processes, machine.cpus, machine.quota) if wanted_us is None else wanted_us

    def workers_max(self, making: bool) -> int:
        """The number of workers; until the envs are made, the largest possible number."""
        count = self._launcher.count
        grows = count is None or (making and not count.chosen)
        later = min(self._make.num_envs, self._launcher.machine.workers_max) if grows else 0
        return max(len(self._slots), later)

    def _decide(self, count: WorkerCount) -> None:
        self._launcher.count = count
        self._resize(count.workers)

    def _separable(self, slot: Slot) -> bool:
        """True if the process of this slot must make more than one env, and no user asked for that."""
        count = self._launcher.count
        decided = count is None or count.chosen or count.crowded or self._recipe.settings.vector
        enough = self._make.num_envs <= max(self._launcher.machine.workers_max, self._launcher.machine.cpus)
        return not decided and len(slot.rows) > 1 and enough

    def _notify_if_crowded(self) -> None:
        if self._launcher.count is not None and self._launcher.count.crowded:
            # Event: There is no room for a process per env: envs share processes.
            self._effects.notify("processes_shared", crowded_text(self._make.num_envs, len(self._slots)))

    def on_shared_changed(self, changed: control.SharedChanged) -> None:
        """Notify the client, once, that its envs change state that a process shares."""
        what = [each for each in control.SHARED if each in changed.what]
        if what and not self._shared_notified:
            self._shared_notified = True
            text = (
                f"envs that share a process change {', '.join(what)}, which all envs of a process have in common: "
                "their results depend on each other; one_per_process=True gives each env a process of its own"
            )
            # Event: Envs that share a process change what they have in common.
            self._effects.notify("process_state_shared", text)

    # --- envs ---------------------------------------------------------------------------------------------------------

    def on_session_made(self, now_s: float) -> None:
        # If the first is to say what it has imported, the others start then, to have the same.
        self._launcher.start(self._slots[:1] if self._launcher.has_zygote is None else self._slots, now_s)
        self._notify_if_crowded()

    def on_first_built(self, process: Process, built: control.FirstBuilt, now_s: float) -> None:
        """Decide on the number of workers, once the first env of each CPU is made, and have the other envs made."""
        if self._launcher.count is not None:
            return
        process.first, process.built, process.stage = built, 1, Stage.BUILT
        begun = [slot.process for slot in self._slots if slot.process is not None and slot.process.first is not None]
        if len(begun) < len(self._slots):
            return
        first = [each.first for each in begun if each.first is not None]
        may_share = bool(self._launcher.rules.hosting.shares_process)
        self._decide(count_workers(self._make.num_envs, first, self._launcher.machine, may_share))
        for each in begun:
            each.stage = Stage.BUILDING
        self._launcher.start_missing(now_s)
        for each in begun:
            self._effects.tell(each.number, self._launcher.order_rest(self._slots[each.slot_index]))
        self._notify_if_crowded()

    def on_imported(self, process: Process, imported: control.Imported, now_s: float) -> None:
        """Start the other workers, once the first has loaded the code that makes its envs."""
        if self._launcher.has_zygote is not None:
            return
        self._launcher.has_zygote = imported.shareable
        if imported.shareable:
            self._effects.fork_zygote(process.number, tuple(imported.files))
        self._launcher.start_missing(now_s)

    def _separate(self, slot: Slot, now_s: float) -> None:
        why = "not all of its envs are known to share one well"
        begun = [each.process for each in self._slots if each.process is not None]
        self._decide(separate(self._make.num_envs, why))
        for process in begun:
            process.made, process.rebuild = None, True
        # Event: Not all envs of a process are known to share one well: each env gets its own.
        self._effects.warn("envs_separated", {"worker": slot.index, "why": why})
        for process in begun:
            self._effects.kill(process.number)
        self._launcher.start_missing(now_s)

    def on_built(self, process: Process, built: control.Built, now_s: float) -> Failure | None:
        slot = self._slots[process.slot_index]
        fits = built.may_share_process or self._launcher.rules.hosting.shares_process
        if self._separable(slot) and not fits:
            self._separate(slot, now_s)
            return None
        process.made, process.stage, process.built = built, Stage.BUILT, len(slot.rows)
        return self._make_arena() if len(self._made) == len(self._slots) else None

    def _make_arena(self) -> Failure | None:
        launcher, made = self._launcher, self._made
        first = made[0]
        action_space, action_leaves = first.action_space, first.action_leaves
        if any(each.action_structure != first.action_structure for each in made):
            action_space, action_leaves = codec.encode(ANYTHING), [OBJECT.wire()]
        launcher.arena = control.MapArena(
            self._make.num_envs,
            first.observation_leaves,
            action_leaves,
            self._info_bytes,
            first.observation_spaces[0],
            action_space,
            self._make.observation_mode,
            self.worker_spin_us,
            slow_ms=launcher.rules.slow_ms,
        )
        try:
            layout = launcher.arena.layout()
        except ValueError as error:
            return Failure("limit", "hub", f"these envs have no place in shared memory: {error}")
        self._effects.make_arena(layout, first.has_object_leaves, self._recipe.settings.vector)
        for process in [slot.process for slot in self._slots if slot.process is not None]:
            launcher.map(process)
        return None

    @property
    def _made(self) -> list[control.Built]:
        made = [slot.process.made for slot in self._slots if slot.process is not None]
        return [each for each in made if each is not None]

    # --- the arena ----------------------------------------------------------------------------------------------------

    def on_mapped(self, process: Process, now_s: float) -> messages.Made | None:
        """Note that a process has mapped the arena; return the description of the session once all have."""
        self._launcher.restarts.serves(process.slot_index, now_s)
        process.stage = Stage.MAPPED
        return self._describe() if all(slot.stage is Stage.MAPPED for slot in self._slots) else None

    def _describe(self) -> messages.Made:
        made, arena = self._made, self._launcher.arena
        first = made[0]
        assert arena is not None
        spaces, layout = first.observation_spaces, arena.layout()
        batch_bytes = sum(layout.rows * leaf.nbytes for leaf in layout.observations)
        if self._make.observation_mode == "different":
            by_slot = [each.observation_spaces for each in made]
            spaces = [by_slot[row % len(made)][row // len(made)] for row in range(self._make.num_envs)]
        return messages.Made(
            num_envs=self._make.num_envs,
            num_workers=len(self._slots),
            observation_spaces=spaces,
            action_space=arena.action_space,
            metadata=first.metadata,
            render_mode=first.render_mode,
            spec=first.spec,
            sizing="" if self._launcher.count is None else self._launcher.count.reason,
            vector=self._recipe.settings.vector,
            window=max(WINDOW_MIN, min(WINDOW, REPLIES_BYTES_MAX // max(1, batch_bytes))),
        )

    def serve(self, now_s: float) -> None:
        for slot in self._slots:
            process = slot.process
            assert process is not None
            process.stage, process.made, slot.serves_since_s = Stage.SERVING, None, now_s
            self._effects.hand_over(slot.index, process.number, control.Serve(), 0)
        self._effects.learn(self._launcher.rules.shares_imports)

    # --- failures -----------------------------------------------------------------------------------------------------

    def on_exited(self, process: Process, exited: WorkerExited, why: KilledFor | None, now_s: float) -> Failure | None:
        """Make the envs of an ended process in another way, if that may help."""
        slot, launcher, building = self._slots[process.slot_index], self._launcher, self._launcher.arena is None
        # It may be the kind of code that works in no fork.
        unshared = process.shares_imports and why is None and not process.rebuild
        if building and (process.rebuild or unshared):
            if unshared:
                launcher.has_zygote, launcher.rules = False, replace(launcher.rules, shares_imports=False)
            launcher.start([slot], now_s)
            return None
        hides = launcher.rules.hide_folders
        if exited.cause.unready:
            return unready_failure(self._make, exited.cause.unready, hides)
        failure = exit_failure(self._make, slot.index, slot.rows, exited.cause, why, hides)
        text = failure.message if isinstance(why, Late) else f"{failure.message} while it built its envs"
        return replace(failure, message=text)
