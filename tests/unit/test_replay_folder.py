"""The folder of replays holds no more than it may, whatever ended the hubs that wrote into it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from envhub_server.catalog.replay_folder import UNFINISHED, ReplayFolder, files_in


def named(name: str) -> str:
    """The name of a file as a hub makes it."""
    return f"{name}-{'0' * 16}-env0-0"


def names(folder: Path) -> list[str]:
    return sorted(path.name.replace(named(""), "") for path in folder.iterdir())


def test_files_of_a_user_are_neither_removed_nor_counted(tmp_path: Path) -> None:
    own = [tmp_path / name for name in ("rocket.replay", ".rocket.replay.part", "saved-env0-0.replay")]
    for path in own:
        path.write_bytes(b"x" * 900)
    folder = ReplayFolder(tmp_path, 1, 1000)
    folder.remove_leftovers()
    for name in ("a", "b"):
        folder.keep(named(name), b"x" * 900)
    assert names(tmp_path) == sorted(["b.replay", *(path.name for path in own)])


def test_file_is_whole_and_the_only_one(tmp_path: Path) -> None:
    path = ReplayFolder(tmp_path / "kept", 10, 1000).keep(named("a"), b"xyz")
    assert path.read_bytes() == b"xyz"
    assert names(tmp_path / "kept") == ["a.replay"]


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[list[str], int]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((names(tmp_path), os.fstat(file).st_size)))
    ReplayFolder(tmp_path, 10, 1000).keep(named("a"), b"xyz")
    ((found, nbytes),) = synced
    assert nbytes == 3 and len(found) == 1 and found[0].endswith(UNFINISHED)


def test_files_that_come_and_go_beside_a_hubs_own_count(tmp_path: Path) -> None:
    folder = ReplayFolder(tmp_path, 10, 1000)
    folder.keep(named("a"), b"x" * 400)
    (tmp_path / f"{named('a')}.replay").unlink()
    ReplayFolder(tmp_path, 10, 1000).keep(named("b"), b"x" * 400)
    folder.keep(named("c"), b"x" * 400)
    assert names(tmp_path) == ["b.replay", "c.replay"]
    folder.keep(named("c"), b"x" * 700)  # the same once more
    assert names(tmp_path) == ["c.replay"]


def test_what_another_hub_is_writing_is_not_removed(tmp_path: Path) -> None:
    with (tmp_path / f".{named('a')}{UNFINISHED}").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ReplayFolder(tmp_path, 10, 1000).remove_leftovers()
        assert names(tmp_path) == [f".a{UNFINISHED}"]


def test_file_for_which_there_is_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="1001 bytes are more than replays_bytes_max=1000"):
        ReplayFolder(tmp_path, 10, 1000).keep(named("b"), b"x" * 1001)
    assert files_in(tmp_path) == []


def test_only_files_are_listed_and_give_way(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{named('pipe')}.replay")  # which blocks whoever opens it
    (tmp_path / f"{named('folder')}.replay").mkdir()
    folder = ReplayFolder(tmp_path, 1, 1000)
    folder.keep(named("a"), b"x")
    folder.keep(named("b"), b"x")
    assert files_in(tmp_path) == [tmp_path / f"{named('b')}.replay"]
    assert names(tmp_path) == ["b.replay", "folder.replay", "pipe.replay"]
