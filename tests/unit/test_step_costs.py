"""What steps of envs took: under which key it is kept, how much of it, and in which file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from envhub_server.catalog.step_cost_file import cache_path, read, write
from envhub_server.catalog.step_costs import ENVIRONMENTS_MAX, KEY_CHARACTERS, StepCost, StepCosts, average, key
from envhub_server.ipc.control import StepTimes
from hypothesis import given
from hypothesis import strategies as st

from envhub.protocol.messages import Make

COST, OTHER = StepCost(0.001, 0.0), StepCost(0.0, 0.01)
A, B = "a" * KEY_CHARACTERS, "b" * KEY_CHARACTERS


def named(number: int) -> str:
    return f"{number:0{KEY_CHARACTERS}}"


# --- averages ---------------------------------------------------------------------------------------------------------


def test_average_is_that_of_all_workers_steps() -> None:
    assert average([StepTimes(30, 10**9, 0, 5), StepTimes(10, 0, 4 * 10**9, 7)]) == StepCost(0.025, 0.1, 7)


@pytest.mark.parametrize("times", [[], [StepTimes(23, 1, 1)], [StepTimes(64, -1, 0)], [StepTimes(64, 0, 10**30)]])
def test_too_few_steps_or_impossible_ones_say_nothing(times: list[StepTimes]) -> None:
    assert average(times) is None


# --- libraries --------------------------------------------------------------------------------------------------------


def test_libraries_of_an_env_are_kept_with_its_cost() -> None:
    costs = StepCosts()
    for at, libraries in ((A, ("torch", "scipy.stats")), (B, ()), (named(1), None)):
        costs.note(at, cost := replace(COST, libraries=libraries))
        assert costs.find(at) == StepCosts.of_text(costs.text()).find(at) == cost


@pytest.mark.parametrize("libraries", [["os"], [["torch"]], [{"torch": 1}], [None, 3], ["torch" * 10_000]])
def test_libraries_of_a_file_that_are_none_are_left_out(libraries: list[object]) -> None:
    read_back = StepCosts.of_text(json.dumps({"format": 3, "costs": {A: [0.001, 0, 0, libraries, False, False]}}))
    assert read_back.find(A) == replace(COST, libraries=())


# --- keys -------------------------------------------------------------------------------------------------------------


def test_key_differs_between_envs_and_is_the_same_for_any_number_of_them() -> None:
    makes = [
        Make(4, "CartPole-v1"),
        Make(4, "CartPole-v0"),
        Make(4, "CartPole-v1", kwargs=b"k"),
        Make(4, "CartPole-v1", wrappers=["a:B"], wrapper_kwargs=[b""]),
        Make(4, "CartPole-v1", wrappers=["a:B"], wrapper_kwargs=[b"x"]),
        Make(4, factories=b"f", factories_digest="d"),
        Make(4, factories=b"f", factories_digest="e"),
    ]
    assert len({key(make) for make in makes}) == len(makes)
    assert key(Make(4, "CartPole-v1", seed := b"k")) == key(Make(64, "CartPole-v1", seed, num_workers=7))
    assert key(Make(4, factories=b"f", factories_digest="d")) == key(Make(4, factories=b"g", factories_digest="d"))
    assert all(len(key(make)) == KEY_CHARACTERS for make in makes)


def test_factories_without_a_digest_have_no_key() -> None:
    assert key(Make(4, factories=b"f")) == ""
    assert key(Make(4, "CartPole-v1", runner=b"r")) == ""


# --- the table --------------------------------------------------------------------------------------------------------


def test_last_cost_is_the_one_that_is_known() -> None:
    costs = StepCosts()
    assert costs.find(A) is None
    costs.note(A, COST)
    costs.note(A, OTHER)
    assert costs.find(A) == OTHER


def test_environment_that_was_used_longest_ago_makes_room() -> None:
    costs = StepCosts()
    for number in range(ENVIRONMENTS_MAX):
        costs.note(named(number), COST)
    assert costs.find(named(0)) == COST  # which uses it
    costs.note(named(ENVIRONMENTS_MAX), COST)
    assert len(costs) == ENVIRONMENTS_MAX
    assert costs.find(named(0)) == COST and costs.find(named(1)) is None


@given(
    st.dictionaries(
        st.integers(0, 9).map(named), st.builds(StepCost, st.floats(0, 9), st.floats(0, 9), st.integers(0, 1 << 40))
    )
)
def test_table_survives_as_text(found: dict[str, StepCost]) -> None:
    costs = StepCosts()
    for name, cost in found.items():
        costs.note(name, cost)
    read = StepCosts.of_text(costs.text())
    assert {name: read.find(name) for name in found} == found


@given(st.text())
def test_any_other_text_is_nothing_known(text: str) -> None:
    assert len(StepCosts.of_text(text)) == 0


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {"format": 2},
        {"format": 1, "costs": {A: [1, 1, 0, None]}},
        {"format": 2, "costs": [1]},
        {"format": 2, "costs": {A: 3}},
        {"format": 2, "costs": {A: [1]}},
        {"format": 2, "costs": {A: ["x", 1, 0, None]}},
        {"format": 2, "costs": {A: [-1, 0, 0, None]}},
        {"format": 2, "costs": {A: [float("nan"), 0, 0, None]}},
        {"format": 2, "costs": {A: [0, float("inf"), 0, None]}},
        {"format": 2, "costs": {"short": [0, 0, 0, None]}},
        {"format": 2, "costs": {A: [10**400, 0, 0, None]}},
        {"format": 2, "costs": {A: [0, 0, -1, None]}},
        {"format": 2, "costs": {A: [0, 0, 10**400, None]}},
        {"format": 2, "costs": {A: [0, 0, 0]}},
        {"format": 2, "costs": {A: [0, 0, 0, 3]}},
    ],
)
def test_impossible_tables_are_nothing_known(found: object) -> None:
    assert len(StepCosts.of_text(json.dumps(found))) == 0


# --- the file ---------------------------------------------------------------------------------------------------------


def test_file_keeps_what_programs_wrote_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "costs.json"
    assert len(read(path)) == 0
    write(path, {A: COST})
    write(path, {B: OTHER})  # which did not know of the other
    costs = read(path)
    assert (costs.find(A), costs.find(B)) == (COST, OTHER)
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]  # and no temporary one


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 2, "costs": {}}' * 2])
def test_broken_file_is_harmless_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    assert len(read(path)) == 0
    write(path, {A: COST})
    assert read(path).find(A) == COST


def test_pipe_in_place_of_the_file_delays_no_hub(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "costs.json")
    assert len(read(tmp_path / "costs.json")) == 0


def test_folder_that_cannot_be_written_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "costs.json"
    write(path, {A: COST})
    assert len(read(path)) == 0


def test_hub_without_a_file_keeps_nothing() -> None:
    write(None, {A: COST})
    assert len(read(None)) == 0


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"HOME": "/home/a"}, Path("/home/a/.cache/envhub/step_costs.json")),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}, Path("/c/envhub/step_costs.json")),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, Path("/home/a/.cache/envhub/step_costs.json")),
        ({"HOME": "/home/a", "ENVHUB_CACHE": "off"}, None),
        ({}, None),
    ],
)
def test_file_is_in_the_users_cache_folder(environ: dict[str, str], path: Path | None) -> None:
    assert cache_path(environ) == path
