"""Core files, which contain a process's memory and so its secret keys."""

from __future__ import annotations

import sys

if sys.platform != "win32":
    import resource


def write_no_core_file() -> None:
    """Have the kernel write no core file of this process and its children, unless a child allows its own."""
    if sys.platform != "win32":  # which writes none
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
