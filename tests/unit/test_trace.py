"""The trace of a worker: what the writer notes is what the hub finds, within bounds, and damage is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envhub_server import replay
from envhub_server.ipc.replay_file import NOTHING, Trace, allocate, entries_in, layout_of, name_of_raised
from envhub_server.replay import files_in, keep, name_beginning
from envhub_server.worker import trace_writer
from envhub_server.worker.gym_compat import GymEnv
from envhub_server.worker.trace_writer import TraceWriter

from envhub.arena import memory
from envhub.arena.layout import Layout
from envhub.arena.memory import Arena
from envhub.protocol.messages import Call, SetAttr
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
        return [note[1:] for note in entries_in(found["entries"])], kinds, values


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
        assert notes == [["codes", [INT64]], ["reset", [[row, 8]], encoded, b""]]
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
        scene.writer.called(one, [1], SetAttr("rate", [codec.encode(value)]))
    scene.writer.called(one, [1], Call("drive", codec.encode([[], {}])))
    scene.reset(3)
    scene.writer.called(one, [1], SetAttr("rate", [codec.encode(b"3")], [1]))
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
    assert codec.decode(scene.read.taken(0))["entries"].count(b"action") == 1
    with pytest.raises(ValueError, match="lacks what is no plain data: an action"):
        scene.taken()
    scene.reset(3)
    scene.writer.called(scene.groups[0], [1], Call("drive", pickled))
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
    assert [note[1] for note in notes if note[0] == "reset"] == [[[0, 1], [2, 2]], [[2, 5]], [[0, None], [2, None]]]
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


# --- the folder of replays --------------------------------------------------------------------------------------------


def named(name: str) -> str:
    """The name of a file as a hub makes it, of step 2 after 3 calls."""
    made = name_of_raised(name_beginning(name, "0" * 16), 1, 3 * memory.CALL_INCREMENT + 2)
    assert made.endswith("-env1-2-3")
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name.replace(named("a")[1:], "") for path in folder.iterdir())


def test_oldest_files_are_removed_beyond_the_bytes_and_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        keep(tmp_path, named(name), b"x" * 400, 1000)
    assert names(tmp_path) == ["b.replay", "c.replay"]
    monkeypatch.setattr(replay, "FILES_MAX", 1)
    keep(tmp_path, named("d"), b"x", 1000)
    assert names(tmp_path) == ["d.replay"]


def test_files_of_a_user_are_not_removed(tmp_path: Path) -> None:
    own = [tmp_path / name for name in ("rocket.replay", "rocket.replay.part", "saved-env0-0.replay")]
    for path in own:
        path.write_bytes(b"x" * 900)
    for name in ("a", "b"):
        keep(tmp_path, named(name), b"x" * 900, 1000)
    assert names(tmp_path) == sorted(["b.replay", *(path.name for path in own)])


def test_file_is_whole_and_the_only_one(tmp_path: Path) -> None:
    keep(tmp_path / "kept", named("a"), b"xyz", 1000)
    (path,) = (tmp_path / "kept").iterdir()
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"xyz", 0o600)
    assert names(tmp_path / "kept") == ["a.replay"]


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[list[str], int]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((names(tmp_path), os.fstat(file.fileno()).st_size)))
    keep(tmp_path, named("a"), b"xyz", 1000)
    assert synced == [(["a.replay.part"], 3)]


def test_file_for_which_there_is_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="1001 bytes are more than replays_bytes_max=1000"):
        keep(tmp_path, named("b"), b"x" * 1001, 1000)
    assert files_in(tmp_path) == []


def test_only_files_are_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "FILES_MAX", 1)
    os.mkfifo(tmp_path / f"{named('pipe')}.replay")  # which blocks whoever opens it
    (tmp_path / f"{named('folder')}.replay").mkdir()
    keep(tmp_path, named("a"), b"x", 1000)
    keep(tmp_path, named("b"), b"x", 1000)
    assert [path for path, _ in files_in(tmp_path)] == [tmp_path / f"{named('b')}.replay"]
    assert names(tmp_path) == ["b.replay", "folder.replay", "pipe.replay"]


def test_name_of_an_env_is_a_name_of_a_file() -> None:
    assert name_beginning("ALE/Pong-v5", "0" * 16) == f"ALE-Pong-v5-{'0' * 16}"
    assert name_beginning("/../", "0" * 16) == f"env-{'0' * 16}"
