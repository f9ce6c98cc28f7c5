"""Interface of every lane, and the batches of results that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub.values.info_columns import Template
from envhub.values.leaf import Leaf


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


class Lane(Protocol):
    """Lane by which envs are stepped. One reset or step of all envs is under way at a time, or steps of some.

    What was begun is waited for until it is returned: a wait that timed out or was interrupted is repeated, and one
    that has returned returns the same again. Every method but ``taken`` and ``give_up`` may raise any ``EnvHubError``
    of the session, also those of ``SESSION_ENDS``.
    """

    num_envs: int
    leaves: Sequence[Leaf]  # of fixed size, of one env's observation

    @property
    def name(self) -> str:
        """``"shared"`` or ``"wire"``; joined by ``+`` where hubs differ."""

    def settle(self) -> bool:
        """Wait for the end of a step that was begun and given up; returns whether some envs are outstanding."""

    def give_up(self) -> None:
        """Give up what was begun, if anything was: its results are dropped."""

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
        """Begin a step of these envs only, with an array per action leaf; ``confirm_rows`` waits for the hub's reply.

        ``ValueError`` if one is under way, or others are with actions of a dtype of another size. Several hubs are all
        asked before one is waited for: where one refuses, its envs have not moved, and the others have.
        """

    def confirm_rows(self, timeout: float | None) -> None:
        """Wait until the hub has begun what ``begin_rows`` sent, if anything is not confirmed; errors as there, too.

        An interrupt of ``begin_rows`` may have come before anything was sent: then the envs are not outstanding. After
        ``HubTimeout`` it can be waited for again.
        """

    def ask_rows(self) -> None:
        """Have the results of the outstanding envs sent as soon as they are done, without a wait for them."""

    def done_rows(self) -> int:
        """Number of outstanding envs whose results have come, which ``wait_rows`` returns at once, or raises."""

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


def invalid_rows(batch: Batch) -> np.ndarray:
    """Mask of the rows of a step's batch whose results are no transition of their env, as their infos say."""
    assert batch.rewards is not None
    invalid = np.zeros(len(batch.rewards), bool)
    for row, blob in batch.rows:
        place = row if batch.env_ids is None else np.searchsorted(batch.env_ids, row)
        try:
            info = codec.decode_leniently(blob)[0] if blob else {}
            if isinstance(info, list):  # an info that came with observations of no fixed size
                info = codec.decode_leniently(info[1])[0] if info[1] else {}
            invalid[place] = bool(info.get("invalid_transition"))
        except (ValueError, TypeError, LookupError, AttributeError):
            continue  # it breaks the protocol, which is found when the batch is read
    return invalid


def with_earlier(batch: Batch, chosen: np.ndarray, earlier: Sequence[np.ndarray]) -> Batch:
    """The batch of some rows; in the ``chosen`` ones with earlier observations, an array of all rows for each leaf."""
    assert batch.env_ids is not None
    observations = [leaf.copy() for leaf in batch.observations]
    for array, leaf in zip(observations, earlier, strict=True):
        array[chosen] = leaf[batch.env_ids[chosen]]
    return batch._replace(observations=observations)


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
