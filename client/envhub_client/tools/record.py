"""Command ``envhub record``: play episodes of an env, by a policy or at random, and record them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from envhub.recording.options import Recorded, RecordOptions
from envhub_client.make import make_vec
from envhub_client.tools.named_function import named_function


def run(env: str, options: RecordOptions, num_envs: int, hub: str | None, policy: str, seed: int) -> Recorded:
    """Play until ``options.episodes_max`` episodes have ended, and return what is recorded.

    Args:
        env: an id or a name.
        options: what is recorded, and where to.
        num_envs: that are stepped together.
        hub: the hub's address or name; None for a private hub.
        policy: ``module:function``, which takes a batch of observations and returns one of actions; empty for actions
            that are drawn at random.
        seed: of the envs, and of random actions.

    Raises:
        RequestRefused: there is no such policy.
        Exception: what ``make_vec``, the envs and the policy raise.
    """
    choose = named_function(policy, "policy") if policy else None
    rendered: dict[str, Any] = {"render_mode": "rgb_array"} if options.film else {}
    envs = make_vec(env, num_envs, hub=hub, record=options, autoreset_mode=AutoresetMode.NEXT_STEP, **rendered)
    chosen = [*options.chosen(num_envs)]
    with closing(envs):
        envs.action_space.seed(seed)
        observations, _ = envs.reset(seed=seed)
        ended = 0
        while ended < options.episodes_max and not envs.recorded.ended:
            actions = envs.action_space.sample() if choose is None else choose(observations)
            observations, _, terminations, truncations, _ = envs.step(actions)
            ended += int(np.count_nonzero((terminations | truncations)[chosen]))
    return envs.recorded
