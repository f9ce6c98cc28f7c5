"""The journal of a worker: what the writer notes is what the reader finds, within bounds, and damage is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envhub_server.ipc import journal as journals
from envhub_server.ipc.journal import BY_REQUEST, History, Journal, JournalLayout, Note
from envhub_server.worker import journal_writer
from envhub_server.worker.env_sources import versions_of
from envhub_server.worker.gym_compat import GymEnv
from envhub_server.worker.journal_writer import CHECKPOINT_TICKS, JournalWriter, RowJournalWriter

from envhub.arena.driver import ArenaDriver
from envhub.arena.layout import Layout
from envhub.arena.memory import OP_PART, OP_STEP, Arena, allocate
from envhub.values import actions, codec
from envhub.values.leaf import OBJECT, Leaf

INT64 = actions.DTYPES.index(np.dtype("i8"))
INT8 = actions.DTYPES.index(np.dtype("i1"))


class Env:
    """What the writer asks of an env."""

    def __init__(self) -> None:
        self.unwrapped = self
        self.np_random = np.random.default_rng(5)


class OneRow:
    """What the writer asks of a row."""

    def __init__(self, index: int) -> None:
        self.index, self.indices, self.env = index, [index], Env()


class Scene:
    """An arena of three rows, of which a worker has the first and the last, and its journal."""

    def __init__(self, observation: Leaf) -> None:
        layout = Layout(3, (observation,), (Leaf("<i8", ()),), 64)
        self.arena = mapped(Arena, layout, allocate(layout))
        self.arena.format(1)
        self.layout = JournalLayout(2, layout.observations, layout.actions)
        descriptor = journals.allocate(self.layout)
        self.read = Journal(self.layout, descriptor)
        self.journal = Journal(self.layout, descriptor)
        os.close(descriptor)
        self.journal.format()
        self.rows: list[Any] = [OneRow(0), OneRow(2)]
        self.writer = JournalWriter(self.journal, self.arena, self.rows)
        self.posts = 0

    def reset(self, seed: int | None = None, options: bytes = b"") -> None:
        self.writer.begin_reset({0: seed, 2: seed}, lambda row: options)
        self.writer.end()

    def history(self, positions: list[int], last: int | None = None) -> History:
        return self.read.copied(range(positions[0], positions[-1] + 1)).history(last)

    def step(self, *values: int, rows: tuple[int, ...] = (0, 2), code: int = INT64, op: int = OP_STEP) -> None:
        """Post these actions for all three rows, and have the worker step those of ``rows``."""
        self.posts += 1
        self.arena.op[:] = op
        self.arena.request[:] = self.posts
        self.arena.action_codes[0][:] = code
        data = np.array(values, actions.DTYPES[code]).view(np.uint8)
        self.arena.actions[0][: data.size] = data
        self.arena.observations[0][self.posts & 1] = self.posts
        chosen = [row for row in self.rows if row.index in rows]
        self.writer.begin(chosen, {})
        self.writer.end()


def mapped(kind: Any, layout: Any, descriptor: int) -> Any:
    found = kind(layout, descriptor)
    os.close(descriptor)
    return found


@pytest.fixture
def scene() -> Iterator[Scene]:
    return Scene(Leaf("<f8", (2,)))


def test_steps_since_the_making_are_found_of_each_row(scene: Scene) -> None:
    scene.reset(7)
    for number in range(3):
        scene.step(number, -1, 10 + number)
    for position, first in enumerate((0, 10)):
        found = scene.history([position])
        assert (found.unrepeatable, found.begins, found.digested) == ("", "made", 4)
        assert [*found.kinds] == [journals.RESET, 0, 0, 0]
        assert np.frombuffer(found.actions[0], np.int64)[1:].tolist() == [first, first + 1, first + 2]
        assert [*found.codes[1:]] == [INT64] * 3
        assert np.frombuffer(found.digests, np.float64).reshape(4, 2)[1:].tolist() == [[1, 1], [2, 2], [3, 3]]
        assert [(note.kind, note.seed, note.tick) for note in found.notes] == [(BY_REQUEST, 7, 0)]


def test_rows_of_a_vector_env_are_found_together() -> None:
    scene = Scene(Leaf("<f8", (2,)))
    batch: Any = OneRow(0)
    batch.indices = [0, 2]
    scene.rows = [batch]
    scene.writer = JournalWriter(scene.journal, scene.arena, scene.rows, is_batch=True)
    scene.reset(7)
    scene.step(1, -1, 2)
    scene.writer.begin_reset({2: 9}, lambda row: b"")
    scene.writer.end()
    scene.step(3, -1, 4, op=OP_PART)
    found = scene.history([0, 1])
    assert (found.begins, found.rows, found.calls, found.digested) == ("made", 2, 4, 4)
    kinds = [[journals.RESET, journals.RESET], [0, 0], [journals.NOTHING, journals.RESET], [0, 0]]
    assert np.frombuffer(found.kinds, np.uint8).reshape(4, 2).tolist() == kinds
    assert [found.kind(call) for call in range(4)] == [journals.RESET, 0, journals.RESET, 0]
    assert np.frombuffer(found.actions[0], np.int64).reshape(4, 2)[[1, 3]].tolist() == [[1, 2], [3, 4]]
    notes = [(note.tick, note.position, note.seed, note.generator) for note in found.notes]
    assert notes == [(0, 0, 7, b""), (0, 1, 7, b""), (2, 1, 9, b"")]


def test_vector_env_is_run_again_from_a_reset_of_all_its_envs_by_seeds_only() -> None:
    scene = Scene(Leaf("<f8", (2,)))
    scene.reset(7)
    for _ in range(scene.layout.ticks):
        scene.step(0, 0, 0)
    scene.writer.begin_reset({2: 9}, lambda row: b"")
    assert "longer than the journal" in scene.history([0, 1]).unrepeatable
    scene.reset(8)
    scene.step(1, 1, 1)
    found = scene.history([0, 1])
    assert (found.begins, found.calls) == ("seed", 2)


def test_step_that_has_no_end_has_no_digest(scene: Scene) -> None:
    scene.reset(7)
    scene.writer.begin(scene.rows, {})
    found = scene.history([0])
    assert (len(found.kinds), found.digested) == (2, 1)


def test_parts_of_a_batch_concern_their_rows_only(scene: Scene) -> None:
    scene.reset(7)
    scene.step(1, -1, 2, rows=(0,), op=OP_PART)
    scene.step(3, -1, 4, rows=(2,), op=OP_PART)
    scene.step(5, -1, 6, op=OP_PART)
    assert np.frombuffer(scene.history([0]).actions[0], np.int64)[1:].tolist() == [1, 5]
    assert np.frombuffer(scene.history([1]).actions[0], np.int64)[1:].tolist() == [4, 6]


def test_rows_whose_results_are_in_several_slots_are_digested_where_they_are(scene: Scene) -> None:
    driver, arena = ArenaDriver(scene.arena), scene.arena

    def work(*indices: int) -> None:
        """As the rows' worker does."""
        scene.writer.begin([row for row in scene.rows if row.index in indices], {})
        for index in np.flatnonzero(arena.request != arena.done):
            arena.observations[0][arena.request[index] & 1, index] = arena.request[index]
            arena.done[index] = arena.request[index]
        scene.writer.end()

    for _ in range(2):
        driver.post(OP_STEP, bytes([INT64]), [np.zeros(3, np.int64)])
        work(0, 2)
        driver.post_rows(np.array([0]), bytes([INT64]), [np.zeros(1, np.int64)])
        work(0)
        driver.taken([0])
    driver.post(OP_STEP, bytes([INT64]), [np.zeros(3, np.int64)])
    work(0, 2)
    for position, wanted in enumerate(([1, 2, 3, 4, 5], [1, 2, 5])):
        found = np.frombuffer(scene.history([position]).digests, np.float64).reshape(-1, 2)[:, 0]
        assert found.tolist() == wanted


