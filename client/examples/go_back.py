"""Go back ten steps before a crash, and look at what led to it.

    python client/examples/go_back.py    # needs Pillow

The simulator ends its process when the cart passes a place. The program keeps a snapshot of each of the last ten steps;
older ones are dropped with their last references. After the crash it goes back to each of these steps, reads the state,
and tries whether other actions would still have avoided the crash.
"""

import argparse
import os
from collections import deque
from contextlib import closing

import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image, ImageDraw

import envhub

STEPS_BACK, BRANCHES, HORIZON = 10, 8, 30


class Simulator(CartPoleEnv):
    """A CartPole that ends its process on the right of 0.2, as a solver in C that has no values there."""

    def step(self, action):
        if self.state[0] > 0.2:
            os._exit(7)
        return super().step(action)


def run_to_crash(envs, seed):
    """Push to where the pole falls until the process ends; return the last snapshots and the actions after them."""
    observations, _ = envs.reset(seed=seed)
    steps = deque(maxlen=STEPS_BACK)
    while True:
        action = int(observations[0, 2] + 0.2 * observations[0, 3] > 0.03)
        steps.append((envs.snapshot([0]), action))
        observations, _, terminations, truncations, infos = envs.step(np.full(BRANCHES, action))
        if "env_failure" in infos and infos["_env_failure"][0]:
            print(f"crashed: {infos['env_failure'][0]}")
            return steps
        if terminations[0] or truncations[0]:
            observations, _ = envs.reset()


def survivors(envs, snapshot, rng):
    """The number of branches of random pushes to the left or right that do not crash from here."""
    envs.restore(snapshot, range(BRANCHES), source=0)
    crashed, ended = np.zeros(BRANCHES, bool), np.zeros(BRANCHES, bool)
    for _ in range(HORIZON):
        _, _, terminations, truncations, infos = envs.step(rng.integers(2, size=BRANCHES))
        failed = infos.get("_env_failure", np.zeros(BRANCHES, bool))
        crashed |= failed & ~ended
        ended |= terminations | truncations
        if ended.all():
            break
    return BRANCHES - int(crashed.sum())


def draw(path, states, counts):
    """Show the cart's place before the crash from left to right, and how many branches survived from each step."""
    picture = Image.new("RGB", (len(states) * 40, 300), "white")
    pen = ImageDraw.Draw(picture)
    places = np.array([state[0] for state in states])
    heights = 280 - 260 * (places - places.min()) / np.ptp(places)
    for number, count in enumerate(counts):
        pen.rectangle((number * 40, 300 - 300 * count / BRANCHES, number * 40 + 38, 300), "lightgreen")
    pen.line([(number * 40 + 20, height) for number, height in enumerate(heights)], "red", 4)
    picture.save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", default="go_back.png")
    options = parser.parse_args()
    rng, states, counts = np.random.default_rng(options.seed), [], []
    with closing(envhub.make_vec(Simulator, BRANCHES, snapshots=True, restarts_max=1000)) as envs:
        for number, (snapshot, action) in enumerate(run_to_crash(envs, options.seed)):
            counts.append(survivors(envs, snapshot, rng))
            envs.restore(snapshot)
            states.append(envs.get_attr("state", env_ids=[0])[0])
            x, speed, angle, _ = states[-1]
            print(
                f"{STEPS_BACK - number:2} steps before: x {x:.2f}, speed {speed:5.2f}, angle {angle:5.2f}, "
                f"push {'right' if action else 'left'}; {counts[-1]} of {BRANCHES} branches avoid the crash"
            )
    draw(options.picture, states, counts)


if __name__ == "__main__":
    main()
