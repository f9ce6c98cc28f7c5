"""Strangers' connections come by a proxy: no message without an end costs the hub or its other clients anything."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
from hubs import ServedHub, below, lives, serve, stopped, wait_until
from new_keys import address_of, admitted, keys_in
from zmtp import ZmtpPeer, connected, frame

import envhub

MIB = 1 << 20
GROWN_MAX = 32 * MIB  # a million empty frames take 64 MiB of libzmq's memory
EMPTY = b"\x01\x00"
TOO_MANY = "one of its messages has more than 1024 frames"

# Sends HELLO, and then messages of so many empty frames, by a key that the hub knows.
ATTACK = """
import sys
import zmq
from envhub.protocol import messages
from envhub.protocol.prelude import NO_SESSION, Prelude
from envhub.transport import address, sockets
place, frames = address.parse(sys.argv[1]), int(sys.argv[2])
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.linger = 0
    dealer.reconnect_ivl = -1
    sockets.present_keys(dealer, place.keys)
    monitor = sockets.open_monitor(dealer, zmq.EVENT_DISCONNECTED)
    dealer.connect(place.text)
    dealer.send(Prelude(messages.Op.HELLO, 0, NO_SESSION, 1).pack() + messages.pack(messages.Hello()))
    dealer.recv_multipart()
    for _ in range(frames):
        dealer.send(b"", zmq.SNDMORE)
    dealer.send(b"")
    print("ended" if monitor.poll(60_000) else "still there")
    dealer.monitor(None, 0)
    monitor.close()
"""


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A hub that admits everybody."""
    with serve(tmp_path_factory.mktemp("strangers"), "counter=sims:counter", "--insecure", "--lease", "20") as hub:
        yield hub


@pytest.fixture
def honest(strangers: ServedHub) -> Iterator[envhub.HubVectorEnv]:
    """A client beside, whose steps are all there at the end."""
    with stepping(strangers, strangers.tcp) as envs:
        yield envs


@contextlib.contextmanager
def stepping(hub: ServedHub, address: str) -> Iterator[envhub.HubVectorEnv]:
    with contextlib.closing(envhub.make_vec("counter", 2, hub=address, lane="wire", on_hub_loss="raise")) as envs:
        envs.reset()
        assert goes_on(envs)
        token = envs.token
        yield envs
        assert goes_on(envs) and envs.token == token
        assert hub.process.poll() is None and "internal_error" not in hub.log and "Traceback" not in hub.log


def goes_on(envs: envhub.HubVectorEnv, steps: int = 20) -> bool:
    """Whether it steps in order."""
    counts = [int(envs.step(np.zeros(2, int))[0][0, 0]) for _ in range(steps)]
    return counts == list(range(counts[0], counts[0] + steps))


@contextlib.contextmanager
def grows_by_at_most(nbytes: int, hub: ServedHub) -> Iterator[None]:
    """Have the hub's process never get more memory than this within the block."""
    Path(f"/proc/{hub.process.pid}/clear_refs").write_text("5")
    before = _peak(hub)
    yield
    assert _peak(hub) - before < nbytes


def _peak(hub: ServedHub) -> int:
    status = Path(f"/proc/{hub.process.pid}/status").read_text()
    (found,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found.split()[1]) * 1024


def proxy_of(hub: ServedHub) -> psutil.Process:
    found: list[tuple[int, str]] = []

    def is_there() -> bool:
        found[:] = below(psutil.Process(hub.process.pid), "envhub-proxy")
        return len(found) == 1

    assert wait_until(is_there, 20), found
    return psutil.Process(found[0][0])


def malformed(hub: ServedHub) -> int:
    """How many messages the hub has read that no client may send."""
    with envhub.connect(hub.ipc) as client:
        return int(client.stats()["malformed"])


