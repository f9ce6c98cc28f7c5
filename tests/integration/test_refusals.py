"""A client is denied only by what a hub has said: one that is silent, away or behind a forwarder refuses nobody."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from chaos.chaos_proxy import ChaosProxy, proxy
from envhub_client.connection.zeromq_transport import AGAIN_S
from envhub_server.network.access import DOMAIN, ZAP_ADDRESS, ZAP_VERSION
from hubs import ServedHub, free_port, serve, stopped, wait_until
from new_keys import address_of, admitted, answers, keys_in

import envhub
from envhub.protocol import client
from envhub.transport import sockets

QUICK_MS = 300  # for a handshake, in place of 3 s


class Keyed:
    """A key of a hub, and of one client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = keys_in(folder)
        self.token = admitted(self.folder, "alice", sessions_max=100)

    def serve(self, folder: Path, **options: Any) -> contextlib.AbstractContextManager[ServedHub]:
        return serve(folder, "counter=sims:counter", "--keys", str(self.folder.path), **options)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    return Keyed(tmp_path_factory.mktemp("refusals") / "keys")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, keyed: Keyed) -> Iterator[ServedHub]:
    with keyed.serve(tmp_path_factory.mktemp("refusals")) as served:
        yield served


@pytest.fixture(scope="module")
def open_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("refusals"), "counter=sims:counter") as served:
        yield served


@contextlib.contextmanager
def training(served: ServedHub, token: str = "", **options: Any) -> Iterator[tuple[ChaosProxy, envhub.HubVectorEnv]]:
    """A forwarder before this hub, and envs behind it that have stepped once."""
    with proxy(served.tcp) as forwarder:
        address = address_of(token, forwarder.address) if token else forwarder.address
        with contextlib.closing(envhub.make_vec("counter", 2, hub=address, **options)) as envs:
            envs.reset()
            envs.step([1, 1])
            yield forwarder, envs


def goes_on(envs: envhub.HubVectorEnv, steps: float = 2) -> bool:
    return bool(envs.step([1, 1])[0][:, 0].tolist() == [steps, steps])


# --- behind a forwarder -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "token", [pytest.param("", marks=pytest.mark.long), "alice's"], ids=["without keys", "with keys"]
)
@pytest.mark.parametrize(
    "broken",
    [
        40,
        pytest.param(18, marks=pytest.mark.long),
        *(pytest.param(each, marks=pytest.mark.chaos) for each in (6, *range(48, 100, 8))),
    ],
)
def test_program_that_is_busy_while_the_hub_is_away_goes_on(
    keyed: Keyed, request: pytest.FixtureRequest, token: str, broken: int
) -> None:
    """The hub is back when the broken handshakes are looked at, of which there were so many."""
    served = request.getfixturevalue("hub" if token else "open_hub")
    with training(served, token and keyed.token) as (forwarder, envs):
        forwarder.lose_target()
        assert wait_until(lambda: forwarder.broken >= broken)
        forwarder.away = False
        assert wait_until(lambda: forwarder.connected)
        assert goes_on(envs)


@pytest.mark.long
def test_hub_that_is_started_again_behind_a_forwarder_is_a_lost_one(keyed: Keyed, tmp_path: Path) -> None:
    with (
        keyed.serve(tmp_path, binds=[f"tcp://127.0.0.1:{free_port()}"]) as first,
        training(first, keyed.token, on_hub_loss="recreate") as (forwarder, envs),
    ):
        first.stop(signal.SIGKILL)
        assert wait_until(lambda: forwarder.broken >= 20)
        with keyed.serve(tmp_path, binds=[first.tcp]):
            assert envs.step([1, 1])[3].all() and envs.step([1, 1])[0][:, 0].tolist() == [0, 0]


def test_key_that_is_removed_is_told_behind_a_forwarder(hub: ServedHub, keyed: Keyed) -> None:
    token = admitted(keyed.folder, "bob")
    assert wait_until(lambda: answers(address_of(token, hub.tcp)))
    with training(hub, token) as (_, envs):
        keyed.folder.remove("bob")
        with pytest.raises(envhub.AccessDenied, match="does not know this key"):
            while True:  # it counts within a second
                envs.step([1, 1])


