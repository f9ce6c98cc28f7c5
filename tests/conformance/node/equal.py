"""Compares the client of this folder, bit for bit, with Gymnasium's SyncVectorEnv.

Argument: a file with a hub's address.
"""

import json
import pathlib
import subprocess
import sys

import gymnasium
import numpy

STEPS = 300
CASES = [
    ("CartPole-v1", 3),
    ("Pendulum-v1", 2),
    ("FrozenLake-v1", 3),
    ("Blackjack-v1", 4),
    ("MountainCarContinuous-v0", 2),
]


def leaves(batch):
    if isinstance(batch, tuple):
        return [text for part in batch for text in leaves(part)]
    return [batch.tobytes().hex()]


def expected(env_id, num_envs):
    state = 1

    def random():
        nonlocal state
        state = (state * 1103515245 + 12345) % 2**31
        return state // 65536

    env = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env_id)] * num_envs)
    yield leaves(env.reset(seed=42)[0])
    discrete = isinstance(env.single_action_space, gymnasium.spaces.Discrete)
    for _ in range(STEPS):
        if discrete:
            actions = numpy.array([random() % env.single_action_space.n for _ in range(num_envs)])
        else:
            actions = numpy.array([[(random() % 4001) / 1000 - 2] for _ in range(num_envs)], numpy.float32)
        observations, rewards, terminations, truncations, _ = env.step(actions)
        ends.append(int((terminations | truncations).sum()))
        yield [*leaves(observations), *(array.tobytes().hex() for array in (rewards, terminations, truncations))]
    env.close()


failed = False
for env_id, num_envs in CASES:
    ends = []
    script = pathlib.Path(__file__).with_name("equal.js")
    command = ["node", str(script), sys.argv[1], env_id, str(num_envs), str(STEPS)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    wanted = list(expected(env_id, num_envs))
    got = [json.loads(line) for line in printed.splitlines()]
    different = [index for index, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1]]
    equal = len(got) == len(wanted) and not different
    failed |= not equal
    what = "equal" if equal else f"DIFFERENT, first at {different[:1]}"
    print(f"{env_id} x {num_envs}: {len(got)} of {len(wanted)} batches, {sum(ends)} episodes ended: {what}")
sys.exit(failed)
