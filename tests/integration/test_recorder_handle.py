"""What a program tells the process that records, also where that does not read."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest
from envhub_server.hub import recordings
from envhub_server.hub.recordings import Recordings
from envhub_server.hub.session_observer import Recipient
from envhub_server.ipc import control
from envhub_server.log import Logger
from envhub_server.loop.poller import Poller
from gymnasium.spaces import Box, Discrete
from hubs import open_files, wait_until
from structlog.testing import CapturingLogger

import envhub
from envhub.arena.layout import Layout
from envhub.job_signals import JOB_SIGNALS
from envhub.protocol.messages import Make
from envhub.recording.process import FPS, Line, RecorderProcess, _fps_of, check_shape
from envhub.recording.recorder import EpisodeRecorder, Selection
from envhub.recording.recorder_handle import RecorderHandle, setup_of, why_unrecordable
from envhub.recording.tape import Tape, TapeShape, new_tape
from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT, Leaf

LINES = 300
SPACES = Box(-9, 9, (1,)), Discrete(2)
DESCRIBED = [codec.encode(spaces.describe(space)) for space in SPACES]


@pytest.fixture
def handle() -> Iterator[RecorderHandle]:
    handle = RecorderHandle()
    os.kill(handle.process.pid, signal.SIGSTOP)
    handle.control.setblocking(False)
    yield handle
    handle.control.close()
    handle.process.kill()
    handle.process.wait()


def go_on(handle: RecorderHandle) -> None:
    os.kill(handle.process.pid, signal.SIGCONT)
    handle.control.settimeout(20)  # for each order that waits
    handle.flush()
    assert not handle.is_waiting


def play_one_step(line: socket.socket, number: int) -> None:
    """Record an episode of the env of this number."""
    recorder = EpisodeRecorder(line, Selection(1, [0], numbers=[number]), SPACES, "Disabled", 4096)
    recorder.open()
    recorder.reset(None, None, [np.zeros((1, 1))])
    recorder.acted([np.zeros(1, int)])
    recorder.stepped([np.ones((1, 1))], (np.zeros(1), np.zeros(1, bool), np.ones(1, bool)), {})
    recorder.close()


@pytest.mark.long
def test_lines_that_the_socket_has_no_room_for_are_recorded(handle: RecorderHandle, tmp_path: Path) -> None:
    options = envhub.RecordOptions(tmp_path)
    about = {"num_envs": LINES}
    handle.set_up(setup_of(options, str(tmp_path), False, DESCRIBED, about))
    lines = [handle.add_line(number, [number], [], 4096) for number in range(LINES)]
    assert handle.is_waiting
    go_on(handle)
    for number in range(0, LINES, 23):
        play_one_step(lines[number], number)
    for line in lines:
        line.close()
    handle.close()
    assert handle.process.wait(60) == 0
    found = minari.MinariDataset(str(tmp_path / "recording-v0/data"))
    abouts = found.storage.get_episode_metadata(found.episode_indices)
    assert (tmp_path / "recording-v0").stat().st_mode & 0o777 == 0o700
    assert [about["env_id"] for about in abouts] == [*range(0, LINES, 23)]


@pytest.mark.long
def test_process_that_is_told_to_end_with_its_program_writes_everything_first(
    handle: RecorderHandle, tmp_path: Path
) -> None:
    handle.set_up(setup_of(envhub.RecordOptions(tmp_path), str(tmp_path), False, DESCRIBED, {}))
    lines = [handle.add_line(number, [number], [], 4096) for number in range(2)]
    go_on(handle)
    for number, line in enumerate(lines):
        play_one_step(line, number)
        for sent in JOB_SIGNALS:
            os.kill(handle.process.pid, sent)
    handle.control.close()
    assert handle.process.wait(60) == 0
    assert minari.MinariDataset(str(tmp_path / "recording-v0/data")).total_episodes == 2


def test_spaces_that_cannot_be_recorded_are_told_from_others() -> None:
    number, empty = Leaf("<f8", ()), Leaf("<f8", (2, 0))
    assert why_unrecordable([number, Leaf("|u1", (3, 4))]) == ""
    assert "fixed size" in why_unrecordable([number, OBJECT])
    assert "without elements" in why_unrecordable([number, empty])


@pytest.mark.long
@pytest.mark.parametrize("gives_up", [False, True])
def test_process_with_a_full_socket_ends_when_it_is_closed(handle: RecorderHandle, gives_up: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    numbers = itertools.count()
    while not handle.is_waiting:
        handle.add_line(next(numbers), [0], [], 1).close()
    if gives_up:
        handle.give_up()
        assert len(os.listdir("/proc/self/fd")) <= before  # libzmq may close descriptors of earlier tests meanwhile
        os.kill(handle.process.pid, signal.SIGCONT)
    else:
        handle.close()
        go_on(handle)
    assert handle.process.wait(30) == 0


def test_process_imports_nothing_of_the_folder_in_which_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("minari", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    handle = RecorderHandle()
    with handle.control:
        handle.close()
        assert handle.process.wait(60) == 0


GIVEN = {"block": 0, "steps": 1, "notes": [], "dropped": 0, "left": 7, "close": False}
MALFORMED: list[Any] = [
    *(b"\xc1", {}, {"shape": 1}, {"shape": {"places": 1}}, {"shape": {**GIVEN, "frame": []}}),
    *({**GIVEN, "block": 8}, {**GIVEN, "block": -1}, {**GIVEN, "steps": 1 << 40}, {**GIVEN, "notes": [[0]]}),
    *({**GIVEN, "block": "all"}, {**GIVEN, "notes": [[0, 0, 1], 5]}, {**GIVEN, "dropped": -1}),
]


def test_line_by_which_nonsense_comes_ends_alone(handle: RecorderHandle, tmp_path: Path) -> None:
    setup = setup_of(envhub.RecordOptions(tmp_path), str(tmp_path), False, DESCRIBED, {})
    handle.set_up(setup)
    lines = [handle.add_line(number, [number], [], 4096) for number in range(2 * len(MALFORMED) + 3)]
    go_on(handle)
    shape = tape_shape()
    for number, what in enumerate(MALFORMED):
        message = what if isinstance(what, bytes) else codec.encode(what)
        lines[2 * number].send(message)  # in place of the tape
        _, tape = new_tape(shape)
        with open(tape, "rb"):
            socket.send_fds(lines[2 * number + 1], [codec.encode({"shape": shape.wire()})], [tape])
        with open(os.devnull) as surplus:  # after it
            socket.send_fds(lines[2 * number + 1], [message], [surplus.fileno()])
    good, no_tape, other = lines[2 * len(MALFORMED) :]
    no_tape.send(codec.encode({"shape": shape.wire()}))
    with open(os.devnull) as file:
        socket.send_fds(other, [codec.encode({"shape": shape.wire()})], [file.fileno()])
    for line in (each for each in lines if each is not good):
        line.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while line.recv(1 << 16):
                """It ends, though this end does not."""
    play_one_step(good, 0)
    assert not [name for name in open_files(handle.process.pid) if name.endswith(os.devnull)][1:]  # of its own stdin
    handle.close()
    handle.control.settimeout(20)
    refused = [answer["refused"] for answer in iter(handle.answer, None) if answer["refused"]]
    assert sorted(each["env"] for each in refused) == sorted({*range(len(lines))} - {lines.index(good)})
    assert all(each["why"].startswith("a message of their worker is refused: ") for each in refused)
    assert handle.process.wait(60) == 0
    assert minari.MinariDataset(str(tmp_path / "recording-v0/data")).total_episodes == 1
    for line in lines:
        line.close()


def test_all_threads_of_the_process_have_their_share_of_the_cpu_at_the_end() -> None:
    code = "import os, threading; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); "
    code += "threading.Thread(target=input).start(); print(flush=True)"
    handle = RecorderHandle()
    with handle.control, subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        handle.process.kill()
        handle.process.wait()
        handle.process = process
        assert process.stdout and process.stdout.readline()
        threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
        assert [os.sched_getscheduler(thread) for thread in threads] == [os.SCHED_IDLE] * 2
        handle.give_up()
        assert [os.sched_getscheduler(thread) for thread in threads] == [os.SCHED_OTHER] * 2
        process.kill()


@pytest.mark.long
def test_process_whose_program_was_killed_has_its_share_of_the_cpu(handle: RecorderHandle, tmp_path: Path) -> None:
    handle.set_up(setup_of(envhub.RecordOptions(tmp_path), str(tmp_path), False, DESCRIBED, {}))
    written, open_line = (handle.add_line(number, [number], [], 4096) for number in range(2))
    go_on(handle)
    play_one_step(written, 0)
    pid = handle.process.pid
    assert wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE)
    handle.control.close()  # it waits for the last words of the open line
    assert wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_OTHER)
    open_line.close()
    assert handle.process.wait(60) == 0


def test_films_of_episodes_beyond_the_limit_are_discarded(tmp_path: Path) -> None:
    class Film:
        discarded = False

        def discard(self) -> None:
            self.discarded = True

    ends = socket.socketpair()
    recorder: Any = RecorderProcess(ends[0])
    recorder._setup = {"only": "all", "limits": dict.fromkeys(("episodes_max", "bytes_max", "folder_bytes_max"), 2)}
    kept: list[Any] = []
    recorder._folder = types.SimpleNamespace(add=kept.extend, episodes=2, nbytes=0, path=tmp_path / "kept")
    films = [Film() for _ in range(4)]
    episodes = [types.SimpleNamespace(ended="cut", steps=1, nbytes=1, film=film) for film in films]
    recorder._keep(episodes)
    assert kept == episodes[:2] and [film.discarded for film in films] == [False, False, True, True]
    for end in ends:
        end.close()


def test_line_of_too_many_envs_for_one_message_is_refused(handle: RecorderHandle) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="too many envs each"):
        handle.add_line(0, range(100_000), [], 1)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("metadata", ["not readable", None, {}, {"render_fps": "30"}, {"render_fps": float("nan")}])
def test_metadata_without_a_usable_rate_of_frames_has_the_usual_one(metadata: Any) -> None:
    assert _fps_of(metadata) == FPS
    assert _fps_of({"render_fps": 20}) == 20


def tape_shape(**changed: Any) -> TapeShape:
    observations, actions = ([leaf.wire() for leaf in spaces.leaves(space)] for space in SPACES)
    return TapeShape(
        **{"places": 1, "steps": 1, "mode": "NextStep", "observations": observations, "actions": actions, **changed}
    )


def test_tape_cannot_be_made_smaller_by_who_has_it() -> None:
    _, descriptor = new_tape(tape_shape())
    with open(descriptor, "r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)


def test_tape_that_could_be_made_smaller_is_not_mapped() -> None:
    with open(os.memfd_create("unsealed", os.MFD_ALLOW_SEALING), "r+b") as file:
        file.truncate(1 << 20)
        with pytest.raises(ValueError, match="not sealed"):
            Tape(tape_shape(), file.fileno())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        *(({"places": 2}, "2 envs"), ({"films": 2}, "2 films"), ({"steps": 9}, "9 steps"), ({"actions": []}, "leaves")),
        *(
            ({"films": 1, "frame": frame}, "its frames")
            for frame in [(), (4, 4), (4, 4, 4), (0, 4, 3), (1 << 20, 4, 3)]
        ),
    ],
)
def test_tape_of_other_sizes_than_were_granted_is_refused(changed: dict[str, Any], why: str) -> None:
    line = Line(socket.socket(), [0], [0], queue_bytes=1)
    leaves = spaces.leaves(SPACES[0]), spaces.leaves(SPACES[1])
    with line.socket:
        check_shape(tape_shape(), line, leaves)  # it cannot be filmed
        check_shape(tape_shape(films=1, frame=(4, 4, 3)), line, leaves)
        with pytest.raises(ValueError, match=why):
            check_shape(tape_shape(**changed), line, leaves)


# --- the hub ----------------------------------------------------------------------------------------------------------

SETTINGS: Any = types.SimpleNamespace(
    vector=False, recorded=types.SimpleNamespace(of_session=lambda count: envhub.RecordOptions("nowhere", range(count)))
)
MAKE: Any = types.SimpleNamespace(name="pole", num_envs=2)


@pytest.fixture
def found() -> Iterator[Recordings]:
    with contextlib.closing(Poller()) as poller:
        found = Recordings(poller, envhub.RecordOptions("nowhere").memory_bytes * 3 // 2)
        yield found
        found.close(lambda: 20.0)
        assert not found.running


def test_recordings_beyond_the_limit_are_not_begun(found: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "RECORDINGS_MAX", 1)
    assert found.begin(SETTINGS, MAKE, "one") is not None
    assert found.begin(SETTINGS, MAKE, "two") is None


@pytest.mark.long
def test_recording_without_memory_is_begun_when_another_has_ended(found: Recordings) -> None:
    made = found.begin(SETTINGS, MAKE, "one")
    assert made is not None and found.begin(SETTINGS, MAKE, "two") is None
    made.close()
    found.close(lambda: 20.0)
    assert found.begin(SETTINGS, MAKE, "two") is not None


@pytest.mark.parametrize("name", ["pidfd_open", "memfd_create"])
def test_recording_that_cannot_be_begun_leaves_nothing(
    found: Recordings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, name, refuse)
    assert found.begin(SETTINGS, MAKE, "one") is None
    assert len(os.listdir("/proc/self/fd")) <= before and not found.running


def test_refused_recording_ends_its_process(found: Recordings) -> None:
    made = found.begin(SETTINGS, MAKE, "one")
    assert made is not None
    made.refuse("it is to be so")
    assert made.handle.process.wait(30) == 0


ARENA = control.MapArena(2, [], [], 64, b"", b"", "same", 0)


def recipient(process: int, rows: list[int], slots: int) -> Recipient:
    layout = Layout(2, (), (), 64)
    return Recipient(process, 0, rows, slots, layout, making=False, log=Logger("test"))


def test_hub_that_waits_for_its_recordings_sees_that_it_may_wait_no_longer(
    found: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = found.begin(SETTINGS, MAKE, "one")
    assert made is not None
    monkeypatch.setattr(made, "_log", logger := CapturingLogger())
    os.kill(made.handle.process.pid, signal.SIGSTOP)
    left_s = [20.0] * 3
    found.close(lambda: left_s.pop() if left_s else 0.0)
    assert not left_s and made.runs
    (line,) = logger.calls
    assert line.args == ("recording_ended",) and line.kwargs["why"] == "the hub ends while it is written"
    made.handle.process.kill()
    made.handle.process.wait()


def test_worker_is_not_recorded_where_no_descriptor_is_left(found: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    made: Any = found.begin(SETTINGS, MAKE, "one")
    made._set_up = True
    told, descriptors = made.arena_given(recipient(0, [0], 2), ARENA)
    assert told.recording["env_ids"] == [0] and set(descriptors) == {"recording_line", "recording_counts"}
    for descriptor in descriptors.values():
        os.close(descriptor)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "dup", refuse)
    assert made.arena_given(recipient(1, [1], 2), ARENA) == (ARENA, {})
    assert made.refused == "Too many open files" and len(os.listdir("/proc/self/fd")) <= before
    assert made.handle.process.wait(30) == 0


def test_wrappers_of_a_session_are_written_beside_its_episodes(
    found: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = found.begin(SETTINGS, MAKE, "one")
    made._make = Make(1, "pole", wrappers=["wraps:It"], wrapper_kwargs=[codec.encode({"size": 3})])
    made._built = types.SimpleNamespace(versions={}, plain_spec=b"", metadata=b"")
    told: list[Any] = []
    monkeypatch.setattr(made.handle, "set_up", told.append)
    made._tell(types.SimpleNamespace(observation_space=b"", action_space=b""))
    assert codec.decode(told[0]["about"])["wrappers"] == ["wraps:It"]
    assert [*map(codec.decode, told[0]["blobs"]["wrapper_kwargs"])] == [{"size": 3}]


def test_process_is_told_that_a_spare_has_the_envs_of_a_worker(
    found: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = found.begin(SETTINGS, MAKE, "one")
    made._set_up = True
    for process in (5, 7):  # the spare, and the worker's, which was started after that
        for descriptor in made.arena_given(recipient(process, [0], 2), ARENA)[1].values():
            os.close(descriptor)
    told: list[int] = []
    monkeypatch.setattr(made.handle, "line_next", told.append)
    made.slot_assigned(5)
    made.slot_assigned(6)  # which has no line
    assert told == [0]


def test_process_is_told_once_that_a_worker_has_ended(found: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = found.begin(SETTINGS, MAKE, "one")
    made._set_up = True
    for descriptor in made.arena_given(recipient(3, [0], 2), ARENA)[1].values():
        os.close(descriptor)
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(made.handle, "line_ended", lambda line, why: told.append((line, why)))
    made.rows_lost(3, "worker 0 was ended by SIGKILL")
    made.process_ended(3, "its worker was ended by SIGKILL")
    made.process_ended(4, "")  # which has no line
    assert told == [(0, "worker 0 was ended by SIGKILL")]


def test_hub_tells_a_process_that_did_not_read_once_it_does(found: Recordings) -> None:
    made: Any = found.begin(SETTINGS, MAKE, "one")
    made._set_up = True
    os.kill(made.handle.process.pid, signal.SIGSTOP)
    for worker in range(LINES):
        for descriptor in made.arena_given(recipient(worker, [0], LINES), ARENA)[1].values():
            os.close(descriptor)
    made.process_ended(LINES - 1, "it was killed")
    made.close()
    assert made.handle.is_waiting and not made.refused
    os.kill(made.handle.process.pid, signal.SIGCONT)
    end_s = time.monotonic() + 60
    while found.running and time.monotonic() < end_s:
        found.poller.handle(found.poller.wait(1))
    assert not found.running and not made.handle.is_waiting
