"""The folder of a recording."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from gymnasium.spaces import Box, Discrete

from envhub.recording.folder import STAGING, RecordingFolder, claim


def test_leftovers_of_recordings_whose_process_was_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", "restored")
    spaces = Box(-1, 1, (1,)), Discrete(2)
    (left := claim(tmp_path) / STAGING / "episodes").mkdir(parents=True)
    running = RecordingFolder(claim(tmp_path), "", *spaces, 30.0)
    assert not left.parent.exists() and left.parent.parent.exists()
    with contextlib.closing(RecordingFolder(claim(tmp_path), "", *spaces, 30.0)):
        assert (running.path / STAGING).exists()
    running.close()
    running.close()
    assert not (running.path / STAGING).exists()
