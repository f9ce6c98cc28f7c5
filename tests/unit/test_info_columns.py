"""Infos in columns are what ``_add_info`` makes of the same infos one by one."""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import Any

import numpy as np
import pytest
from envhub_client.envs.observations import Infos
from envhub_client.lanes.wire import InfoTemplates
from envhub_server.worker.batch_memory import choose_infos, info_columns, infos_by_env
from gymnasium.vector import VectorEnv
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envhub.values import codec
from envhub.values.info_columns import (
    EXAMPLE_BYTES_MAX,
    NESTING_MAX,
    TEMPLATES_MAX,
    VECTOR_REWARD,
    BatchWriter,
    NotInColumns,
    Rows,
    Template,
    Writer,
    example_of,
    pack_columns,
    unpack_columns,
)

ROW_BYTES = 256
ENVS = 5

numbers = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.booleans().map(np.bool_)
    | st.sampled_from([np.int8, np.uint16, np.int32, np.uint64, np.float16, np.float32, np.float64]).flatmap(
        lambda kind: hnp.from_dtype(np.dtype(kind))
    )
)
arrays = hnp.arrays(
    st.sampled_from([np.dtype(name) for name in ("?", "u1", "i4", "f4", "f8")]),
    hnp.array_shapes(min_dims=0, max_side=3),
)
values = st.recursive(
    numbers | arrays | st.sampled_from(["text", None, 2**70]),
    lambda deeper: st.dictionaries(st.sampled_from(["a", "b", "_a"]), deeper, max_size=3),
    max_leaves=4,
)
forms = st.dictionaries(st.sampled_from(["a", "b", "c", "_a", "final_obs", "n"]), values, max_size=4)


class Batch(VectorEnv[Any, Any, Any]):
    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


class OwnLayout(Batch):
    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        return {**vector_infos, str(env_num): env_info}


class Told(InfoTemplates):
    """Templates that were announced already."""

    def __init__(self, known: dict[int, bytes]) -> None:
        self._templates = {number: Template(codec.decode(example)) for number, example in known.items()}


def carried(infos: list[dict[str, Any]]) -> Infos:
    """The infos as they arrive at a client, by columns where they can."""
    known: dict[int, bytes] = {}
    writer = Writer(ROW_BYTES, lambda number, example, nbytes: known.__setitem__(number, example))
    maps: dict[int, dict[str, Any]] = {}
    found: dict[int, list[tuple[int, bytes]]] = {}
    for row, info in enumerate(infos):
        place = bytearray(ROW_BYTES)
        number, length = writer.write(info, memoryview(place))
        if number:
            found.setdefault(number, []).append((row, bytes(place[:length])))
        elif info:
            maps[row] = codec.decode(codec.encode(info))
    groups = [
        Rows(number, np.array([row for row, _ in rows]), np.array([list(blob) for _, blob in rows], np.uint8))
        for number, rows in found.items()
    ]
    return Infos(maps, Told(known).read(unpack_columns(pack_columns(groups), ENVS)))


