"""Replays: the trace of what a worker's envs were asked, and the file from which a failure is run again.

The trace is in memory that the hub also maps, since it must outlive the worker. The hub makes a sealed memfd for each
process of a slot, and the process entries every batch before it calls an env. Of a process that has ended the hub reads
it; of an env that raised its process sends it, since it goes on. The memory has, one after the other::

    words    int64: the number of batches; and per group of rows the batch with which its trace begins, and the bytes
             of its entries
    rings    of bytes, batch ``t`` at ``t % batches``: ``[rows][8]`` the ``needs_reset`` of each row before the step, or
             NOTHING; then for each leaf of the actions ``[rows][8 per element]``
    entries  per group, what is no step: each its length (uint32) and an encoded list of the batch that it comes before,
             its kind, and its fields

The kinds are RESET ``([row, seed] of each, options, generator)``, ACTION ``(row, leaves without a fixed size)``, CODES
``(of each leaf of the actions)``, CALL ``(rows, name, [arguments])``, SET ``(rows, name, values)`` and RESTORED
``(snapshot)``, which no replay runs. Each value is encoded, or None where it is no plain data.

A worker runs foreign code, which may write anything here: the hub checks all numbers, and decodes nothing.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from envhub.arena.memory import CALL_INCREMENT
from envhub.files import read_regular_file
from envhub.protocol.messages import as_map
from envhub.protocol.messages import build as message_of
from envhub.transport.descriptors import new_memory
from envhub.values import codec
from envhub.values.leaf import OBJECT, Leaf
from envhub_server.ipc import control

NOTHING = -1  # what a row was asked in a batch of others
RESET, ACTION, CALL, SET, CODES, RESTORED = "reset", "action", "call", "set", "codes", "restored"
TAKEN_BYTES_MAX = 1 << 25

LENGTH = struct.Struct("<I")


class TraceLayout(NamedTuple):
    """The offsets of everything: ``env_bytes`` per row, half of them for the steps, and half for the entries."""

    rows: int
    groups: int
    items: Sequence[int]  # elements of each action leaf
    env_bytes: int

    @property
    def widths(self) -> list[int]:
        return [8, *(8 * items for items in self.items)]

    @property
    def batches(self) -> int:
        return max(2, self.env_bytes // 2 // sum(self.widths))

    @property
    def entries_bytes(self) -> int:
        return self.env_bytes // 2 * (self.rows // self.groups)

    def offsets(self) -> list[int]:
        sizes = [8 * (1 + 2 * self.groups), *(self.batches * self.rows * width for width in self.widths)]
        return [*accumulate(-(-size // 64) * 64 for size in [*sizes, *[self.entries_bytes] * self.groups])]


def layout_of(rows: int, is_batch: bool, leaves: Sequence[Leaf], env_bytes: int) -> TraceLayout:
    items = tuple(0 if leaf == OBJECT else leaf.items for leaf in leaves)
    return TraceLayout(rows, 1 if is_batch else rows, items, env_bytes)


def allocate(layout: TraceLayout) -> int:
    """A sealed memfd; the caller owns the descriptor. Its pages are taken as they are written."""
    return new_memory("envhub-trace", layout.offsets()[-1])


class Trace:
    """The mapped memory; the descriptor remains the caller's."""

    def __init__(self, layout: TraceLayout, descriptor: int) -> None:
        self.layout, starts = layout, layout.offsets()
        self._memory = mmap.mmap(descriptor, starts[-1])
        if hasattr(mmap, "MADV_DONTFORK"):  # as of the arena
            self._memory.madvise(mmap.MADV_DONTFORK)  # a child of an env must not write to it
            self._memory.madvise(mmap.MADV_DONTDUMP)  # a core file would allocate what is not written
        self.words = np.frombuffer(self._memory, np.int64, 1 + 2 * layout.groups).data
        self.rings = [
            np.ndarray((layout.batches, layout.rows, width), np.uint8, self._memory, start)
            for width, start in zip(layout.widths, starts)
        ]
        first = len(layout.widths)
        whole = memoryview(self._memory)
        self.entries = [whole[start : start + layout.entries_bytes] for start in starts[first : first + layout.groups]]

    def taken(self, group: int) -> bytes:
        """A copy of what is kept of a group, encoded, for ``worker.replayer``; ``cut`` says why that is not enough."""
        layout, size = self.layout, self.layout.rows // self.layout.groups
        begun, (first, length) = self.words[0], self.words[1 + 2 * group : 3 + 2 * group]
        if not (0 <= first <= begun < 1 << 62 and length >= 0):
            raise ValueError("its trace is damaged")
        if begun - first > layout.batches or length > layout.entries_bytes:
            text = f"since its last reset it was asked more than trace_bytes_max={layout.env_bytes} holds"
            return codec.encode({"cut": text})
        if (begun - first) * size * sum(layout.widths) + length > TAKEN_BYTES_MAX:
            raise ValueError(f"its trace has more than {TAKEN_BYTES_MAX} bytes")
        places, rows = np.arange(first, begun) % layout.batches, slice(group * size, (group + 1) * size)
        rings = [ring[places, rows].tobytes() for ring in self.rings]
        return codec.encode({"cut": "", "first": first, "entries": bytes(self.entries[group][:length]), "rings": rings})


