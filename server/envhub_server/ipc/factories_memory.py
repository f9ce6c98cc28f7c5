"""The pickled factories of a session's envs in anonymous memory: one copy, from which each worker loads its own.

The hub never unpickles.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import replace
from hashlib import sha256
from typing import Iterator

from envhub.protocol.messages import Make, offset_of, places_of
from envhub.transport.descriptors import new_memory


def held(make: Make) -> tuple[Make, int]:
    """The request without its factories, of which only a digest is left, and the memory that holds them."""
    # The caller owns the descriptor, which is -1 where the envs are made by their name. Raises ``OSError``.
    if not make.factories:
        return make, -1
    descriptor = new_memory("envhub-factories", len(make.factories))
    try:
        view = memoryview(make.factories)
        while view:
            view = view[os.write(descriptor, view) :]
    except BaseException:
        os.close(descriptor)
        raise
    return replace(make, factories=sha256(make.factories).digest()), descriptor


def why_malformed(make: Make) -> str:
    count, end = places_of(make.factories)
    if count and (count != make.num_envs or end < 0):
        return f"{make.num_envs} envs and the places of {count} factories in {len(make.factories)} bytes"
    for begin, finish in (offset_of(make.factories, row) or (0, 0) for row in range(count)):
        if not begin <= finish <= end:
            return f"a factory that is not in the {end} bytes of the pickles"
    return ""


@contextlib.contextmanager
def pickle_of(descriptor: int, row: int) -> Iterator[tuple[memoryview, bool]]:
    """The pickle of this row's factory in such memory, mapped within the context, and whether it has no other."""
    # It is mapped and not read: the pickle of much data is no memory of the process.
    with contextlib.closing(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)) as memory:
        place = offset_of(memory, row)
        begin, end = place or (0, len(memory))
        with memoryview(memory) as whole, whole[begin:end] as pickled:
            yield pickled, place is not None
