"""Code pickled by value keeps the names of its files; modules that another process finds by their names."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import multiprocessing
import pickle
import shutil
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from envhub.values import pickling
from envhub.values.pickling import is_importable, why_unpicklable

SOURCE = """
class Arm:
    def step(self):
        def inner():
            return 1
        return inner

make = lambda: Arm()
"""


def written_in(file: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, file, "exec"), names)  # noqa: S102
    return names


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from codes_of(part)


def test_function_its_class_and_what_is_nested_in_them_keep_their_file() -> None:
    make = pickle.loads(pickling.dumps(written_in("sims/arm.py")["make"]))
    arm = make()
    codes = [*codes_of(make.__code__), *codes_of(type(arm).step.__code__)]
    assert [code.co_name for code in codes] == ["<lambda>", "step", "inner"]
    assert {code.co_filename for code in codes} == {"sims/arm.py"}
    assert arm.step()() == 1


def test_functions_of_two_files_keep_each_its_own() -> None:
    made = pickle.loads(pickling.dumps([written_in(file)["make"] for file in ("a.py", "<stdin>")]))
    assert [make.__code__.co_filename for make in made] == ["a.py", "<stdin>"]


def test_module_of_a_folder_that_cannot_be_read_any_more_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "envhub_once_there"
    package.mkdir()
    for name in ("__init__.py", "part.py"):
        (package / name).write_text("def act(): return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("envhub_once_there.part")
    shutil.rmtree(package)  # as of a program that has changed its user
    importlib.invalidate_caches()
    for module in ("envhub_once_there", "envhub_once_there.part"):
        assert is_importable(module)
    for module in ("envhub_once_there.part", "envhub_once_there"):
        del sys.modules[module]


def test_module_that_no_import_finds_goes_by_value_and_is_registered_no_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))  # noqa: S102
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    pickled = pickling.dumps(module.make)
    monkeypatch.delitem(sys.modules, "made_by_hand")
    assert pickle.loads(pickled)().step()() == 1
    assert "made_by_hand" not in pickling.cloudpickle.list_registry_pickle_by_value()


def test_module_under_another_name_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("envhub_first_name")
    exec("def act(): return 4", vars(module))  # noqa: S102
    module.act.__module__ = "envhub_second_name"
    monkeypatch.setitem(sys.modules, "envhub_second_name", module)
    assert b"envhub_second_name" in pickling.dumps(module.act)


def test_module_without_a_file_is_found_by_its_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_importable("sys")
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    assert not is_importable("made_by_hand")


def test_finder_that_raises_hides_no_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken:
        def find_spec(self, *args: object) -> None:
            raise RuntimeError("no network")

    (tmp_path / "behind_a_finder.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("behind_a_finder")
    monkeypatch.setattr(sys, "meta_path", [Broken(), object(), *sys.meta_path])
    assert is_importable("behind_a_finder")


def test_part_of_a_package_that_is_not_there_is_found_by_no_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = ModuleType("made_by_hand.part")
    part.__file__ = str(tmp_path / "part.py")
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    monkeypatch.setitem(sys.modules, "made_by_hand.part", part)
    assert not is_importable("made_by_hand.part")


# --- why a value cannot be pickled ------------------------------------------------------------------------------------


LOCK = threading.Lock()


def why(value: Any) -> str:
    with pytest.raises(Exception) as raised:
        pickling.dumps(value)
    return why_unpicklable("it", value, raised.value)


def path(value: Any) -> str:
    return why(value).split(", which cannot be pickled")[0]


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclasses.dataclass
class Options:
    names: list[str]
    inner: dict[str, Any]


class Choosy:
    """Sends no lock."""

    def __init__(self) -> None:
        self.lock, self.kept = threading.Lock(), threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}


def local_class() -> type:
    class Base:
        lock = LOCK

    class Env(Base):
        def __init__(self) -> None:
            super().__init__()

        def other(self) -> Any:
            return Env

    return Env


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def uses_global() -> Callable[[], Any]:
    return eval("lambda: [LOCK for _ in range(1)]", {"LOCK": LOCK, "lock": LOCK})  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (closure(Holder(LOCK)), "it (closure.<locals>.<lambda>) > variable 'value' > attribute 'held'"),
        (uses_global(), "it (<lambda>) > global 'LOCK'"),
        (functools.partial(Holder, held=[1, {"a": LOCK}]), "it > argument 'held' > item 1 > item 'a'"),
        (functools.partial(Holder, LOCK), "it > argument 0"),
        (closure(3).__get__(Slotted((LOCK,))), "it > its object > attribute 'held' > item 0"),
        (Options(["a"], {"x": deque([LOCK])}), "it > attribute 'inner' > item 'x' > item 0"),
        ({LOCK: 1}, "it > key <unlocked _thread.lock object"),
    ],
)
def test_path_leads_to_the_part(value: Any, found: str) -> None:
    assert path(value).startswith(found)
    assert "is a _thread.lock" in path(value)


def test_class_that_is_in_a_cycle_is_searched_once() -> None:
    assert path(local_class()).endswith("> class attribute 'lock' is a _thread.lock")
    ring: list[Any] = []
    ring += [ring, Holder(ring), LOCK]
    assert path(ring) == "it > item 2 is a _thread.lock"


def test_what_a_class_leaves_out_is_not_blamed() -> None:
    assert path(Choosy()) == "it > attribute 'kept' is a _thread.RLock"


def test_value_without_parts_is_told_with_its_error() -> None:
    text = why(LOCK)
    assert text.startswith("it cannot be pickled: cannot pickle '_thread.lock' object; make it in the factory")


@pytest.mark.parametrize("name", ["Queue", "Event", "Lock", "Semaphore", "Condition", "Value", "Array", "SimpleQueue"])
def test_objects_of_multiprocessing_point_to_its_manager(name: str) -> None:
    made = getattr(multiprocessing, name)(*{"Value": "i", "Array": ("i", [1])}.get(name, ()))
    managed = "Queue" if name == "SimpleQueue" else name
    text = why(closure(made))
    assert f"multiprocessing.Manager().{managed}()" in text and "variable 'value' is a multiprocessing." in text


def test_search_ends_at_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = LOCK
    for _ in range(pickling.DEPTH_MAX + 5):
        deep = [deep]
    assert why(deep).count("item 0") == pickling.DEPTH_MAX
    pickled = []
    monkeypatch.setattr(pickling, "PICKLES_MAX", 10)
    wide = [[number] for number in range(100)] + [LOCK]
    dumps = pickling.dumps
    monkeypatch.setattr(pickling, "dumps", lambda value: pickled.append(value) or dumps(value))
    why_unpicklable("it", wide, ValueError("x"))
    assert len(pickled) == 10


def test_unsendable_raises_why_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="a lock"):
        pickling.Unsendable("a lock")(render_mode=None)


def empty_cell() -> Callable[[], Any]:
    def later() -> Any:
        return made, lock

    lock = threading.Lock()
    if lock is None:
        made = 1
    return later


class Stateful:
    """Its state is no dict."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Holder, (1,), threading.Lock()


