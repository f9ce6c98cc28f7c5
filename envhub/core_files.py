"""Core files, which have all of a process's memory, and of a process with keys its secrets."""

from __future__ import annotations

import resource


def write_no_core_file() -> None:
    """Have the kernel write no core file of this process, and of those that it starts, unless one allows it itself."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