def test_actions_of_another_dtype_are_read_by_theirs(scene: Scene) -> None:
    scene.reset(7)
    scene.step(1, 2, 3)
    scene.step(4, 5, 6, code=INT8)
    found = scene.history([1])
    assert [*found.codes[1:]] == [INT64, INT8]
    assert found.actions[0][2 * 8] == 6


def test_rows_with_actions_of_several_dtypes_at_one_time_are_cut(scene: Scene) -> None:
    scene.reset(7)
    scene.arena.action_codes[0][:] = [INT64, INT64, INT8]
    scene.writer.begin(scene.rows, {})
    assert "several kinds" in scene.history([0]).unrepeatable


def test_last_reset_with_a_seed_is_the_beginning_once_the_making_is_forgotten(scene: Scene) -> None:
    for _ in range(scene.layout.ticks):
        scene.step(0, 0, 0)
    assert scene.layout.ticks == journals.TICKS_MAX
    assert "longer than the journal, which holds 16384 batches" in scene.history([0]).unrepeatable
    scene.reset(8)
    scene.step(1, 1, 1)
    found = scene.history([0])
    assert (found.begins, [*found.kinds]) == ("seed", [journals.RESET, 0])


def test_random_numbers_are_noted_now_and_then_at_the_end_of_an_episode(scene: Scene) -> None:
    ends = 0
    for number in range(scene.layout.ticks + CHECKPOINT_TICKS):
        scene.arena.needs_reset[:] = number % 50 == 0
        scene.step(0, 0, 0)
        ends += number % 50 == 0
        if number % 50 == 0:
            scene.writer.autoreset(scene.rows[0])
    found = scene.history([0])
    assert (found.unrepeatable, found.begins, found.kinds[0]) == ("", "generator", 1)
    assert len(found.kinds) <= CHECKPOINT_TICKS + 50
    assert codec.decode(found.notes[0].generator).random() == np.random.default_rng(5).random()
    assert len(scene.read.copied(range(2)).notes()) < ends / 10


