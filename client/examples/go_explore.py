"""Explore as the first phase of Go-Explore: return to a place that was seldom explored, and go on from there.

    python client/examples/go_explore.py     # needs minigrid and Pillow
    python client/examples/go_explore.py --env ale_py:ALE/MontezumaRevenge-v5    # shows the calls; it needs more frames

A cell is a place. Its first visit is kept as a snapshot, which is exact whatever the simulator. A random agent, which
begins at the start again and again, gets as many frames. It finds a fraction of the cells.
"""

import argparse
from contextlib import closing, suppress

import gymnasium as gym
import numpy as np
from PIL import Image, ImageDraw

import envhub
from envhub.errors import SnapshotLimit

NUM_ENVS, ROUND = 8, 8  # envs, and steps from a cell before the next one is chosen


class Cells(gym.Wrapper):
    """An env whose infos say where the agent is."""

    def reset(self, **options):
        observation, info = self.env.reset(**options)
        return observation, {**info, "cell": self.cell()}

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "cell": self.cell()}

    def cell(self):
        game = self.env.unwrapped
        if hasattr(game, "ale"):  # Montezuma's Revenge has x, y and the room there
            return game.ale.getRAM()[[42, 43, 3]].astype(int) // [8, 8, 1]
        doors = sum(thing is not None and thing.type == "door" and thing.is_open for thing in game.grid.grid)
        return np.array([*game.agent_pos, doors])


def explore(envs, seed, frames, returns_to_cells):
    """The first frame of each cell, by Go-Explore or by an agent that begins at the start each time."""
    rng = np.random.default_rng(seed)
    _, infos = envs.reset(seed=[seed] * NUM_ENVS)  # each has the same rooms
    start = tuple(infos["cell"][0].tolist())
    first_frames, snapshots, chosen = {start: 0}, {start: envs.snapshot([0])}, {start: 0}
    done = np.ones(NUM_ENVS, bool)
    for frame in range(0, frames, NUM_ENVS):
        if returns_to_cells and frame % (NUM_ENVS * ROUND) == 0:
            cells = [*snapshots]
            weights = np.array([1 / (1 + chosen[cell]) ** 2 for cell in cells])
            for row, number in enumerate(rng.choice(len(cells), NUM_ENVS, p=weights / weights.sum())):
                cell = cells[number]
                chosen[cell] += 1
                envs.restore(snapshots[cell], [row], source=snapshots[cell].env_ids[0])
            done[:] = False
        elif done.any() and not returns_to_cells:
            envs.restore(snapshots[start], np.flatnonzero(done), source=0)
            done[:] = False
        _, _, terminations, truncations, infos = envs.step(rng.integers(envs.single_action_space.n, size=NUM_ENVS))
        done |= terminations | truncations
        for row in np.flatnonzero(~done):
            cell = tuple(infos["cell"][row].tolist())
            if cell not in first_frames:
                first_frames[cell] = frame
                if returns_to_cells:
                    with suppress(SnapshotLimit):  # then no exploration begins there
                        snapshots[cell], chosen[cell] = envs.snapshot([row]), 0
    return first_frames


def draw(path, ways, frames):
    """Show the cells of each way, the later the brighter."""
    across, down = (max(cell[axis] for first_frames in ways for cell in first_frames) + 2 for axis in (0, 1))
    picture = Image.new("RGB", (len(ways) * across * 10, down * 10), "black")
    for number, first_frames in enumerate(ways):
        for (x, y, *_), frame in reversed(first_frames.items()):  # so that the first visit is on top
            left, top, bright = (number * across + x) * 10, y * 10, 80 + 175 * frame // frames
            ImageDraw.Draw(picture).rectangle((left, top, left + 8, top + 8), (bright, bright // 2, 255 - bright))
    picture.save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", default="minigrid:MiniGrid-MultiRoom-N6-v0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=8000)
    parser.add_argument("--picture", default="go_explore.png")
    options = parser.parse_args()
    with closing(envhub.make_vec(lambda: Cells(gym.make(options.env)), NUM_ENVS, snapshots=True)) as envs:
        ways = [explore(envs, options.seed, options.frames, returns) for returns in (False, True)]
    draw(options.picture, ways, options.frames)
    agent, explorer = map(len, ways)
    print(f"random agent {agent} cells, Go-Explore {explorer}: {explorer / agent:.1f}x -> {options.picture}")


if __name__ == "__main__":
    main()
