from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from envhub_server.worker.batch_places import choose_infos, info_columns, infos_by_env
from gymnasium.vector import VectorEnv

from envhub.values.info_columns import TEMPLATES_MAX, BatchWriter, Writer

EACH: list[list[dict[str, Any]]] = [
    [{"a": 1, "b": {"c": 0.5, "d": np.arange(2)}}, {"a": 2, "b": {"c": 1.5, "d": np.arange(2) + 5}}],
    [{"a": 1}, {}, {"a": 3, "word": "x"}],
    [{}, {"deep": {"er": {"x": True}}}],
    [{"flag": np.True_}, {"flag": np.False_}],
    [{"final_obs": {"at": np.zeros(2)}, "final_info": {"n": 1}}, {}],
    [{}, {}],
]


class Envs(VectorEnv[Any, Any, Any]):
    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


def batched(each: list[dict[str, Any]]) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    for number, info in enumerate(each):
        infos = Envs(len(each))._add_info(infos, info, number)
    return infos


@pytest.mark.parametrize("each", EACH, ids=str)
def test_infos_are_taken_apart_as_gymnasium_has_put_them_together(each: list[dict[str, Any]]) -> None:
    found = infos_by_env(batched(each), len(each))
    assert re.sub(r"np\.\w+64\((.*?)\)", r"\1", str(found)) == str(each)  # what was in an array is NumPy's
    assert str(batched(found)) == str(batched(each))


@pytest.mark.parametrize("each", EACH, ids=str)
def test_columns_are_there_only_if_every_env_has_every_number(each: list[dict[str, Any]]) -> None:
    found = info_columns(batched(each), len(each))
    assert (found is None) == (each not in (EACH[0], EACH[5]))


def test_key_without_a_mask_is_every_envs_and_a_value_that_is_none_per_env_too() -> None:
    infos = {"lives": np.array([3, 2], np.int32), "fast": np.array([True, False]), "total": 9, "names": ["a", "b"]}
    first, second = infos_by_env(infos, 2)
    assert first == {"lives": 3, "fast": True, "total": 9, "names": "a"} and type(first["lives"]) is np.int32
    assert second["fast"] is False and second["total"] == 9
    assert info_columns(infos, 2) is None
    assert set(info_columns({"lives": infos["lives"], "in": {"x": infos["fast"]}}, 2) or {}) == {
        "lives",
        "in",
    }


def test_values_of_several_types_are_no_column() -> None:
    assert info_columns({"n": [1, 2.5]}, 2) is None
    assert info_columns({"n": [True, 5]}, 2) is None
    assert info_columns({"n": [1.0, 2.5]}, 2) is not None


def test_infos_of_some_envs_are_their_entries() -> None:
    infos = {"a": np.arange(3), "b": {"c": [4, 5, 6]}, "d": 7}
    found = choose_infos(infos, np.array([True, False, True]))
    assert found["a"].tolist() == [0, 2] and found["b"]["c"] == [4, 6] and found["d"] == 7


def test_batch_of_infos_is_written_as_each_env_would_write_its_own() -> None:
    announced: list[int] = []
    batch = {
        "n": np.array([1, 2]),
        "deep": {"at": np.array([[1, 2], [3, 4]], np.float32)},
        "ok": np.array([True, False]),
    }
    places = np.zeros((5, 64), np.uint8)
    writer = Writer(64, lambda number, example: announced.append(number))
    number, nbytes = BatchWriter(writer, places, slice(1, 4, 2)).write(batch, lambda: infos_by_env(batch, 2)[0])
    assert announced == [number]
    for row, info in zip((1, 3), infos_by_env(batch, 2), strict=True):
        place = np.zeros(64, np.uint8)
        assert writer.write(info, place.data) == (number, nbytes)
        assert places[row].tobytes() == place.tobytes()
    assert not places[[0, 2, 4]].any()


def test_batch_of_infos_that_is_too_large_is_not_written() -> None:
    batch = {"n": np.zeros((2, 100))}
    writer = BatchWriter(Writer(64, lambda number, example: None), np.zeros((2, 64), np.uint8), slice(0, 2))
    assert writer.write(batch, lambda: infos_by_env(batch, 2)[0]) == (0, 0)


def test_batches_of_infos_have_a_limit_of_forms() -> None:
    writer = BatchWriter(Writer(64, lambda number, example: None), np.zeros((2, 64), np.uint8), slice(0, 2))
    batches = [{str(key): np.arange(2)} for key in range(TEMPLATES_MAX + 2)]
    written = [writer.write(batch, partial(dict.fromkeys, batch, 0)) for batch in batches]
    assert [nbytes for _, nbytes in written] == [8] * TEMPLATES_MAX + [0, 0]
    assert len({number for number, _ in written}) == TEMPLATES_MAX + 1 and written[-1] == (0, 0)
    assert writer.write(batches[0], dict) == written[0]  # its form is known


def test_batches_of_infos_that_nest_otherwise_or_have_other_types_are_of_other_forms() -> None:
    numbers = np.arange(2)
    nested = (
        {"a": {"b": numbers}, "c": numbers},
        {"a": {"b": numbers, "c": numbers}},
        {"a": {"c": numbers, "b": numbers}},
        {"a": {"c": numbers, "b": numbers + 0.5}},
    )
    writer = BatchWriter(Writer(64, lambda number, example: None), np.zeros((2, 64), np.uint8), slice(0, 2))
    written = [writer.write(batch, infos_by_env(batch, 2)[0].copy) for batch in nested]
    assert len(set(written)) == len(nested) and (0, 0) not in written
