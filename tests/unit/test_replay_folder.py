"""The folder of replays holds no more than it may, and a hub removes nothing there that is not its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from envhub_server import replay
from envhub_server.replay import files_in, keep, name_beginning


def named(name: str) -> str:
    """The name of a file as a hub makes it."""
    return f"{name_beginning(name, '0' * 16)}-env0-0"


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
