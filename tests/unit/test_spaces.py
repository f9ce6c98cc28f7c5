from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as gym_spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import any_space

from envhub.errors import UnsupportedSpace
from envhub.values import codec, spaces
from envhub.values.leaf import LEAF_DIMENSIONS_MAX, OBJECT, Leaf

SOME = settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# --- any space --------------------------------------------------------------------------------------------------------


def over_the_wire(space: Any) -> Any:
    return spaces.build(codec.decode(codec.encode(spaces.describe(space))))


@SOME
@given(any_space)
def test_space_is_built_equal_to_the_one_described(space: Any) -> None:
    built = over_the_wire(space)
    assert built == space
    assert repr(built) == repr(space)
    assert spaces.leaves(built) == spaces.leaves(space)


@pytest.mark.filterwarnings("ignore:.*Casting input x")  # of a box without dimensions, whose sample is a number
@SOME
@given(any_space, st.integers(0, 2**31))
def test_element_is_put_together_from_its_parts(space: Any, seed: int) -> None:
    space.seed(seed)
    element = space.sample()
    parts = spaces.flatten(space, element)
    for part, leaf in zip(parts, spaces.leaves(space), strict=True):
        assert leaf == OBJECT or np.shape(part) == leaf.shape
    again = spaces.assemble(space, iter(parts))
    assert space.contains(again) == space.contains(element)
    assert all(left is right for left, right in zip(spaces.flatten(space, again), parts, strict=True))


@SOME
@given(any_space, st.integers(0, 2**31))
def test_space_that_was_seeded_samples_alike_once_it_is_built(space: Any, seed: int) -> None:
    space.seed(seed)
    built = over_the_wire(space)
    for _ in range(3):
        assert repr(built.sample()) == repr(space.sample())


# --- particular spaces ------------------------------------------------------------------------------------------------


def test_bound_that_is_the_same_everywhere_travels_as_one_value() -> None:
    image = gym_spaces.Box(0, 255, (84, 84, 4), np.uint8)
    assert len(codec.encode(spaces.describe(image))) < 250
    assert over_the_wire(image) == image


@pytest.mark.skipif(not hasattr(gym_spaces.Dict(), "sort_keys"), reason="this version of Gymnasium always sorts them")
@pytest.mark.parametrize("sort_keys", [True, False])
def test_dict_remembers_whether_it_sorts_its_keys(sort_keys: bool) -> None:
    space = gym_spaces.Dict({"b": gym_spaces.Discrete(2), "a": gym_spaces.Discrete(3)}, sort_keys=sort_keys)
    built = over_the_wire(space)
    assert built.sort_keys is sort_keys
    assert list(built.spaces) == list(space.spaces)


def test_leaves_are_in_the_order_of_the_space() -> None:
    space = gym_spaces.Tuple(
        [gym_spaces.Dict({"x": gym_spaces.Box(0, 1, (2,)), "y": gym_spaces.Discrete(3)}), gym_spaces.MultiBinary(4)]
    )
    assert spaces.leaves(space) == [Leaf("<f4", (2,)), Leaf("<i8", ()), Leaf("|i1", (4,))]
    assert not spaces.is_flat(space)
    assert spaces.is_flat(space[1])
    x, y, z = np.ones(2, np.float32), np.int64(2), np.ones(4, np.int8)
    parts = spaces.flatten(space, ({"x": x, "y": y}, z))
    assert [id(part) for part in parts] == [id(x), id(y), id(z)]
    assert spaces.assemble(space, iter(parts)) == ({"x": x, "y": y}, z)


# --- what is refused --------------------------------------------------------------------------------------------------


class Box(gym_spaces.Box):
    """May mean something else by the same fields."""


class Wide(gym_spaces.Dict):
    pass


class Sampled(gym_spaces.Space[Any]):
    """A space of an unknown class, which has these samples in turn."""

    def __init__(self, *samples: Any) -> None:
        super().__init__()
        self.samples = [*samples] * 3

    def sample(self, *masks: Any, **more: Any) -> Any:
        return self.samples.pop(0)

    def contains(self, value: Any) -> bool:
        return True


FOREIGN = {
    "subclass": Box(0, 1, (2,)),
    "subclass_of_dict": Wide({"a": gym_spaces.Discrete(2)}),
    "inside_a_tuple": gym_spaces.Tuple([gym_spaces.Discrete(2), Wide({"a": gym_spaces.Text(4)})]),
    "inside_a_sequence": gym_spaces.Sequence(Box(0, 1, (2,))),
    "inside_a_dict": gym_spaces.Dict({"a": gym_spaces.Tuple([Box(0, 1, (2,))])}),
    "texts": Sampled("go", "stop"),
}


