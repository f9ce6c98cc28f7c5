"""Let the envs step while the policy thinks: two halves of a batch in turn, against the whole batch at once.

    python client/examples/half_batches.py                     # a private hub starts and ends with the program
    python client/examples/half_batches.py --hub ipc://PATH    # a hub that `envhub serve CartPole-v1` runs

A policy that takes as long as its envs do leaves each idle for half of the time. With ``send`` and ``recv`` one half of
the envs steps while the policy works on the other half's observations. The policy here stands for one on an
accelerator: it keeps no CPU busy.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import numpy as np

import envhub

NUM_ENVS = 64


def policy(observations: np.ndarray, think_s: float) -> np.ndarray:
    """Push to where the pole falls, after some thought."""
    time.sleep(think_s)
    return (observations[:, 2] > 0).astype(np.int64)


def whole_batches(envs: envhub.HubVectorEnv, think_s: float, seconds: float) -> float:
    """Env-steps/s where envs and policy take turns."""
    observations, _ = envs.reset(seed=1)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        observations, *_ = envs.step(policy(observations, think_s))
        count += NUM_ENVS
    return count / (time.perf_counter() - begun)


def half_batches(envs: envhub.HubVectorEnv, think_s: float, seconds: float) -> float:
    """Env-steps/s where one half of the envs steps while the policy works on the other, which takes half as long."""
    observations, _ = envs.reset(seed=1)
    for half in np.split(np.arange(NUM_ENVS), 2):  # every worker has envs in both
        envs.send(policy(observations[half], think_s / 2), half)
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        seen, *_, done = envs.recv(min_envs=NUM_ENVS // 2)
        envs.send(policy(seen, think_s * len(done) / NUM_ENVS), done)
        count += len(done)
    rate = count / (time.perf_counter() - begun)
    envs.recv()
    return rate


def main() -> None:
    """Compare the two for a policy that takes as long as a step of all envs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hub", help="a hub's address; without it a private hub is started")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each way is timed")
    arguments = parser.parse_args()
    seconds = arguments.seconds
    with contextlib.closing(envhub.make_vec("CartPole-v1", NUM_ENVS, hub=arguments.hub)) as envs:
        envs.reset(seed=1)
        think_s = NUM_ENVS / whole_batches(envs, 0.0, seconds)
        print(f"{NUM_ENVS} envs, {envs.lane} lane; envs and policy take {think_s * 1e3:.2f} ms each")
        whole, halves = (step(envs, think_s, seconds) for step in (whole_batches, half_batches))
        print(f"whole batches {whole:,.0f} env-steps/s, half batches {halves:,.0f} env-steps/s: {halves / whole:.2f}x")


if __name__ == "__main__":
    main()