@pytest.mark.long
def test_forwarder_that_refuses_for_a_moment_and_then_has_no_hub_proves_no_loss(
    hub: ServedHub, keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REFUSED_S", 1.0)
    with training(hub, keyed.token) as (forwarder, envs):
        with forwarder.refusing():
            forwarder.lose_target()
            envs.step_async([1, 1])
            with pytest.raises(envhub.HubTimeout):
                envs.step_wait(timeout=0.5)
        with pytest.raises(envhub.HubTimeout):
            envs.step_wait(timeout=1.0)
        forwarder.away = False
        assert envs.step_wait(timeout=60)[0][:, 0].tolist() == [2, 2]


@pytest.mark.long
def test_answer_that_is_none_of_a_hub_does_not_end_the_attempts(keyed: Keyed, hub: ServedHub) -> None:
    """libzmq tries no more after one, as of a web server that has the port while the hub is away."""
    with training(hub, keyed.token) as (forwarder, envs):
        forwarder.says = b"HTTP/1.0 503 Service Unavailable\r\n\r\n"
        forwarder.lose_target()
        assert wait_until(lambda: forwarder.broken >= 2)
        forwarder.away = False
        assert goes_on(envs)


# --- what is silent ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_training_goes_on_after_a_hub_was_stopped_for_many_handshakes(
    keyed: Keyed, hub: ServedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", QUICK_MS)
    with contextlib.closing(envhub.make_vec("counter", 2, hub=address_of(keyed.token, hub.tcp))) as envs:
        envs.reset()
        with stopped(hub.process.pid):
            envs.step_async([1, 1])
            with pytest.raises(envhub.HubTimeout):
                envs.step_wait(timeout=10 * QUICK_MS / 1000)
        assert envs.step_wait(timeout=60)[0][:, 0].tolist() == [1, 1] and goes_on(envs)


# --- what a handshake that breaks off may mean ------------------------------------------------------------------------


@pytest.mark.long
def test_hub_with_another_key_is_told_as_what_may_be_there(
    keyed: Keyed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It can say nothing that this client could read."""
    monkeypatch.setattr(client, "REFUSED_S", 60.0)  # a hub on a busy machine takes long to start
    may_be = "or a hub that has another key than this address says: ask its operator for the address"
    with (
        keyed.serve(tmp_path, binds=[f"tcp://127.0.0.1:{free_port()}"]) as first,
        training(first, keyed.token, reconnect_timeout=5.0) as (forwarder, envs),
    ):
        first.stop(signal.SIGKILL)
        with Keyed(tmp_path / "other").serve(tmp_path, binds=[first.tcp]):
            with pytest.raises(envhub.HubLost, match=f"reconnect_timeout=5 s: .*{may_be}"):
                envs.step([1, 1])
            assert "out of reach: the connection to it is lost, and what accepts" in caplog.text
            with pytest.raises(envhub.HubUnreachable, match=may_be):
                envhub.connect(address_of(keyed.token, forwarder.address), timeout=2)


@pytest.mark.long
def test_own_user_who_is_kept_out_by_another_ones_connection_tries_again() -> None:
    asked, done = [], threading.Event()

    def refuse() -> None:
        with handler:
            while not done.is_set():
                if handler.poll(20):
                    asked.append(time.monotonic())
                    request = handler.recv_multipart()[1]
                    handler.send_multipart([ZAP_VERSION, request, b"400", b"unknown key", b"", b""])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        handler = context.socket(zmq.REP)
        handler.bind(ZAP_ADDRESS)
        refusing = threading.Thread(target=refuse)
        refusing.start()
        sockets.ask_before_admitting(router, None, DOMAIN)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        try:
            with pytest.raises(envhub.HubUnreachable, match="its own user only, and not while others are connected"):
                envhub.connect(f"tcp://127.0.0.1:{port}", timeout=4 * AGAIN_S)
        finally:
            done.set()
            refusing.join()  # before its socket's context ends
    # On a busy machine libzmq connects once more before the client has heard that it is kept out.
    assert max(after - before for before, after in itertools.pairwise(asked)) >= AGAIN_S
