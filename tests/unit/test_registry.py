from __future__ import annotations

import sys

import pytest
from envhub_server.catalog.registry import EnvSettings, Recipe, Registry
from envhub_server.ipc.packages import on_this_machine
from envhub_server.processes.interpreter import OWN


def test_without_entries_every_registered_id_is_offered() -> None:
    registry = Registry()
    assert registry.find("CartPole-v1") == Recipe("CartPole-v1")
    assert registry.offered({OWN: ["B-v0", "A-v0"]}) == ["A-v0", "B-v0"]


def test_named_id_is_offered_and_no_other() -> None:
    registry = Registry(["CartPole-v1", "Ant-v5"])
    assert registry.find("CartPole-v1") == Recipe("CartPole-v1")
    assert registry.find("CartPole-v0") is None
    assert registry.find("cartpole-v1") is None
    assert registry.offered({OWN: ["Ant-v5", "CartPole-v1", "Hopper-v5"]}) == ["Ant-v5", "CartPole-v1"]


def test_pattern_offers_what_it_matches() -> None:
    registry = Registry(["ALE/*", "Ant-v?"])
    assert registry.find("ALE/Pong-v5") == Recipe("ALE/Pong-v5", ("ale_py",))
    assert registry.find("Ant-v5") == Recipe("Ant-v5")
    assert registry.find("Hopper-v5") is None
    assert registry.offered({OWN: ["ALE/Pong-v5", "Hopper-v5", "Ant-v5"]}) == ["ALE/Pong-v5", "Ant-v5"]


def test_module_before_an_id_is_imported_for_it() -> None:
    registry = Registry(["my_sims:Robot-v0", "other:Sim*"])
    assert registry.find("Robot-v0") == Recipe("Robot-v0", ("my_sims",))
    assert registry.find("SimA-v1") == Recipe("SimA-v1", ("other",))
    assert registry.modules(OWN) == ["my_sims", "other"]


def test_module_of_a_known_namespace_is_imported_without_being_named() -> None:
    assert Registry().find("ALE/Pong-v5") == Recipe("ALE/Pong-v5", ("ale_py",))
    assert Registry(["ALE/Pong-v5"]).modules(OWN) == ["ale_py"]
    assert Registry().find("Elsewhere/Pong-v5") == Recipe("Elsewhere/Pong-v5")


def test_client_may_name_the_operators_module_and_none_of_its_own() -> None:
    registry = Registry(["my_sims:Robot-v0", "CartPole-v1"])
    assert registry.find("my_sims:Robot-v0") == Recipe("Robot-v0", ("my_sims",))
    assert registry.find("os:Robot-v0") is None
    assert registry.find("os:CartPole-v1") is None
    assert registry.find("my_sims:os:Robot-v0") is None
    assert Registry().find("antigravity:CartPole-v1") is None


def test_entry_point_is_offered_under_its_name() -> None:
    registry = Registry(["libero=my_sims:make"])
    assert registry.find("libero") == Recipe("libero", (), "my_sims:make")
    assert registry.find("my_sims:make") is None
    assert registry.find("my_sims:libero") is None
    assert registry.offered({OWN: []}) == ["libero"]
    assert registry.modules(OWN) == []  # it is imported when an env is made, not to list names


def test_entry_point_may_be_a_nested_module() -> None:
    assert Registry(["a=pkg.sub:factory"]).find("a") == Recipe("a", (), "pkg.sub:factory")


def test_first_entry_that_matches_decides() -> None:
    registry = Registry(["mine:Robot-v0", "theirs:*"])
    assert registry.find("Robot-v0") == Recipe("Robot-v0", ("mine",))
    assert registry.find("Other-v0") == Recipe("Other-v0", ("theirs",))


def test_entries_that_name_nothing_are_found() -> None:
    registry = Registry(["libero=m:f", "Ant-*", "CartPole-v7", "m:Sim-*"])
    assert registry.offered({OWN: ["Ant-v5", "Hopper-v5"]}) == ["Ant-v5", "libero"]
    assert registry.unmatched(OWN, ["Ant-v5", "Hopper-v5"]).keys() == {"CartPole-v7", "Sim-*"}


def test_id_that_is_not_registered_is_told_with_the_nearest_one_or_the_package_to_install() -> None:
    registry = Registry(["Cartpole-v1", "ALE/Pogn-v5", "dm_control/*", "Zzz-v0"])
    unmatched = registry.unmatched(OWN, ["CartPole-v1", "ALE/Pong-v5"])
    assert (
        unmatched["Cartpole-v1"] == f"no id 'Cartpole-v1' is registered{on_this_machine()}; did you mean 'CartPole-v1'?"
    )
    assert unmatched["ALE/Pogn-v5"].endswith("; did you mean 'ALE/Pong-v5'?")
    assert unmatched["dm_control/*"].endswith(f"run: {sys.executable} -m pip install 'shimmy[dm-control]'")
    assert unmatched["Zzz-v0"] == f"no id 'Zzz-v0' is registered{on_this_machine()}"


