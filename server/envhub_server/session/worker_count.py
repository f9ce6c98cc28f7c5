"""The number of a session's workers, and the reason for it. Pure, from facts about the env and the machine.

The first row that applies decides:

=======================  ==============================================================================================
fact                     workers
=======================  ==============================================================================================
a chosen number          that number: ``num_workers``, or the hub's ``--workers``
one env per process      a process per env: ``one_per_process``, or a second env could not be made in a process before
known step cost,         the number by which ``batch_s`` is shortest, and among about equal numbers the smallest:
and envs may share
.. steps wait long       a process per env, so that no wait is added to another
.. steps compute long    one per CPU
.. steps cost little     fewer: one more env costs a worker less than one more worker costs the driver, and as many
                         workers as CPUs leave the driver no CPU of its own
envs may share           one per CPU
nothing                  a process per env, within a share of the memory, descriptors and processes
=======================  ==============================================================================================

Envs of a session may share a process if a user says so (``shared_process``), or if the env and its wrappers are of
packages that keep no state per process, see ``worker.env_family``. A known step cost alone does not let envs share: the
first session of an env and all later ones give the same results.

If there are no more envs than CPUs, and their step cost is unknown, there is a process per env.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envhub_server.catalog.step_costs import StepCost
from envhub_server.ipc.control import FirstBuilt

# The cost of a batch besides the envs, measured on 2 CPUs (tests/benchmarks/NOTES.md). Its proportion to an env's step
# matters. On more CPUs the workers run in parallel; the driver's share is serial.
ROW_S = 4e-6  # a worker's CPU time per env
WORKER_S = 30e-6  # a worker's CPU time per batch: wake, find its rows, report them done, park
DRIVER_S = 12e-6  # the driver's CPU time per worker: wake it, and read its report
SHARED_CPU_S = 80e-6  # if the driver has no CPU of its own, on 2 CPUs: it parks, and its caches are cold
ABOUT_EQUAL = 1.05  # a batch may take this many times as long if it needs fewer workers
NOTABLY = 1.5  # a user is notified if another number of workers would be this many times as fast
SHARE = 0.5  # of the available memory, descriptors and processes, for a session without a chosen number of workers


@dataclass(frozen=True)
class WorkerCount:
    """A number of workers, and the reason for it.

    Attributes:
        workers: the number.
        reason: the reason for the number, for people.
        chosen: True if a user or a rule fixed the number, so that later sessions do not adapt it.
        alone: True if a process could not make two of the envs.
        crowded: True if envs share processes only because there is no room for more.
    """

    workers: int
    reason: str
    chosen: bool = False
    alone: bool = False
    crowded: bool = False


@dataclass(frozen=True)
class Machine:
    """The part of the machine that a session may use.

    Attributes:
        affinity: the CPUs' numbers.
        cpus: the number of usable CPUs.
        quota: True if a cgroup limits the CPU time.
        workers_max: the number of workers that the session's share of descriptors and processes allows.
        memory_bytes: the available memory.
    """

    affinity: tuple[int, ...]
    cpus: int
    quota: bool = False
    workers_max: int = 1 << 20
    memory_bytes: int = 1 << 50

    def cpu(self, slot: int) -> int:
        """The CPU of this slot, if each has its own."""
        return self.affinity[slot % len(self.affinity)]


def chosen_count(num_envs: int, wanted: int, by: str) -> WorkerCount:
    """The number of workers that the setting ``by`` fixes, at most one per env."""
    return WorkerCount(min(wanted, num_envs), f"told by {by}", chosen=True)


def separate(num_envs: int, why: str, alone: bool = False) -> WorkerCount:
    """A process per env, without a limit."""
    return WorkerCount(num_envs, f"a process per env: {why}", chosen=True, alone=alone)


def lacking(num_envs: int, count: WorkerCount, machine: Machine) -> str:
    """The reason why envs that need their own processes cannot have them; empty if they can."""
    need = f"{num_envs} envs need a process each (one_per_process, or such envs could not share one before)"
    if count.workers < num_envs:
        return f"{need}, and there are to be {count.workers}, {count.reason}"
    room = max(machine.workers_max, machine.cpus)
    return f"{need}, and there is room for {room}; num_workers={room} has them share" if count.workers > room else ""


def count_in_advance(
    num_envs: int, cost: StepCost | None, machine: Machine, shares: bool = False
) -> WorkerCount | None:
    """The best number before any env is made; None if the first envs decide.

    ``shares`` is True if a user says that the envs may share a process.
    """
    if cost is not None and cost.alone:
        return separate(num_envs, "a second env could not be made in a process before", alone=True)
    if cost is not None and not (cost.fit or shares):
        return _separate_if_possible(num_envs, cost.env_bytes, "nobody says that its envs may share one", machine)
    if cost is not None:
        best = soonest(num_envs, cost, machine.cpus)
        workers = _within(best, cost.env_bytes, machine)
        return WorkerCount(workers, f"a step of this env took {cost} before{_limited(best, workers)}")
    if num_envs <= machine.cpus:
        return WorkerCount(num_envs, "a process per env: there are no more envs than CPUs")
    return None


def of_first_envs(num_envs: int, first: Iterable[FirstBuilt], machine: Machine, shares: bool = False) -> WorkerCount:
    """The number for envs of unknown step time, once the first envs are made."""
    built = list(first)
    if shares:
        return WorkerCount(machine.cpus, "one per CPU: shared_process")
    if all(each.fit for each in built):
        return WorkerCount(machine.cpus, "one per CPU: the env and its wrappers are known to share a process well")
    nbytes = max(each.private_bytes for each in built)
    return _separate_if_possible(num_envs, nbytes, "nothing is known of this env", machine)


def _separate_if_possible(num_envs: int, each_bytes: int, why: str, machine: Machine) -> WorkerCount:
    workers = _within(num_envs, each_bytes, machine)
    reason = f"a process per env: {why}{_limited(num_envs, workers)}"
    return WorkerCount(workers, reason, crowded=workers < num_envs)


def crowded_text(num_envs: int, workers: int) -> str:
    """The notice about envs that share processes for lack of room."""
    return (
        f"{num_envs} envs in {workers} processes, which is all that there is room for: envs that keep something per "
        "process may differ from envs with one each; pass fewer envs, or shared_process=True if they may share"
    )


def shared_text(what: Iterable[str]) -> str:
    """The notice about envs whose steps change state that all envs of their process share."""
    return (
        f"envs that share a process change {', '.join(what)}, which all envs of a process have in common: their "
        "results depend on each other; one_per_process=True gives each env a process of its own"
    )


def _within(wanted: int, each_bytes: int, machine: Machine) -> int:
    """The number of wanted workers that memory allows, with ``each_bytes`` each; at least one per CPU."""
    room = min(machine.workers_max, int(SHARE * machine.memory_bytes) // max(1, each_bytes))
    return min(wanted, max(machine.cpus, room))


def _limited(wanted: int, workers: int) -> str:
    limits = "memory, descriptors and processes"
    return "" if workers == wanted else f"; {wanted} are more than the {limits} that are to be had allow"


def soonest(num_envs: int, cost: StepCost, cpus: int) -> int:
    """The number of workers with the shortest batch time; among about equal ones the smallest."""
    times = {workers: batch_s(num_envs, workers, cost, cpus) for workers in _worth_a_look(num_envs, cpus)}
    limit_s = min(times.values()) * ABOUT_EQUAL
    return min(workers for workers, time_s in times.items() if time_s <= limit_s)


def _worth_a_look(num_envs: int, cpus: int) -> set[int]:
    """The candidates for the best number; a number between two candidates has no smaller maximum of envs per worker."""
    rows = range(1, num_envs + 1)
    return {-(-num_envs // row) for row in rows} | {min(cpus, num_envs)}


def batch_s(num_envs: int, workers: int, cost: StepCost, cpus: int) -> float:
    """Estimate the time of a batched step by ``workers`` workers.

    The worker with the most envs steps them one after the other, waits included. The CPU time of all workers is divided
    by at most ``cpus``. The driver's own part is serial. With fewer workers than CPUs, the driver has its own CPU.
    """
    rows = -(-num_envs // workers)
    alone_s = rows * (cost.cpu_s + cost.wait_s + ROW_S) + WORKER_S
    computing_s = num_envs * (cost.cpu_s + ROW_S) + workers * WORKER_S
    driver_s = workers * DRIVER_S + (SHARED_CPU_S if workers >= cpus else 0.0)
    return max(alone_s, computing_s / min(workers, cpus)) + driver_s


def better_count(num_envs: int, workers: int, cost: StepCost, machine: Machine) -> tuple[int, float] | None:
    """A number of workers that is more than ``NOTABLY`` times as fast, and the ratio; None if there is none.

    It is the number that ``count_in_advance`` gives the next session, if such envs may share a process.
    """
    best = _within(soonest(num_envs, cost, machine.cpus), cost.env_bytes, machine)
    taken_s, best_s = (batch_s(num_envs, count, cost, machine.cpus) for count in (workers, best))
    return (best, taken_s / best_s) if taken_s / best_s > NOTABLY else None


def better_count_text(
    num_envs: int, workers: int, best: int, times_as_fast: float, cost: StepCost, known_again: bool
) -> str:
    """The notice about a number of ``better_count``; with ``known_again`` the next session uses it by itself."""
    then = "the next session of this env gets them by itself" if known_again else f"pass num_workers={best}"
    if best < num_envs and not known_again:
        then += ", or shared_process=True, if its envs may share a process"
    return (
        f"{num_envs} envs in {workers} workers: {best} would step them about {times_as_fast:.1f} times as fast, for a "
        f"step takes {cost}; {then}"
    )