@pytest.mark.parametrize("space", FOREIGN.values(), ids=FOREIGN)
def test_space_of_another_class_travels_as_the_nearest_one(space: Any) -> None:
    built = spaces.build(codec.decode(codec.encode(spaces.describe(space))))
    assert spaces.leaves(built) == spaces.leaves(spaces.nearest(space)) and spaces.nearest(space) == built
    assert type(built).__module__.startswith("gymnasium.spaces.")
    assert spaces.nearest(space, pickled=True) is space and spaces.nearest(built) is built
    with pytest.raises(UnsupportedSpace):
        spaces.describe(space, exact=True)


def test_samples_tell_what_a_space_of_another_class_is_like() -> None:
    text = spaces.nearest(Sampled("pick up the key", "größer"))
    assert isinstance(text, gym_spaces.Text) and text.contains("größer key\n") and text.max_length == spaces.TEXT_CHARS
    assert spaces.nearest(Sampled(np.ones(2, np.float32))) == gym_spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert spaces.nearest(Sampled(np.uint8(3))) == gym_spaces.Box(0, 255, (), np.uint8)
    assert spaces.nearest(Sampled(True)).dtype == np.bool_


def test_object_with_the_fields_of_a_space_stands_for_it() -> None:
    box = SimpleNamespace(low=0, high=255, shape=(2, 3), dtype=np.uint8)
    assert spaces.native(box) == gym_spaces.Box(0, 255, (2, 3), np.uint8)
    assert spaces.native(SimpleNamespace(n=17)) == gym_spaces.Discrete(17)
    assert spaces.native(SimpleNamespace(nvec=[2, 3])) == gym_spaces.MultiDiscrete([2, 3])
    inside = SimpleNamespace(spaces={"a": box, "b": gym_spaces.Discrete(2)})
    assert spaces.native(inside) == gym_spaces.Dict({"a": spaces.native(box), "b": gym_spaces.Discrete(2)})
    assert spaces.native(SimpleNamespace(spaces=[box])) == gym_spaces.Tuple([spaces.native(box)])


@pytest.mark.parametrize(
    "space",
    [
        gym_spaces.Space((2,), np.float32),
        gym_spaces.Dict({"a": gym_spaces.Space()}),
        Sampled({"a": 1}),
        Sampled("text", 3),
        Sampled(np.ones(2), np.ones(3)),
        None,
        "Discrete",
    ],
    ids=["no_samples", "inside_a_dict", "dicts", "mixed", "shapes", "None", "str"],
)
def test_space_that_is_near_to_none_is_refused(space: Any) -> None:
    with pytest.raises(UnsupportedSpace, match="has no form on the network"):
        spaces.describe(space)


def test_any_space_travels_pickled_within_a_program() -> None:
    space = gym_spaces.Dict({"a": Box(0, 1, (2,)), "b": gym_spaces.Text(3)})
    description = codec.encode(spaces.describe(space, pickled=True), codec.as_pickle)
    built = spaces.build(codec.decode(description, allow_pickle=True))
    assert built == space and type(built["a"]) is Box
    with pytest.raises(codec.DecodeError):
        codec.decode(description)


def test_space_of_old_gym_is_native_as_one_of_gymnasium() -> None:
    kind = type("Discrete", (), {"__module__": "gym.spaces.discrete", "n": 3, "dtype": np.dtype(np.int64)})
    assert spaces.native(kind()) == gym_spaces.Discrete(3)
    spaces.check_action_space(kind(), gym_spaces.Discrete(3))
    keyed = type("Dict", (), {"__module__": "gym.spaces.dict", "spaces": {"b": kind(), "a": kind()}})
    native = spaces.native(keyed())
    assert native == gym_spaces.Dict([("b", gym_spaces.Discrete(3)), ("a", gym_spaces.Discrete(3))])
    assert list(native.spaces) == ["b", "a"] and not spaces.describe(keyed())["sort_keys"]
    other = type("Discrete", (), {"__module__": "gymlike.discrete", "n": 3, "dtype": np.dtype(np.int64)})
    assert spaces.native(other()) == gym_spaces.Discrete(3)  # its fields say what it is


