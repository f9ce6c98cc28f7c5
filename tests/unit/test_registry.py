from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from envhub_server.catalog.registry import EnvSettings, Recipe, Registry
from envhub_server.config import HubConfig
from envhub_server.hub.directory import MINUTE_S, ClientUsage
from envhub_server.hub.planner import Usage, admitted, hosting_of_session
from envhub_server.ipc.packages import on_this_machine
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.network.connections import OWN_USER, Holder, Quotas
from envhub_server.processes.interpreter import OWN
from sessions import ready

from envhub.options import BYTES_MIN, options_from
from envhub.protocol.messages import Failure, Faults, Hosting, Make, Recycle
from envhub.values import codec


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


# --- admission --------------------------------------------------------------------------------------------------------


DEALS_TWO = HubConfig(gpus=(0, 1))
DEALS_NONE = HubConfig()


def asked(make: Make, config: HubConfig = DEALS_NONE, deploys: bool = False) -> Recipe | Failure:
    return admitted(make, config, config.registry(), 0, deploys)


def test_client_may_choose_among_the_operators_devices_and_no_others() -> None:
    assert asked(Make(1, "A-v0", hosting=Hosting(gpus=[1])), DEALS_TWO) == Recipe("A-v0")
    for config, dealt in ((DEALS_TWO, "0, 1"), (DEALS_NONE, "no devices")):
        refused = asked(Make(1, "A-v0", hosting=Hosting(gpus=[1, 2])), config)
        assert isinstance(refused, Failure) and refused.code == "not_permitted"
        assert f"this hub deals {dealt} to its workers; its operator names others by --gpus" in refused.message


def test_client_may_lower_the_operators_limit_of_memory_and_not_raise_it() -> None:
    limited = HubConfig(memory_max=BYTES_MIN)
    assert asked(Make(1, "A-v0", hosting=Hosting(memory_max=99)), limited) == Recipe("A-v0")
    for wanted in (BYTES_MIN + 1, 0):
        refused = asked(Make(1, "A-v0", hosting=Hosting(memory_max=wanted)), limited)
        assert isinstance(refused, Failure) and f"allows up to {BYTES_MIN} bytes of a worker" in refused.message
    assert asked(Make(1, "A-v0", hosting=Hosting(memory_max=0))) == Recipe("A-v0")
    assert hosting_of_session(Hosting(memory_max=99), limited.hosting, 1).memory_max == 99
    assert hosting_of_session(Hosting(), limited.hosting, 1).memory_max == BYTES_MIN


def test_client_may_have_so_many_spares_and_as_many_as_the_operator_says() -> None:
    assert asked(Make(1, "A-v0", hosting=Hosting(spares=8))) == Recipe("A-v0")
    refused = asked(Make(1, "A-v0", hosting=Hosting(spares=9)))
    assert isinstance(refused, Failure) and "spares_max=8" in refused.message
    assert asked(Make(1, "A-v0", hosting=Hosting(spares=9)), HubConfig(spares=20)) == Recipe("A-v0")
    assert hosting_of_session(Hosting(), Hosting(spares=20), 1).spares == 20
    assert hosting_of_session(Hosting(spares=0), Hosting(spares=20), 1).spares == 0


@pytest.mark.parametrize("wrong", [{"spares": 1_000_000}, {"gpus": (0, 0)}, {"gpus": (-1,)}])
def test_operator_says_numbers_within_bounds(wrong: dict[str, Any]) -> None:
    for kind in (HubConfig, EnvSettings):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            kind(**options_from(wrong, kind))


def test_client_may_not_keep_workers_for_long_by_closing() -> None:
    assert asked(Make(1, "A-v0", faults=Faults(close_s=60.0))) == Recipe("A-v0")
    assert asked(Make(1, "A-v0"), HubConfig(close_timeout_max=10.0)) == Recipe("A-v0")  # by default it has 10 s then
    assert isinstance(asked(Make(1, "A-v0", faults=Faults(close_s=30.0)), HubConfig(close_timeout_max=10.0)), Failure)
    refused = asked(Make(1, "A-v0", faults=Faults(close_s=61.0)))
    assert isinstance(refused, Failure) and refused.code == "limit"
    assert "close_timeout=61 is more than close_timeout_max=60 s of this hub" in refused.message
    assert asked(Make(1, "A-v0", faults=Faults(close_s=61.0)), HubConfig(close_timeout_max=90.0)) == Recipe("A-v0")


