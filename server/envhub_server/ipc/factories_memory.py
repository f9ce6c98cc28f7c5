"""The pickled factories of a session's envs in anonymous memory: one copy, from which each worker loads its own.

The memory begins with words: how many factories have a place of their own, and for each of them, or for the pickled
list of all, where its pickle begins and ends. The hub never unpickles.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import replace
from hashlib import sha256
from typing import Iterator

from envhub.protocol.messages import Make, offsets_in
from envhub.transport.descriptors import new_memory

_COUNT, _OFFSETS = struct.Struct("<Q"), struct.Struct("<QQ")


def held(make: Make) -> tuple[Make, int]:
    """The request without its factories, of which only a digest is left, and the memory that holds them."""
    # The caller owns the descriptor, which is -1 where the envs are made by their name. Raises ``OSError``.
    if not make.factories:
        return make, -1
    offsets = offsets_in(make.factories, make.num_envs)
    head = _COUNT.size + _OFFSETS.size * max(1, len(offsets))
    begins_and_ends = offsets or [(0, len(make.factories))]
    words = b"".join(
        [_COUNT.pack(len(offsets)), *(_OFFSETS.pack(head + begin, head + end) for begin, end in begins_and_ends)]
    )
    descriptor = new_memory("envhub-factories", head + len(make.factories))
    try:
        _write(descriptor, words)
        _write(descriptor, make.factories)
    except BaseException:
        os.close(descriptor)
        raise
    return replace(make, factories=sha256(make.factories).digest()), descriptor


def why_malformed(make: Make) -> str:
    try:
        offsets_in(make.factories, make.num_envs)
    except ValueError as error:
        return str(error)
    return ""


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def pickle_of(descriptor: int, row: int) -> Iterator[tuple[memoryview, bool]]:
    """The pickle of this row's factory in such memory, mapped within the context, and whether it has no other."""
    # It is mapped and not read: the pickle of much data is no memory of the process.
    with contextlib.closing(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)) as memory:
        (count,) = _COUNT.unpack_from(memory)
        begin, end = _OFFSETS.unpack_from(memory, _COUNT.size + _OFFSETS.size * (row if count else 0))
        with memoryview(memory) as whole, whole[begin:end] as pickled:
            yield pickled, bool(count)
