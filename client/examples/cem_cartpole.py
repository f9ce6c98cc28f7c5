"""Learn CartPole-v1 by the cross-entropy method, with 64 envs in a hub and nothing but numpy to learn with.

    python client/examples/cem_cartpole.py                          # a private hub starts and ends with the program
    python client/examples/cem_cartpole.py --hub tcp://simbox:5555  # a hub that `envhub serve` runs somewhere

A policy is four weights: push right where their product with the observation is positive. A generation draws one
policy per env from a normal distribution, plays one episode with each, and fits the distribution to the best of them.
It is solved once the distribution's mean, as the policy of 64 fresh episodes, returns more than 475 on average.

``envhub demo`` runs this very file: the package holds a link to it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

import envhub

NUM_ENVS = 64
ELITES = 16
SOLVED = 475.0  # what Gymnasium registers as CartPole-v1's reward threshold; 500 is the most there is
GENERATIONS_MAX = 50  # out of 250 seeds tried, none needed more than 6


def learn(hub: str | None, seed: int, console: Console, **options: Any) -> float:
    """Learn from a seed, with ``options`` of ``envhub.make_vec``, until it is solved; returns the last mean return."""
    envs = envhub.make_vec("CartPole-v1", num_envs=NUM_ENVS, hub=hub, **options)
    rng = np.random.default_rng(seed)
    mean, deviation = np.zeros(4), np.ones(4)
    env_steps, start_s, mean_return, generation = 0, time.monotonic(), 0.0, 0

    bar = (
        SpinnerColumn(),
        TextColumn("generation {task.fields[generation]}"),
        BarColumn(),
        TextColumn("mean return {task.completed:.1f}"),
        TextColumn("{task.fields[rate]:,.0f} env-steps/s"),
    )
    with contextlib.closing(envs), Progress(*bar, console=console) as progress:
        task = progress.add_task("", total=SOLVED, generation=0, rate=0.0)
        while mean_return <= SOLVED and generation < GENERATIONS_MAX:
            generation += 1
            candidates = rng.normal(mean, deviation, size=(NUM_ENVS, 4))
            returns, steps = play(envs, candidates, rng)
            env_steps += steps

            elites = candidates[np.argsort(returns)[-ELITES:]]
            mean, deviation = elites.mean(axis=0), elites.std(axis=0)

            returns, steps = play(envs, np.tile(mean, (NUM_ENVS, 1)), rng)
            env_steps += steps
            whole = returns[np.isfinite(returns)]
            mean_return = float(whole.mean()) if whole.size else 0.0
            rate = env_steps / (time.monotonic() - start_s)
            progress.update(task, completed=mean_return, generation=generation, rate=rate)

    console.print(
        f"mean return {mean_return:.1f} of {NUM_ENVS} episodes after {generation} generations, "
        f"{env_steps:,} env-steps, {time.monotonic() - start_s:.1f} s",
        highlight=False,
    )
    return mean_return


def play(envs: Any, policies: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Play an episode in env ``i`` by ``policies[i]``; returns their returns, -inf where it died, and the env-steps."""
    observations, _ = envs.reset(seed=int(rng.integers(1 << 31)))
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, dtype=bool)
    env_steps = 0
    while playing.any():
        actions = ((observations * policies).sum(axis=1) > 0).astype(np.int64)
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        env_steps += envs.num_envs
        # Under NEXT_STEP autoreset an env whose episode has ended begins another while the others still play their
        # first. Only the first one counts.
        returns += rewards * playing
        if "env_failure" in infos:
            returns[playing & infos["_env_failure"]] = -np.inf
        playing &= ~(terminations | truncations)
    return returns, env_steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 by the cross-entropy method.")
    parser.add_argument("--hub", metavar="ADDRESS", help="a hub's address; by default a private hub")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    mean_return = learn(arguments.hub, arguments.seed, Console())
    sys.exit(0 if mean_return > SOLVED else 1)


if __name__ == "__main__":
    main()
