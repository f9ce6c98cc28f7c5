"""Who ended a session, and why: what its user reads, what the log says, and what the table of sessions keeps."""

from __future__ import annotations

import json
import os
import pwd
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combinations import each_value
from envhub_server.network.key_folder import KeyFolder
from hubs import ServedHub, serve, wait_until
from new_keys import address_of, admitted, keys_in
from several_hubs import SeveralHubs

import envhub

OFFERED = ("CartPole-v1", "disconnected=faulty:disconnected")
WHY = "makes room for the demo"
TWO = np.zeros(2, np.int64)
ME = f"user {pwd.getpwuid(os.getuid()).pw_name}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    return keys_in(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def tokens(keys: KeyFolder) -> dict[str, str]:
    return {name: admitted(keys, name, may) for name, may in (("ops", "admin"), ("alice", "use"), ("bob", "use"))}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, keys: KeyFolder, tokens: dict[str, str]) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), *OFFERED, "--lease", "1", "--keys", str(keys.path)) as served:
        yield served


@pytest.fixture(scope="module")
def ops(hub: ServedHub, tokens: dict[str, str]) -> Iterator[envhub.Client]:
    with envhub.connect(address_of(tokens["ops"], hub.tcp)) as client:
        yield client


@pytest.fixture(scope="module")
def alice(hub: ServedHub, tokens: dict[str, str]) -> str:
    return address_of(tokens["alice"], hub.tcp)


def lines(hub: ServedHub, session: str, *events: str) -> list[dict[str, Any]]:
    """The lines of the log about a session, of these events or of all."""
    read = map(json.loads, hub.log.splitlines()[: hub.log.count("\n")])
    return [line for line in read if line.get("session") == session and (not events or line["event"] in events)]


def check_end(hub: ServedHub, name: str, **fields: str) -> None:
    """Check the one line of the log about the end of a session, in which these fields are, and no line denies it."""
    assert wait_until(lambda: bool(lines(hub, name, "session_ended")))
    (ended,) = lines(hub, name, "session_ended")
    assert {each: ended[each] for each in fields} == fields and ended["audit"]
    assert not [line for line in lines(hub, name, "request_failed") if "broken" in line["why"]]


@pytest.mark.parametrize(
    ("lane", "act"), each_value(["wire", "shared"], ["end", "end in a step", "attach"], others=pytest.mark.long)
)
def test_user_reads_who_has_ended_the_session_and_why(
    hub: ServedHub, ops: envhub.Client, alice: str, lane: str, act: str
) -> None:
    address = alice if lane == "wire" else hub.ipc  # only the hub's own user has the shared lane
    why = "it took the session over to end it" if act == "attach" else WHY
    with closing(envhub.make_vec("CartPole-v1", 2, hub=address, num_workers=2)) as envs:
        envs.reset()
        assert envs.lane == lane
        name = envs.token[:8]
        text = f"session {name} was ended by admin ops: {why}"
        if act == "attach":
            ops.attach(name).close(terminate=True)
        elif act == "end":
            ops.end(name, why)
        else:
            for pid in next(each["workers"] for each in ops.sessions() if each["session"] == name):
                os.kill(pid, signal.SIGSTOP)
            envs.step_async(TWO)
            ops.end(name, why)
            with pytest.raises(envhub.SessionLost, match=text):
                envs.step_wait()
        for call in (lambda: envs.step(TWO), envs.reset, lambda: envs.call("spec")):
            with pytest.raises(envhub.SessionLost, match=text):
                call()
    assert bool(lines(hub, name, "session_taken_over")) == (act == "attach")
    owner = "alice" if lane == "wire" else ""
    check_end(hub, name, owner=owner, client=owner, by="admin ops", why=why, how="killed")
    (row,) = [each for each in ops.sessions(ended=True) if each["session"] == name]
    assert (row["by"], row["why"], row["how"]) == ("admin ops", why, "killed") and row["ended_s"] < 60


@pytest.mark.long
def test_user_of_several_hubs_reads_who_has_ended_a_session(tmp_path: Path) -> None:
    several = SeveralHubs(tmp_path, 2, "CartPole-v1", names=("one", "two"))
    with closing(envhub.make_vec("CartPole-v1", 4, hub=several.addresses("tcp"))) as envs:
        envs.reset()
        with envhub.connect(several.hubs[1].ipc) as ops:
            (row,) = ops.sessions()
            ops.end(row["session"], why=WHY)
        for _ in range(2):
            with pytest.raises(envhub.SessionLost, match=f"session {row['session']} was ended by {ME}: {WHY}"):
                envs.step(np.zeros(4, np.int64))


