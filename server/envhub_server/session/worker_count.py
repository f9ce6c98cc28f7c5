"""Number of a session's workers, and the reason. Pure, from facts of the env and of the machine.

What is known of the env decides; of these, the first that there is:

=======================  ==============================================================================================
known                    workers
=======================  ==============================================================================================
a number that was told   that many: ``num_workers``, or the hub's ``--workers``
it shares no process     a process per env: ``one_per_process``, or a second env could not be made in a process before
its steps before,        those by which ``batch_s`` steps the envs soonest, and of about equal numbers the fewest:
and it may share one
.. that wait for long    a process per env, so that no wait is added to another
.. that compute for long one per CPU
.. that cost little      the fewer, the cheaper: one env more costs a worker less than one worker more costs its driver,
                         and as many workers as CPUs leave the driver no CPU of its own
it may share a process   one per CPU
nothing                  a process per env, within a share of the memory, descriptors and processes
=======================  ==============================================================================================

An env may share a process with others of its session where somebody says so (``shared_process``), or where it and its
wrappers are of packages that keep nothing per process, see ``worker.env_family``. What its steps took before is no
leave: the first session of an env and all later ones give the same results.

Where there are no more envs than CPUs, and nothing is known of their steps, there is a process per env.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envhub_server.catalog.step_costs import StepCost
from envhub_server.ipc.control import FirstBuilt

# What a batch costs besides the envs, as measured on 2 CPUs (tests/benchmarks/NOTES.md); it is the proportion to a step
# of an env that counts. On more CPUs the workers' shares run side by side, and the driver's do not.
ROW_S = 4e-6  # of a worker's CPU time, for each env
WORKER_S = 30e-6  # of CPU time, for each worker: it is woken, finds its rows, tells that they are done, and parks
DRIVER_S = 12e-6  # of the driver's CPU time, for each worker: to wake it, and to hear of it
SHARED_CPU_S = 80e-6  # where the driver has no CPU of its own, on 2 CPUs: it parks, and its caches are cold then
ABOUT_EQUAL = 1.05  # a batch that takes so many times as long is as good, if it needs fewer workers
NOTABLY = 1.5  # a session's user is told where another number of workers would be so many times as fast
SHARE = 0.5  # of the memory, descriptors and processes that are to be had, for one session that sizes itself


@dataclass(frozen=True)
class WorkerCount:
    """A number of workers, and the reason for it.

    Attributes:
        workers: how many.
        reason: why so many, for people.
        told: whether somebody chose the number, so that no other will be taken by itself.
        alone: whether a process cannot have two of the envs, as was seen.
        crowded: whether envs share processes though nobody knows that they may: there is no room for more.
    """

    workers: int
    reason: str
    told: bool = False
    alone: bool = False
    crowded: bool = False


@dataclass(frozen=True)
class Machine:
    """Share of the machine that a session may have.

    Attributes:
        affinity: the CPUs' numbers.
        cpus: how many of them are usable.
        quota: whether a cgroup limits the CPU time.
        workers_max: how many more workers a session may have, by its share of the descriptors and processes.
        memory_bytes: how much memory is to be had.
    """

    affinity: tuple[int, ...]
    cpus: int
    quota: bool = False
    workers_max: int = 1 << 20
    memory_bytes: int = 1 << 50

    def cpu(self, worker: int) -> int:
        """CPU of this worker, where each has its own."""
        return self.affinity[worker % len(self.affinity)]


def told(num_envs: int, wanted: int, by: str) -> WorkerCount:
    """Sizing by a number that ``by`` says."""
    return WorkerCount(min(wanted, num_envs), f"told by {by}", told=True)


def separate(num_envs: int, why: str, alone: bool = False) -> WorkerCount:
    """A process per env, however many that are."""
    return WorkerCount(num_envs, f"a process per env: {why}", told=True, alone=alone)


def lacking(num_envs: int, sizing: WorkerCount, machine: Machine) -> str:
    """The reason why envs that need a process each cannot have them; empty if they can."""
    need = f"{num_envs} envs need a process each (one_per_process, or such envs could not share one before)"
    if sizing.workers < num_envs:
        return f"{need}, and there are to be {sizing.workers}, {sizing.reason}"
    room = max(machine.workers_max, machine.cpus)
    return f"{need}, and there is room for {room}; num_workers={room} has them share" if sizing.workers > room else ""


def known(num_envs: int, cost: StepCost | None, machine: Machine, shares: bool = False) -> WorkerCount | None:
    """Best number before any env is made; None where the first envs decide.

    ``shares`` is whether somebody says that the envs may share a process.
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
    """Sizing for envs whose step time is unknown, but of which the first ones are made."""
    found = list(first)
    if shares:
        return WorkerCount(machine.cpus, "one per CPU: shared_process")
    if all(each.fit for each in found):
        return WorkerCount(machine.cpus, "one per CPU: the env and its wrappers are known to share a process well")
    nbytes = max(each.private_bytes for each in found)
    return _separate_if_possible(num_envs, nbytes, "nothing is known of this env", machine)


