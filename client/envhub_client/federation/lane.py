"""The lane of a session over several hubs: their batches, as one."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np

from envhub.errors import HubLost, HubTimeout
from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub.values.leaf import Leaf
from envhub_client.batch import Batch, joined
from envhub_client.deadline import Deadline
from envhub_client.federation.joint_request import JointRequest
from envhub_client.federation.part import HubPart
from envhub_client.federation.slices import out_of_band_of, reset_of

PARK_S = 0.25  # at a time in a wait for several hubs: connections are kept up meanwhile

Buffers = list[np.ndarray]
Result = TypeVar("Result")
_RESULTS = itemgetter(slice(1, 4))  # rewards, terminations and truncations of a batch


class FederatedLane:
    """Steps rows that are on several hubs; as ``Lane``.

    With ``copy`` every observation array is the caller's own. Without, two sets of buffers alternate.
    """

    def __init__(self, parts: Sequence[HubPart], leaves: Sequence[Leaf], loose: bool, copy: bool) -> None:
        """Step the rows of these parts; with ``loose`` observations also have leaves of no fixed size."""
        self.parts = parts
        self.num_envs, self.leaves = parts[-1].rows.stop, leaves
        self._loose = loose
        self._buffers = None if copy else [self._new_arrays() for _ in range(2)]
        self._turn = 0
        self._request: JointRequest[Batch] = JointRequest()
        self._resets = False  # whether the request is a reset
        self._left_out: list[HubPart] = []  # by the mask of the reset under way
        self._into: Buffers = []  # for the observations that are waited for
        self._sent = np.zeros(self.num_envs, bool)

    def _new_arrays(self) -> Buffers:
        return [np.empty((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    @property
    def name(self) -> str:
        """The lanes of the hubs, such as ``"wire"``, or ``"shared+wire"`` where they differ."""
        return "+".join(sorted({part.lane.name for part in self.parts}))

    def settle(self) -> bool:
        """Wait for the end of what was given up; returns whether some envs are outstanding."""
        self._request.settle()
        return bool(self._sent.any())

    def give_up(self) -> None:
        """Give up what was begun; its results are dropped."""
        self._request.give_up()

    def lose(self, loss: HubLost) -> None:
        """Raise the loss of a hub."""
        raise loss

    # --- the whole batch ------------------------------------------------------------------------------------------

    def begin_reset(self, reset: Reset) -> None:
        """Begin a reset on the hubs whose rows it has."""
        resets = [reset_of(reset, part.rows) for part in self.parts]
        wanted = {part: each for part, each in zip(self.parts, resets, strict=True) if each is not None}
        self._turn, self._resets = 1 - self._turn, True
        self._left_out = [part for part in self.parts if part not in wanted]
        self._request.begin([*wanted], lambda part: part.lane.begin_reset(wanted[part]), self._await)

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        """Begin a step on all hubs."""
        self._turn, self._resets, self._left_out = 1 - self._turn, False, []
        packed: dict[HubPart, bytes] = {}
        if out_of_band:
            of_each = out_of_band_of(out_of_band, [part.rows for part in self.parts])
            packed = dict(zip(self.parts, of_each, strict=True))

        def send(part: HubPart) -> None:
            part.lane.begin_step(codes, [*map(part.take, arrays)], packed.get(part, b""))

        self._request.begin(self.parts, send, self._await)

    def _await(self, part: HubPart, timeout: float | None) -> Batch:
        return part.numbered(part.lane.wait(timeout, [*map(part.take, self._into)]))

    def wait(self, timeout: float | None) -> Batch:
        """The results of what was begun, of all hubs; errors as for ``JointRequest.results``."""
        observations = self._into = self._new_arrays() if self._buffers is None else self._buffers[self._turn]
        batches = self._request.results(timeout)
        rows = [row for batch in batches for row in batch.rows]
        groups = [group for batch in batches for group in batch.groups]
        if self._resets:
            rows = sorted([*rows, *self._last_ones()])
            return Batch(observations, None, None, None, rows, groups)
        rewards, terminations, truncations = zip(*map(_RESULTS, batches), strict=True)
        results = np.concatenate(rewards), np.concatenate(terminations), np.concatenate(truncations)
        return Batch(observations, *results, rows, groups)

    def _last_ones(self) -> list[tuple[int, bytes]]:
        """Last observations of the rows that the reset leaves out, and the rows that have some of no fixed size."""
        unchanged = codec.encode_pair(b"", b"")
        rows: list[tuple[int, bytes]] = []
        for part in self._left_out:
            for array, last in zip(self._into, part.observe()[1], strict=True):
                part.take(array)[...] = last
            rows += [(row, unchanged) for row in part.rows] if self._loose else []
        return rows

    # --- parts of the batch ---------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Number of envs were begun by ``begin_rows`` and not taken."""
        return int(self._sent.sum())

    @property
    def are_outstanding(self) -> np.ndarray:
        """Mask of the envs that are outstanding."""
        return self._sent

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs only; errors as for ``Lane.begin_rows``."""
        if self._sent[env_ids].any():
            raise ValueError(f"envs {env_ids[self._sent[env_ids]].tolist()} are under way; receive them first")
        for part in self.parts:
            places = np.flatnonzero((part.rows.start <= env_ids) & (env_ids < part.rows.stop))
            if places.size:
                rows = env_ids[places]
                self._sent[rows] = True  # before it is known: at an interrupt, they may be
                try:
                    part.lane.begin_rows(rows - part.rows.start, codes, [array[places] for array in arrays])
                except Exception:
                    self._sent[rows] = False
                    raise

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        """The results of all outstanding envs that are done, once these are ``min_envs``; errors as for ``wait``."""
        deadline = None if timeout is None else Deadline(timeout)
        parts = [part for part in self.parts if part.take(self._sent).any()]
        with contextlib.ExitStack() as held:  # nothing else may take in what arrives
            for part in parts:
                held.enter_context(part.connection.in_use)
            done = self._done_rows(parts)
            while sum(done) < min_envs:
                left_s = PARK_S if deadline is None else deadline.left_s()
                _parked(parts, min(left_s, PARK_S))
                done = self._done_rows(parts)
                if sum(done) < min_envs and deadline is not None and not deadline.left_s():
                    raise HubTimeout(f"{sum(done)} of {min_envs} envs were done within {timeout:g} s; receive again")
            batches = [
                self._of_rows(part, lambda part: part.numbered(part.lane.wait_rows(1, 0)))
                for part, count in zip(parts, done, strict=True)
                if count
            ]
        return joined(batches)

    def _done_rows(self, parts: Sequence[HubPart]) -> list[int]:
        for part in parts:
            part.lane.ask_rows()
        return [self._of_rows(part, lambda part: part.lane.done_rows()) for part in parts]

    def _of_rows(self, part: HubPart, get: Callable[[HubPart], Result]) -> Result:
        """Get this of the part; an env of it that raised is not under way any more."""
        try:
            return get(part)
        except HubTimeout:
            raise
        except Exception:
            part.take(self._sent)[...] &= part.lane.are_outstanding
            raise

    def taken(self, env_ids: np.ndarray) -> None:
        """Note that the results of these envs have reached the caller: they are outstanding no more."""
        self._sent[env_ids] = False
        for part in self.parts:
            own = env_ids[(part.rows.start <= env_ids) & (env_ids < part.rows.stop)]
            if own.size:
                part.lane.taken(own - part.rows.start)


def _parked(parts: Sequence[HubPart], seconds: float) -> None:
    """Wait until something may have arrived from one of these hubs, at most so many seconds."""
    poller = select.poll()
    for part in parts:
        for descriptor in part.lane.descriptors():
            poller.register(descriptor, select.POLLIN)
    poller.poll(seconds * 1000)
