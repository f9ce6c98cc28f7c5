"""Plans of sessions, from facts: who is refused, and by how many workers the envs of others are stepped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from envhub_server.catalog.registry import EnvSettings, Recipe
from envhub_server.config import HubConfig
from envhub_server.hub import planner
from envhub_server.hub.planner import Admission, SessionPlan, Usage
from envhub_server.network.connections import ANYBODY, OWN_USER, Holder, Quotas
from envhub_server.processes.supervisor import FILES_MAX, KEPT_MAX, KeptZygotes
from envhub_server.session.launcher import Machine

from envhub.protocol.messages import Capacity, Failure, Hosting, Make, ProgramEnvironment

MACHINE = Machine((0, 1, 2, 3), 4, workers_max=100, memory_bytes=1 << 40)
ALICE = Holder("alice", "use", Quotas(sessions_max=2, envs_max=10, workers_max=6))


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
    shares_imports: bool = True,
) -> SessionPlan | Failure:
    admission = admitted(make, holder, config, usage)
    if isinstance(admission, Failure):
        return admission
    return planner.plan(admission, machine, shares_imports, config or HubConfig(), "0badcafe", "kept-")


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
    plan = planned(Make(2, "A-v0"), ANYBODY, config, shares_imports=False)
    assert isinstance(plan, SessionPlan)
    rules = plan.rules
    assert (rules.session, rules.replays, rules.memory_bytes_max, rules.info_bytes_max) == (
        "0badcafe",
        "kept-",
        32 << 20,
        1 << 16,
    )
    assert rules.hide_folders and not rules.shares_imports


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


def test_imports_are_of_a_program_and_of_what_it_has_workers_take_over() -> None:
    program = ProgramEnvironment(["/sims"], "/here", {"HOME": "/home"}, b"registry", b"authkey")
    make, recipe = Make(2, "A-v0", program_environment=program), Recipe("A-v0")
    at = planner.imports_key(make, recipe)
    assert at and at == planner.imports_key(replace(make, num_envs=9, kwargs=b"k"), recipe)
    assert at != planner.imports_key(replace(make, program_environment=replace(program, cwd="/there")), recipe)
    assert at != planner.imports_key(replace(make, factories=b"f", factories_digest="d"), recipe)
    own = replace(recipe, settings=EnvSettings(python="3.8"))
    for makes, of in ((replace(make, factories=b"f"), recipe), (make, own), (Make(2, "A-v0"), recipe)):
        assert planner.imports_key(makes, of) == ""


# --- zygotes that later sessions use ----------------------------------------------------------------------------------


class Zygote:
    ended = False

    def kill(self) -> None:
        self.ended = True


@pytest.fixture
def kept() -> Any:
    return KeptZygotes()


def test_zygote_used_longest_ago_ends_for_another(kept: Any) -> None:
    zygotes = [Zygote() for _ in range(KEPT_MAX + 1)]
    for number, zygote in enumerate(zygotes):
        kept.keep(str(number), zygote, ())
        assert kept.find("0") is zygotes[0]
    assert [zygote.ended for zygote in zygotes] == [number == 1 for number in range(KEPT_MAX + 1)]
    zygotes[0].kill()
    assert kept.find("0") is None


def test_zygote_of_a_session_ends_with_it_unless_it_is_kept(kept: Any) -> None:
    first, second, large = Zygote(), Zygote(), Zygote()
    kept.keep("a", first, ())
    kept.keep("a", second, ())  # of a session that began before the first one was kept
    kept.keep("b", large, [str(number) for number in range(FILES_MAX + 1)])
    for zygote in (first, second, large):
        kept.release(zygote)
    assert (first.ended, second.ended, large.ended) == (False, True, True)


@pytest.mark.parametrize("removed", [False, True])
def test_zygote_ends_once_its_code_has_changed(kept: Any, tmp_path: Path, removed: bool) -> None:
    zygote, file = Zygote(), tmp_path / "sim.py"
    file.write_text("")
    kept.keep("a", zygote, [str(file)])
    assert kept.find("a") is zygote
    file.unlink() if removed else file.write_text("import other")
    assert kept.find("a") is None and zygote.ended and kept.find("a") is None
