"""Learn a long way from its end: episodes begin where the agent sometimes succeeds, and ever earlier.

    python client/examples/curriculum.py    # needs Pillow

One successful episode over the frozen lake is the demonstration. The program keeps a snapshot of each of its steps.
Q-learning begins at the last one, and a step earlier each time that half of the episodes succeed. Each episode has a
seed of its own, so the ice is different. With as many steps, the same learner that begins at the start learns nothing.
"""

import argparse
from collections import deque
from contextlib import closing

import numpy as np
from PIL import Image

import envhub

NUM_ENVS, LEARNING_RATE, EXPLORES, DISCOUNT = 8, 0.2, 0.1, 0.95
ICE = {"success_rate": 0.9}  # of moves; the others slip to a side
RIGHT, DOWN = 2, 1


def demonstrate(envs, seed):
    """A snapshot of each step of an episode that ends at the goal; it goes along the upper and the right side."""
    squares, _ = envs.reset(seed=seed)
    snapshots = []
    while True:
        snapshots.append(envs.snapshot([0]))
        squares, rewards, terminations, truncations, _ = envs.step(np.where(squares % 8 < 7, RIGHT, DOWN))
        if rewards[0]:
            return snapshots
        if terminations[0] or truncations[0]:
            (squares, _), snapshots = envs.reset(), []


def learn(envs, rng, snapshots, steps):
    """The values of actions; episodes begin at the last snapshot, and at earlier ones as they succeed."""
    values, recent = np.zeros((64, 4)), deque(maxlen=16)
    stage, over, seed = len(snapshots) - 1, np.ones(NUM_ENVS, bool), 0
    for _ in range(0, steps, NUM_ENVS):
        if over.any():
            rows = np.flatnonzero(over)
            seed += len(rows)
            squares, _ = envs.restore(snapshots[stage], rows, source=0, reseed=seed)
        best = values[squares] + 1e-9 * rng.random((NUM_ENVS, 4))  # of equal ones any
        actions = np.where(rng.random(NUM_ENVS) < EXPLORES, rng.integers(4, size=NUM_ENVS), best.argmax(axis=1))
        before = squares
        squares, rewards, terminations, truncations, _ = envs.step(actions)
        over = terminations | truncations
        for row in range(NUM_ENVS):
            target = rewards[row] + DISCOUNT * ~terminations[row] * values[squares[row]].max()
            values[before[row], actions[row]] += LEARNING_RATE * (target - values[before[row], actions[row]])
            if over[row]:
                recent.append(rewards[row])
        if len(recent) == 16 and np.mean(recent) >= 0.5 and stage:
            stage -= 1
            recent.clear()
    return values


def evaluate(envs, values, seed, episodes):
    """The share of episodes from the start that reach the goal."""
    (squares, _), ended, won = envs.reset(seed=seed), 0, 0.0
    while ended < episodes:
        squares, rewards, terminations, truncations, _ = envs.step(values[squares].argmax(axis=1))
        over = terminations | truncations
        ended, won = ended + int(over.sum()), won + rewards.sum()
    return won / ended


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--picture", default="curriculum.png")
    options = parser.parse_args()
    promises = []
    with closing(envhub.make_vec("FrozenLake8x8-v1", NUM_ENVS, env_kwargs=ICE, snapshots=True)) as envs:
        snapshots = demonstrate(envs, options.seed)
        for name, begins in (("from the start", snapshots[:1]), ("curriculum", snapshots)):
            values = learn(envs, np.random.default_rng(options.seed), begins, options.steps)
            promises.append(values.max(axis=1).reshape(8, 8))
            print(f"{name}: {evaluate(envs, values, options.seed, 100):.0%} of episodes reach the goal", flush=True)
    # Both lakes, the brighter the more a square promises.
    pixels = np.concatenate(promises, axis=1).repeat(32, axis=0).repeat(32, axis=1)
    Image.fromarray((255 * pixels).astype(np.uint8)).save(options.picture)


if __name__ == "__main__":
    main()