def one_by_one(infos: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for row, info in enumerate(infos):
        batch = Batch(ENVS)._add_info(batch, info, row)
    return batch


def assert_equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype == object:
            for one, other in zip(found.flat, wanted.flat, strict=True):
                assert_equal(one, other)
        else:
            assert found.tobytes() == wanted.tobytes()
    else:
        assert found == wanted or (found != found and wanted != wanted)


def outcome(work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        return type(error)


@example([{"_a": {}, "a": {}}, {"a": {"a": False}}])
@given(st.lists(forms, min_size=1, max_size=3).flatmap(lambda some: st.lists(st.sampled_from(some), max_size=ENVS)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_infos_batch_as_they_do_one_by_one(infos: list[dict[str, Any]]) -> None:
    wanted = outcome(lambda: one_by_one(infos))
    found = outcome(lambda: carried(infos).batched(Batch(ENVS)))
    assert_equal(found, wanted)


@given(st.lists(forms, max_size=ENVS))
def test_each_env_s_info_keeps_its_types(infos: list[dict[str, Any]]) -> None:
    assert_equal(carried(infos).by_env(), {row: info for row, info in enumerate(infos) if info})


def test_most_infos_do_come_in_columns() -> None:
    infos = [{"lives": row, "reward": {"x": float(row), "all": np.arange(3.0)}, "won": np.True_} for row in range(ENVS)]
    (group,) = carried(infos)._groups
    assert group.rows.tolist() == list(range(ENVS)) and group.records.nbytes == ENVS * 48


def test_an_own_layout_is_called_for_each_env() -> None:
    assert carried([{"n": 1}, {"n": 2}]).batched(OwnLayout(2)) == {"0": {"n": 1}, "1": {"n": 2}}


def test_a_part_counts_by_its_own_places() -> None:
    infos = carried([{"n": 1}, {}, {"n": 3}, {}, {"s": "x"}]).batched_of(np.array([0, 2, 4]))
    assert infos["n"].tolist() == [1, 3, 0] and infos["_s"].tolist() == [False, False, True]


def test_what_is_too_large_deep_or_odd_is_left_to_the_codec() -> None:
    writer = Writer(64, lambda number, example, nbytes: None)
    deep: dict[str, Any] = {}
    deep["deep"] = deep
    odd: list[dict[Any, Any]] = [{"n": np.zeros(9)}, deep, {1: 2}, {"n": 1 + 2j}, {}, {"n": 2**64}]
    odd.append({"k" * EXAMPLE_BYTES_MAX: 1})
    assert [writer.write(info, bytearray(64)) for info in odd] == [(0, 0)] * len(odd)


def test_info_and_example_may_be_as_large_as_their_limits() -> None:
    announced: list[bytes] = []
    writer = Writer(8, lambda number, example, nbytes: announced.append(example))
    key = "k" * (EXAMPLE_BYTES_MAX - len(codec.encode({"k" * 1000: 1})) + 1000)
    assert writer.write({key: 1}, bytearray(8))[1] == 8 and len(announced[0]) == EXAMPLE_BYTES_MAX
    assert writer.write({key + "k": 1}, bytearray(8)) == writer.write({"a": 1, "b": 2}, bytearray(8)) == (0, 0)


def nested(maps: int) -> dict[str, Any]:
    info: dict[str, Any] = {"n": 1.0}
    for _ in range(maps - 1):
        info = {"in": info}
    return info


def test_template_nests_as_deep_as_a_writers_infos_and_not_without_end() -> None:
    example = nested(NESTING_MAX)
    assert Writer(64, lambda number, example, nbytes: None).write(example, bytearray(64))[1] == 8
    template = Template(example_of(example))
    assert template.infos(np.ones(1, template.dtype)) == [example]
    with pytest.raises(NotInColumns):
        Template(nested(NESTING_MAX + 2))
    with pytest.raises(NotInColumns):
        example_of({"n": ["<f8", [2]]})


@pytest.mark.parametrize("dtype", [">i4", "c8", "O", "U3", "S3", "M8[s]", "i4,f4"])
def test_array_of_what_is_no_native_number_is_in_no_column(dtype: str) -> None:
    with pytest.raises(NotInColumns):
        Template(example_of({"n": np.zeros(2, dtype)}))


@pytest.mark.parametrize(
    "array", [[], ["<f8"], ["<f8", [-1]], ["<f8", [1 << 20]], ["<f8", [1 << 62]], ["<f8", 3], ["xf8", [1]], [8, [1]]]
)
def test_array_that_an_example_does_not_describe_is_refused(array: list[Any]) -> None:
    with pytest.raises((NotInColumns, ValueError, TypeError)):
        Template({"n": array})


def test_last_observations_are_in_columns_unless_gymnasium_keeps_them_apart() -> None:
    for final, groups in (({"x": 1.0}, 0), (np.arange(2.0), 1)):
        infos = [{"final_obs": final, "n": row} for row in range(ENVS)]
        assert len(carried(infos)._groups) == groups
        assert_equal(carried(infos).batched(Batch(ENVS)), one_by_one(infos))


def test_number_of_templates_has_a_limit() -> None:
    announced: list[int] = []
    writer = Writer(64, lambda number, example, nbytes: announced.append(number))
    for key in range(TEMPLATES_MAX + 3):
        writer.write({str(key): 1}, bytearray(64))
    assert len(set(announced)) == TEMPLATES_MAX
    assert writer.write({"0": 7}, bytearray(64))[0] == announced[0]


@pytest.mark.parametrize(
    "frame",
    [
        b"\0" * 15,
        struct.pack("<QII", 1, 0, 8),
        struct.pack("<QII", 1, ENVS + 1, 0),
        struct.pack("<QIII", 1, 1, 8, 0),
        struct.pack("<QIII", 1, 1, 0, ENVS),
        struct.pack("<QIIII", 1, 2, 0, 1, 1),
        struct.pack("<QIIIII", 1, 3, 0, 0, 2, 1),
        struct.pack("<QIII", 1, 1, 0, 0) * (ENVS + 1),
    ],
)
def test_frames_that_do_not_add_up_are_refused(frame: bytes) -> None:
    with pytest.raises(codec.DecodeError):
        unpack_columns(frame, ENVS)


def test_template_without_the_reward_reads_the_same_records() -> None:
    template = Template({VECTOR_REWARD: ["<f8", [2]], "a": 1})
    assert set(template.drop_reward().tree) == {"a"}
    assert template.drop_reward().dtype == template.dtype and set(template.tree) == {VECTOR_REWARD, "a"}
    assert Template({VECTOR_REWARD: ["<f8", [2]]}).drop_reward().infos(np.zeros((3, 16), np.uint8)) == [{}, {}, {}]


def test_info_with_what_no_column_holds_has_no_template() -> None:
    writer = Writer(ROW_BYTES, lambda number, example, nbytes: None)
    assert writer.template_of({"a": 1}, []) is not None and writer.template_of({"a": object()}, []) is None


def test_array_of_another_type_than_its_first_info_is_in_no_column() -> None:
    writer = Writer(ROW_BYTES, lambda number, example, nbytes: None)
    batch = BatchWriter(writer, lambda nbytes: np.zeros((2, ROW_BYTES), np.uint8), slice(0, 2))
    assert batch.write({"a": np.zeros(2, np.float32)}, lambda: {"a": 1.0}) == (0, 0)
    assert batch.write({"a": np.zeros(2)}, lambda: {"a": 1.0})[1] == 8
    assert batch.write({"b": np.zeros(2)}, lambda: {"b": object()}) == (0, 0)


def test_infos_longer_than_the_room_of_their_rows_are_in_no_columns_until_there_is_more() -> None:
    writer, room = Writer(ROW_BYTES, lambda number, example, nbytes: None), list[np.ndarray]()
    assert writer.write({"a": 1.0}, bytearray(4)) == (0, 0) and writer.write({"a": 1.0}, b"", bytearray(8))[1] == 8
    batch = BatchWriter(writer, lambda nbytes: room[0] if room else None, slice(0, 2))
    assert batch.write({"a": np.zeros(2)}, lambda: {"a": 1.0}) == (0, 0)
    room.append(np.zeros((2, ROW_BYTES), np.uint8))
    assert batch.write({"a": np.zeros(2)}, lambda: {"a": 1.0})[1] == 8


# --- infos of a batch -------------------------------------------------------------------------------------------------


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
    assert set(info_columns({"lives": infos["lives"], "in": {"x": infos["fast"]}}, 2) or {}) == {"lives", "in"}


def test_values_of_several_types_are_no_column() -> None:
    assert info_columns({"n": [1, 2.5]}, 2) is None
    assert info_columns({"n": [True, 5]}, 2) is None
    assert info_columns({"n": [1.0, 2.5]}, 2) is not None


def test_infos_of_some_envs_are_their_entries() -> None:
    infos = {"a": np.arange(3), "b": {"c": [4, 5, 6]}, "d": 7}
    found = choose_infos(infos, np.array([True, False, True]))
    assert found["a"].tolist() == [0, 2] and found["b"]["c"] == [4, 6] and found["d"] == 7


def two_rows() -> BatchWriter:
    infos = np.zeros((2, 64), np.uint8)
    return BatchWriter(Writer(64, lambda number, example, nbytes: None), lambda nbytes: infos, slice(0, 2))


def test_batch_of_infos_is_written_as_each_env_would_write_its_own() -> None:
    announced: list[int] = []
    batch = {
        "n": np.array([1, 2]),
        "deep": {"at": np.array([[1, 2], [3, 4]], np.float32)},
        "ok": np.array([True, False]),
    }
    places = np.zeros((5, 64), np.uint8)
    writer = Writer(64, lambda number, example, nbytes: announced.append(number))
    of_rows = BatchWriter(writer, lambda nbytes: places, slice(1, 4, 2))
    number, nbytes = of_rows.write(batch, lambda: infos_by_env(batch, 2)[0])
    assert announced == [number]
    for row, info in zip((1, 3), infos_by_env(batch, 2), strict=True):
        place = np.zeros(64, np.uint8)
        assert writer.write(info, place.data) == (number, nbytes)
        assert places[row].tobytes() == place.tobytes()
    assert not places[[0, 2, 4]].any()


def test_batch_of_infos_that_is_too_large_is_not_written() -> None:
    batch = {"n": np.zeros((2, 100))}
    writer = two_rows()
    assert writer.write(batch, lambda: infos_by_env(batch, 2)[0]) == (0, 0)


def test_batch_of_infos_that_have_no_columns_is_not_written() -> None:
    for info in (nested(NESTING_MAX + 1), {1: 2.0}):
        assert two_rows().write(info, lambda info=info: info) == (0, 0)  # type: ignore[misc]


def test_batches_of_infos_have_a_limit_of_forms() -> None:
    writer = two_rows()
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
    writer = two_rows()
    written = [writer.write(batch, infos_by_env(batch, 2)[0].copy) for batch in nested]
    assert len(set(written)) == len(nested) and (0, 0) not in written
