"""Fleets on a Ray cluster of three nodes, whose actors, hubs and nodes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from envhub_client.connection.known_hubs import members
from pages import blocks
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.cluster_utils import Cluster
from ray_clusters import NODE, ray_cluster

import envhub
from envhub.errors import AddressError, HubUnreachable
from envhub.fleet import Fleet
from envhub.fleet.fleet import fleets
from envhub.transport.address import runtime_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # a fleet alone may take two minutes to start


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes with two CPUs each, which want a token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        with ray_cluster(patch, 2, {}, {}) as nodes:
            yield nodes
    reset_auth_token_state()


@pytest.fixture
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    """A fleet of two hubs; after the test nothing is left of it."""
    fleet = Fleet.up("sims", ["CartPole-v1"], hubs=2, timeout=120)
    yield fleet
    fleet.down()
    assert fleets() == []
    assert serving_processes() == []
    assert not [*folders().iterdir()]


def folders() -> Path:
    """The folder of the folders of all hubs."""
    return runtime_folder() / "fleets"


def serving_processes() -> list[int]:
    """The pids of the hubs below this program's nodes."""
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if any(str(folders()) in part for part in each.info["cmdline"] or ())]


def actors_of(fleet: Fleet) -> list[int]:
    return [psutil.Process(hub.pid).ppid() for hub in fleet.ls()]


def await_(what: Callable[[], bool], timeout_s: float = 90.0) -> float:
    """Wait until it is so, and return the seconds that it took."""
    started_s = time.monotonic()
    while not what():
        assert time.monotonic() - started_s < timeout_s
        time.sleep(0.05)
    return time.monotonic() - started_s


def steps(fleet: str) -> None:
    """Step a vector env of four envs of a fleet."""
    with contextlib.closing(envhub.make_vec("CartPole-v1", 4, hub=fleet)) as envs:
        envs.reset(seed=1)
        envs.step([0, 1, 0, 1])


def serves_all(fleet: Fleet) -> bool:
    return all(hub.state == "serving" for hub in fleet.ls())


def test_members_of_a_fleet_step_by_shared_memory_on_their_node_and_by_tcp(fleet: Fleet) -> None:
    assert [each.name for each in members("ray://sims")] == ["sims/0", "sims/1"]
    steps("ray://sims")
    for access in fleet.access().values():
        for address, lane in zip(access, ("wire", "shared"), strict=True):
            with contextlib.closing(envhub.make_vec("CartPole-v1", 2, hub=address)) as envs:
                assert envs.lane == lane

    def names() -> list[str]:  # in here, since Ray's processes cannot import this module
        from envhub_client.connection.known_hubs import members

        return [each.name for each in members("ray://sims")]

    assert ray.get(ray.remote(num_cpus=0)(names).remote()) == ["sims/0", "sims/1"]
    addresses = {hub.address for hub in fleet.ls()}
    with pytest.raises(envhub.AccessDenied):
        envhub.connect(addresses.pop())


def test_fleet_grows_and_shrinks(fleet: Fleet) -> None:
    before = fleet.ls()
    fleet.scale(4, timeout=120)
    assert [hub.index for hub in fleet.ls()] == [0, 1, 2, 3]
    assert fleet.ls()[:2] == before
    fleet.scale(1)
    assert fleet.ls() == before[:1]
    steps("ray://sims")
    with pytest.raises(ValueError, match="1 to"):
        fleet.scale(0)


def test_hubs_that_wait_for_cpus_are_told(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(HubUnreachable, match="is placing; `ray status` shows what the nodes have left"):
        fleet.scale(9, timeout=60)  # on six CPUs
    (told,) = [each.getMessage() for each in caplog.records if "wait for CPUs" in each.getMessage()]
    assert re.fullmatch(r"\d hubs of 'sims' wait for CPUs: each wants 1, and the nodes of Ray have \d left.*", told)
    assert [hub.index for hub in fleet.ls()] == [0, 1]


@pytest.mark.parametrize("variables", [{}, {"RAY_AUTH_MODE": "token"}], ids=str)
def test_program_without_the_token_is_told_what_to_set(cluster: Cluster, variables: dict[str, str]) -> None:
    environ = {name: value for name, value in os.environ.items() if "RAY_AUTH" not in name}
    command = [sys.executable, "-m", "envhub", "fleet", "down", "--name", "sims", "--ray", cluster.address]
    ran = subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True)
    assert ran.returncode == 1 and "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its token" in ran.stderr


def test_hub_that_is_killed_serves_again_at_its_address(fleet: Fleet) -> None:
    before = fleet.ls()[0]
    os.kill(before.pid, signal.SIGKILL)
    await_(lambda: fleet.ls()[0].pid not in (0, before.pid))
    took_s = await_(lambda: serves_all(fleet))
    after = fleet.ls()[0]
    assert (after.address, after.starts, after.why) == (before.address, 2, "the hub was ended by SIGKILL")
    steps("ray://sims")
    print(f"a hub that was killed serves again after {took_s:.1f} s")


def test_actor_that_is_killed_leaves_no_hub_and_serves_again_with_new_keys(fleet: Fleet) -> None:
    before, access = fleet.ls()[0], fleet.access()[0]
    os.kill(actors_of(fleet)[0], signal.SIGKILL)
    print(f"its hub has ended after {await_(lambda: not psutil.pid_exists(before.pid)):.1f} s")
    print(f"another serves after {await_(lambda: fleet.access().get(0, access) != access):.1f} s")
    assert len(serving_processes()) == 2
    assert len([*folders().iterdir()]) == 2
    steps("ray://sims")


