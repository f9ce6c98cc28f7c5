"""The envs with which a client is tested: small, and known in advance.

The value of an env is ``(7 * seed + 101 * row + 13 * moves) % 1000``, where ``moves`` is the number of its steps since
the last RESET. An observation is two float32: the value, and the value + 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from envhub.protocol.messages import Made, pack_rows
from envhub.values import actions, codec, spaces

NAME = "Conformance-v0"
NUM_ENVS = 2
SEEDS = [7, 8]
STEPS = 8
CHECK = "check"  # the method that a client tells what it has received
_END_MOVES = (5, 3)  # the step that ends the episode of each env: a termination of env 0, a truncation of env 1
_ACTION_BYTES = 8


class CountingEnvs:
    """Two envs.

    Attributes:
        moves: the number of steps of each env since the last RESET.
    """

    def __init__(self, seeds: Sequence[int | None] = ()) -> None:
        """Make envs that were just reset with these seeds; a seed that is None or missing counts as 0."""
        self.moves = [0] * NUM_ENVS
        self._seeds = [seed or 0 for seed in seeds] or [0] * NUM_ENVS
        self._rewards = [0.0] * NUM_ENVS
        self._ends = [0] * NUM_ENVS
        self._numbers = [0] * NUM_ENVS

    def observations(self, rows: Sequence[int]) -> list[bytes]:
        """The observation frame of these rows."""
        values = [[self._value(row), self._value(row) + 0.5] for row in rows]
        return [np.array(values, np.float32).tobytes()]

    def step(self, rows: Sequence[int]) -> list[bytes]:
        """Step these rows; returns the observations, the results and, where an env has an info, the rows frame."""
        rewards, terminations, truncations, infos = [], [], [], []
        for row in rows:
            self.moves[row] += 1
            moves = self.moves[row]
            ends = moves == _END_MOVES[row]
            # The step after the end of an episode is a reset, as in Gymnasium's next-step mode.
            reward = 0.0 if moves == _END_MOVES[row] + 1 else moves * (row + 1) / 4
            rewards.append(reward)
            terminations.append(ends and row == 0)
            truncations.append(ends and row == 1)
            self._rewards[row] += reward
            self._ends[row] += ends
            if ends:
                self._numbers[row] += moves
                infos.append((row, codec.encode({"n": moves})))
        results = np.array(rewards).tobytes() + bytes(terminations) + bytes(truncations)
        return [*self.observations(rows), results, *([pack_rows(infos)] if infos else [])]

    def actions_fault(self, rows: Sequence[int], codes: bytes, frames: Sequence[Any]) -> str:
        """Why these actions are not the ones that are due; empty if they are."""
        if len(codes) != 1 or codes[0] & 0x7F >= len(actions.DTYPES):
            return f"the action codes are {codes.hex()}, one code of a dtype was due, such as 04 (int64)"
        dtype = actions.DTYPES[codes[0] & 0x7F]
        found = [bytes(frame) for frame in frames]
        due = [self._value(row) for row in rows]
        if [*map(len, found)] != [len(rows) * dtype.itemsize]:
            lengths = [*map(len, found)]
            return f"the action frames have {lengths} bytes, [{len(rows) * dtype.itemsize}] were due"
        given = np.frombuffer(found[0], dtype).tolist()
        return "" if given == due else f"the actions of envs {[*rows]} are {given}, {due} were due: {found[0].hex()}"

    def check_fault(self, args: bytes) -> str:
        """Why the arguments of ``check`` are not the ones that are due; empty if they are."""
        due = [[self._rewards, self._ends, self._numbers], {}]
        try:
            given = codec.decode(args)
        except codec.DecodeError as error:
            return f"the arguments of {CHECK} cannot be read: {error}"
        return "" if given == due else f"the arguments of {CHECK} are {given!r:.200}, {due} were due"

    def _value(self, row: int) -> int:
        return (7 * self._seeds[row] + 101 * row + 13 * self.moves[row]) % 1000


def made(**fields: Any) -> Made:
    """The description of the envs."""
    space, action = gym_spaces.Box(0, 1000, (2,), np.float32), gym_spaces.Discrete(1000)
    described = [codec.encode(spaces.describe(each)) for each in (space, action)]
    return Made(NUM_ENVS, 1, described[:1], described[1], codec.encode({}), **fields)


def values_text() -> str:
    """The results of the program's steps, a line each, for people."""
    envs = CountingEnvs(SEEDS)
    lines = [f"  RESET   observations {_shown(envs.observations(range(NUM_ENVS)))}"]
    for number in range(1, STEPS + 1):
        frames = envs.step(range(NUM_ENVS))
        rewards = np.frombuffer(frames[1], np.float64, NUM_ENVS).tolist()
        flags = list(frames[1][-2 * NUM_ENVS :])
        info = f", info of env {frames[2][0]} {{'n': {number}}}" if len(frames) > 2 else ""
        results = f"rewards {rewards}, terminations {flags[:NUM_ENVS]}, truncations {flags[NUM_ENVS:]}"
        lines.append(f"  STEP {number}  observations {_shown(frames)}, {results}{info}")
    lines.append(f"  CALL    {CHECK}({envs._rewards}, {envs._ends}, {envs._numbers})")
    return "\n".join(lines)


def _shown(frames: Sequence[bytes]) -> list[list[float]]:
    shown: list[list[float]] = np.frombuffer(frames[0], np.float32).reshape(NUM_ENVS, 2).tolist()
    return shown
