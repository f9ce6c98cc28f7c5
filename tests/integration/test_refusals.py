"""A client tells of a refusal only if one is proven: a hub that is silent, for whatever reason, refuses nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from envhub_client.connection.broken_handshakes import BROKEN_MAX
from envhub_client.connection.zeromq_transport import ZeroMqTransport
from envhub_server.network.key_folder import KeyFolder
from hubs import ServedHub, free_port, serve, stopped
from new_keys import address_of, admitted

import envhub
from envhub.protocol import client
from envhub.transport import sockets
from envhub.transport.keys import HubKeys, keys_of, token_of

QUICK_MS = 300  # for a handshake, in place of 3 s
SEED = 5

# A hub of which only libzmq's thread goes on while there is a file. Its handshakes take no longer than a client's.
STALL = """
import os, pathlib, signal, sys, time

def stall(*_):
    while pathlib.Path(os.environ["ENVHUB_TEST_STALLED"]).exists():
        time.sleep(0.01)

if "serve" in sys.orig_argv:
    signal.signal(signal.SIGWINCH, stall)
    from envhub.transport import sockets
    sockets.HANDSHAKE_MS = int(os.environ["ENVHUB_TEST_HANDSHAKE_MS"])
"""


class Keyed:
    """A key of a hub, and of one client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = KeyFolder(folder)
        self.folder.make_secret()
        self._keys = keys_of(admitted(self.folder, "alice"))

    def address(self, place: str, server: bytes = b"") -> str:
        """The client's address of what listens at ``place``, if need be of another hub's key."""
        keys = HubKeys(server or self._keys.server, self._keys.secret)
        return address_of(token_of(keys).reveal_secret(), place)

    def serve(self, folder: Path, **options: Any) -> contextlib.AbstractContextManager[ServedHub]:
        return serve(folder, "counter=sims:counter", "--keys", str(self.folder.path), **options)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    return Keyed(tmp_path_factory.mktemp("refusals") / "keys")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, keyed: Keyed) -> Iterator[ServedHub]:
    with keyed.serve(tmp_path_factory.mktemp("refusals")) as served:
        yield served


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake times out sooner on the client's side."""
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", QUICK_MS)


class Failures:
    """Counts the handshakes that have failed, and calls something once the third is there, before it is judged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.at_third: Callable[[], object] = bool
        real = ZeroMqTransport._on_refusal

        def on_refusal(transport: ZeroMqTransport, event: int, value: int) -> bool:
            self.count += 1
            if self.count == BROKEN_MAX:
                self.at_third()
            return real(transport, event, value)

        monkeypatch.setattr(ZeroMqTransport, "_on_refusal", on_refusal)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    return Failures(monkeypatch)


def trains_on(envs: envhub.HubVectorEnv, steps: float) -> None:
    """The step that is under way ends, and others do."""
    assert envs.step_wait(timeout=60)[0][:, 0].tolist() == [steps, steps]
    assert envs.step([1, 1])[0][:, 0].tolist() == [steps + 1, steps + 1]


@contextlib.contextmanager
def listening(handle: Callable[[socket.socket], object]) -> Iterator[str]:
    """Something at this place that does this with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)


def _in_vain(address: str, failures: Failures, timeout: float) -> str:
    """Why no hub is reached, of a connection in whose time more handshakes failed than a refusal takes."""
    for _ in range(20):  # on a busy machine fewer of them fail in that time
        failures.count = 0
        with pytest.raises(envhub.HubUnreachable) as caught:
            envhub.connect(address, timeout=timeout)
        if failures.count > BROKEN_MAX:
            return str(caught.value)
    raise AssertionError(f"{failures.count} handshakes failed, at {address}")


# --- what is silent ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_training_goes_on_after_a_hub_was_stopped_for_many_handshakes(
    keyed: Keyed, hub: ServedHub, quick: None, failures: Failures
) -> None:
    with contextlib.closing(envhub.make_vec("counter", 2, hub=keyed.address(hub.tcp))) as envs:
        envs.reset()
        _stopped_until_the_third_failed(envs, hub, failures)


@pytest.mark.chaos
def test_training_goes_on_after_a_hub_was_stopped_for_half_a_minute(
    keyed: Keyed, hub: ServedHub, failures: Failures
) -> None:
    with contextlib.closing(envhub.make_vec("counter", 2, hub=keyed.address(hub.tcp))) as envs:
        envs.reset()
        with stopped(hub.process.pid):
            envs.step_async([1, 1])
            with pytest.raises(envhub.HubTimeout):
                envs.step_wait(timeout=30)
        trains_on(envs, 1)
        assert failures.count > BROKEN_MAX
        failures.count = 0
        envs.reset()
        _stopped_until_the_third_failed(envs, hub, failures)


def _stopped_until_the_third_failed(envs: envhub.HubVectorEnv, hub: ServedHub, failures: Failures) -> None:
    """The hub goes on at the worst moment, at which it can answer whatever the client does next."""
    failures.at_third = lambda: hub.process.send_signal(signal.SIGCONT)
    with stopped(hub.process.pid):
        envs.step_async([1, 1])
        trains_on(envs, 1)
    assert failures.count >= BROKEN_MAX


