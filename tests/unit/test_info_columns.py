"""Infos in columns are what ``_add_info`` makes of the same infos one by one."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from envhub_client.envs.observations import Infos
from envhub_client.lanes.wire import InfoTemplates
from gymnasium.vector import VectorEnv
from hypothesis import given
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
    writer = Writer(ROW_BYTES, known.__setitem__)
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
    writer = Writer(64, lambda number, example: None)
    deep: dict[str, Any] = {}
    deep["deep"] = deep
    odd: list[dict[Any, Any]] = [{"n": np.zeros(9)}, deep, {1: 2}, {"n": 1 + 2j}, {}, {"n": 2**64}, {"k" * 20000: 1}]
    assert [writer.write(info, bytearray(64)) for info in odd] == [(0, 0)] * len(odd)


def test_info_and_example_may_be_as_large_as_their_limits() -> None:
    announced: list[bytes] = []
    writer = Writer(8, lambda number, example: announced.append(example))
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
    assert Writer(64, lambda number, example: None).write(example, bytearray(64))[1] == 8
    template = Template(example)
    assert template.infos(np.ones(1, template.dtype)) == [example]
    with pytest.raises(NotInColumns):
        Template(nested(NESTING_MAX + 2))


@pytest.mark.parametrize("dtype", [">i4", "c8", "O", "U3", "S3", "M8[s]", "i4,f4"])
def test_array_of_what_is_no_native_number_is_in_no_column(dtype: str) -> None:
    with pytest.raises(NotInColumns):
        Template({"n": np.zeros(2, dtype)})


def test_last_observations_are_in_columns_unless_gymnasium_keeps_them_apart() -> None:
    for final, groups in (({"x": 1.0}, 0), (np.arange(2.0), 1)):
        infos = [{"final_obs": final, "n": row} for row in range(ENVS)]
        assert len(carried(infos)._groups) == groups
        assert_equal(carried(infos).batched(Batch(ENVS)), one_by_one(infos))


def test_number_of_templates_has_a_limit() -> None:
    announced: list[int] = []
    writer = Writer(64, lambda number, example: announced.append(number))
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
    template = Template({VECTOR_REWARD: np.zeros(2), "a": 1})
    assert set(template.without_reward().tree) == {"a"}
    assert template.without_reward().dtype == template.dtype and set(template.tree) == {VECTOR_REWARD, "a"}
    assert Template({VECTOR_REWARD: np.zeros(2)}).without_reward().infos(np.zeros((3, 16), np.uint8)) == [{}, {}, {}]


def test_info_with_what_no_column_holds_has_no_template() -> None:
    writer = Writer(ROW_BYTES, lambda number, example: None)
    assert writer.template_of({"a": 1}) is not None and writer.template_of({"a": object()}) is None


def test_array_of_another_type_than_its_first_info_is_in_no_column() -> None:
    writer = Writer(ROW_BYTES, lambda number, example: None)
    batch = BatchWriter(writer, np.zeros((2, ROW_BYTES), np.uint8), slice(0, 2))
    assert batch.write({"a": np.zeros(2, np.float32)}, lambda: {"a": 1.0}) == (0, 0)
    assert batch.write({"a": np.zeros(2)}, lambda: {"a": 1.0})[1] == 8
    assert batch.write({"b": np.zeros(2)}, lambda: {"b": object()}) == (0, 0)
