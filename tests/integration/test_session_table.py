"""The table of sessions: what it says of each while it lives."""

from __future__ import annotations

import getpass
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from hubs import ServedHub, serve, stopped, wait_until
from new_keys import address_of, admitted, keys_in

import envhub

TWO = np.zeros(2, np.int64)


@pytest.fixture(params=["shared", *(pytest.param(each, marks=pytest.mark.long) for each in ("wire", "private"))])
def envs(request: pytest.FixtureRequest, hub: ServedHub) -> Iterator[envhub.HubVectorEnv]:
    hub_options = {"private": {}, "shared": {"hub": hub.ipc}, "wire": {"hub": hub.ipc, "lane": "wire"}}[request.param]
    options = {"num_workers": 2, "label": "ablation 3", "sutton_barto_reward": True}
    with closing(envhub.make_vec("CartPole-v1", 4, **options, **hub_options)) as made:
        made.reset()
        yield made


@pytest.fixture
def client(envs: envhub.HubVectorEnv) -> Iterator[envhub.Client]:
    with envhub.connect(envs._session.connection.address) as connected:
        yield connected


def test_row_says_whose_the_session_is_and_what_was_made(envs: envhub.HubVectorEnv, client: envhub.Client) -> None:
    (row,) = client.sessions()
    assert row["session"] == envs.token[:8] and row["label"] == "ablation 3" and row["lane"] == envs.lane
    assert (row["env"], row["kwargs"], row["num_envs"]) == ("CartPole-v1", "sutton_barto_reward=True", 4)
    owner = row["owner"]
    assert (owner["key"], owner["user"], owner["pid"]) == ("", getpass.getuser(), os.getpid())
    assert owner["host"] == socket.gethostname() and owner["said"] == ["program"] and owner["program"]
    assert row["sizing"] and not row["leased"] and row["recycled"] == row["restarts"] == 0 and row["reasons"] == []


def test_row_has_rates_costs_and_what_each_process_does(envs: envhub.HubVectorEnv, client: envhub.Client) -> None:
    (first,) = client.sessions()
    for _ in range(50):
        envs.step(np.zeros(4, np.int64))
    assert wait_until(lambda: client.sessions()[0]["steps_per_s"] is not None)
    assert wait_until(lambda: client.sessions()[0]["idle_s"] > 0)
    (row,) = client.sessions()
    assert row["steps"] == first["steps"] + 200 and row["age_s"] >= first["age_s"] and row["phase"] == "ready"
    assert row["workers"] == [each["pid"] for each in row["processes"]]
    for each in row["processes"]:
        assert each["doing"] == "waiting" and each["env"] is None and each["restarts"] == 0
        times = psutil.Process(each["pid"]).cpu_times()
        assert 0 <= each["cpu_s"] <= times.user + times.system + 0.02 and each["memory_bytes"] > 1 << 20
    assert [each["envs"] for each in row["processes"]] == [[0, 2], [1, 3]]
    assert row["memory_bytes"] == sum(each["memory_bytes"] for each in row["processes"])
    pid = row["workers"][1]
    with stopped(pid):
        envs.step_async(np.zeros(4, np.int64))
        assert wait_until(lambda: client.sessions()[0]["processes"][1]["since_s"] >= 0.5)
        (row,) = client.sessions()
        assert row["processes"][1]["doing"] == "step" and row["processes"][1]["env"] in (1, 3)
        assert row["processes"][0]["doing"] == "waiting" and row["idle_s"] < 60
    envs.step_wait()


def test_worker_that_ended_is_a_restart_with_its_reason(envs: envhub.HubVectorEnv, client: envhub.Client) -> None:
    (before,) = client.sessions()
    pids = before["workers"]
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(lambda: client.sessions()[0]["restarts"] == 1 and pids[0] not in client.sessions()[0]["workers"])
    envs.step(np.zeros(4, np.int64))
    (row,) = client.sessions()
    (reason,) = row["reasons"]
    assert row["cpu_s"] >= before["cpu_s"]  # what the former process used counts
    assert (reason["worker"], reason["env"]) == (0, None) and "SIGKILL" in reason["why"] and reason["ago_s"] < 60


def test_client_by_tcp_sees_its_own_sessions_and_its_account_is_marked_as_said(tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "keys")
    alice, bob, ops = (admitted(keys, name, may) for name, may in (("alice", "use"), ("bob", "use"), ("ops", "admin")))
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path)) as hub:
        addresses = [address_of(token, hub.tcp) for token in (alice, bob, ops)]
        clients = [envhub.connect(address) for address in addresses]
        with closing(envhub.make_vec("CartPole-v1", 2, hub=addresses[0])) as envs:
            rows = [client.sessions() for client in clients]
            assert [len(each) for each in rows] == [1, 0, 1] and rows[0][0]["owner"] == rows[2][0]["owner"]
            owner = rows[0][0]["owner"]
            assert owner["key"] == "alice" and owner["pid"] == os.getpid() and "127.0.0.1" in owner["address"]
            assert owner["said"] == ["host", "pid", "program", "user"]
            with pytest.raises(envhub.SessionLost, match="of yours"):
                clients[1].end(envs.token[:8])
            with pytest.raises(envhub.RequestRefused, match="knows no action 'dance'"):
                clients[0]._operate("dance", envs.token[:8])
            assert clients[0].end(envs.token[:8], "a mistake")["by"] == "client alice"
            with pytest.raises(envhub.SessionLost, match="was ended by client alice: a mistake"):
                envs.step(TWO)
            with pytest.raises(envhub.SessionLost, match=r"has ended \d+ s ago, by client alice: a mistake"):
                clients[0].end(envs.token[:8])
        for each in clients:
            each.close()


def test_label_is_a_short_line() -> None:
    for label in ("x" * 101, "two\nlines", 7):
        with pytest.raises(ValueError, match="label must be a text of at most 100 printable characters"):
            envhub.make_vec("CartPole-v1", label=label)  # type: ignore[arg-type]


@pytest.mark.long
def test_client_without_a_key_ends_only_what_it_has_the_token_of(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "--insecure") as hub, envhub.connect(hub.tcp) as client:
        for address, is_ended in ((hub.ipc, False), (hub.tcp, True)):
            with closing(envhub.make_vec("CartPole-v1", 2, hub=address)) as envs:
                with pytest.raises(envhub.SessionLost, match="of yours"):
                    client.end(envs.token[:8])
                envs.reset()
                if is_ended:
                    assert client.end(envs.token)["by"] == "a client without a key"
                    with pytest.raises(envhub.SessionLost, match="was ended by a client without a key"):
                        envs.step(TWO)


def test_session_whose_envs_are_being_made_is_shown_and_ended(hub: ServedHub) -> None:
    with envhub.connect(hub.ipc) as client, ThreadPoolExecutor() as pool:
        making = pool.submit(envhub.make_vec, "faulty", 2, hub=hub.ipc, num_workers=1, build_s=600.0)
        assert wait_until(lambda: any(each["processes"] for each in client.sessions()))
        (row,) = client.sessions()
        assert row["phase"] == "building" and row["idle_s"] == 0 and row["step_ms"] == {"p50": None, "p99": None}
        assert row["processes"][0]["doing"] == "building" and row["processes"][0]["env"] == 0
        client.end(row["session"], "it takes too long")
        with pytest.raises(envhub.SessionLost, match=r"was ended by user \S+: it takes too long"):
            making.result()
