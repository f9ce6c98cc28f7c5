"""Partial batches, as tests receive them."""

from __future__ import annotations

import envhub


def outstanding(envs: envhub.HubVectorEnv) -> int:
    """The number of envs whose results ``recv`` has not returned."""
    envs._session.check_free("recv", among_others=True)  # which notes what it has
    return envs._session.lane.outstanding


def received(envs: envhub.HubVectorEnv) -> dict[int, float]:
    """The rewards of all envs that are under way, by env; each env comes once."""
    rewards: dict[int, float] = {}
    while outstanding(envs):
        _, part, *_, env_ids = envs.recv(1, timeout=20)
        assert not rewards.keys() & set(env_ids.tolist())
        rewards.update(zip(env_ids.tolist(), part.tolist(), strict=True))
    return rewards