# --- messages without an end ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("frames", "peers"), [(20_000_000, 1), (1_000_000, 8)])
def test_message_of_empty_frames_ends_its_connection_before_it_is_whole(
    strangers: ServedHub, honest: envhub.HubVectorEnv, frames: int, peers: int
) -> None:
    before, message = malformed(strangers), EMPTY * frames

    def attack() -> None:
        with ZmtpPeer(strangers.tcp) as peer:
            peer.connection.settimeout(60)
            with contextlib.suppress(ConnectionError):
                peer.connection.sendall(message)
            ended.append(peer.ends())

    ended: list[bool] = []
    threads = [threading.Thread(target=attack) for _ in range(peers)]
    with grows_by_at_most(GROWN_MAX, strangers):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert goes_on(honest)
    assert ended == [True] * peers and malformed(strangers) == before and TOO_MANY in strangers.log


@contextlib.contextmanager
def guarded(folder: Path, *names: str) -> Iterator[tuple[ServedHub, list[str]]]:
    """A hub with keys, and an address for each of these clients; only the first may do more than observe."""
    keys = keys_in(folder / "keys")
    tokens = [admitted(keys, name, "use" if name == names[0] else "observe") for name in names]
    with serve(folder, "counter=sims:counter", "--keys", str(keys.path)) as hub:
        yield hub, [address_of(token, hub.tcp) for token in tokens]


@pytest.mark.long
def test_key_that_may_only_observe_ends_nothing_but_its_own_connections(tmp_path: Path) -> None:
    frames, peers = 1_000_000, 8
    with guarded(tmp_path, "alice", "eve") as (hub, (alice, eve)), stepping(hub, alice) as envs:
        before = malformed(hub)
        command = [sys.executable, "-c", ATTACK, eve, str(frames)]
        with grows_by_at_most(GROWN_MAX, hub):
            attackers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(peers)]
            while any(attacker.poll() is None for attacker in attackers):
                assert goes_on(envs)
        assert [attacker.communicate()[0].strip() for attacker in attackers] == ["ended"] * peers
        assert malformed(hub) == before
    lines = hub.audit
    found = {(line["client"], line["host"], line["why"]) for line in lines if line["event"] == "connection_ended"}
    assert found == {("eve", "127.0.0.1", TOO_MANY)} and len(lines) < 20 + 2 * peers


def test_bytes_without_end_end_their_connection_at_the_limit(strangers: ServedHub, honest: envhub.HubVectorEnv) -> None:
    part = frame(bytes(16 * MIB), more=True)
    with grows_by_at_most(128 * MIB, strangers), ZmtpPeer(strangers.tcp) as peer:  # of which a client may have 96
        peer.connection.settimeout(60)
        with pytest.raises(OSError):
            for _ in range(64):
                peer.connection.sendall(part)
        assert goes_on(honest)


@pytest.mark.long
def test_client_that_has_not_shown_its_key_sends_little(tmp_path: Path) -> None:
    greeting = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0")).ljust(64, b"\0")
    with guarded(tmp_path, "alice") as (hub, (alice,)), stepping(hub, alice) as envs:
        with grows_by_at_most(4 * MIB, hub), contextlib.closing(connected(hub.tcp, 60)) as peer:
            with contextlib.suppress(ConnectionError):
                peer.sendall(greeting + frame(bytes(32 * MIB), more=False))
            with contextlib.suppress(ConnectionError):
                while peer.recv(1 << 16):
                    pass
            assert goes_on(envs)
        assert wait_until(lambda: "it has sent too many bytes before it was let in" in hub.log)


# --- what clients may do ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_large_values_pass_both_ways(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        _, (address,) = stack.enter_context(guarded(tmp_path, "alice"))
        large = np.arange(MIB, dtype=np.float64)
        envs = stack.enter_context(contextlib.closing(envhub.make_vec("counter", 1, hub=address, lane="wire")))
        envs.reset()
        for _ in range(2):
            envs.set_attr("note", [large])
            assert np.array_equal(envs.get_attr("note")[0], large)
        assert goes_on_alone(envs)


