"""What ``RecordOptions`` accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.record_options import RecordOptions
from envhub_client.session.options import SessionOptions


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"folder": 3}, "folder must be a path, got 3"),
        ({"env_ids": "0"}, r"env_ids must be numbers of envs, such as \[0, 1\], got '0'"),
        ({"env_ids": 3}, r"env_ids must be numbers of envs, such as \[0, 1\], got 3"),
        ({"env_ids": [True]}, "each of env_ids must be a whole number, got True"),
        ({"film": [0.0]}, "each of film must be a whole number, got 0.0"),
        ({"every": 1.5}, "every must be a whole number, got 1.5"),
        ({"queue_bytes": "1"}, "queue_bytes must be a whole number, got '1'"),
    ],
)
def test_value_of_another_type_is_named(said: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        RecordOptions(**{"folder": "runs", **said})


def test_folder_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r'folder is empty; "\." is the working directory'):
        SessionOptions(record="")
    with pytest.raises(ValueError, match=r"folder has a null character: 'a\\x00b'"):
        SessionOptions(record="a\0b")


def test_numbers_of_numpy_become_those_that_json_has() -> None:
    options = RecordOptions("runs", env_ids=np.arange(2), every=np.int64(3), film=np.array([1]))  # type: ignore[arg-type]
    numbers = [*options.chosen(2), *options.film, options.every]
    assert numbers == [0, 1, 1, 3] and {*map(type, numbers)} == {int}


def test_record_that_is_no_folder_is_named() -> None:
    assert SessionOptions(record=Path("runs")).record == RecordOptions(Path("runs"))
    with pytest.raises(TypeError, match="record must be a folder, a RecordOptions or None, got 3"):
        SessionOptions(record=3)  # type: ignore[arg-type]