BOX = spaces.describe(gym_spaces.Box(0, 1, (2,)))
MALFORMED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no name": {"n": 2},
    "unknown name": {"space": "Cube"},
    "text longer than itself": {"space": "Text", "min_length": 3, "max_length": 2, "charset": "a"},
    "items that are none": {"space": "Sequence", "item": None, "stack": False},
    "nodes that are none": {"space": "Graph", "nodes": {"space": "Text"}, "edges": None},
    "pickled": {"space": "Pickled", "value": b"cos\nsystem\n"},
    "value of another space": {"space": "Cube", "value": gym_spaces.Discrete(2)},
    "name of another class": {"space": "Space"},
    "name is a number": {"space": 1},
    "name is a list": {"space": ["Box"]},
    "missing field": {"space": "Discrete", "n": 2, "start": 0},
    "unknown field": {"space": "Discrete", "n": 2, "start": 0, "dtype": "<i8", "seed": 1},
    "zero of them": {"space": "Discrete", "n": 0, "start": 0, "dtype": "<i8"},
    "text for a number": {"space": "Discrete", "n": "two", "start": 0, "dtype": "<i8"},
    "dtype of floats": {"space": "Discrete", "n": 2, "start": 0, "dtype": "<f8"},
    "dtype of objects": {**BOX, "dtype": "|O"},
    "dtype that is none": {**BOX, "dtype": "zz"},
    "bounds of another shape": {**BOX, "low": np.zeros(3, np.float32)},
    "bounds of text": {**BOX, "high": "high"},
    "bounds the wrong way round": {**BOX, "low": np.array(2, np.float32), "high": np.array(1, np.float32)},
    "shape of text": {**BOX, "shape": "two"},
    "negative shape": {**BOX, "shape": [-2]},
    "more dimensions than an arena has": {**BOX, "shape": [1] * (LEAF_DIMENSIONS_MAX + 1)},
    "shape beyond memory": {**BOX, "shape": [1 << 60]},
    "empty nvec": {
        "space": "MultiDiscrete",
        "nvec": np.zeros(2, np.int64),
        "start": np.zeros(2, np.int64),
        "dtype": "<i8",
    },
    "negative n": {"space": "MultiBinary", "n": [-1], "flat": True},
    "flat of nothing": {"space": "MultiBinary", "n": [], "flat": True},
    "spaces is a number": {"space": "Tuple", "spaces": 1},
    "part is no description": {"space": "Tuple", "spaces": ["Box"]},
    "part is malformed": {"space": "Tuple", "spaces": [BOX, {"space": "Dict"}]},
    "keys is nil": {"space": "Dict", "keys": None, "spaces": []},
}


@pytest.mark.parametrize("description", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_description_is_refused(description: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSpace):
        spaces.build(description)


def box(*shape: float) -> dict[str, Any]:
    bound = np.zeros((), np.float32)
    return {"space": "Box", "dtype": "<f4", "shape": [*shape], "low": bound, "high": bound}


HUGE = {
    "box": box(10**6, 10**6),
    "box of one dimension": box(2**28 + 1),
    "bits": {"space": "MultiBinary", "n": [10**12], "flat": True},
    "boxes that are huge together": {"space": "Tuple", "spaces": [box(2**26)] * 5},
    "boxes in a dict": {"space": "Dict", "keys": ["a", "b"], "spaces": [box(2**27), box(2**27 + 1)]},
    "box in a sequence": {"space": "Sequence", "item": box(2**28 + 1), "stack": True},
    "box in a graph": {"space": "Graph", "nodes": box(4), "edges": box(2**28 + 1)},
    "one of many": {"space": "OneOf", "spaces": [{"space": "Discrete", "n": 2, "start": 0, "dtype": "<i8"}] * 5000},
}


@pytest.mark.parametrize("description", HUGE.values(), ids=HUGE.keys())
def test_space_that_a_short_description_makes_huge_is_refused_before_it_is_built(description: dict[str, Any]) -> None:
    tracemalloc.start()
    with pytest.raises(UnsupportedSpace, match="at most"):
        spaces.build(description)
    assert tracemalloc.get_traced_memory()[1] < 1 << 21
    tracemalloc.stop()


@pytest.mark.parametrize("other", [-(2**28), math.nan, 0.5], ids=str)
def test_size_that_is_none_hides_no_huge_one(other: float) -> None:
    tracemalloc.start()
    with pytest.raises(UnsupportedSpace, match="a dimension that is no number"):
        spaces.build({"space": "Tuple", "spaces": [box(2**28 + 1), box(other)]})
    assert tracemalloc.get_traced_memory()[1] < 1 << 21
    tracemalloc.stop()


def test_space_may_be_as_large_as_the_caller_says() -> None:
    assert spaces.build(box(256), bytes_max=1024).shape == (256,)
    with pytest.raises(UnsupportedSpace, match="1028 bytes; at most 1024"):
        spaces.build(box(257), bytes_max=1024)


def test_descriptions_nested_without_end_are_refused() -> None:
    description: dict[str, Any] = BOX
    for _ in range(5000):
        description = {"space": "Tuple", "spaces": [description]}
    with pytest.raises(UnsupportedSpace):
        spaces.build(description)


@pytest.mark.parametrize("value", [(1,), (1, 2, 3), ()])
def test_tuple_of_another_length_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="2 parts"):
        spaces.flatten(gym_spaces.Tuple([gym_spaces.Discrete(2), gym_spaces.Discrete(2)]), value)


