"""The programs of the kit, by this repository's client."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import Any

import numpy as np

import envhub
from envhub.errors import HubTimeout

SEEDS, STEPS, FAULT_STEP, ROUNDS = [7, 8], 8, 3, 4


class Totals:
    """The sums that the program reports at its end."""

    def __init__(self) -> None:
        self.rewards, self.ends, self.numbers = np.zeros(2), np.zeros(2, int), np.zeros(2, int)

    def add(self, results: Any, env_ids: Any = slice(None)) -> None:
        """Add the results of a step of these envs."""
        _, rewards, terminations, truncations, infos = results
        self.rewards[env_ids] += rewards
        self.ends[env_ids] += terminations | truncations
        if "n" in infos:
            self.numbers[env_ids] += infos["n"]

    def check(self, envs: Any) -> None:
        """Call ``check``."""
        envs.call("check", self.rewards.tolist(), self.ends.tolist(), self.numbers.tolist())


def actions(observations: np.ndarray) -> np.ndarray:
    return observations[:, 0].astype(np.int64)


def step_to_the_end(envs: Any, observations: np.ndarray) -> None:
    totals = Totals()
    for _ in range(STEPS):
        results = envs.step(actions(observations))
        observations = results[0]
        totals.add(results)
    totals.check(envs)


def steps(address: str) -> None:
    with closing(envhub.make_vec("Conformance-v0", 2, hub=address)) as envs:
        step_to_the_end(envs, envs.reset(seed=SEEDS)[0])


def give_up(address: str) -> None:
    with closing(envhub.make_vec("Conformance-v0", 2, hub=address)) as envs:
        observations, _ = envs.reset(seed=SEEDS)
        for _ in range(FAULT_STEP - 1):
            observations = envs.step(actions(observations))[0]
        envs.step_async(actions(observations))
        with suppress(HubTimeout):
            envs.step_wait(timeout=1)
        envs.drop_pending()
        step_to_the_end(envs, envs.reset(seed=SEEDS)[0])


def parts(address: str) -> None:
    with closing(envhub.make_vec("Conformance-v0", 2, hub=address)) as envs:
        observations, totals = envs.reset(seed=SEEDS)[0].copy(), Totals()
        for _ in range(ROUNDS):
            for env in (1, 0):
                envs.send(actions(observations[[env]]), [env])
            missing = 2
            while missing:
                *results, env_ids = envs.recv(min_envs=1)
                observations[env_ids] = results[0]
                totals.add(results, env_ids)
                missing -= len(env_ids)
        totals.check(envs)


def attach(address: str, token: str) -> None:
    with envhub.connect(address) as client:
        with client.attach(token, observe=True) as observer:
            observations = observer.observe().observations
        with closing(client.attach(token)) as envs:
            step_to_the_end(envs, observations)


if __name__ == "__main__":
    {"steps": steps, "give_up": give_up, "parts": parts, "attach": attach}[sys.argv[1]](*sys.argv[2:])
