"""The bytes on the wire are those of ``golden.json``: a change of theirs breaks clients in other languages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance import golden

from envhub.values import codec

KEPT = json.loads(Path(golden.__file__).with_suffix(".json").read_text())
MADE = golden.golden()


@pytest.mark.parametrize("kind", ["exchanges", "values"])
def test_nothing_was_added_or_dropped_unsaid(kind: str) -> None:
    assert list(MADE[kind]) == list(KEPT[kind])


@pytest.mark.parametrize("name", KEPT["exchanges"])
def test_frames_are_the_golden_ones(name: str) -> None:
    assert MADE["exchanges"][name] == KEPT["exchanges"][name]


@pytest.mark.parametrize("name", KEPT["values"])
def test_values_are_the_golden_ones_and_decode(name: str) -> None:
    assert MADE["values"][name] == KEPT["values"][name]
    assert codec.encode(codec.decode(bytes.fromhex(KEPT["values"][name]))).hex() == KEPT["values"][name]
