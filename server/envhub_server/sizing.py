"""How many workers a session gets, and how those who wait in it wait: pure, from the machine and a measured step."""

from __future__ import annotations

from dataclasses import dataclass

from envhub.waiting import spin_us

# What a step costs besides the envs, as measured on 4 CPUs; only their proportion to a step of an env matters.
ROW_S = 3e-6  # of a worker, for each env
WORKER_S = 8e-6  # for each worker: to wake it, and to hear of it
CROWDED_S = 250e-6  # where no CPU is left to who drives the workers, so that one of them waits for it


@dataclass(frozen=True)
class Sizing:
    """What is known before the envs are.

    Attributes:
        affinity: the CPUs' numbers.
        cpus: how many of them are usable.
        quota: whether a cgroup limits the CPU time.
        spin_us: for how long to look before parking, if that was said.
    """

    affinity: tuple[int, ...]
    cpus: int
    quota: bool = False
    spin_us: int | None = None

    @property
    def usual(self) -> int:
        """Workers of envs of which nothing is known: one CPU is left to who drives them.

        With it busy, too, every worker would wait.
        """
        return max(1, self.cpus - 1)

    def workers(self, num_envs: int, step_s: float) -> int:
        """How many workers step so many envs soonest, each of which takes so long; of equals, the fewest."""

        def batch_s(workers: int) -> float:
            rows = -(-num_envs // workers)
            return rows * (step_s + ROW_S) + workers * WORKER_S + (CROWDED_S if workers >= self.cpus else 0)

        return min(range(1, min(num_envs, self.cpus) + 1), key=batch_s)

    def cpu(self, worker: int) -> int:
        """Which CPU is this worker's, where each has its own."""
        return self.affinity[worker % len(self.affinity)]

    def look_us(self, workers: int) -> int:
        """For how long so many workers, and who drives them, look before they park."""
        # Other sessions do not count: most are idle, and where they are not, spins are in vain and so become rare.
        return spin_us(workers + 1, self.cpus, self.quota) if self.spin_us is None else self.spin_us