@pytest.mark.long
def test_hub_that_is_stopped_again_and_again_refuses_nobody(keyed: Keyed, hub: ServedHub, quick: None) -> None:
    rng, address, ended = random.Random(SEED), keyed.address(hub.tcp), threading.Event()

    def stop() -> None:
        while not ended.wait(rng.choice([0.0, 0.001, 0.01])):
            hub.process.send_signal(signal.SIGSTOP)
            ended.wait(rng.choice([0.01, QUICK_MS / 1000, 4 * QUICK_MS / 1000]))
            hub.process.send_signal(signal.SIGCONT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        until_s = time.monotonic() + 4
        while time.monotonic() < until_s:
            with contextlib.suppress(envhub.HubTimeout, envhub.HubUnreachable):
                envhub.connect(address, timeout=2).close()
    finally:
        ended.set()
        stopping.join()


@pytest.mark.long
@pytest.mark.parametrize("hubs_ms", [QUICK_MS - 50, pytest.param(10 * QUICK_MS, marks=pytest.mark.long)])
def test_hub_of_which_only_the_thread_of_libzmq_answers_refuses_nobody(
    keyed: Keyed, tmp_path: Path, quick: None, failures: Failures, hubs_ms: int
) -> None:
    stalled = tmp_path / "stalled"
    (tmp_path / "sitecustomize.py").write_text(STALL)
    environ = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ENVHUB_TEST_STALLED": str(stalled),
        "ENVHUB_TEST_HANDSHAKE_MS": str(hubs_ms),
    }
    with keyed.serve(tmp_path, environ=environ) as hub:
        stalled.touch()
        hub.process.send_signal(signal.SIGWINCH)
        assert "stopped or overloaded" in _in_vain(keyed.address(hub.tcp), failures, timeout=8 * QUICK_MS / 1000)
        stalled.unlink()
        envhub.connect(keyed.address(hub.tcp)).close()


# --- what is no hub, or not always ------------------------------------------------------------------------------------


def _wait_for_its_end(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def _greet_and_end(connection: socket.socket) -> None:
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
    connection.recv(1)
    connection.close()


def _end_or_wait(connection: socket.socket) -> None:
    if len(connection.recv(64)) == 64:  # of a client that does not wait for the greeting; libzmq does
        _wait_for_its_end(connection)
    connection.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "does",
    [
        pytest.param(socket.socket.close, id="it ends"),
        pytest.param(_wait_for_its_end, id="it waits", marks=pytest.mark.long),
        pytest.param(_greet_and_end, id="it greets and ends"),
        pytest.param(_end_or_wait, id="it ends or waits", marks=pytest.mark.long),
    ],
)
def test_forwarder_whose_hub_is_gone_refuses_nobody(
    keyed: Keyed, quick: None, failures: Failures, does: Callable[[socket.socket], Any]
) -> None:
    with listening(does) as place:
        why = _in_vain(keyed.address(place), failures, timeout=1.6)
    assert "a forwarder without its hub, or a hub with another key" in why


@pytest.mark.parametrize("lives_ms", [3, pytest.param(20, marks=pytest.mark.long)])
def test_hub_that_begins_and_ends_again_and_again_refuses_nobody(
    keyed: Keyed, failures: Failures, lives_ms: int
) -> None:
    ended, rng = threading.Event(), random.Random(SEED)
    port = free_port()

    def live() -> None:
        while not ended.wait(rng.random() * lives_ms / 1000):
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.setsockopt(zmq.LINGER, 0)
                sockets.ask_before_admitting(router, keyed.folder.secret(), b"envhub")
                with contextlib.suppress(zmq.ZMQError):  # the one before it has not gone
                    router.bind(f"tcp://127.0.0.1:{port}")
                    ended.wait(rng.random() * 2 * lives_ms / 1000)

    living = threading.Thread(target=live)
    living.start()
    try:
        for _ in range(20):  # on a busy machine it lives seldom
            with pytest.raises(envhub.HubUnreachable):
                envhub.connect(keyed.address(f"127.0.0.1:{port}"), timeout=1.5)
            if failures.count > BROKEN_MAX:
                break
    finally:
        ended.set()
        living.join()
    assert failures.count > BROKEN_MAX


# --- what is a refusal ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_hub_of_another_key_is_told_at_once_also_where_it_takes_the_place_of_the_hub(
    keyed: Keyed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REFUSED_S", 60.0)  # a hub on a busy machine takes long to start
    other = Keyed(tmp_path / "other")
    with (
        keyed.serve(tmp_path, binds=[f"tcp://127.0.0.1:{free_port()}"]) as first,
        contextlib.closing(envhub.make_vec("counter", 2, hub=keyed.address(first.tcp))) as envs,
    ):
        envs.reset()
        first.stop(signal.SIGKILL)
        with other.serve(tmp_path, binds=[first.tcp]):
            begun_s = time.monotonic()
            with pytest.raises(envhub.AccessDenied, match="has another key than this address says"):
                envs.step(np.ones(2, int))
            with pytest.raises(envhub.AccessDenied, match="has another key than this address says"):
                envhub.connect(keyed.address(first.tcp), timeout=60)
            assert time.monotonic() - begun_s < 30
