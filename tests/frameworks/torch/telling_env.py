"""An env whose infos have values of many kinds."""

import gymnasium
import numpy as np

KINDS = [1, 2.5, True, np.float32(0.5), np.int64(7), np.bool_(True), "text", None, [1, 2], {"r": 3.0, "l": 4}]


class Telling(gymnasium.Env):
    """Episodes of 2 + ``place`` steps, with another info in each step; every third episode is truncated."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, place):
        self.place, self.episode = place, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        self.episode += 1
        return self._shown(), {"began": self.episode, "sub": {"of": self.place}}

    def step(self, action):
        self.at += 1
        ended, truncates = self.at == 2 + self.place, self.episode % 3 == 0
        info = {} if (self.at + self.place) % 3 == 0 else {"kind": KINDS[(self.at + self.place) % len(KINDS)]}
        if self.at % 2:
            info["shown"] = self._shown()
        if ended:
            info["episode"] = {"r": np.array([3.5]), "l": np.array([self.at])}
        return self._shown(), float(action), ended and not truncates, ended and truncates, info

    def _shown(self):
        return np.array([self.place, self.at + 100 * self.episode], np.float32)
