"""Batch of results that a lane returns of a reset or a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from envhub.values import codec
from envhub.values.info_columns import Template


class InfoGroup(NamedTuple):
    """Infos of the same form: of these rows, a record each."""

    template: Template
    rows: np.ndarray
    records: np.ndarray


class Batch(NamedTuple):
    """The results of a reset or of a step, of all envs or of some.

    Attributes:
        observations: an array per leaf of fixed size.
        rewards, terminations, truncations: one entry per env; None for a reset.
        rows: row and blob of the envs whose info travels by itself. The blob is the encoded info, or, where
            observations have leaves of no fixed size, those and the info.
        groups: the other infos.
        env_ids: of which envs this is, ascending; None for all of them.
    """

    observations: Sequence[np.ndarray]
    rewards: np.ndarray | None
    terminations: np.ndarray | None
    truncations: np.ndarray | None
    rows: list[tuple[int, bytes]]
    groups: list[InfoGroup]
    env_ids: np.ndarray | None = None


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