class Named:
    """Pickled by the name of a global that does not exist."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return "no_such_global"


def module_by_hand() -> types.ModuleType:
    module = types.ModuleType("envhub_made_by_hand")
    module.lock = threading.Lock()  # type: ignore[attr-defined]
    return module


def test_object_that_pickles_by_a_name_has_no_part_to_blame() -> None:
    assert why(Named()).startswith("it cannot be pickled: ")


def test_class_is_named_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [Slotted]

    def dumps(value: Any) -> bytes:
        if value is Slotted or value is whole:
            raise TypeError("no")
        return b""

    monkeypatch.setattr(pickling, "dumps", dumps)
    sentence = why_unpicklable("it", whole, TypeError("no"))
    assert f"is the class {__name__}.Slotted, which cannot be pickled: no" in sentence


class Mapped:
    """Its items are a mapping's."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter([("lock", threading.Lock())])


@pytest.mark.parametrize(
    "value, path",
    [
        (Stateful(), "its state"),
        (module_by_hand(), "global 'lock'"),
        (Mapped(), "item 'lock'"),
        (classmethod(functools.partial(print, LOCK)), "its function"),  # type: ignore[arg-type]
        (property(functools.partial(print, LOCK)), "its function"),
        (empty_cell(), "variable 'lock'"),
    ],
)
def test_path_leads_through_values_of_other_kinds(value: Any, path: str) -> None:
    assert path in why(value)
