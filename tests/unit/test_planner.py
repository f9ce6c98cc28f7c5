"""Plans of sessions, from facts: who is refused, and by how many workers the envs of others are stepped."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from envhub_server.catalog.registry import EnvFacts, EnvSettings
from envhub_server.config import HubConfig
from envhub_server.hub import planner
from envhub_server.hub.planner import Admission, SessionPlan, Usage
from envhub_server.network.connections import ANYBODY, OWN_USER, Holder, Quotas
from envhub_server.session.launcher import Machine

from envhub.protocol.messages import Capacity, Failure, Hosting, Make

MACHINE = Machine((0, 1, 2, 3), 4, workers_max=100, memory_bytes=1 << 40)
ALICE = Holder("alice", "use", Quotas(sessions_max=2, envs_max=10, workers_max=6))
NOTHING = EnvFacts()


def admitted(
    make: Make, holder: Holder = OWN_USER, config: HubConfig | None = None, usage: Usage | None = None
) -> Admission | Failure:
    config = config or HubConfig()
    return planner.admit(make, holder, config, config.registry(), None, usage or Usage(), 1)


def planned(
    make: Make,
    holder: Holder = OWN_USER,
    config: HubConfig | None = None,
    usage: Usage | None = None,
    machine: Machine = MACHINE,
    facts: EnvFacts = NOTHING,
) -> SessionPlan | Failure:
    admission = admitted(make, holder, config, usage)
    if isinstance(admission, Failure):
        return admission
    return planner.plan(admission, machine, facts, config or HubConfig(), "0badcafe", "kept-")


def workers(*arguments: Any, **keywords: Any) -> int | None:
    plan = planned(*arguments, **keywords)
    assert isinstance(plan, SessionPlan), plan
    return None if plan.count is None else plan.count.workers


def refusal(*arguments: Any, **keywords: Any) -> Failure:
    failure = planned(*arguments, **keywords)
    assert isinstance(failure, Failure), failure
    return failure


@pytest.mark.parametrize("most_s, close_s", [(10.0, 10.0), (90.0, 60.0)])
def test_env_has_as_much_time_to_close_by_default_as_the_hub_gives(most_s: float, close_s: float) -> None:
    plan = planned(Make(1, "A-v0"), config=HubConfig(close_timeout_max=most_s))
    assert isinstance(plan, SessionPlan) and plan.make.faults.close_s == close_s


def test_number_of_workers_that_a_client_asks_for_comes_before_all_others() -> None:
    assert workers(Make(8, "A-v0", num_workers=3), config=HubConfig(workers=2)) == 3
    alone = Make(8, "A-v0", num_workers=3, hosting=Hosting(shares_process=False))
    assert "there are to be 3" in refusal(alone).message


def test_hubs_number_of_workers_is_within_the_room_of_the_machine() -> None:
    config = HubConfig(workers=5)
    assert workers(Make(8, "A-v0"), config=config) == 5
    assert workers(Make(8, "A-v0"), config=config, machine=replace(MACHINE, workers_max=2)) == 2
    assert workers(Make(8, "A-v0"), config=config, machine=replace(MACHINE, workers_max=0)) == 1


def test_envs_of_which_nothing_is_known_are_counted_when_the_first_are_made() -> None:
    plan = planned(Make(8, "A-v0", hosting=Hosting(spares=2)))
    assert isinstance(plan, SessionPlan) and plan.count is None
    assert plan.processes == MACHINE.cpus + 2


def test_plan_says_what_every_worker_gets() -> None:
    config = HubConfig(worker_memory=32 << 20, info_bytes_max=1 << 16)
    plan = planned(Make(2, "A-v0"), ANYBODY, config, facts=EnvFacts(("a.so",)))
    assert isinstance(plan, SessionPlan)
    rules = plan.rules
    assert (rules.session, rules.replays, rules.memory_bytes_max, rules.info_bytes_max) == (
        "0badcafe",
        "kept-",
        32 << 20,
        1 << 16,
    )
    assert rules.hide_folders and rules.libraries == ("a.so",)


@pytest.mark.parametrize(
    "holder, verbose, hides", [(OWN_USER, False, False), (ANYBODY, False, True), (ANYBODY, True, False)]
)
def test_folders_are_hidden_from_all_but_the_hubs_user_unless_its_operator_says(
    holder: Holder, verbose: bool, hides: bool
) -> None:
    assert planner.hides_folders(HubConfig(verbose_errors=verbose), holder) is hides


@pytest.mark.parametrize(
    "usage, why",
    [
        (Usage(sessions=2), "alice has 2 and wants 1 more, of sessions_max=2 of its key"),
        (Usage(envs=7), "alice has 7 and wants 4 more, of envs_max=10 of its key"),
        (Usage(processes=4), "alice has 4 and wants 3 more, of workers_max=6 of its key"),
    ],
)
def test_quota_that_a_session_would_exceed_refuses_it(usage: Usage, why: str) -> None:
    make = Make(4, "A-v0", num_workers=2, hosting=Hosting(spares=1))
    assert refusal(make, ALICE, usage=usage) == Failure("limit", "hub", why)
    assert workers(make, OWN_USER, usage=usage) == 2


def test_session_has_no_more_workers_than_the_quota_of_its_client_leaves() -> None:
    make = Make(4, "A-v0", hosting=Hosting(spares=1))
    admission = admitted(make, ALICE, usage=Usage(processes=3))
    assert isinstance(admission, Admission) and admission.workers_max == 2
    unlimited = admitted(make)
    assert isinstance(unlimited, Admission) and unlimited.workers_max == math.inf
    plan = planned(make, ALICE, usage=Usage(processes=3))
    assert isinstance(plan, SessionPlan)
    assert (plan.machine.cpus, plan.machine.workers_max, plan.processes) == (2, 2, 3)


def test_hubs_limit_of_envs_counts_those_of_all_clients() -> None:
    config = HubConfig(max_envs=10)
    assert "7 are in use" in refusal(Make(4, "A-v0"), config=config, usage=Usage(hub_envs=7)).message
    assert workers(Make(3, "A-v0"), config=config, usage=Usage(hub_envs=7)) == 3


def test_envs_that_need_a_process_each_are_refused_where_there_is_no_room() -> None:
    make = Make(8, "A-v0", hosting=Hosting(shares_process=False))
    assert workers(make) == 8
    why = refusal(make, machine=replace(MACHINE, workers_max=5))
    assert (why.code, why.scope) == ("refused", "request") and "there is room for 5" in why.message
    alone = EnvFacts(alone=True)
    assert (
        "there is room for 5" in refusal(Make(8, "A-v0"), machine=replace(MACHINE, workers_max=5), facts=alone).message
    )


def test_vector_env_has_one_worker() -> None:
    config = HubConfig(tables={"many": EnvSettings("A-v0", vector=True)}, workers=4)
    assert workers(Make(8, "many", vector=True), config=config) == 1


def test_env_that_is_not_offered_is_refused_by_its_name() -> None:
    failure = refusal(Make(1, "Cartpole-v1"), config=HubConfig(envs=("CartPole-v1",)))
    assert failure.code == "unknown_env" and "CartPole-v1" in failure.message


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_capacity_is_what_hub_and_key_leave() -> None:
    config = HubConfig(sessions_max=5, max_envs=100)
    usage = Usage(hub_sessions=4, hub_envs=60, busy_workers=3, sessions=1, envs=8)
    assert planner.capacity(OWN_USER, config, usage, 4) == Capacity(4, 1, 40, 1)
    assert planner.capacity(ALICE, config, usage, 4) == Capacity(4, 1, 2, 1)
    assert planner.capacity(ALICE, HubConfig(), usage, 2) == Capacity(2, 0, 2, 1)


def test_capacity_is_never_negative() -> None:
    over = Usage(hub_sessions=9, hub_envs=900, busy_workers=90, sessions=9, envs=90)
    assert planner.capacity(ALICE, HubConfig(sessions_max=5, max_envs=100), over, 4) == Capacity(4, 0, 0, 0)