def entries_in(blob: bytes) -> Iterator[List[Any]]:
    at = 0
    while at < len(blob):
        (length,) = LENGTH.unpack_from(blob, at)
        record = codec.decode(blob[at + LENGTH.size : at + LENGTH.size + length])
        at += LENGTH.size + length
        if record[1] == RESTORED:
            raise ValueError(
                f"the env went on from snapshot {record[2]!r}, and the file lacks what it was asked before"
            )
        if None in record:
            named = {ACTION: "an action", RESET: "the options of a reset"}
            what = named.get(record[1]) or f"the arguments of {record[3]}"
            raise ValueError(f"the file lacks what is no plain data: {what}")
        yield record


SUFFIX = ".replay"
FILE_BYTES_MAX = 1 << 26

# What is sent to workers only: pickles, and what may be secret.
_LEFT_OUT: Dict[str, Any] = {"factories": b"", "registrations": b"", "environ": {}, "authkey": b"", "runner": b""}
_LEFT_OUT.update(argv=[], setup=b"", allow_pickle=False)


@dataclass(frozen=True)
class Replay:
    """The requests of an env until it failed, and how it was made; a failure is described as in ``EnvFailure``."""

    build: Dict[str, Any]  # what its worker was told, and so in ``mapped``; without what is no plain data
    mapped: Dict[str, Any]
    lacks: List[str]  # what is missing, because it is no plain data, in words; the env cannot be run again without it
    python: str  # of the interpreter of its worker, and so are the next two
    variables: Dict[str, str]
    ld_library_path: List[str]
    cause: str
    message: str
    exception: str
    ended: str  # the signal that ended its process, or its exit status; empty where it did not end
    limits_s: Dict[str, float]  # ``init``, ``reset``, ``step``: how long a call may take
    memory_max: int  # how many bytes of memory its worker was allowed; 0 for no limit
    spec: bytes  # of the env, encoded, for an id that is registered by its program only; empty where it has none
    trace: bytes  # what it was asked until the call that failed, as ``Trace.taken`` gives it

    @property
    def cut(self) -> str:
        return str(codec.decode(self.trace)["cut"])

    def orders(self) -> Tuple[control.Build, control.MapArena]:
        build = message_of(control.Build, self.build)
        if foreign := [name for name, nothing in _LEFT_OUT.items() if getattr(build, name) != nothing]:
            raise ValueError(f"it holds what no hub writes: {', '.join(foreign)}")
        if not build.rows or (len(build.rows) > 1 and not build.batch_workers):
            raise ValueError("its rows are not those of one env, or vector env")
        return build, message_of(control.MapArena, self.mapped)


def name_of_raised(prefix: str, row: int, number: int) -> str:
    """The name has the number of the env's step or reset, and of the calls until then if there were any."""
    calls, steps = divmod(number, CALL_INCREMENT)
    return f"{prefix}-env{row}-{steps}{f'-{calls}' if calls else ''}"


def plain(build: control.Build, row: int, source: bytes) -> Tuple[control.Build, List[str]]:
    """The message for this row, or vector env, without what is no plain data, and what of that is needed, in words."""
    lacks = ["the class that runs the env (worker=)"] if build.runner else []
    lacks += ["what sets up its worker, which has no name (worker_setup=)"] if build.setup else []
    entry, kwargs = build.entry, dict(zip(build.rows, build.kwargs_each)).get(row, build.kwargs)
    if build.factories:
        entry, kwargs = codec.decode(source)
        if not entry:
            text = kwargs.decode("utf-8", "replace")
            lacks.append(f"the factory of the env, which is in no module that can be imported ({text})")
    if not (lacks or is_plain(kwargs)):
        lacks.append("the arguments of the env")
    wrapped = zip(build.wrappers, build.wrapper_kwargs)
    lacks += [f"the arguments of the wrapper {wrapper}" for wrapper, blob in wrapped if not is_plain(blob)]
    rows = build.rows if build.batch_workers else [row]
    kept = replace(
        build, rows=rows, kwargs=kwargs, kwargs_each=[], entry=entry, cpu=None, first_only=False, **_LEFT_OUT
    )
    return (replace(kept, kwargs=b"", wrapper_kwargs=[]) if lacks else kept), lacks


def is_plain(blob: bytes) -> bool:
    if type(blob) is bytes and codec.PICKLE not in blob:
        return True  # no pickle without the byte that is its type
    try:
        codec.decode(blob) if blob else None
    except codec.DecodeError:
        return False
    return True


def pack(replay: Replay) -> bytes:
    blob = codec.encode(as_map(replay))
    if len(blob) > FILE_BYTES_MAX:
        raise ValueError(f"{len(blob)} bytes; a file holds at most {FILE_BYTES_MAX}")
    return blob


def unpack(blob: bytes) -> Replay:
    try:
        replay: Replay = message_of(Replay, codec.decode(blob))
        replay.orders(), replay.cut
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    return replay


def read_replay(path: str) -> Replay:
    return unpack(read_regular_file(path, FILE_BYTES_MAX))