def test_session_that_recycles_workers_has_a_spare_unless_it_wants_none() -> None:
    recycle = Recycle(episodes=10)
    assert hosting_of_session(Hosting(recycle=recycle), Hosting(), 1) == Hosting(recycle=recycle, spares=1)
    assert hosting_of_session(Hosting(), Hosting(recycle=recycle, spares=3), 1).spares == 3
    assert hosting_of_session(Hosting(recycle=recycle, spares=0), Hosting(), 1).spares == 0


def test_worker_is_recycled_by_the_first_of_the_clients_and_the_operators_limits() -> None:
    of_operator = Hosting(recycle=Recycle(episodes=5, age_s=1.0))
    assert hosting_of_session(Hosting(recycle=Recycle(episodes=10)), of_operator, 1).recycle == Recycle(
        episodes=5, age_s=1.0
    )
    assert hosting_of_session(Hosting(recycle=Recycle(3, 0.0, 9)), of_operator, 1).recycle == Recycle(3, 1.0, 9)
    assert hosting_of_session(Hosting(), of_operator, 1).recycle == of_operator.recycle


def test_table_of_an_env_says_which_devices_its_workers_may_have() -> None:
    config = HubConfig(tables={"A-v0": EnvSettings(gpus=(2,))}, gpus=(0, 1))
    assert isinstance(asked(Make(1, "A-v0", hosting=Hosting(gpus=[2])), config), Recipe)
    assert isinstance(asked(Make(1, "A-v0", hosting=Hosting(gpus=[0])), config), Failure)


def test_sessions_begin_with_the_operators_devices_in_turn() -> None:
    dealt = [hosting_of_session(Hosting(), Hosting(gpus=[4, 5, 6]), session).gpus for session in range(3)]
    assert dealt == [[4, 5, 6], [5, 6, 4], [6, 4, 5]]
    assert hosting_of_session(Hosting(gpus=[6, 4]), Hosting(gpus=[4, 5, 6]), 1).gpus == [6, 4]
    assert hosting_of_session(Hosting(), Hosting(), 1).gpus == []


def test_program_chooses_any_devices_of_its_own_hub() -> None:
    assert asked(Make(1, "A-v0", hosting=Hosting(gpus=[7])), HubConfig(program=3)) == Recipe("A-v0")


def test_arguments_are_of_every_env_or_of_none() -> None:
    refused = asked(Make(3, "A-v0", kwargs_each=[b"", b""]))
    assert isinstance(refused, Failure) and "3 envs and arguments for 2" in refused.message
    refused = asked(Make(3, "A-v0", seeds=[1, 2]))
    assert isinstance(refused, Failure) and "3 envs and seeds for 2" in refused.message


def test_arguments_of_each_env_are_checked_as_those_of_all() -> None:
    each = [codec.encode({"file": name}) for name in ("plain", "/etc/passwd")]
    refused = asked(Make(2, "A-v0", kwargs_each=each))
    assert isinstance(refused, Failure) and "file='/etc/passwd'" in refused.message
    assert asked(Make(2, "A-v0", kwargs_each=each), deploys=True) == Recipe("A-v0")
    assert asked(Make(2, "A-v0", kwargs_each=each), HubConfig(allow_arguments=("A-v0=file",))) == Recipe(
        "A-v0", arguments=frozenset(["file"])
    )


def test_operator_says_which_envs_are_vector_envs_and_a_program_of_its_own_hub() -> None:
    config = HubConfig(tables={"A-v0": EnvSettings(vector=True), "B-v0": EnvSettings()})
    for vector in (False, True):
        found = asked(Make(2, "A-v0", vector=vector), config)
        assert isinstance(found, Recipe) and found.settings.vector
        own = asked(Make(2, "A-v0", vector=vector), HubConfig(program=3))
        assert isinstance(own, Recipe) and own.settings.vector == vector
    refused = asked(Make(2, "B-v0", vector=True), config)
    assert isinstance(refused, Failure) and "as single envs; its operator decides" in refused.message


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Make(1, "A-v0", wrappers=["gymnasium.wrappers.common:TimeLimit"], wrapper_kwargs=[b""]), "wrappers"),
        (Make(1, "A-v0", kwargs_each=[b""]), "arguments for each env"),
        (Make(1, "A-v0", observation_mode="different"), "observation_mode='different'"),
    ],
)
def test_what_a_vector_env_does_not_take_is_refused(make: Make, what: str) -> None:
    refused = asked(make, HubConfig(tables={"A-v0": EnvSettings(vector=True)}))
    assert isinstance(refused, Failure) and f"makes a vector env, which takes no {what}" in refused.message


