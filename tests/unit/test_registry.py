from __future__ import annotations

import sys

import pytest
from envhub_server.catalog.registry import EnvSettings, Recipe, Registry
from envhub_server.ipc.packages import on_this_machine
from envhub_server.processes.interpreter import OWN


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], {"CartPole-v1": Recipe("CartPole-v1"), "antigravity:CartPole-v1": None}),
        (["CartPole-v1"], {"CartPole-v1": Recipe("CartPole-v1"), "CartPole-v0": None, "cartpole-v1": None}),
        (["Ant-v?"], {"Ant-v5": Recipe("Ant-v5"), "Hopper-v5": None}),
        # A known namespace names its module.
        ([], {"ALE/Pong-v5": Recipe("ALE/Pong-v5", ("ale_py",)), "Elsewhere/Pong-v5": Recipe("Elsewhere/Pong-v5")}),
        (["ALE/*"], {"ALE/Pong-v5": Recipe("ALE/Pong-v5", ("ale_py",))}),
        # A client may name the operator's module, and none of its own.
        (
            ["my_sims:Robot-v0", "CartPole-v1"],
            {
                **dict.fromkeys(("Robot-v0", "my_sims:Robot-v0"), Recipe("Robot-v0", ("my_sims",))),
                **dict.fromkeys(("os:Robot-v0", "os:CartPole-v1", "my_sims:os:Robot-v0")),
            },
        ),
        (
            ["libero=my_sims:make", "a=pkg.sub:factory"],
            {
                "libero": Recipe("libero", (), "my_sims:make"),
                "a": Recipe("a", (), "pkg.sub:factory"),
                **dict.fromkeys(("my_sims:make", "my_sims:libero")),
            },
        ),
        # The first entry that matches decides.
        (
            ["mine:Robot-v0", "theirs:*"],
            {"Robot-v0": Recipe("Robot-v0", ("mine",)), "Other-v0": Recipe("Other-v0", ("theirs",))},
        ),
    ],
)
def test_name_is_found_by_the_first_entry_that_offers_it(entries: list[str], found: dict[str, Recipe | None]) -> None:
    registry = Registry(entries)
    assert {name: registry.find(name) for name in found} == found


def test_ids_are_offered_that_entries_match_and_modules_imported_that_they_name() -> None:
    registered = {OWN: ["Hopper-v5", "ALE/Pong-v5", "Ant-v5"]}
    assert Registry().offered(registered) == ["ALE/Pong-v5", "Ant-v5", "Hopper-v5"]
    assert Registry(["ALE/*", "Ant-v?"]).offered(registered) == ["ALE/Pong-v5", "Ant-v5"]
    assert Registry(["libero=my_sims:make"]).offered({OWN: []}) == ["libero"]
    assert Registry(["my_sims:Robot-v0", "other:Sim*", "ALE/Pong-v5"]).modules(OWN) == ["ale_py", "my_sims", "other"]
    assert Registry(["libero=my_sims:make"]).modules(OWN) == []  # imported when an env is made, not to list names


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
