"""Memory that a hub keeps because clients do not read its replies.

An unused arena stays mapped while a client has not read replies with views of it. Its bytes count as used until it is
unmapped. The hub ends the connections that such replies may have been sent on after ``UNREAD_S``; libzmq then drops the
replies.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envhub.protocol.prelude import FRAMES_MAX
from envhub.transport.sockets import ZERO_COPY_BYTES
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.memory.step_io import Blob, row_frames

UNREAD_S = 2.0  # for a client to read the replies of a session that has ended
CHECK_S = 0.25


@dataclass
class _Left:
    memory: weakref.ref[Any]
    nbytes: int
    budget: ArenaBudget
    connections: set[int]
    until_s: float


class UnreadMemory:
    """The arenas of all sessions of a hub that are no longer used, and the results of calls."""

    def __init__(self, joined_bytes_max: int) -> None:
        """Join results of at most ``joined_bytes_max`` bytes in one frame."""
        self._joined_bytes_max = joined_bytes_max
        self._left: list[_Left] = []
        self._results: list[tuple[weakref.ref[np.ndarray], int, ArenaBudget]] = []
        self.next_s = math.inf  # when to call ``check`` next

    def add(
        self, memory: weakref.ref[Any], nbytes: int, budget: ArenaBudget, connections: set[int], now_s: float
    ) -> None:
        """Note an arena of ``nbytes`` of this budget; the caller keeps no reference, but updates ``connections``."""
        self._left.append(_Left(memory, nbytes, budget, connections, now_s + UNREAD_S))
        self.release()
        self.next_s = now_s + CHECK_S if self._left else math.inf

    def results(self, blobs: Sequence[Blob], apart: bool, budget: ArenaBudget) -> tuple[list[np.ndarray], str]:
        """The frames of a reply to a call, which count in this budget for as long as they exist, or why they may not.

        The protocol keeps them until the session's next request, and libzmq until its client has read them. Where the
        client takes results ``apart`` and libzmq does not copy them, each is a frame: joining them would hold the loop.
        """
        self.release()
        nbytes = sum(len(blob) for _, blob in blobs)
        text = f"the results of a call have {nbytes} bytes"
        if nbytes > budget.left:
            return [], f"{text}; of arena_bytes_max {max(0, budget.left)} are left"
        if apart and 1 < len(blobs) < FRAMES_MAX and nbytes >= len(blobs) * ZERO_COPY_BYTES:
            frames = [blob for _, blob in blobs]
        elif nbytes > self._joined_bytes_max:
            return [], f"{text}; one frame has at most {self._joined_bytes_max}: call fewer envs at a time"
        else:
            frames = row_frames(blobs)
        arrays = [np.frombuffer(frame, np.uint8) for frame in frames]
        for array in arrays:
            budget.use(array.nbytes)
            self._results.append((weakref.ref(array), array.nbytes, budget))
        return arrays, ""

    def release(self) -> None:
        """Give back the bytes of what is unmapped and of results that are gone."""
        results, self._results = self._results, []
        for result in results:
            if result[0]() is None:
                result[2].use(-result[1])
            else:
                self._results.append(result)
        for left in [each for each in self._left if each.memory() is None]:
            left.budget.use(-left.nbytes)
            self._left.remove(left)

    def connection_ended(self, connection: int) -> None:
        """Forget a connection: its number may become another's."""
        for left in self._left:
            left.connections.discard(connection)

    def check(self, now_s: float) -> list[int]:
        """The connections to end now, whose clients have not read for too long."""
        if any(each.until_s <= now_s for each in self._left):
            gc.collect()  # else a cycle of objects could be taken for an unread reply
        self.release()
        late = [each for each in self._left if each.until_s <= now_s]
        for each in late:
            each.until_s = math.inf
        self.next_s = now_s + CHECK_S if self._left else math.inf
        return sorted({connection for each in late for connection in each.connections})


class UnreadObservations:
    """The copies of observations that clients have asked for, without a session of theirs, and have not read."""

    def __init__(self, bytes_max: int) -> None:
        """Bound the bytes per client."""
        self._bytes_max = bytes_max
        self._sent: dict[object, list[weakref.ref[np.ndarray]]] = {}

    def refusal(self, client: object, nbytes: int) -> str:
        """The reason why a copy of this size may not be sent to the client; empty if it may."""
        sent = ((each, [ref for ref in refs if ref() is not None]) for each, refs in self._sent.items())
        self._sent = {each: refs for each, refs in sent if refs}
        unread = sum(array.nbytes for ref in self._sent.get(client, ()) if (array := ref()) is not None)
        if unread and unread + nbytes > self._bytes_max:
            return (
                f"observations of {nbytes} bytes, next to {unread} that were not read; at most {self._bytes_max} wait"
            )
        return ""

    def add(self, client: object, arrays: Sequence[np.ndarray]) -> None:
        """Note what the client is sent."""
        self._sent.setdefault(client, []).extend(map(weakref.ref, arrays))