def test_name_of_a_session_stays_through_takeovers_in_log_and_table(
    hub: ServedHub, ops: envhub.Client, alice: str
) -> None:
    with envhub.connect(alice) as client:
        first = client.make_vec("CartPole-v1", 2, num_workers=2)
        first.reset()
        name = first.token[:8]
        envs = client.attach(first.token)
        assert envs.token[:8] != name
        (row,) = client.sessions()
        assert row["session"] == name and row["owner"]["key"] == "alice"
        os.kill(row["workers"][0], signal.SIGKILL)  # its lines, and those of the next worker, are of this session
        envs.step(TWO)
        assert wait_until(lambda: len(lines(hub, name, "worker_started")) == 3)
        envs.close()
    check_end(hub, name, owner="alice", by="client", why="its client closed it", how="closed")
    (taken,) = lines(hub, name, "session_taken_over")
    assert (taken["owner"], taken["by"]) == ("alice", "client alice")
    assert not lines(hub, envs.token[:8])


@pytest.mark.parametrize(
    "how_it_ends, by, why, how",
    [
        ("closed", "client", "its client closed it", "closed"),
        ("terminated", "client", "its client closed it", "killed"),
        ("left", "lease", "its client was out of reach until its lease ran out", "closed"),
        ("not made", "hub", "no arm is connected", "not made"),
    ],
)
def test_every_end_has_its_reason(hub: ServedHub, alice: str, how_it_ends: str, by: str, why: str, how: str) -> None:
    with envhub.connect(alice) as client:
        before = len(client.sessions(ended=True))
        if how_it_ends == "not made":
            with pytest.raises(ConnectionError, match="no arm"):
                client.make_vec("disconnected")
        else:
            envs = client.make_vec("CartPole-v1", 2)
            envs.detach() if how_it_ends == "left" else envs.close(terminate=how_it_ends == "terminated")
        assert wait_until(lambda: len(client.sessions(ended=True)) == before + 1)
        row = client.sessions(ended=True)[-1]
        assert (row["by"], row["how"]) == (by, how) and why in row["why"] and row["phase"] == "ended"
        check_end(hub, row["session"], owner="alice", by=by, why=row["why"], how=how)


@pytest.mark.long
def test_key_that_is_removed_and_hub_that_drains_end_sessions_by_name(
    hub: ServedHub, ops: envhub.Client, keys: KeyFolder, tokens: dict[str, str], tmp_path: Path
) -> None:
    with closing(envhub.make_vec("CartPole-v1", hub=address_of(tokens["bob"], hub.tcp))) as envs:
        keys.remove("bob")
        check_end(hub, envs.token[:8], owner="bob", by="key removed", how="killed")
        with pytest.raises(envhub.EnvHubError):
            envs.reset()
    with serve(tmp_path, "CartPole-v1") as other, closing(envhub.make_vec("CartPole-v1", hub=other.ipc)) as envs:
        other.stop()
        check_end(other, envs.token[:8], owner="", by="hub", why="the hub is shutting down", how="closed")
        with pytest.raises(envhub.HubLost, match="shutting down"):
            envs.reset()


BUGGY = """
import runpy
from envhub_server.hub.runtime import SessionRuntime

def post_step(runtime):
    raise RuntimeError("no such step")

SessionRuntime.post_step = post_step
runpy.run_module("envhub", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
def test_bug_is_the_reason_of_the_end_of_its_session(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    program = ("-c", BUGGY)
    with pytest.raises(AssertionError), serve(tmp_path, "CartPole-v1", program=program) as hub:  # it logs the bug
        with closing(envhub.make_vec("CartPole-v1", 2, hub=hub.ipc, lane="wire")) as envs:
            envs.reset()
            for error, text in ((envhub.EnvHubError, "no such step"), (envhub.SessionLost, "a bug in the hub")):
                with pytest.raises(error, match=text):
                    envs.step(TWO)
        with envhub.connect(hub.ipc) as client:
            rows += client.sessions(ended=True)
    (row,) = rows
    assert (row["by"], row["how"]) == ("hub", "killed") and "no such step" in row["why"]


def test_private_hub_keeps_the_sessions_that_ended() -> None:
    with closing(envhub.make_vec("CartPole-v1")) as envs, envhub.connect(envs._session.connection.address) as client:
        for number in range(3):
            envhub.make_vec("CartPole-v1", label=f"{number}").close()
        ended = client.sessions(ended=True)[-3:]
        assert [each["label"] for each in ended] == ["0", "1", "2"]
        assert client.sessions()[0]["session"] == envs.token[:8]
