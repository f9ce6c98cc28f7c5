from __future__ import annotations

import copy
import enum
import pickle
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import msgpack
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.codec_attacks import ATTACKS, PICKLED
from support.codec_values import Opaque, packed, values

from envhub.values import codec


@pytest.mark.parametrize("blob", ATTACKS.values(), ids=ATTACKS.keys())
def test_attack_is_refused_by_both_decoders(blob: bytes) -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode(blob)
    with pytest.raises(codec.DecodeError):
        codec.decode_header(blob)


@pytest.mark.parametrize(
    ("name", "position"), [("MT19937", 625), ("MT19937", -1), ("MT19937", 10**8), ("Philox", 5), ("Philox", -1)]
)
def test_generator_that_would_read_foreign_memory_is_refused(name: str, position: int) -> None:
    # NumPy 2.4 takes such a state and ends in SIGSEGV at the first draw.
    state = getattr(np.random, name)(1).state
    (state["state"] if name == "MT19937" else state)["pos" if name == "MT19937" else "buffer_pos"] = position
    blob = packed(msgpack.ExtType(codec.GENERATOR, codec.encode([name, state])))
    with pytest.raises(codec.DecodeError, match="position"):
        codec.decode(blob)


def extensions_inside_each_other(count: int) -> bytes:
    blob = packed([])
    for _ in range(count):
        blob = packed([msgpack.ExtType(codec.TUPLE, blob)])
    return blob


def test_extensions_inside_each_other_are_refused_beyond_the_limit() -> None:
    assert codec.decode(extensions_inside_each_other(1)) == [()]
    codec.decode(extensions_inside_each_other(codec.DECODED_DEPTH_MAX - 1))
    with pytest.raises(codec.DecodeError, match="nested deeper"):
        codec.decode(extensions_inside_each_other(codec.DECODED_DEPTH_MAX))


