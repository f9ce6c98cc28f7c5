"""Find the way over a frozen lake by Monte Carlo tree search, without a model: the env itself goes back.

    python client/examples/tree_search.py    # needs Pillow

A node is the actions that lead to it. A snapshot costs more than a few steps. So the root and nodes on every third
level are kept as snapshots, and other nodes are reached from these by their last actions.
"""

import argparse
from collections import defaultdict
from contextlib import closing

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import MAPS
from PIL import Image, ImageDraw

import envhub

NUM_ENVS, STEPS = 8, 24  # leaves that are tried at a time, and steps of a trial
FROZEN_LEVELS, ACTIONS, DISCOUNT = 3, 4, 0.95


def search(envs, rng, root, way, frozen, rounds):
    """The child of the root that was tried most often; ``frozen`` has snapshots of nodes, and gets more."""
    visits, returns, dead = defaultdict(int), defaultdict(float), set()
    first = dict.fromkeys(way, root)  # the first node on each square; other ones are dead, as those that fall

    def children(node):
        return [child for action in rng.permutation(ACTIONS) if (child := (*node, int(action))) not in dead]

    def select(node):
        while visits[node] and (living := children(node)):
            counts = np.array([visits[child] or 1e-9 for child in living])  # one that was never tried comes first
            promises = [returns[child] for child in living] / counts + np.sqrt(2 * np.log(visits[node] + 1) / counts)
            node = living[np.argmax(promises)]
        visits[node] += 1  # so that the next env tries another one
        return node

    for _ in range(rounds):
        leaves = [select(root) for _ in range(NUM_ENVS)]
        origins = [next(leaf[:n] for n in range(len(leaf), -1, -1) if leaf[:n] in frozen) for leaf in leaves]
        actions = rng.integers(ACTIONS, size=(STEPS, NUM_ENVS))
        for row, (leaf, origin) in enumerate(zip(leaves, origins, strict=True)):
            actions[: len(leaf) - len(origin), row] = leaf[len(origin) :]
        for origin in {*origins}:
            rows = [row for row in range(NUM_ENVS) if origins[row] == origin]
            envs.restore(frozen[origin], rows, source=frozen[origin].env_ids[0])
        done, returned = np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS)
        for step in range(STEPS):
            squares, rewards, terminations, truncations, _ = envs.step(actions[step])
            returned += ~done * rewards * DISCOUNT ** (step + np.array([*map(len, origins)]))
            done |= terminations | truncations
            for row, (leaf, origin) in enumerate(zip(leaves, origins, strict=True)):
                if len(leaf) == len(origin) + step + 1 and not rewards[row]:
                    if done[row] or first.setdefault(squares[row], leaf) != leaf:
                        dead.add(leaf)
                    elif len(leaf) % FROZEN_LEVELS == 0 and leaf not in frozen:
                        frozen[leaf] = envs.snapshot([row])
            if done.all():
                break
        for leaf, each in zip(leaves, returned, strict=True):
            for n in range(len(root), len(leaf) + 1):
                visits[leaf[:n]] += n < len(leaf)
                returns[leaf[:n]] += each
    return max(children(root), key=lambda child: visits[child])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6, help="of 8 leaves each, before a move")
    parser.add_argument("--picture", default="tree_search.png")
    options = parser.parse_args()
    rng, root, squares, done = np.random.default_rng(options.seed), (), [0], False
    lake = {"map_name": "4x4", "is_slippery": False}
    with closing(envhub.make_vec("FrozenLake-v1", NUM_ENVS, env_kwargs=lake, snapshots=True)) as envs:
        envs.reset(seed=options.seed)
        frozen = {root: envs.snapshot([0])}
        while not done:
            before, root = frozen[root], search(envs, rng, root, squares, frozen, options.rounds)
            envs.restore(before, [0], source=before.env_ids[0])
            seen, rewards, terminations, truncations, _ = envs.step(np.full(NUM_ENVS, root[-1]))
            squares, done = [*squares, int(seen[0])], terminations[0] or truncations[0]
            # Snapshots of other branches are dropped with their last references.
            frozen = {node: each for node, each in frozen.items() if node[: len(root)] == root}
            if root not in frozen:
                frozen[root] = envs.snapshot([0])
    colors = {"H": (0, 0, 128), "G": (0, 128, 0)}
    pixels = np.array([[colors.get(each, (170, 200, 255)) for each in row] for row in MAPS["4x4"]], np.uint8)
    size, picture = len(pixels), Image.fromarray(pixels.repeat(40, axis=0).repeat(40, axis=1))
    way = [(square % size * 40 + 20, square // size * 40 + 20) for square in squares]
    ImageDraw.Draw(picture).line(way, "red", 4)
    picture.save(options.picture)
    print(f"reward {rewards[0]:g} after {len(root)} moves -> {options.picture}")


if __name__ == "__main__":
    main()
