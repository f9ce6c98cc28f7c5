"""The pickled factories of a session's envs, in memory without a name: one copy, from which each worker loads its own.

The memory begins with words: how many factories have a place of their own, and for each of them, or for the pickled
list of all, where its pickle begins and ends. The hub never unpickles.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
from dataclasses import replace
from hashlib import sha256
from typing import Any

from envhub.protocol.messages import Make
from envhub.sealing import new_memory

_COUNT, _PLACE = struct.Struct("<Q"), struct.Struct("<QQ")


def held(make: Make) -> tuple[Make, int]:
    """What asks for the session without its factories, of which only a digest is left, and their memory.

    Returns:
        The message, and a descriptor that the caller owns; -1 where the envs are made by their name.

    Raises:
        OSError: there is no memory or descriptor left.
    """
    if not make.factories:
        return make, -1
    begins, ends = make.factory_places[::2], make.factory_places[1::2]
    head = _COUNT.size + _PLACE.size * max(1, len(begins))
    places = list(zip(begins, ends)) or [(0, len(make.factories))]
    words = b"".join([_COUNT.pack(len(begins)), *(_PLACE.pack(head + begin, head + end) for begin, end in places)])
    descriptor = new_memory("envhub-factories", head + len(make.factories))
    try:
        _write(descriptor, words, 0)
        _write(descriptor, make.factories, head)
    except BaseException:
        os.close(descriptor)
        raise
    return replace(make, factories=sha256(make.factories).digest(), factory_places=[]), descriptor


def why_misplaced(make: Make) -> str:
    """Why the places of the factories are none; empty where they are right, or there are none."""
    begins, ends = make.factory_places[::2], make.factory_places[1::2]
    if not begins and not ends:
        return ""
    if not len(begins) == len(ends) == make.num_envs:
        return f"{make.num_envs} envs and {len(make.factory_places)} numbers in factory_places"
    if not all(begin <= end <= len(make.factories) for begin, end in zip(begins, ends)):
        return f"a factory that is not in the {len(make.factories)} bytes of factories"
    return ""


def _write(descriptor: int, found: bytes, offset: int) -> None:
    view = memoryview(found)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


class PickledFactories:
    """The factories in such memory, by row, in a worker: each is loaded once it is used."""

    def __init__(self, descriptor: int) -> None:
        """Of this memory, whose descriptor stays the caller's."""
        self._descriptor = descriptor
        self._loaded: dict[int, Any] = {}

    def __getitem__(self, row: int) -> Any:
        """The factory of this row.

        Raises:
            Exception: what unpickling raises.
        """
        if row not in self._loaded:
            self._load(row)
        return self._loaded[row]

    def _load(self, row: int) -> None:
        # Mapped and not read: the pickle of much data is no memory of this process.
        with contextlib.closing(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)) as memory:
            (count,) = _COUNT.unpack_from(memory)
            begin, end = _PLACE.unpack_from(memory, _COUNT.size + _PLACE.size * (row if count else 0))
            with memoryview(memory) as whole, whole[begin:end] as pickled:
                found = pickle.loads(pickled)  # noqa: S301  only ever in workers, never in the hub
        self._loaded.update({row: found} if count else enumerate(found))
