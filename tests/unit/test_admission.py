from __future__ import annotations

from typing import Any

import pytest
from envhub_server.catalog.admission import admitted, hosting_of_session
from envhub_server.catalog.registry import EnvSettings, Recipe
from envhub_server.config import HubConfig

from envhub.options import BYTES_MIN
from envhub.protocol.messages import Failure, Faults, Hosting, Make, Recycle
from envhub.values import codec

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
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HubConfig(**wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HubConfig(tables={"a": EnvSettings("b:c", **wrong)})


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
