"""A replay that an earlier version has written: hubs that are upgraded keep their files.

``replay.hex`` was written by version 0.1.0, without paths of its machine. It is of an env of ``FrozenLake-v1`` that was
reset twice, and raised in its sixth call.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from envhub_server import replay
from envhub_server.ipc import replay_file

KEPT = bytes.fromhex((Path(__file__).parent / "replay.hex").read_text())


def test_replay_of_an_earlier_version_has_the_calls_of_its_env() -> None:
    calls = replay_file.unpack(KEPT).calls()
    assert [note.seed for note in calls.notes[:2]] == [3, 5]
    assert [int.from_bytes(calls.actions[0][at : at + 8], "little") for at in range(0, 48, 8)] == [0, 1, 2, 0, 0, 9]


@pytest.mark.long
def test_replay_of_an_earlier_version_fails_alike(tmp_path: Path) -> None:
    kept = replay_file.unpack(KEPT)
    here = {**kept.build, "sys_path": sys.path, "cwd": str(tmp_path)}
    file = tmp_path / "kept.replay"
    file.write_bytes(
        replay_file.pack(replace(kept, build=here, interpreter={**kept.interpreter, "python": sys.executable}))
    )
    found = replay.run(file)
    assert found.alike and "KeyError: 9 at step 5" in found.text, found.text
