"""The numbers that an operator may give, by the names of their keys in the file and of their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envhub.protocol.validation import GPUS_MAX, ROWS_MAX, SECONDS_MAX

PROCESSES_MAX = 1024  # workers or spares of a session, as many as it may have envs
BYTES_MIN = 16 << 20  # of memory, in which an interpreter just starts
BYTES_MAX = 1 << 50  # of memory or of files: a petabyte
EPISODES_MAX = 1 << 40
FILES_MAX = 1_000_000


@dataclass(frozen=True)
class NumberBounds:
    """The smallest and the largest number of a key, and its unit; ``or_zero`` also allows 0, which means no limit."""

    low: int
    high: int
    unit: str = ""
    or_zero: bool = False

    def admits(self, number: float) -> bool:
        """True if the number is allowed, which NaN is not."""
        return self.low <= number <= self.high or (self.or_zero and number == 0)

    def __str__(self) -> str:
        span = f"from {self.low} to {self.high}{self.unit and f' {self.unit}'}"
        span += ", or 0 for no limit" if self.or_zero else ""
        return f'{span}, written such as 2000000000 or "2GB"' if self.unit == "bytes" else span


MEMORY = NumberBounds(BYTES_MIN, BYTES_MAX, "bytes", or_zero=True)
BOUNDS: Mapping[str, NumberBounds] = {
    "max_envs": NumberBounds(1, ROWS_MAX, "envs"),
    "workers": NumberBounds(1, PROCESSES_MAX, "workers"),
    "lease": NumberBounds(0, SECONDS_MAX, "seconds"),
    "close_timeout_max": NumberBounds(0, SECONDS_MAX, "seconds"),
    "info_bytes_max": NumberBounds(1 << 10, 32 << 20, "bytes"),
    "worker_memory": MEMORY,
    "memory_max": MEMORY,
    "gpus": NumberBounds(0, GPUS_MAX - 1),
    "spares": NumberBounds(0, PROCESSES_MAX, "workers"),
    "replays_max": NumberBounds(0, FILES_MAX, "files"),
    "replays_bytes_max": NumberBounds(0, BYTES_MAX, "bytes"),
    "recordings_memory_max": NumberBounds(1, BYTES_MAX, "bytes"),
    "episodes": NumberBounds(0, EPISODES_MAX, "episodes"),
    "age_s": NumberBounds(0, SECONDS_MAX, "seconds"),
    "memory_bytes": MEMORY,
    "env_ids": NumberBounds(0, ROWS_MAX - 1),
    "film": NumberBounds(0, ROWS_MAX - 1),
    "every": NumberBounds(1, EPISODES_MAX, "episodes"),
    **dict.fromkeys(("bytes_max", "folder_bytes_max"), NumberBounds(1, BYTES_MAX, "bytes")),
    "episodes_max": NumberBounds(1, EPISODES_MAX, "episodes"),
    "queue_bytes": NumberBounds(1, BYTES_MAX, "bytes"),
    # The quotas of a client.
    **dict.fromkeys(("sessions_max", "envs_max", "workers_max"), NumberBounds(0, BYTES_MAX)),
    "arena_bytes_max": NumberBounds(0, BYTES_MAX, "bytes"),
    **dict.fromkeys(("connections_max", "makes_per_minute_max"), NumberBounds(0, BYTES_MAX)),
    "worker_memory_bytes_max": MEMORY,
}
OF_BYTES = frozenset(name for name, bounds in BOUNDS.items() if bounds.unit == "bytes")  # which may have a unit
DISTINCT = frozenset(["bind", "gpus", "env_ids", "film"])  # lists without repeated items