def test_history_ends_with_the_tick_that_is_asked_for(scene: Scene) -> None:
    scene.reset(7)
    scene.step(1, 1, 1)
    tick = scene.writer.tick
    scene.writer.built(scene.rows[0])  # of the env that takes the place of the one that failed then
    scene.step(2, 2, 2)
    found = scene.history([0], tick)
    assert (found.begins, len(found.kinds)) == ("made", 2)
    assert len(scene.history([0]).kinds) == 1


def test_reset_that_fails_is_found_with_what_came_before_it(scene: Scene) -> None:
    for _ in range(scene.layout.ticks):
        scene.step(0, 0, 0)
    scene.reset(8)
    scene.step(1, 1, 1)
    scene.reset(9)
    assert [*scene.history([0]).kinds] == [journals.RESET, 0, journals.RESET]


def test_notes_are_bounded_and_the_oldest_give_way(scene: Scene) -> None:
    for number in range(300):
        scene.reset(number, codec.encode(b"x" * 1000))
    notes = scene.read.copied(range(2)).notes()
    assert 0 < len(notes) < 300
    assert [note.seed for note in notes[-2:]] == [299, 299]
    assert scene.history([0]).begins == "seed"


def test_note_that_is_too_large_leaves_its_place_only(scene: Scene) -> None:
    scene.reset(1, codec.encode(b"x" * journals.NOTE_BYTES_MAX))
    assert scene.read.copied(range(2)).notes()[-1] == Note(0, 1, None, None, b"", b"")  # type: ignore[arg-type]


def test_journal_fits_its_bounds_whatever_the_actions() -> None:
    layout = JournalLayout(64, (Leaf("|u1", (84, 84, 4)),), (Leaf("<f4", (1000,)),))
    assert 2 <= layout.ticks <= journals.TICKS_MAX
    assert layout.fields()[1] <= journals.RING_BYTES_MAX + journals.NOTES_BYTES + 2 * journals._HEADER_BYTES


@pytest.mark.parametrize("shape", [(9,), (84, 84, 4), (5, 7)])
def test_digests_tell_one_changed_number(shape: tuple[int, ...]) -> None:
    scene = Scene(Leaf("<f4" if shape == (9,) else "|u1", shape))
    assert scene.layout.digest_bytes == (36 if shape in [(9,)] else 35 if shape == (5, 7) else 8)
    scene.step(0, 0, 0)
    scene.step(0, 0, 0)
    scene.arena.observations[0][0] = 1
    scene.writer.begin(scene.rows, {})
    scene.writer.end()
    digests = np.frombuffer(scene.history([0]).digests, np.uint8).reshape(3, -1)
    assert digests[0].tolist() == digests[2].tolist() != digests[1].tolist()


class Copied:
    """A ring of which a copy takes long."""

    def __init__(self, ring: Any, meanwhile: Callable[[], None]) -> None:
        self.ring, self.meanwhile = ring, meanwhile

    def __getitem__(self, key: Any) -> Any:
        self.meanwhile()
        return self.ring[key]