@pytest.mark.parametrize(
    "entry", ["", ":", ":CartPole-v1", "module:", "=m:f", "name=", "name=m", "name=m:", "name=:f", "a:b=m:f"]
)
def test_entry_of_no_known_form_is_refused_and_quoted(entry: str) -> None:
    with pytest.raises(ValueError, match="name=module:factory") as caught:
        Registry([entry])
    assert repr(entry) in str(caught.value)


def test_arguments_are_declared_for_envs_and_patterns() -> None:
    registry = Registry(["ALE/*", "robot=sims:robot"], ["ALE/*=game,mode", "*=level", "robot=file"])
    pong, robot = registry.find("ALE/Pong-v5"), registry.find("robot")
    assert pong is not None and pong.arguments == {"game", "mode", "level"}
    assert robot is not None and robot.arguments == {"file", "level"}
    for text in ("level", "=level", "ALE/*=", "ALE/*=a,,b", "ALE/*=a b"):
        with pytest.raises(ValueError, match="name=argument"):
            Registry((), [text])


def test_nearest_names_are_those_on_offer_whatever_their_case_namespace_or_version() -> None:
    registry = Registry(["*"])
    names = ["ALE/Pong-v5", "ALE/Pooyan-v5", "Ant-v5", "CartPole-v0", "CartPole-v1", "HalfCheetah-v5"]
    assert registry.nearest("pong", names)[0] == "ALE/Pong-v5"
    assert registry.nearest("ale_py:ALE/Pongg-v5", names)[0] == "ALE/Pong-v5"
    assert registry.nearest("cartpole-v2", names)[:2] == ["CartPole-v1", "CartPole-v0"]
    assert registry.nearest("Zork", names) == [] == registry.nearest("x" * 100_000, names)


def test_nearest_names_are_the_entries_while_the_registered_ids_are_unknown() -> None:
    registry = Registry(["CartPole-v1", "ALE/*", "arm=my_sims:Arm"])
    assert registry.nearest("CartPol-v1") == ["CartPole-v1"] and registry.nearest("Arms") == ["arm"]
    assert registry.nearest("ALE/Pong-v5") == []


def test_example_is_an_env_on_offer() -> None:
    entries = Registry(["Ant-v?", "arm=my_sims:Arm", "Pendulum-v1"])
    assert entries.example(["Ant-v5", "Pendulum-v1", "arm"]) == "arm"
    assert entries.example(["Ant-v5", "Pendulum-v1"]) == "Pendulum-v1"
    assert entries.example(["Ant-v5"]) == "Ant-v5" and entries.example([]) == ""
    assert Registry().example(["Acrobot-v1", "CartPole-v1"]) == "CartPole-v1"


def test_entry_that_names_no_id_is_impossible_unless_a_module_is_missing_that_may_have_it() -> None:
    ids = ["CartPole-v1", "my/Arm-v0"]
    both: list[tuple[list[str], dict[str, EnvSettings]]] = [(["Zzz-v0"], {}), ([], {"arm": EnvSettings("Zzz-v0")})]
    for entries, tables in both:
        found = Registry(["CartPole-v1", *entries], tables=tables).impossible(OWN, ids, imported=False)
        assert found == f"no id 'Zzz-v0' is registered{on_this_machine()}"
    named = Registry(["CartPole-v1", "mine:Zzz-v0"])
    assert named.impossible(OWN, ids, imported=False) == ""  # its package may be installed yet
    assert named.impossible(OWN, ids, imported=True) != ""
    assert Registry(["mine:Zzz-v0"]).impossible(OWN, ids, imported=False) != ""  # the only one
    other = Registry(["CartPole-v1", "Zzz-v0"], defaults=EnvSettings(python="/old"))
    assert other.impossible(other.interpreters[0], ids, imported=True) == ""


def test_entries_may_be_vector_envs_and_tables_say_so_themselves() -> None:
    registry = Registry(["CartPole-v1"], tables={"a": EnvSettings(), "b": EnvSettings(vector=True)}, vector=True)
    found = {name: registry.find(name) for name in ("CartPole-v1", "a", "b")}
    assert {name: recipe is not None and recipe.settings.vector for name, recipe in found.items()} == {
        "CartPole-v1": True,
        "a": False,
        "b": True,
    }