def test_hub_has_the_priority_and_the_variables_of_one_started_by_hand(fleet: Fleet) -> None:
    hub, actor = fleet.ls()[0].pid, actors_of(fleet)[0]
    node = psutil.Process(actor).ppid()
    scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (hub, node)]
    assert scores[0] == scores[1]
    assert psutil.Process(hub).nice() == psutil.Process(node).nice() < psutil.Process(actor).nice()
    of_ray = re.compile("RAY_|OMP_NUM_THREADS$|PYTHONBREAKPOINT$")
    assert not [*filter(of_ray.match, psutil.Process(hub).environ())]


def test_no_key_is_in_an_argument_a_log_or_a_table_of_ray(fleet: Fleet) -> None:
    secrets = [access.tcp.removeprefix("envhub://").partition("@")[0][43:] for access in fleet.access().values()]
    table = b"".join(ray._private.state.state._connect_and_get_accessor().get_actor_table(None, None))
    arguments = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    logs = [path.read_text(errors="replace") for path in (session / "logs").rglob("*.*") if path.is_file()]
    assert b"sims" in table
    assert any("hub_started" in log for log in logs)
    for secret in secrets:
        assert len(secret) > 20
        assert secret.encode() not in table
        assert not [text for text in (*arguments, *logs) if secret in text]


PROGRAM = """
import sys
import envhub, ray
from envhub_client.connection.known_hubs import members
for member in members("ray://sims"):
    with envhub.connect(member.address) as hub:
        print(member.name, *hub.envs())
assert not ray.is_initialized()
ray.init(log_to_driver=False)
"""


def test_program_that_is_not_connected_to_ray_finds_the_fleet(fleet: Fleet) -> None:
    started_s = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    print(f"took {time.monotonic() - started_s:.1f} s")
    assert ran.stdout.split() == ["sims/0", "CartPole-v1", "sims/1", "CartPole-v1"]


def test_command_line_starts_changes_shows_and_ends_a_fleet(cluster: Cluster, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "envhub", "fleet", *arguments]
        started_s = time.monotonic()
        ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
        print(f"envhub fleet {arguments[0]}: {time.monotonic() - started_s:.1f} s")
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    (tmp_path / "hub.toml").write_text('lease = 7.0\n[envs.pole]\nenv = "CartPole-v1"\n')
    up = run("up", "--name", "farm", "--hubs", "2", "--cpus-per-hub", "2", "--config", str(tmp_path / "hub.toml"))
    assert up.splitlines()[-1] == 'connect with hub="ray://farm"'
    try:
        listed = json.loads(run("ls", "ray://farm", "--json"))
        assert [(each["name"], each["state"]) for each in listed] == [("farm/0", "ok"), ("farm/1", "ok")]
        assert "1: serving" not in run("scale", "farm", "1")
        with envhub.connect("ray://farm") as hub:
            assert [*hub.envs()] == ["pole"]
    finally:
        run("down", "farm")
    assert fleets() == serving_processes() == []


@pytest.mark.chaos
def test_fleet_that_cannot_start_says_why_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match="No module named 'no_such_sims'"):
        Fleet.up("broken", ["one=no_such_sims:make"], timeout=120)
    with pytest.raises(HubUnreachable, match="hub 0 is placing; `ray status`"):
        Fleet.up("large", ["CartPole-v1"], cpus_per_hub=64, timeout=2)
    with pytest.raises(ValueError, match="bind"):
        (tmp_path / "hub.toml").write_text('bind = ["tcp://127.0.0.1:5555"]\n')
        Fleet.up("bound", config=tmp_path / "hub.toml")
    with pytest.raises(AddressError, match="no name for a fleet"):
        Fleet.up("a:b")
    with pytest.raises(AddressError, match=r"no fleet is up as 'sims' \(up: none yet\)"):
        envhub.connect("ray://sims")
    assert serving_processes() == []


def test_program_of_the_page_runs(cluster: Cluster) -> None:
    (program,) = blocks("python ray")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
    assert fleets() == serving_processes() == []


@pytest.mark.chaos
def test_lost_node_is_replaced_by_another_and_a_new_node_takes_a_hub(cluster: Cluster) -> None:
    fleet = Fleet.up("wide", ["CartPole-v1"], hubs=3, cpus_per_hub=2, timeout=120)
    try:
        lost = next(iter(cluster.worker_nodes))
        before = fleet.access()
        cluster.remove_node(lost, allow_graceful=False)
        took_s = await_(lambda: len([hub for hub in fleet.ls() if hub.state == "serving"]) == 2)
        print(f"the loss of the node is known after {took_s:.1f} s")
        steps("ray://wide")
        cluster.add_node(**NODE)
        print(f"the new node serves after {await_(lambda: serves_all(fleet)):.1f} s")
        after = fleet.access()
        assert sum(before[index] == after[index] for index in range(3)) == 2
        steps("ray://wide")
    finally:
        fleet.down()
    assert fleets() == serving_processes() == []
    assert not [*folders().iterdir()]


def test_hub_that_ray_cannot_start_is_an_error(cluster: Cluster) -> None:
    runtime_env = {"pip": {"packages": ["/no/such/sims-1.0-py3-none-any.whl"], "pip_check": False}}
    with pytest.raises(HubUnreachable, match="Ray cannot start hub 0 of 'sims'"):
        Fleet.up("sims", ["CartPole-v1"], runtime_env=runtime_env, timeout=200)
    assert fleets() == []