BOXES = gym_spaces.Box(0, 1, (2,)), gym_spaces.Box(0, 2, (2,)), gym_spaces.Box(0, 1, (3,))


@pytest.mark.filterwarnings("ignore:invalid value")  # of Gymnasium's own cast
def test_integer_box_without_bounds_samples_as_before() -> None:
    space = gym_spaces.Box(-np.inf, np.array([5, np.inf]), (2,), np.int64)
    built = spaces.build(codec.decode(codec.encode(spaces.describe(space))))
    space.seed(3)
    built.seed(3)
    assert all(np.array_equal(built.sample(), space.sample()) for _ in range(20))


def test_spaces_that_cannot_be_batched_are_refused() -> None:
    wanted, wider, larger = BOXES
    spaces.check_equivalent(wanted, wanted, "same")
    spaces.check_equivalent(wider, wanted, "different")
    spaces.check_action_space(wanted, wanted)
    with pytest.raises(RuntimeError, match="observation_mode='same'"):
        spaces.check_equivalent(wider, wanted, "same")
    with pytest.raises(RuntimeError, match="common shape and dtype"):
        spaces.check_equivalent(larger, wanted, "different")
    with pytest.raises(RuntimeError, match="common shape and dtype"):
        spaces.check_equivalent(gym_spaces.Text(3), gym_spaces.Text(4), "different")
    for nest in (lambda box: gym_spaces.Dict({"a": box, "b": wanted}), lambda box: gym_spaces.Tuple([wanted, box])):
        spaces.check_equivalent(nest(wider), nest(wanted), "different")
        with pytest.raises(RuntimeError, match="common shape and dtype"):
            spaces.check_equivalent(nest(larger), nest(wanted), "different")
    with pytest.raises(RuntimeError, match="action space"):
        spaces.check_action_space(wider, wanted)
    with pytest.raises(RuntimeError, match="action space"):
        spaces.check_action_space(gym_spaces.Space((2,), np.float32), wanted)


def test_space_of_every_value_travels_and_takes_any_other() -> None:
    found = spaces.build(codec.decode(codec.encode(spaces.describe(spaces.Anything()))))
    assert found == spaces.Anything() != BOXES[0] and spaces.leaves(found) == [OBJECT]
    assert found.contains("text") and spaces.flatten(found, {"a": 1}) == [{"a": 1}]
    for space in (*BOXES, gym_spaces.Text(3)):
        spaces.check_equivalent(space, found, "any")
        spaces.check_action_space(space, found, "any")
    with pytest.raises(NotImplementedError, match="get_attr"):
        found.sample()
    with pytest.raises(spaces.SpacesDiffer, match="action space"):
        spaces.check_action_space(BOXES[2], BOXES[0], "any")


def test_space_contains_what_gymnasium_says() -> None:
    text = gym_spaces.Text(100_000, min_length=1, charset="abc\u00e9")
    nested = gym_spaces.Dict(text=text, pair=gym_spaces.Tuple([gym_spaces.Discrete(3), text]))
    long = "abc" * 30_000
    for value in ("", "a", "abd", "\u00e9", "abc\u00ea", long, "d" + long, long + "d", "a" * 100_001, 3, None):
        assert spaces.contains(text, value) == text.contains(value)
        for whole in ({"text": value, "pair": (1, "a")}, {"text": "a", "pair": (1, value)}):
            assert spaces.contains(nested, whole) == nested.contains(whole)
    for wrong in ({"text": "a"}, {"text": "a", "pair": (1,)}, {"text": "a", "pair": [1, "a"]}, ()):
        assert spaces.contains(nested, wrong) == nested.contains(wrong)


def test_anything_has_no_samples_and_equals_another() -> None:
    space = spaces.Anything()
    assert space == spaces.Anything() and space != gym_spaces.Discrete(2) and repr(space) == "Anything()"
    with pytest.raises(NotImplementedError, match="spaces of their own"):
        space.sample()


def test_space_without_a_form_is_another_structure() -> None:
    with pytest.raises(spaces.SpacesDiffer):
        spaces.check_equivalent(Sampled(object()), gym_spaces.Discrete(2), "different")


def test_space_in_its_wire_form_is_nearest_to_what_it_describes() -> None:
    class Discrete:
        n, start, dtype = 3, 0, np.dtype(np.int64)

    assert spaces.nearest(Discrete()) == gym_spaces.Discrete(3)


def test_space_of_another_library_without_known_fields_travels_as_its_samples() -> None:
    class Space:
        """The name by which a space of any library is known."""

    class Words(Space):
        def seed(self, seed: int) -> None: ...

        def sample(self) -> str:
            return "go"

    assert isinstance(spaces.native(Words()), gym_spaces.Text)