def _separate_if_possible(num_envs: int, each_bytes: int, why: str, machine: Machine) -> WorkerCount:
    workers = _within(num_envs, each_bytes, machine)
    reason = f"a process per env: {why}{_limited(num_envs, workers)}"
    return WorkerCount(workers, reason, crowded=workers < num_envs)


def crowded_text(num_envs: int, workers: int) -> str:
    """Text for envs that share processes though it is not known that they may."""
    return (
        f"{num_envs} envs in {workers} processes, which is all that there is room for: envs that keep something per "
        "process may differ from envs with one each; pass fewer envs, or shared_process=True if they may share"
    )


def shared_text(what: Iterable[str]) -> str:
    """Text for envs whose steps change what all envs of their process share."""
    return (
        f"envs that share a process change {', '.join(what)}, which all envs of a process have in common: their "
        "results depend on each other; one_per_process=True gives each env a process of its own"
    )


def _within(wanted: int, each_bytes: int, machine: Machine) -> int:
    """Number of the wanted workers that memory allows where each takes so much; at least one per CPU."""
    room = min(machine.workers_max, int(SHARE * machine.memory_bytes) // max(1, each_bytes))
    return min(wanted, max(machine.cpus, room))


def _limited(wanted: int, workers: int) -> str:
    limits = "memory, descriptors and processes"
    return "" if workers == wanted else f"; {wanted} are more than the {limits} that are to be had allow"


def soonest(num_envs: int, cost: StepCost, cpus: int) -> int:
    """By how many workers so many envs are stepped soonest; of about equal numbers, the fewest."""
    times = {workers: batch_s(num_envs, workers, cost, cpus) for workers in _worth_a_look(num_envs, cpus)}
    limit_s = min(times.values()) * ABOUT_EQUAL
    return min(workers for workers, time_s in times.items() if time_s <= limit_s)


def _worth_a_look(num_envs: int, cpus: int) -> set[int]:
    """Numbers of workers, of which one is about the best: between two of them the largest has as many envs."""
    rows = range(1, num_envs + 1)
    return {-(-num_envs // row) for row in rows} | {min(cpus, num_envs)}


def batch_s(num_envs: int, workers: int, cost: StepCost, cpus: int) -> float:
    """Estimate the time of a batched step by so many workers.

    The worker with the most envs takes them one after the other, waits included. All together need so much CPU time,
    of which ``cpus`` run side by side at best; and the driver's own part is one after the other. With fewer workers
    than CPUs, the driver has one to itself.
    """
    rows = -(-num_envs // workers)
    alone_s = rows * (cost.cpu_s + cost.wait_s + ROW_S) + WORKER_S
    computing_s = num_envs * (cost.cpu_s + ROW_S) + workers * WORKER_S
    driver_s = workers * DRIVER_S + (SHARED_CPU_S if workers >= cpus else 0.0)
    return max(alone_s, computing_s / min(workers, cpus)) + driver_s


def better_count(num_envs: int, workers: int, cost: StepCost, machine: Machine) -> tuple[int, float] | None:
    """A number of workers that is more than ``NOTABLY`` times as fast, and how many times; None if there is none.

    It is the number that ``known`` gives the next session, if such envs may share a process.
    """
    best = _within(soonest(num_envs, cost, machine.cpus), cost.env_bytes, machine)
    taken_s, best_s = (batch_s(num_envs, count, cost, machine.cpus) for count in (workers, best))
    return (best, taken_s / best_s) if taken_s / best_s > NOTABLY else None


def better_count_text(
    num_envs: int, workers: int, best: int, times_as_fast: float, cost: StepCost, known_again: bool
) -> str:
    """Text for a better number of ``better_count``; ``known_again``: the next session takes it."""
    then = "the next session of this env gets them by itself" if known_again else f"pass num_workers={best}"
    if best < num_envs and not known_again:
        then += ", or shared_process=True, if its envs may share a process"
    return (
        f"{num_envs} envs in {workers} workers: {best} would step them about {times_as_fast:.1f} times as fast, for a "
        f"step takes {cost}; {then}"
    )