def goes_on_alone(envs: envhub.HubVectorEnv) -> bool:
    return int(envs.step(np.zeros(1, int))[0][0, 0]) == 1


@pytest.mark.long
def test_hubs_own_user_has_no_more_rights_by_the_proxy_than_others(tmp_path: Path) -> None:
    """The hub's libzmq sees a process of the hub's own user, the proxy."""
    with serve(tmp_path, "counter=sims:counter", "--insecure", "--allow-factories") as hub:
        with contextlib.closing(envhub.make_vec(lambda: gymnasium.make("CartPole-v1"), 1, hub=hub.ipc)) as envs:
            envs.reset()
        with pytest.raises(envhub.RequestRefused, match="--allow-factories"):
            envhub.make_vec(lambda: gymnasium.make("CartPole-v1"), 1, hub=hub.tcp)


@pytest.mark.long
def test_addresses_of_either_family_are_served(tmp_path: Path) -> None:
    binds = ["tcp://*:0", "tcp://[::1]:0", "tcp://localhost:0"]
    with serve(tmp_path, "counter=sims:counter", "--insecure", binds=binds) as hub:
        assert [address.rpartition(":")[0] for address in hub.addresses] == [
            "tcp://0.0.0.0",
            "tcp://[::1]",
            "tcp://127.0.0.1",
        ]
        for address in hub.addresses:
            envhub.connect(address.replace("0.0.0.0", "127.0.0.1")).close()


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_clients_resume_by_another_proxy_after_the_end_of_one(tmp_path: Path) -> None:
    with guarded(tmp_path, "alice") as (hub, (alice,)):
        with contextlib.closing(envhub.make_vec("counter", 2, hub=alice, lane="wire", on_hub_loss="raise")) as envs:
            envs.reset()
            token = envs.token
            for _ in range(2):
                process = proxy_of(hub)
                os.kill(process.pid, signal.SIGKILL)
                assert wait_until(lambda process=process: not lives(process))  # type: ignore[misc]
                assert goes_on(envs) and envs.token == token
                assert proxy_of(hub) != process
        assert hub.log.count('"proxy_ended"') >= 1 and '"client_back"' in hub.log


@pytest.mark.long
def test_nobody_takes_the_names_of_connections_to_come(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter", "--insecure") as hub, contextlib.ExitStack() as undo:
        (seen,) = [word for word in proxy_of(hub).cmdline() if word.startswith("envhub-proxy-")]
        for number in range(1, 400):  # every user may bind an abstract name, and see those that are bound
            taken = undo.enter_context(socket.socket(socket.AF_UNIX))
            taken.bind(f"\0{seen}/{number - 1}/{number}/127.0.0.1")
        with envhub.connect(hub.tcp) as client:
            assert client.health()


@pytest.mark.long
def test_no_proxy_is_left_after_the_end_of_its_hub(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with serve(tmp_path, "counter=sims:counter", "--insecure") as hub:
            process, peer = proxy_of(hub), connected(hub.tcp)
            hub.stop(number)
            assert wait_until(lambda process=process: not process.is_running(), 10)
            peer.close()


@pytest.mark.long
def test_last_reply_of_a_hub_that_stops_passes(tmp_path: Path) -> None:
    with serve(tmp_path, "wide=odd_sims:Wide", "--insecure") as hub:
        options = {"env_kwargs": {"mebibytes": 16}, "on_hub_loss": "raise"}
        with contextlib.closing(envhub.make_vec("wide", 1, hub=hub.tcp, lane="wire", **options)) as envs:
            envs.reset()
            with stopped(*(worker.pid for worker in hub.workers())), envhub.connect(hub.tcp) as client:
                envs.step_async(np.zeros(1, int))
                assert wait_until(lambda: "moving" in [found["phase"] for found in client.sessions()])
                hub.process.terminate()
                assert wait_until(lambda: '"event": "stopping"' in hub.log)
            assert envs.step_wait(timeout=30)[0].nbytes == 16 * MIB
            assert hub.process.wait(15) == 0