@pytest.mark.parametrize("setup", [{"worker_setup": "a:b"}, {"worker_setup_code": b"pickle"}])
@pytest.mark.parametrize(("allow", "deploys"), [(True, True), (True, False), (False, True), (False, False)])
def test_what_sets_workers_up_is_the_operators_choice_as_factories_are(
    setup: dict[str, Any], allow: bool, deploys: bool
) -> None:
    found = asked(Make(1, "A-v0", **setup), HubConfig(allow_factories=allow), deploys=deploys)
    if allow and deploys:
        assert found == Recipe("A-v0")
    else:
        assert isinstance(found, Failure) and found.code == "not_permitted"
        assert "is its operator's choice, by worker_setup in the table" in found.message
    assert asked(Make(1, "A-v0", **setup), HubConfig(program=3)) == Recipe("A-v0")


def test_client_may_name_the_setup_that_the_operator_has_named() -> None:
    config = HubConfig(tables={"A-v0": EnvSettings(worker_setup="a:b")})
    assert isinstance(asked(Make(1, "A-v0", worker_setup="a:b"), config), Recipe)
    assert isinstance(asked(Make(1, "A-v0", worker_setup="a:c"), config), Failure)
    assert isinstance(asked(Make(1, "A-v0", worker_setup="a:b", worker_setup_code=b"x"), config), Failure)


# --- usage by each client ---------------------------------------------------------------------------------------------


ALICE = Holder("alice", quotas=Quotas(makes_per_minute_max=2, arena_bytes_max=100))
BOB = replace(ALICE, name="bob")


@pytest.fixture
def usage() -> ClientUsage:
    """The usage of a hub on which alice has two sessions, one of them with a spare, and bob has one."""
    owned = [("alice", ready(3, 2, hosting=Hosting(spares=1))), ("bob", ready(4, 4)), ("alice", ready(1, 1))]
    directory: Any = SimpleNamespace(sessions=[SimpleNamespace(owner=owner, state=state) for owner, state in owned])
    return ClientUsage(ArenaBudget(1000), directory)


def test_sessions_of_all_count_for_the_hub_and_the_own_ones_with_their_spares_for_a_client(usage: ClientUsage) -> None:
    of_hub = Usage(hub_sessions=3, hub_envs=8, busy_workers=7)
    assert usage.of(OWN_USER) == of_hub
    assert usage.of(ALICE) == replace(of_hub, sessions=2, envs=4, processes=4)
    assert usage.of(BOB) == replace(of_hub, sessions=1, envs=4, processes=4)


def test_makes_of_a_minute_count_and_no_earlier_ones(usage: ClientUsage) -> None:
    assert [usage.count("makes", ALICE, at_s) for at_s in (0.0, 1.0)] == ["", ""]
    why = "alice has 2 and wants 1 more, of makes_per_minute_max=2 of its key"
    assert usage.count("makes", ALICE, MINUTE_S - 0.1) == why and usage.count("makes", BOB, MINUTE_S - 0.1) == ""
    assert usage.count("makes", ALICE, MINUTE_S) == ""  # one that was refused does not count
    assert usage.count("makes", ALICE, MINUTE_S) == why
    assert usage.count("makes", replace(ALICE, quotas=Quotas(makes_per_minute_max=3)), MINUTE_S) == ""
    assert not any(usage.count("makes", OWN_USER, 0.0) for _ in range(100))
    assert usage.count("restarts", ALICE, MINUTE_S) == ""


def test_memory_is_used_by_clients_apart_within_that_of_all_by_the_limit_of_the_moment(usage: ClientUsage) -> None:
    usage.budget(ALICE).use(60)
    assert (usage.budget(ALICE).left, usage.budget(BOB).left, usage.budget(OWN_USER).left) == (40, 100, 940)
    assert usage.budget(replace(ALICE, quotas=Quotas(arena_bytes_max=70))).left == 10
    usage.budget(OWN_USER).use(930)
    assert usage.budget(BOB).left == 10
