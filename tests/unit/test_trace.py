"""The trace of a worker: what the writer notes is what the hub finds, within bounds, and damage is refused."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envhub_server.ipc.control import CallRows, SetAttrRows
from envhub_server.ipc.replay_file import NOTHING, Trace, allocate, layout_of
from envhub_server.worker import trace_writer
from envhub_server.worker.gym_compat import GymEnv
from envhub_server.worker.replayer import _notes
from envhub_server.worker.trace_writer import TraceWriter

from envhub.arena import memory
from envhub.arena.layout import Layout
from envhub.arena.memory import Arena
from envhub.values import actions, codec
from envhub.values.leaf import OBJECT, Leaf

INT64 = actions.DTYPES.index(np.dtype("i8"))
INTEGER = Leaf("<i8", ())
INT8 = actions.DTYPES.index(np.dtype("i1"))


class Env:
    """What the writer asks of an env."""

    def __init__(self) -> None:
        self.unwrapped = self
        self.np_random = np.random.default_rng(5)


class OneRow:
    """What the writer asks of a group."""

    def __init__(self, *indices: int) -> None:
        self.index, self.indices, self.env = indices[0], list(indices), Env()


class Scene:
    """An arena of three rows, of which a worker has the first and the last, and its trace."""

    def __init__(self, *groups: Any, action: Leaf = INTEGER, env_bytes: int = 1 << 14) -> None:
        layout = Layout(3, (Leaf("<f8", (2,)),), (action,), 64)
        descriptor = memory.allocate(layout)
        self.arena = Arena(layout, descriptor)
        os.close(descriptor)
        self.groups: list[Any] = [*groups] or [OneRow(0), OneRow(2)]
        rows = sum(len(group.indices) for group in self.groups)
        own = layout_of(rows, len(self.groups) < rows, layout.actions, env_bytes)
        descriptor = allocate(own)
        self.read, self.writer = Trace(own, descriptor), TraceWriter(own, descriptor, self.arena, self.groups)
        os.close(descriptor)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        for group in self.groups:
            self.writer.reset(group, dict.fromkeys(group.indices, seed), options)

    def step(self, *values: Any, rows: tuple[int, ...] = (0, 2), code: int = INT64) -> None:
        """Note steps of these rows; the actions are of all three rows."""
        self.arena.action_codes[0][:] = code
        data = np.array(values, actions.DTYPES[code]).view(np.uint8).reshape(-1)
        self.arena.actions[0][: data.size] = data
        self.writer.step([group for group in self.groups if group.index in rows], {})

    def taken(self, group: int = 0) -> tuple[list[Any], list[int], list[int]]:
        """The notes, the kinds and the actions."""
        found = codec.decode(self.read.taken(group))
        assert not found["cut"]
        kinds, values = (np.frombuffer(ring, np.int64).tolist() for ring in found["rings"])
        return [note[1:] for note in _notes(found["notes"])], kinds, values


def test_steps_since_a_reset_with_a_seed_are_found_of_each_row() -> None:
    scene = Scene()
    scene.reset(7)
    scene.step(1, -1, 11)
    scene.reset(8, {"easy": True})
    scene.step(2, -1, 12)
    scene.step(3, -1, 13, rows=(2,))
    encoded = codec.encode({"easy": True})
    for group, (row, kinds, values) in enumerate([(0, [0, NOTHING], [2, 3]), (2, [0, 0], [12, 13])]):
        notes, *steps = scene.taken(group)
        assert notes == [["codes", [INT64]], ["reset", {row: 8}, encoded, b""]]
        assert steps == [kinds, values]


def test_trace_goes_on_over_resets_without_a_seed_until_it_is_long() -> None:
    scene = Scene(OneRow(1), env_bytes=2 * 16 * 100)  # a hundred batches
    state = scene.groups[0].env.np_random.bit_generator.state
    scene.reset()  # the first: its random numbers are known
    for number in range(49):
        scene.step(0, number, 0, rows=(1,))
        scene.writer.autoreset(scene.groups[0])
    scene.reset()
    notes, _, values = scene.taken()
    assert values == [*range(49)] and [note[0] for note in notes] == ["reset", "codes", "reset"]
    assert codec.decode(notes[0][3]).bit_generator.state == state and notes[2][3] == b""
    scene.step(0, 49, 0, rows=(1,))
    scene.writer.autoreset(scene.groups[0])
    scene.step(0, 50, 0, rows=(1,))
    notes, _, values = scene.taken()
    assert values == [50] and [note[0] for note in notes] == ["codes", "reset"] and notes[1][3]


def test_trace_that_has_lost_its_reset_says_so() -> None:
    scene = Scene(OneRow(1), env_bytes=2 * 16 * 100)
    scene.reset(1)
    for number in range(101):
        scene.step(0, number, 0, rows=(1,))
    assert "more than trace_bytes_max=3200 holds" in codec.decode(scene.read.taken(0))["cut"]
    scene.reset(1, {"large": b"x" * 1600})
    assert "more than trace_bytes_max=3200 holds" in codec.decode(scene.read.taken(0))["cut"]
    scene.reset(1)
    assert scene.taken()[1] == []


def test_attributes_and_calls_outlive_a_reset_and_the_last_of_a_name_is_kept() -> None:
    scene = Scene(OneRow(1))
    one = scene.groups[0]
    for value in (b"1", b"2"):
        scene.writer.called(one, [1], SetAttrRows([1], "rate", codec.encode(value)))
    scene.writer.called(one, [1], CallRows([1], "drive", codec.encode([[], {}])))
    scene.reset(3)
    scene.writer.called(one, [1], SetAttrRows([1], "rate", each=[codec.encode(b"3")]))
    assert [(note[0], *note[2:]) for note in scene.taken()[0] if note[0] != "reset"] == [
        ("set", "rate", [codec.encode(b"2")]),
        ("call", "drive", [codec.encode([[], {}])]),
        ("set", "rate", [codec.encode(b"3")]),
    ]
    scene.writer.made(one)
    assert scene.taken()[0] == []


def test_what_is_no_plain_data_is_not_kept() -> None:
    scene = Scene(OneRow(1))
    pickled = codec.encode(object(), codec.as_pickle)
    scene.writer.step(scene.groups, {1: pickled, 2: pickled})
    assert codec.decode(scene.read.taken(0))["notes"].count(b"action") == 1
    with pytest.raises(ValueError, match="lacks what is no plain data: an action"):
        scene.taken()
    scene.reset(3)
    scene.writer.called(scene.groups[0], [1], CallRows([1], "drive", pickled))
    with pytest.raises(ValueError, match="lacks what is no plain data: the arguments of drive"):
        scene.taken()
    scene.writer.made(scene.groups[0])
    scene.reset(3, {"odd": object()})
    with pytest.raises(ValueError, match="lacks what is no plain data: the options of a reset"):
        scene.taken()


def test_vector_env_has_one_trace_which_begins_with_a_reset_of_all_by_seeds() -> None:
    scene = Scene(OneRow(0, 2))
    one = scene.groups[0]
    scene.writer.reset(one, {0: 1, 2: 2})
    scene.step(1, -1, 2, rows=(0,))
    scene.writer.reset(one, {2: 5})
    scene.writer.reset(one, {0: None, 2: None})
    notes, kinds, values = scene.taken()
    assert (kinds, values) == ([0, 0], [1, 2])
    assert [note[1] for note in notes if note[0] == "reset"] == [{0: 1, 2: 2}, {2: 5}, {0: None, 2: None}]
    assert scene.writer.taken_of(2) == b"" and scene.writer.taken_of(0) == scene.read.taken(0)


@pytest.mark.parametrize(("word", "value"), [(0, -1), (0, 1 << 62), (1, -5), (1, 50), (2, -1)])
def test_trace_that_an_env_has_overwritten_is_refused(word: int, value: int) -> None:
    scene = Scene(OneRow(1))
    scene.reset(3)
    scene.writer.words[word] = value
    with pytest.raises(ValueError, match="damaged"):
        scene.read.taken(0)
    assert codec.decode(scene.writer.taken_of(1))["cut"] == "its trace is damaged"


@pytest.mark.parametrize("action", [Leaf("<i8", ()), Leaf("<f4", (3,)), OBJECT])
def test_one_row_is_noted_as_several_are(action: Leaf) -> None:
    one, several = Scene(OneRow(1), action=action), Scene(OneRow(1), OneRow(2), action=action)
    rng = np.random.default_rng(3)
    codes = [actions.OUT_OF_BAND] if action == OBJECT else [INT64, INT8, INT8 | actions.PYTHON, actions.OUT_OF_BAND]
    for scene in (one, several):
        scene.reset(1)
    for _ in range(50):
        values, code = rng.integers(0, 256, one.arena.actions[0].size), rng.choice(codes)
        kinds = rng.integers(0, 4, 3)
        for scene in (one, several):
            scene.arena.needs_reset[:] = kinds
            scene.arena.action_codes[0][:], scene.arena.actions[0][:] = code, values
            scene.writer.step(scene.groups, {})
    assert one.read.taken(0) == several.read.taken(0)


class OldEnv:
    """An env of gym 0.21, whose random numbers are those of a ``RandomState``."""

    observation_space = action_space = gym.spaces.Discrete(2)
    spec = None
    metadata: dict[str, Any] = {}

    def __init__(self) -> None:
        self.unwrapped = self
        self.np_random = np.random.RandomState(5)


def test_random_numbers_of_an_env_of_an_old_gym_are_known() -> None:
    env = GymEnv(OldEnv())
    saved = codec.decode(trace_writer._generator(env)).bit_generator.state
    drawn = env.env.np_random.random()
    trace_writer.bit_generator_of(env).state = saved
    assert env.env.np_random.random() == drawn


def test_env_without_known_random_numbers_has_none_noted() -> None:
    env = GymEnv(OldEnv())
    for odd in (None, 3, np.random.Generator(np.random.PCG64(1)).bit_generator):
        env.env.np_random = odd
        assert trace_writer._generator(env) == b""