def test_integers_of_any_size_and_the_largest_containers_are_carried() -> None:
    for number in (-(1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1 << 64, (1 << 65) - 1):
        assert codec.decode(codec.encode(number)) == number
    most = [None] * (codec.ITEMS_MAX // 2)
    assert codec.decode(codec.encode(most)) == most


EQUAL_HASHES = 2**61 - 1  # Python's hash of an int is the int modulo this prime
XXPRIME_1, XXPRIME_2, XXPRIME_5 = 11400714785074694791, 14029467366897019727, 2870177450012600261  # of a tuple's hash
WORD = 1 << 64


def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    first = 0
    while len(found) < count:
        first += 1
        lane = XXPRIME_5 + first * XXPRIME_2
        lane = (lane << 31 | lane % WORD >> 33) * XXPRIME_1 % WORD
        second = (12345 - lane) * pow(XXPRIME_2, -1, WORD) % WORD
        second -= WORD if second >> 63 else 0
        if abs(second) < EQUAL_HASHES:
            found.append((first, second))
    assert len(set(map(hash, found))) == 1
    return found


COLLIDING = {
    "ints": [number * EQUAL_HASHES for number in range(codec.EQUAL_HASHES_MAX + 1)],
    "floats": [2.0 ** (61 * number) for number in range(codec.EQUAL_HASHES_MAX + 1)],
    "pairs": pairs_of_one_hash(codec.EQUAL_HASHES_MAX + 1),
    "words whose hashes differ": list(range(codec.UNSALTED_KEYS_MAX + 1)),
}


@pytest.mark.parametrize("keys", COLLIDING.values(), ids=COLLIDING.keys())
@pytest.mark.parametrize("code", [codec.MAPPING, codec.SET, codec.FROZENSET])
def test_keys_that_would_take_quadratic_time_are_refused(keys: list[Any], code: int) -> None:
    items = [part for key in keys for part in ((key, None) if code == codec.MAPPING else (key,))]
    with pytest.raises(codec.DecodeError, match="keys"):
        codec.decode(packed(msgpack.ExtType(code, codec.encode(items))))
    with pytest.raises(codec.EncodeError):
        codec.encode(dict.fromkeys(keys) if code == codec.MAPPING else set(keys))


def test_as_many_keys_as_the_limit_are_carried_and_any_number_of_texts() -> None:
    numbers = set(range(codec.UNSALTED_KEYS_MAX))
    texts = {str(number) for number in range(4 * codec.UNSALTED_KEYS_MAX)}
    for value in (numbers, texts, numbers | texts, dict.fromkeys(numbers, 1)):
        assert codec.decode(codec.encode(value)) == value


SPECIAL = [(1,), {2}, 1j, {1: 2}, np.array(["a"]), gym.spec("CartPole-v1"), gym_spaces.Discrete(2)]


@pytest.mark.parametrize("value", SPECIAL, ids=lambda value: type(value).__name__)
def test_header_holds_no_extension_type_but_integers(value: Any) -> None:
    codec.decode(codec.encode(value))
    with pytest.raises(codec.DecodeError, match=r"not accepted|none has"):
        codec.decode_header(codec.encode([value]))
    assert codec.decode_header(codec.encode([2**70])) == [2**70]


@pytest.mark.parametrize("length", [b"\x00" * 8, b"\x03", b"\x00\x03", b"\x00\x00\x00\x03"], ids=bytes.hex)
def test_item_is_measured_as_msgpack_reads_it_whatever_its_first_byte_is(length: bytes) -> None:
    for lead in range(256):
        blob = bytes([lead]) + length + b"\x01" * 64
        unpacker = msgpack.Unpacker(max_buffer_size=len(blob))
        unpacker.feed(blob)
        try:
            unpacker.skip()
        except msgpack.OutOfData:
            continue  # of so many bytes and items
        except msgpack.FormatError:
            refused(codec.check_header, blob, codec.KNOWN)
            continue
        end = unpacker.tell()
        codec.check_header(blob[:end], codec.KNOWN)
        refused(codec.check_header, blob[: end - 1], codec.KNOWN)
        refused(codec.check_header, blob[: end + 1], codec.KNOWN)


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\x01"


def test_header_nests_no_deeper_than_the_limit() -> None:
    codec.decode_header(nested(codec.HEADER_DEPTH_MAX))
    with pytest.raises(codec.DecodeError, match="around an item"):
        codec.decode_header(nested(codec.HEADER_DEPTH_MAX + 1))


@pytest.mark.parametrize(
    ("head", "repeated", "times"),
    [
        (b"\xdd\x00\x80\x00\x00", b"\x90", 8 << 20),
        (b"", b"\xdd\x00\x00\xff\xff", 500),
        (b"\x93", b"\xdc\x0f\xff" + b"\x90" * 0xFFF, 3),
        (b"\xdb\x00\x80\x00\x00", b"x", 8 << 20),
    ],
    ids=["8 MiB of empty lists", "lists that are only announced", "many lists in lists", "8 MiB of text"],
)
def test_header_that_is_too_large_costs_no_memory(head: bytes, repeated: bytes, times: int) -> None:
    blob = head + repeated * times
    with pytest.raises(codec.DecodeError, match="a header of more than"):
        codec.decode_header(blob, codec.STRANGERS)
    assert peak_bytes(lambda: refused(codec.decode_header, blob, codec.STRANGERS)) < 1 << 20


LISTS = b"\xdd\x00\x0f\x00\x00" * 60  # msgpack by itself allocates 5 MB or more, by its version, for what they announce
ANNOUNCED = {
    "more lists than are looked at": LISTS * 4 + bytes(1_000_000),
    "few lists": LISTS + b"\xc6\x00\x0f\x42\x40" + bytes(1_000_000),
    "list of as many items as bytes": b"\xdd\x00\x0f\x43\x6c" + LISTS + bytes(1_000_000),
    "map of as many items as bytes": b"\xdf\x00\x0f\x43\x6c" + LISTS + bytes(1_000_000),
}


@pytest.mark.parametrize("blob", ANNOUNCED.values(), ids=ANNOUNCED.keys())
def test_lists_that_a_value_only_announces_are_refused_before_they_are_allocated(blob: bytes) -> None:
    assert peak_bytes(lambda: refused(codec.decode, blob)) < 3 << 20


def test_bytes_after_a_large_value_are_refused() -> None:
    blob = codec.encode([*range(codec.CHECKED_BYTES_MIN)])
    assert len(codec.decode(blob)) == codec.CHECKED_BYTES_MIN
    refused(codec.decode, blob + b"\x01")
    refused(codec.decode, blob[:-1])


def refused(decode: Any, *arguments: Any) -> None:
    with pytest.raises(codec.DecodeError):
        decode(*arguments)


def peak_bytes(work: Any) -> int:
    """How much memory Python allocates at most meanwhile."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_list_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode(b"\xdd\x00\x10\x00\x01" + bytes(codec.ITEMS_MAX + 1))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values, st.data())
def test_flipped_bytes_are_decoded_or_refused(value: Any, data: st.DataObject) -> None:
    blob = bytearray(codec.encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        repr(codec.decode(bytes(blob)))
    except codec.DecodeError:
        pass
    except ValueError as error:
        assert "datetime" in str(error)  # NumPy cannot print some times that it can hold


# --- pickle -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trapped_pickle(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Records what reaches ``pickle.loads``."""
    reached: list[bytes] = []
    monkeypatch.setattr(pickle, "loads", lambda blob, **_: reached.append(bytes(blob)))
    return reached


def test_no_attack_reaches_pickle(trapped_pickle: list[bytes]) -> None:
    for blob in ATTACKS.values():
        for decode in (codec.decode, codec.decode_header):
            with pytest.raises(codec.DecodeError):
                decode(blob)
    assert trapped_pickle == []


def test_pickled_value_is_unpickled_only_where_it_is_allowed(trapped_pickle: list[bytes]) -> None:
    blob = codec.encode([Opaque()], codec.as_pickle)
    with pytest.raises(codec.DecodeError, match="extension type 10"):
        codec.decode(blob)
    assert trapped_pickle == []
    codec.decode(blob, allow_pickle=True)
    assert len(trapped_pickle) == 1
    with pytest.raises(codec.DecodeError):
        codec.decode(packed(msgpack.ExtType(codec.COMPLEX, PICKLED)), allow_pickle=True)
    assert len(trapped_pickle) == 1


def test_pickled_values_arrive_as_they_were() -> None:
    shift = 3
    found = codec.decode(codec.encode({"f": lambda x: x + shift}, codec.as_pickle), allow_pickle=True)
    assert found["f"](1) == 4


def test_value_that_cannot_be_pickled_is_refused_or_travels_as_its_repr() -> None:
    class Sealed:
        def __reduce__(self) -> Any:
            raise TypeError("sealed")

        def __repr__(self) -> str:
            return "<sealed>"

    with pytest.raises(codec.EncodeError, match="Sealed cannot be pickled: sealed"):
        codec.encode(Sealed(), codec.as_pickle)
    assert codec.decode(codec.encode(Sealed(), codec.as_pickle_or_repr), allow_pickle=True) == "<sealed>"


class OneWay(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left)


def test_value_that_cannot_be_unpickled_is_an_error_or_replaced_by_a_text() -> None:
    blob = codec.encode({"e": OneWay(1, 2), "x": 1}, codec.as_pickle)
    with pytest.raises(codec.DecodeError, match="cannot be unpickled: TypeError"):
        codec.decode(blob, allow_pickle=True)
    found, represented = codec.decode_leniently(blob, allow_pickle=True)
    assert found["x"] == 1 and "cannot be unpickled" in found["e"] and represented == [found["e"]]


TOO_LARGE: dict[str, Callable[[], Any]] = {
    "list": lambda: [0] * 600_000,
    "dict": lambda: dict.fromkeys(map(str, range(600_000))),
    "set": lambda: set(range(600_000)),
    "str": lambda: "x" * (17 << 20),
}


@pytest.mark.parametrize("make", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_what_would_not_be_decoded_is_not_encoded(make: Callable[[], Any]) -> None:
    value = make()
    with pytest.raises(codec.EncodeError):
        codec.encode({"deep": value})
    assert codec.decode(codec.encode(value, codec.as_repr)) == repr(value)[: codec.REPR_CHARS_MAX]
    assert codec.decode(codec.encode({"deep": value}, codec.as_pickle), allow_pickle=True) == {"deep": value}


class Task(enum.IntEnum):
    HARD = 1


class Place(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    "value",
    [Task.HARD, Place(1, 2), defaultdict(list, a=[1]), bytearray(b"x"), np.ma.masked_array([1, 2], [True, False])],
    ids=lambda value: type(value).__name__,
)
def test_pickling_keeps_the_class_of_a_value(value: Any) -> None:
    found = codec.decode(codec.encode({"a": [value]}, codec.as_pickle), allow_pickle=True)["a"][0]
    assert type(found) is type(value) and repr(found) == repr(value)


def test_elements_of_a_graph_are_carried() -> None:
    space = gym_spaces.Graph(gym_spaces.Box(0, 1, (2,)), gym_spaces.Discrete(3), seed=1)
    for number in range(5):
        value = space.sample(num_nodes=number + 1)
        for unknown in (codec.refuse, codec.as_pickle):
            found = codec.decode(codec.encode([value], unknown))[0]
            assert type(found) is type(value)
            assert all(np.array_equal(left, right) for left, right in zip(found, value, strict=True))


TIMES = [np.datetime64("2026-01-01"), np.datetime64("NaT"), np.timedelta64(3, "us")]


@pytest.mark.parametrize("value", [*TIMES, np.str_("ä"), np.str_(), np.bytes_(b"\x00a"), np.bytes_()])
def test_scalars_that_are_no_numbers_are_carried(value: Any) -> None:
    found = codec.decode(codec.encode(value))
    assert type(found) is type(value) and found.dtype == value.dtype and repr(found) == repr(value)


def test_spaces_are_carried() -> None:
    space = gym_spaces.Dict({"a": gym_spaces.Box(0, 1, (2,)), "b": gym_spaces.Sequence(gym_spaces.Text(3))}, seed=1)
    for unknown, allowed in ((codec.refuse, False), (codec.as_pickle, True)):
        found = codec.decode(codec.encode([space], unknown), allowed)[0]
        assert found == space and found.sample()["b"] == copy.deepcopy(space).sample()["b"]
    with pytest.raises(codec.EncodeError, match="OwnSpace"):
        codec.encode(type("OwnSpace", (gym_spaces.Discrete,), {"__module__": "gymnasium.spaces.box"})(2))


def test_spaces_in_one_value_are_limited_together() -> None:
    bound = np.zeros((), np.float32)
    shape = [codec.SPACES_BYTES_MAX // 8]
    description = {"space": "Box", "dtype": "<f4", "shape": shape, "low": bound, "high": bound}
    half = msgpack.ExtType(codec.SPACE, codec.encode(description))
    assert len(codec.decode(packed([half, half]))) == 2
    with pytest.raises(codec.DecodeError, match="at most"):
        codec.decode(packed([half, half, half]))


def test_specs_are_carried_where_they_name_what_they_make() -> None:
    spec = copy.deepcopy(gym.spec("CartPole-v1"))
    spec.kwargs = {"size": (1, 2), "by": {1: "one"}}
    spec.additional_wrappers = gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), -1, 1).spec.additional_wrappers
    assert codec.decode(codec.encode({"spec": spec}))["spec"] == spec
    local = gym.envs.registration.EnvSpec("Local-v0", entry_point=lambda: gym.make("CartPole-v1"))
    with pytest.raises(codec.EncodeError, match="EnvSpec"):
        codec.encode(local)


@pytest.mark.parametrize("blob", [b"", b"{}", b"[]", b"\xff", b'{"id": 1}'])
def test_malformed_specs_are_refused(blob: bytes) -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode(packed(msgpack.ExtType(codec.SPEC, blob)))


def test_text_in_place_of_a_value_is_cut_as_its_sender_should_have_cut_it() -> None:
    blob = msgpack.packb(msgpack.ExtType(codec.REPR, "é".encode() * 10**6))
    assert codec.decode(blob) == "é" * codec.REPR_CHARS_MAX
