"""Replays are written in a thread, which neither holds the hub's loop nor keeps more memory than it may."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from envhub_server.hub import replay_writer
from envhub_server.hub.replay_writer import WAITING_BYTES_MAX, ReplayWriter
from envhub_server.loop.poller import Poller

SOME_S = 10.0


class SlowFolder:
    """Keeps nothing until it is told to."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def remove_leftovers(self) -> None:
        pass

    def keep(self, name: str, blob: bytes) -> Path:
        self.begun.set()
        assert self.go.wait(SOME_S)
        self.kept.append(name)
        return Path(name)


class Log:
    """Keeps what is logged, whatever another test has made of the log of this process."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []

    def warning(self, event: str, replay: str, why: str) -> None:
        self.lines.append((event, replay, why))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_writer, "CLOSE_S", SOME_S)  # so that the thread has its turn, however late


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(replay_writer, "log", log)
    return log


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


def test_loop_goes_on_while_the_disk_does_not(poller: Poller) -> None:
    folder = SlowFolder()
    writer = ReplayWriter(folder, poller)
    writer.begin()
    writer.write(1, "first", 10, lambda: b"")
    assert folder.begun.wait(SOME_S)
    writer.write(1, "second", 10, lambda: b"")
    assert folder.kept == []
    folder.go.set()
    writer.close()
    assert folder.kept == ["first", "second"]


def test_session_may_take_half_of_what_waits(poller: Poller, log: Log) -> None:
    folder, half = SlowFolder(), WAITING_BYTES_MAX // 2
    writer = ReplayWriter(folder, poller)
    writer.begin()
    for session, name in ((1, "a"), (1, "b"), (2, "c"), (3, "d")):
        writer.write(session, name, half, lambda: b"")
    folder.go.set()
    writer.close()
    assert folder.kept == ["a", "c"]
    assert log.lines == [
        ("replay_not_kept", "b", f"those of its session that wait to be written hold up to {half} bytes of journals"),
        ("replay_not_kept", "d", f"those that wait to be written hold up to {2 * half} bytes of journals"),
    ]


def test_loop_logs_what_the_thread_could_not_write(poller: Poller, log: Log) -> None:
    def damaged() -> bytes:
        raise KeyError("kinds")

    folder = SlowFolder()
    folder.go.set()
    writer = ReplayWriter(folder, poller)
    writer.begin()
    writer.write(1, "a", 1, damaged)
    poller.handle(poller.wait(SOME_S))
    assert log.lines == [("replay_not_kept", "a", "KeyError('kinds')")]
    writer.write(1, "b", 1, lambda: b"")
    writer.close()
    assert folder.kept == ["b"]


def test_reason_does_not_differ_by_the_name_of_the_file(poller: Poller, log: Log, tmp_path: Path) -> None:
    class NoFolder(SlowFolder):
        def keep(self, name: str, blob: bytes) -> Path:
            (tmp_path / "none" / name).write_bytes(blob)
            return Path(name)

    writer = ReplayWriter(NoFolder(), poller)
    writer.begin()
    for name in ("a", "b"):
        writer.write(1, name, 1, lambda: b"")
    writer.close()
    assert log.lines == [("replay_not_kept", name, "No such file or directory") for name in ("a", "b")]


class Journal:
    """Can be read, and is gone once nobody holds it."""

    def read(self) -> bytes:
        return b""


def test_what_is_written_is_held_no_longer(poller: Poller) -> None:
    folder, journal = SlowFolder(), Journal()
    folder.go.set()
    writer = ReplayWriter(folder, poller)
    writer.begin()
    gone = threading.Event()
    weakref.finalize(journal, gone.set)
    writer.write(1, "replay", 100, journal.read)
    del journal
    assert gone.wait(SOME_S)
    writer.close()


def test_hub_that_ends_waits_for_a_moment_only(poller: Poller, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_writer, "CLOSE_S", 0.05)
    folder = SlowFolder()
    writer = ReplayWriter(folder, poller)
    writer.begin()
    writer.write(1, "a", 1, lambda: b"")
    assert folder.begun.wait(SOME_S)
    writer.write(1, "b", 1, lambda: b"")
    writer.close()
    folder.go.set()
    assert log.lines == [("replay_not_kept", "b", "the hub ends")]
