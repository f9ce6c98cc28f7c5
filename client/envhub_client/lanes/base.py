"""Interface of every lane, and the batches of results that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, Observed, Reset, SetAttr
from envhub.protocol.prelude import Frame
from envhub.values.info_columns import Template
from envhub.values.leaf import Leaf

Decode = Callable[[Frame], Any]  # of a result of a call, which may be a view that holds only until it returns


class InfoGroup(NamedTuple):
    """Infos of the same form: of these rows, a record each."""

    template: Template
    rows: np.ndarray
    records: np.ndarray


class Batch(NamedTuple):
    """The results of a reset or of a step, of all envs or of some."""

    observations: Sequence[np.ndarray]  # one per leaf of fixed size
    rewards: np.ndarray | None  # None for a reset, as the flags are
    terminations: np.ndarray | None
    truncations: np.ndarray | None
    # Of envs whose info travels by itself: it, encoded; with the observations of no fixed size, where there are any.
    rows: list[tuple[int, bytes]]
    groups: list[InfoGroup]  # the other infos
    env_ids: np.ndarray | None = None  # ascending; None for all envs


new_batch: Callable[[tuple[Any, ...]], Batch] = partial(tuple.__new__, Batch)  # of all fields, without a Python call


class Lane(Protocol):
    """Lane by which envs are stepped. One reset or step of all envs is under way at a time, or steps of some.

    What was begun is waited for until it is returned: a wait that timed out or was interrupted is repeated, and one
    that has returned returns the same again. Every method but ``taken`` may raise any ``EnvHubError``
    of the session, also those of ``SESSION_ENDS``.
    """

    num_envs: int
    leaves: Sequence[Leaf]  # of fixed size, of one env's observation

    @property
    def name(self) -> str:
        """``"shared"`` or ``"wire"``; joined by ``+`` where hubs differ."""

    def settle(self) -> bool:
        """Wait for the end of a step that was begun and given up; returns whether some envs are outstanding."""

    def breach(self, row: int, what: str) -> None:
        """Take the hub of this row for lost, since ``what`` it sent breaks the protocol, or raise that.

        What was waited for is to be waited for again.
        """

    def begin_reset(self, reset: Reset) -> None: ...

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        """Begin a step of all envs, by a code per action leaf and a contiguous array per leaf that has one by its code.

        The arrays are copied: they may change at once. ``out_of_band`` has the packed actions of the other leaves.
        """

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        """The results of what was begun, or ``HubTimeout``, or what an env raised; observations go ``into`` arrays."""

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers that differ once another reset or step has begun, even where an interrupt broke off its beginning.

        Such a one is carried out all the same, and can be waited for.
        """

    @property
    def outstanding(self) -> int:
        """Number of envs that were begun by ``begin_rows`` and not taken."""

    @property
    def are_outstanding(self) -> np.ndarray: ...

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs only, with an array per action leaf; several may be under way.

        ``ValueError`` if an env is under way, or others are with actions of a dtype of another size. What a hub refuses
        is an error in place of the envs' results. An interrupt may come before anything was sent: ``settle`` knows, and
        then the envs are not outstanding.
        """

    def done_rows(self, min_envs: int = 1) -> int:
        """Number of outstanding envs whose results have come, which ``wait_rows`` returns at once.

        Results are asked for, without a wait: those of at least ``min_envs``, as the next ``wait_rows`` may want.
        Errors as there.
        """

    def descriptors(self) -> Sequence[int]:
        """Descriptors of which one becomes readable when ``done_rows`` may return more than it did last.

        Nothing else may use the lane between that call and a wait for these.
        """

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        """The results of all outstanding envs that are done, once these are ``min_envs``; errors as for ``wait``."""

    def taken(self, env_ids: np.ndarray) -> None:
        """Note that the results of these envs, or their error, have reached the caller: they are outstanding no more.

        Until then ``wait_rows`` returns or raises the same. After an interrupt it is called again.
        """

    def last_observations(self) -> list[np.ndarray]:
        """Copies of the envs' observations as they were returned last, an array for each leaf, also after a loss.

        The lane must have been made to keep them.
        """


class HubLane(Lane, Protocol):
    """Lane to one hub, which calls envs, too: one call, reset or step is under way at a time."""

    def begin_call(self, message: Call | SetAttr) -> None:
        """Begin a call of its rows, or of all rows if it names none, or to set an attribute."""

    def wait_call(self, timeout: float | None, decode: Decode) -> dict[int, Any]:
        """The decoded result of each row that was called; errors as for ``wait``. Where attributes are set, any."""


def check_observed(observed: Observed, num_envs: int) -> None:
    """Raise ``ValueError`` unless the reply has this number of envs."""
    counts = observed.num_envs, len(observed.steps), len(observed.given)
    if {*counts} != {num_envs}:
        raise ValueError(f"{counts[0]} envs, steps of {counts[1]} and flags of {counts[2]}")


def observed_arrays(reply: Reply, num_envs: int, leaves: Sequence[Leaf]) -> list[np.ndarray]:
    """The envs' last observations in a reply to OBSERVE, an array for each leaf; ``ValueError`` for other envs."""
    check_observed(reply.message, num_envs)
    shaped = zip(reply.frames, leaves, strict=True)
    return [np.frombuffer(frame, leaf.dtype).reshape(num_envs, *leaf.shape) for frame, leaf in shaped]


def checked_item_sizes(
    sent: np.ndarray, env_ids: np.ndarray, arrays: Sequence[np.ndarray], outstanding_sizes: list[int]
) -> list[int]:
    """The sizes of the actions' items; ``ValueError`` if a hub would refuse these envs, as ``Lane.begin_rows`` says."""
    if sent[env_ids].any():
        raise ValueError(f"envs {env_ids[sent[env_ids]].tolist()} are under way; receive them first")
    item_sizes = [array.dtype.itemsize for array in arrays]
    if sent.any() and item_sizes != outstanding_sizes:
        raise ValueError("other envs are under way with actions of a dtype of another size; receive them first")
    return item_sizes


def joined(parts: Sequence[Batch]) -> Batch:
    """One batch of several, in the order of their envs."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.env_ids for part in parts]))

    def join(arrays: Iterable[Any]) -> np.ndarray:
        joined: np.ndarray = np.concatenate([*arrays])[order]
        return joined

    return Batch(
        [join(leaves) for leaves in zip(*(part.observations for part in parts), strict=True)],
        join(part.rewards for part in parts),
        join(part.terminations for part in parts),
        join(part.truncations for part in parts),
        sorted(row for part in parts for row in part.rows),
        [group for part in parts for group in part.groups],
        join(part.env_ids for part in parts),
    )