@pytest.mark.parametrize("room", [0, 199, 200])
def test_history_has_nothing_that_the_worker_has_written_over_while_it_was_copied(scene: Scene, room: int) -> None:
    def go_on() -> None:
        for _ in range(200):
            scene.step(-1, -1, -1)

    scene.reset(7)
    asked = range(scene.layout.ticks - 2 - room)
    for number in asked:
        scene.step(number, -1, number)
    reader: Any = scene.read
    reader.kinds = Copied(reader.kinds, go_on)
    found = scene.history([0], scene.writer.tick)
    if room < 200:
        assert found.unrepeatable.startswith("its episode is longer than the journal")
    else:
        assert np.frombuffer(found.actions[0], np.int64)[1:].tolist() == [*asked]


def test_notes_have_nothing_that_the_worker_has_written_over_while_they_were_copied(scene: Scene) -> None:
    def go_on() -> None:
        for number in range(300, 350):
            scene.reset(number, codec.encode(b"x" * 1000))

    for number in range(300):
        scene.reset(number, codec.encode(b"x" * 1000))
    before = scene.read.copied(range(2)).notes()
    reader: Any = scene.read
    reader.kinds = Copied(reader.kinds, go_on)
    found = reader.copied(range(2)).notes()
    assert 0 < len(found) < len(before) and found == before[-len(found) :]


@pytest.mark.parametrize(("word", "value"), [(0, 5), (1, -1), (3, -5), (4, 1 << 40), (3, 3)])
def test_journal_that_an_env_has_overwritten_is_refused(scene: Scene, word: int, value: int) -> None:
    scene.reset(7)
    scene.step(1, 1, 1)
    scene.journal.words[word] = value
    with pytest.raises(ValueError):
        scene.history([0])


class OldEnv:
    """An env of gym 0.21, whose random numbers are those of a ``RandomState``."""

    observation_space = action_space = gym.spaces.Discrete(2)
    spec = None
    metadata: dict[str, Any] = {}

    def __init__(self) -> None:
        self.unwrapped = self
        self.np_random = np.random.RandomState(5)


def test_random_numbers_of_an_env_of_an_old_gym_are_known_and_its_versions_too() -> None:
    env = GymEnv(OldEnv())
    saved = codec.decode(journal_writer._encoded_generator(env)).bit_generator.state
    drawn = env.env.np_random.random()
    journal_writer.bit_generator_of(env).state = saved
    assert env.env.np_random.random() == drawn
    assert versions_of(env)["numpy"] == np.__version__


def test_env_without_known_random_numbers_has_none_noted() -> None:
    env = GymEnv(OldEnv())
    for odd in (None, 3, np.random.Generator(np.random.PCG64(1)).bit_generator):
        env.env.np_random = odd
        assert journal_writer._encoded_generator(env) == b""


@pytest.mark.parametrize("observation", [Leaf("<f8", (2,)), Leaf("|u1", (84, 84, 4)), Leaf("<f4", (0,))])
@pytest.mark.parametrize("action", [Leaf("<i8", ()), Leaf("<f4", (3,)), OBJECT])
def test_writer_of_one_row_writes_what_the_writer_of_several_does(observation: Leaf, action: Leaf) -> None:
    layout = Layout(3, (observation,), (action,), 64)
    arena = mapped(Arena, layout, allocate(layout))
    arena.format(1)
    of_journal = JournalLayout(1, layout.observations, layout.actions)
    written = [mapped(Journal, of_journal, journals.allocate(of_journal)) for _ in range(2)]
    row: Any = OneRow(1)
    writers = [JournalWriter(written[0], arena, [row]), RowJournalWriter(written[1], arena, [row])]
    rng = np.random.default_rng(3)
    codes = [actions.OUT_OF_BAND] if action == OBJECT else [INT64, INT8, INT8 | actions.PYTHON, actions.OUT_OF_BAND]
    for number in range(50):
        arena.needs_reset[:] = rng.integers(0, 4)
        arena.op[:] = OP_PART if number % 7 == 3 else OP_STEP
        arena.action_codes[0][:] = rng.choice(codes)
        arena.actions[0][:] = rng.integers(0, 256, arena.actions[0].size)
        arena.request[:] += 1
        for writer in writers:
            if number % 10 == 5:
                writer.begin_reset({1: number} if number % 20 == 5 else {}, lambda row: b"")
            else:
                writer.begin([row], {})
        arena.observations[0][:] = rng.integers(0, 256, arena.observations[0].shape)
        arena.request[:] += number % 2  # the driver may post the next step before the end is noted
        for writer in writers:
            writer.end()
    one, other = ([j.words.tolist(), j.kinds, j.codes, *j.actions, j.digests] for j in written)
    assert all(np.array_equal(*both) for both in zip(one, other, strict=True)) and one[0][1] == 50
