"""Prepares the process of a hub: its standard streams, its descriptors and its memory."""

from __future__ import annotations

import os
import resource

from envhub.process import keep_freed_memory, write_no_core_file


def prepare() -> None:
    """Make this process one in which a hub can run; called before anything is opened or started."""
    # Closed standard streams are opened: else a socket would get the number of one, and prints would go into it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # As many descriptors as the system allows: libzmq ends the process when it cannot accept a connection.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    write_no_core_file()
    keep_freed_memory()
