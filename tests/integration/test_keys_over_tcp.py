"""Who gets in to a hub that has keys, and what they may do there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import zmq
from conformance.kit.raw_peer import RawPeer
from envhub_client.connection import known_hubs
from envhub_client.tools.bench import served_hub
from envhub_server.network.key_folder import KeyFolder
from hubs import HERE, ServedHub, at_rest, free_port, listening, serve, wait_until
from new_keys import address_of, admitted, answers, keys_in
from zmq.utils.monitor import recv_monitor_message

import envhub
from envhub.errors import KeysError
from envhub.protocol import messages
from envhub.protocol.messages import Close, Hello, Op
from envhub.protocol.prelude import NO_SESSION, Prelude
from envhub.secret import Secret
from envhub.transport import sockets
from envhub.transport.address import HubKeys, keys_of, parse, text_of, token_of

Admit = Callable[..., str]


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return keys_in(tmp_path / "keys")


@pytest.fixture
def hub(tmp_path: Path, keys: KeyFolder) -> Iterator[ServedHub]:
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path)) as served:
        yield served


@pytest.fixture
def admit(hub: ServedHub, keys: KeyFolder) -> Admit:
    """Admits a client, and returns the address with its key."""
    return lambda name, may="use": address_of(admitted(keys, name, may), hub.tcp)


@pytest.fixture(scope="module")
def common_keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    return keys_in(tmp_path_factory.mktemp("common") / "keys")


@pytest.fixture(scope="module")
def common_hub(tmp_path_factory: pytest.TempPathFactory, common_keys: KeyFolder) -> Iterator[ServedHub]:
    """A hub for the tests that leave no session behind, as one does whose key was removed."""
    with serve(tmp_path_factory.mktemp("hub"), "CartPole-v1", "--keys", str(common_keys.path)) as served:
        yield served


@pytest.fixture
def admit_for_now(common_hub: ServedHub, common_keys: KeyFolder) -> Iterator[Admit]:
    """Admits a client of the common hub until the test has ended."""
    names: set[str] = set()

    def admit(name: str, may: str = "use") -> str:
        names.add(name)
        address = address_of(admitted(common_keys, name, may), common_hub.tcp)
        # The hub may have looked for another unknown key just now, and looks again within ``KEYS_S``.
        assert wait_until(lambda: answers(address))
        return address

    yield admit
    for name in names.intersection(common_keys.names()):
        common_keys.remove(name)


def test_client_with_a_key_trains_and_one_without_is_told_so_at_once(
    common_hub: ServedHub, admit_for_now: Admit
) -> None:
    address = admit_for_now("alice")
    with closing(envhub.make_vec("CartPole-v1", 4, hub=address)) as envs:
        observations, _ = envs.reset(seed=1)
        assert observations.shape == (4, 4) and envs.compression == "zstd"
        envs.step(np.zeros(4, int))
    with envhub.connect(common_hub.ipc) as local:
        assert local.health()["status"] == "ok"
    begun = time.monotonic()
    with pytest.raises(envhub.AccessDenied, match="without a key"):
        envhub.connect(common_hub.tcp, timeout=60.0)
    with pytest.raises(envhub.AccessDenied, match="does not know this key"):
        envhub.connect(with_secret(address, sockets.new_key_pair()[1]), timeout=60.0)
    assert time.monotonic() - begun < 30.0


def with_secret(address: str, secret: Secret[bytes]) -> str:
    token, _, place = address.removeprefix("envhub://").partition("@")
    return f"envhub://{token_of(HubKeys(keys_of(token).server, secret)).reveal_secret()}@{place}"


def with_server(address: str, server: bytes) -> str:
    token, _, place = address.removeprefix("envhub://").partition("@")
    return f"envhub://{token_of(HubKeys(server, keys_of(token).secret)).reveal_secret()}@{place}"


@pytest.mark.long
def test_refusal_of_a_kept_key_says_where_it_is_kept_and_how_to_replace_it(
    common_hub: ServedHub, admit_for_now: Admit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known_hubs.keep("box", address := admit_for_now("alice"))
    place = f"kept as 'box' in {tmp_path}/envhub/hubs/box"
    with pytest.raises(envhub.AccessDenied, match=f"without a key, and one for it is {place}: connect by hub='box'"):
        envhub.connect(common_hub.tcp)
    remedy = "and run `envhub login box` with what you are given; `envhub logout box` removes what is kept"
    for wrong, error, why in (
        (with_secret(address, sockets.new_key_pair()[1]), envhub.AccessDenied, "does not know this key"),
        (with_server(address, sockets.new_key_pair()[0]), envhub.HubUnreachable, "another key than this address says"),
    ):
        known_hubs.keep("box", wrong)
        for hub in ("box", wrong):
            with pytest.raises(error, match=f"{why}, which is {place}: .*ask its operator.* {remedy}"):
                envhub.connect(hub, timeout=2.0)
        known_hubs.forget("box")
        monkeypatch.setenv("ENVHUB_ADDRESS", wrong)
        with pytest.raises(error, match=f"{why}, which is in ENVHUB_ADDRESS: .* set ENVHUB_ADDRESS to"):
            envhub.connect(timeout=2.0)


@pytest.mark.long
def test_address_without_keys_refuses_a_client_that_has_one(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", binds=["tcp://127.0.0.1:0"]) as hub:
        token = token_of(HubKeys(*sockets.new_key_pair())).reveal_secret()
        with pytest.raises(envhub.AccessDenied, match="takes no keys"):
            envhub.connect(address_of(token, hub.tcp))


def test_key_that_is_removed_ends_the_training_of_its_client_alone(
    hub: ServedHub, keys: KeyFolder, admit: Admit
) -> None:
    alice, bob = admit("alice"), admit("bob")
    with (
        closing(envhub.make_vec("CartPole-v1", 2, hub=bob)) as others,
        closing(envhub.make_vec("CartPole-v1", 2, hub=alice)) as envs,
    ):
        envs.reset(), others.reset()
        begun = time.monotonic()
        keys.remove("alice")
        with pytest.raises(envhub.AccessDenied, match="does not know this key"):
            while True:
                envs.step(np.zeros(2, int))
        assert time.monotonic() - begun < 10.0  # it counts within a second
        others.step(np.zeros(2, int))
        assert "its key was removed" in hub.log


@pytest.mark.long
def test_program_that_knows_the_hub_by_name_goes_on_with_the_key_that_is_kept_by_then(
    hub: ServedHub, keys: KeyFolder, admit: Admit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    known_hubs.keep("simbox", admit("alice"))
    with closing(envhub.make_vec("CartPole-v1", 2, hub="simbox", on_hub_loss="raise")) as envs:
        envs.reset()
        token = envs.token
        first = keys.holder("alice")[1][0]
        known_hubs.keep("simbox", admit("alice"))
        keys.remove("alice", first)
        assert wait_until(lambda: bool(envs.step(np.zeros(2, int))) and "its key was removed" in hub.log)
        for _ in range(20):
            envs.step(np.zeros(2, int))
        assert envs.token == token
        keys.remove("alice")
        with pytest.raises(envhub.AccessDenied):
            while True:
                envs.step(np.zeros(2, int))


def test_session_belongs_to_its_key(common_hub: ServedHub, admit_for_now: Admit) -> None:
    alice, bob, admin = admit_for_now("alice"), admit_for_now("bob"), admit_for_now("root", "admin")
    with closing(envhub.make_vec("CartPole-v1", 2, hub=alice)) as envs:
        envs.reset()
        token = envs.token
        with envhub.connect(bob) as client:
            assert client.sessions() == []
            for look in (lambda: client.attach(token), lambda: client.attach(token, observe=True).observe()):
                with pytest.raises(envhub.SessionLost):
                    look()
        for owner in (alice, admin, common_hub.ipc):
            with envhub.connect(owner) as client:
                assert len(client.sessions()) == 1
                assert client.attach(token, observe=True).observe()
        envs.step(np.zeros(2, int))


def test_observer_sees_and_makes_nothing(admit_for_now: Admit) -> None:
    with envhub.connect(admit_for_now("eve", "observe")) as client:
        assert client.health()["status"] == "ok" and client.envs() == ["CartPole-v1"]
        with pytest.raises(envhub.AccessDenied, match="observe, not use"):
            client.make_vec("CartPole-v1", 2)


@pytest.mark.long
def test_quotas_of_a_key(tmp_path: Path, keys: KeyFolder) -> None:
    token = admitted(keys, "alice", sessions_max=1, envs_max=8, workers_max=2, connections_max=3)
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path)) as hub:
        alice = address_of(token, hub.tcp)
        for options, named in (({"num_envs": 9}, "envs_max=8"), ({"num_envs": 4, "num_workers": 3}, "workers_max=2")):
            with pytest.raises(envhub.RequestRefused, match=named):
                envhub.make_vec("CartPole-v1", hub=alice, **options)
        with closing(envhub.make_vec("CartPole-v1", 8, hub=alice)) as envs:
            envs.reset()
            with pytest.raises(envhub.RequestRefused, match="sessions_max=1"):
                envhub.make_vec("CartPole-v1", 1, hub=alice)
            with envhub.connect(hub.ipc) as local:  # the hub knows that the connections of those refused have ended
                assert wait_until(lambda: local.stats()["connections"] == 2)
            refused = pytest.raises(envhub.RequestRefused, match="connections_max=3")
            with envhub.connect(alice) as client, envhub.connect(alice), refused:
                capacity = client.stats()["capacity"]
                assert (capacity["envs_free"], capacity["sessions_free"]) == (0, 0)
                envhub.connect(alice)
            envs.step(np.zeros(8, int))


@pytest.mark.long
def test_workers_of_sessions_that_are_made_at_one_time_count(tmp_path: Path, keys: KeyFolder) -> None:
    token = admitted(keys, "alice", workers_max=8)
    with serve(tmp_path, "counter=sims:counter", "--keys", str(keys.path)) as hub:
        alice = address_of(token, hub.tcp)

        def make(_: int) -> Any:
            with suppress(envhub.RequestRefused):
                return envhub.make_vec("counter", 6, hub=alice)

        with ThreadPoolExecutor(4) as pool:
            made = [envs for envs in pool.map(make, range(4)) if envs is not None]
        try:
            assert 1 <= sum(envs.num_workers for envs in made) <= 8
        finally:
            for envs in made:
                envs.close()


@pytest.mark.long
def test_admin_observes_takes_over_and_ends_sessions_by_their_names_and_a_removed_key_has_none(
    tmp_path: Path, keys: KeyFolder
) -> None:
    tokens = admitted(keys, "alice"), admitted(keys, "boss", "admin"), admitted(keys, "carol")
    with serve(tmp_path, "counter=sims:counter", "--keys", str(keys.path)) as hub:
        alice, boss, carol = (address_of(token, hub.tcp) for token in tokens)
        for address in (alice, carol):
            envs = envhub.make_vec("counter", 1, hub=address)
            envs.reset()
            envs.step(np.zeros(1, int))
            if address is alice:
                alices = envs
        with envhub.connect(boss) as client, envhub.connect(carol) as other:
            name = next(each["session"] for each in client.sessions() if alices.token.startswith(each["session"]))
            with pytest.raises(envhub.SessionLost):
                other.attach(name, observe=True)  # another client's, and no token
            with pytest.raises(envhub.SessionLost):
                other.attach(envs.token[:8])  # its own by its name
            with client.attach(name, observe=True) as observer:
                assert observer.observe().steps.tolist() == [2]
            client.attach(name).close()
            assert [each["session"] for each in client.sessions()] == [envs.token[:8]]
            keys.remove("carol")
            assert wait_until(lambda: client.sessions() == [] and hub.workers() == [])
        assert '"session_revoked"' in hub.log and "session_expired" not in hub.log


@pytest.mark.long
def test_key_of_two_that_is_removed_loses_its_session_alone_and_a_lowered_right_holds_for_one_that_runs(
    tmp_path: Path, keys: KeyFolder
) -> None:
    first, second = admitted(keys, "alice"), admitted(keys, "alice")
    removed = keys_of(first).secret
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path), "--lease", "1") as hub:
        addresses = [address_of(token, hub.tcp) for token in (first, second)]
        # Where the only hub does not let them in, no envs are made again.
        ended, other = (envhub.make_vec("CartPole-v1", 1, hub=address, on_hub_loss="recreate") for address in addresses)
        ended.reset(), other.reset()
        keys.remove("alice", sockets.public_key(removed))
        with pytest.raises(envhub.AccessDenied):
            while True:
                ended.step(np.zeros(1, int))
        with envhub.connect(hub.ipc) as local, envhub.connect(addresses[1]) as client:
            # Until its lease runs out, a program of alice that has her other key by then goes on with it.
            assert wait_until(lambda: [each["session"] for each in local.sessions()] == [other.token[:8]])
            other.step(np.zeros(1, int))
            path = keys.path / "clients/alice.toml"
            path.write_text(path.read_text().replace('may = "use"', 'may = "observe"'))
            with pytest.raises(envhub.AccessDenied, match="observe, not use"):
                while True:
                    other.step(np.zeros(1, int))
            assert [each["session"] for each in client.sessions()] == [other.token[:8]]
            with client.attach(other.token, observe=True) as observer:
                assert observer.observe().steps[0] > 1
            assert hub.log.count("session_ended") == 1 and "session_revoked" not in hub.log


@pytest.mark.long
def test_arguments_of_a_key_name_no_file_and_no_module(admit_for_now: Admit) -> None:
    alice, dave = admit_for_now("alice"), admit_for_now("dave", "deploy")
    for value in ("/etc/passwd", "os:system", "x" * 65, {"a": 1}, "..", [["a/b"]]):
        with pytest.raises(envhub.RequestRefused, match="letters, digits"):
            envhub.make_vec("CartPole-v1", 2, hub=alice, render_mode=value)
    with closing(
        envhub.make_vec("CartPole-v1", 2, hub=alice, render_mode="rgb_array", sutton_barto_reward=True)
    ) as envs:
        envs.reset()
    with pytest.raises(TypeError, match="nonsense"):  # which the env itself says
        envhub.make_vec("CartPole-v1", 2, hub=dave, nonsense="/etc/passwd")


@pytest.mark.long
@pytest.mark.parametrize("verbose", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_errors_name_no_folder_of_the_hub_to_its_remote_clients(tmp_path: Path, keys: KeyFolder, verbose: bool) -> None:
    address = f"envhub://{admitted(keys, 'alice')}@"
    arguments = ["missing=odd_sims:Missing", "--keys", str(keys.path), *(["--verbose-errors"] if verbose else [])]
    with serve(tmp_path, *arguments) as hub:
        for place, tells in ((address + hub.tcp.removeprefix("tcp://"), verbose), (hub.ipc, True)):
            with closing(envhub.make_vec("missing", 2, hub=place)) as envs:
                envs.reset()
                with pytest.raises(FileNotFoundError) as found:
                    envs.step(np.array([0, 1]))
                told = str(found.value) + str(found.value.__cause__)
                assert "odd_sims.py" in told and str(found.value.filename).endswith("hub")
                assert ("/no/such/folder" in told) == (str(HERE) in told) == tells
                infos = envs.step(np.array([0, 2]))[4]
                tail = infos["env_failure"][1].log_tail
                assert "odd_sims.py" in tail and (str(HERE) in tail) == tells
            with closing(envhub.make_vec("missing", 2, hub=place, on_exception="truncate")) as envs:
                envs.reset()
                failure = envs.step(np.array([0, 1]))[4]["env_failure"][1]
                told = failure.message + failure.traceback
                assert "odd_sims.py" in told and ("/no/such/folder" in told) == tells


@pytest.mark.long
@pytest.mark.parametrize("verbose", [False, True])
def test_health_names_no_folder_of_the_hub_to_its_remote_clients(
    tmp_path: Path, keys: KeyFolder, verbose: bool
) -> None:
    address = f"envhub://{admitted(keys, 'alice')}@"
    (tmp_path / "hub.toml").write_text(
        f'[envs.lost]\nenv = "CartPole-v1"\npython = "{tmp_path}/no/python3.8"\n'
        f'[envs.gone]\nenv = "CartPole-v1"\nfolder = "{tmp_path}/nowhere"\n'
    )
    arguments = ["--config", str(tmp_path / "hub.toml"), "--keys", str(keys.path)]
    with serve(tmp_path, *arguments, *(["--verbose-errors"] if verbose else [])) as hub:
        for place, tells in ((address + hub.tcp.removeprefix("tcp://"), verbose), (hub.ipc, True)):
            with envhub.connect(place) as client:
                assert wait_until(lambda: len(client.health()["unready"]) == 2)
                told = client.health()["unready"]
                assert "python3.8" in told["lost"] and told["lost"].endswith("no such file")
                assert "nowhere" in told["gone"] and told["gone"].endswith("does not exist")
                assert client.stats()["unready"] == told
                for name, why in told.items():
                    assert (str(tmp_path) in why) == tells
                    with pytest.raises(envhub.RequestRefused, match="is not ready") as refused:
                        client.make_vec(name, 2)
                    assert (str(tmp_path) in str(refused.value).replace(place, "")) == tells


@pytest.mark.long
def test_factories_are_for_those_who_may_deploy_where_the_hub_takes_them(tmp_path: Path, keys: KeyFolder) -> None:
    addresses = {may: admitted(keys, may, may) for may in ("use", "deploy")}
    arguments = ["CartPole-v1", "--keys", str(keys.path)]
    with serve(tmp_path, *arguments) as closed, pytest.raises(envhub.RequestRefused, match="--allow-factories"):
        envhub.make_vec(lambda: gym.make("CartPole-v1"), 2, hub=closed.ipc)
    with serve(tmp_path, *arguments, "--allow-factories") as hub:
        place = hub.tcp.removeprefix("tcp://")
        with pytest.raises(envhub.RequestRefused, match="--allow-factories"):
            envhub.make_vec(lambda: gym.make("CartPole-v1"), 2, hub=f"envhub://{addresses['use']}@{place}")
        for address in (hub.ipc, f"envhub://{addresses['deploy']}@{place}"):
            with closing(envhub.make_vec(lambda: gym.make("Pendulum-v1", g=1.0), 2, hub=address)) as envs:
                assert envs.reset()[0].shape == (2, 3)
        assert hub.log.count('"factories": "') == 2 and "factories: workers run code of its own user" in hub.log


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_other_users_of_an_insecure_hub_send_no_code(tmp_path: Path) -> None:
    program = """
import os, sys, gymnasium, envhub
envhub.make_vec("CartPole-v1", 1).close()  # imports all that another user could not
os.setuid(65534)
for wanted, options in ((lambda: gymnasium.make("CartPole-v1"), {}), ("CartPole-v1", {"render_mode": "/etc/passwd"})):
    try:
        envhub.make_vec(wanted, 1, hub=sys.argv[1], **options)
    except envhub.RequestRefused as error:
        print("refused", error)
envhub.make_vec("CartPole-v1", 1, hub=sys.argv[1]).close()
"""
    arguments = ["CartPole-v1", "--insecure", "--allow-factories"]
    with serve(tmp_path, *arguments, binds=["tcp://127.0.0.1:0"]) as hub:
        run = [sys.executable, "-c", program, hub.tcp]
        found = subprocess.run(run, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert found.returncode == 0 and found.stdout.count("refused") == 2, found.stderr


@pytest.mark.long
@pytest.mark.parametrize("guarded_by", ["keys", "user"])
def test_old_and_foreign_handshakes_get_nowhere(tmp_path: Path, keys: KeyFolder, guarded_by: str) -> None:
    """ZMTP 1.0 and 2.0, HTTP, which a web page can send, PLAIN, and where there are keys also NULL."""
    arguments = {"keys": ["--keys", str(keys.path)], "user": []}[guarded_by]
    greeting = b"\xff" + bytes(8) + b"\x7f"
    hello = Prelude(Op.HELLO, 0, NO_SESSION, 1).pack() + messages.pack(Hello())
    said = b"\x01\x00" + bytes([len(hello) + 1, 0]) + hello  # a routing id of no bytes, and the request
    posted = b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + said
    with serve(tmp_path, "CartPole-v1", *arguments, binds=["tcp://127.0.0.1:0"]) as hub:
        host, port = hub.tcp.removeprefix("tcp://").split(":")
        for data in (said, greeting + b"\x01\x05" + said, posted):
            with socket.create_connection((host, int(port))) as peer:
                peer.settimeout(5.0)
                peer.sendall(data)
                received = b"".join(iter(lambda peer=peer: receive(peer), b""))
                assert len(received) < 20 and b"EHUB" not in received
        for plain in (True, False) if guarded_by == "keys" else (True,):
            assert not shakes_hands(hub.tcp, plain)
        assert '"connection_ended"' not in hub.log  # libzmq has refused them, before a deadline of the hub
        if guarded_by != "keys":
            envhub.connect(hub.tcp).close()


def shakes_hands(address: str, plain: bool) -> bool:
    """Whether libzmq lets a client in that presents no key, but a user's name where ``plain``."""
    refused = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    refused |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # the hub has closed the connection before this side read why
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        if plain:
            dealer.setsockopt(zmq.PLAIN_USERNAME, b"root")
        monitor = sockets.open_monitor(dealer, zmq.EVENT_HANDSHAKE_SUCCEEDED | refused)
        dealer.connect(address)
        assert monitor.poll(20_000)
        event = recv_monitor_message(monitor)["event"]
        dealer.monitor(None, 0)
        monitor.close()
    return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def receive(peer: socket.socket) -> bytes:
    try:
        return peer.recv(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.long
@pytest.mark.parametrize("is_folder", [False, True])
def test_hub_whose_key_others_can_read_or_is_a_folder_does_not_start(keys: KeyFolder, is_folder: bool) -> None:
    path = keys.path / "server.key"
    path.chmod(0o644)
    if is_folder:
        path.unlink()
        path.mkdir(mode=0o700)
    arguments = [sys.executable, "-m", "envhub", "serve", "CartPole-v1", "--bind", "tcp://127.0.0.1:0"]
    found = subprocess.run([*arguments, "--keys", str(keys.path)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 3 and ("no regular file" if is_folder else "0600") in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.long
def test_hub_that_lets_strangers_in_does_not_start(tmp_path: Path, keys: KeyFolder) -> None:
    """The throw-away key is let in by a handler that admits everybody."""
    program = (
        "from envhub_server.network.access import Access\n"
        "Access._admitted = lambda *asked: 'anybody'\n"
        "from envhub.cli import main\n"
        "main()"
    )
    arguments = ["serve", "CartPole-v1", "--bind", "tcp://127.0.0.1:0", "--keys", str(keys.path)]
    found = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert found.returncode == 3 and "got in" in found.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_loopback_without_keys_admits_the_hubs_user_only(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", binds=["tcp://127.0.0.1:0"]) as hub:
        envhub.connect(hub.tcp).close()
        port = int(hub.tcp.rpartition(":")[2])
        program = (
            "import encodings.idna, os, socket; os.setuid(65534); "
            f"peer = socket.create_connection(('127.0.0.1', {port})); "
            "peer.settimeout(8); received = b''\n"
            "while chunk := peer.recv(100): received += chunk\n"
            "print('ended')"
        )
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
        assert found.stdout.strip() == "ended", found.stderr
        assert "another user" in hub.log
        envhub.connect(hub.tcp).close()


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_ipc_admits_the_hubs_user_only() -> None:
    """Also where the modes of the folder and the sockets would let others in."""
    connecting = (
        "import os, socket, sys; os.setuid(int(sys.argv[1]))\n"
        "for path in sys.argv[2:]:\n"
        "    peer = socket.socket(socket.AF_UNIX); peer.connect(path)\n"
        "    peer.settimeout(30 if os.getuid() or not path.endswith('.side') else 2)\n"  # the hub waits for its user
        "    try: print(len(peer.recv(1)))\n"
        "    except TimeoutError: print('open')\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve(folder, "CartPole-v1", binds=[f"ipc://{folder}/hub.sock"]) as hub:
            places = [f"{folder}/hub.sock", f"{folder}/hub.sock.side"]
            folder.chmod(0o777)
            for path in places:
                os.chmod(path, 0o777)
            found = {}
            for user in (os.getuid(), 65534):
                run = [sys.executable, "-c", connecting, str(user), *places]
                found[user] = subprocess.run(run, capture_output=True, text=True, timeout=100).stdout.split()
            assert found == {os.getuid(): ["1", "open"], 65534: ["0"] * 2}
            assert hub.log.count("side_socket_refused") == 1


@pytest.mark.long
def test_address_for_other_machines_needs_keys(tmp_path: Path, keys: KeyFolder) -> None:
    arguments = [sys.executable, "-m", "envhub", "serve", "CartPole-v1", "--bind", "tcp://0.0.0.0:0"]
    found = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "--keys" in found.stderr and "--insecure" in found.stderr
    with (
        serve(tmp_path, "CartPole-v1", "--keys", str(keys.path), binds=["tcp://0.0.0.0:0"]) as hub,
        pytest.raises(envhub.AccessDenied),
    ):
        envhub.connect(hub.tcp.replace("0.0.0.0", "127.0.0.1"))


def handshakes_refused(hub: ServedHub) -> int:
    with envhub.connect(hub.ipc) as client:
        return int(client.stats()["handshakes_refused"])


@pytest.mark.long
def test_audit_says_who_did_what_from_where_and_has_no_secret(tmp_path: Path, keys: KeyFolder) -> None:
    token_of_alice = admitted(keys, "alice")
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path)) as hub:
        place = hub.tcp.removeprefix("tcp://")
        address = address_of(token_of_alice, place)
        with closing(envhub.make_vec("CartPole-v1", 2, hub=address)) as envs:
            token = envs.token
            with envhub.connect(hub.ipc) as local:
                local.attach(token).close()
        for _ in range(5):
            with pytest.raises(envhub.RequestRefused):
                envhub.make_vec("CartPole-v1", 5000, hub=address)
        observer = admitted(keys, "olga", "observe")
        with pytest.raises(envhub.AccessDenied):
            envhub.connect(with_secret(address, sockets.new_key_pair()[1]))
        socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2]))).close()
        assert wait_until(lambda: "it sent nothing" in hub.log), hub.log
        with pytest.raises(envhub.AccessDenied):
            envhub.connect(hub.tcp)
        with pytest.raises(envhub.HubUnreachable):
            envhub.connect(with_server(address, sockets.new_key_pair()[0]), timeout=2.0)
        silent = zmq.Context()
        with silent, silent.socket(zmq.DEALER) as dealer:  # with alice's key
            sockets.present_keys(dealer, parse(address).keys)  # type: ignore[arg-type]
            monitor = sockets.open_monitor(dealer, zmq.EVENT_HANDSHAKE_SUCCEEDED)
            refused = at_rest(lambda: handshakes_refused(hub))  # those of the strangers are counted a moment later
            dealer.connect(hub.tcp)
            assert monitor.poll(20_000)
            dealer.monitor(None, 0)
            monitor.close()
        assert not wait_until(lambda: handshakes_refused(hub) != refused, 1)
        with pytest.raises(envhub.AccessDenied):
            envhub.make_vec("CartPole-v1", 1, hub=f"envhub://{observer}@{place}")
        keys.remove("alice")
        assert wait_until(lambda: '"removed"' in hub.log)
    text, lines = hub.log, hub.audit
    events = {(line["event"], line.get("client", "")) for line in lines}
    assert events >= {
        ("connected", "alice"),
        ("connected", ""),
        ("disconnected", "alice"),
        ("disconnected", ""),
        ("session_made", "alice"),
        ("session_taken_over", ""),
        ("session_ended", ""),
        ("request_refused", "alice"),
        ("client_refused", ""),
        ("request_refused", "olga"),
        ("handshake_unfinished", ""),
        ("keys_read", "olga"),
        ("keys_read", "alice"),
    }
    assert {line["host"] for line in lines if line.get("client") and "host" in line} == {"127.0.0.1"}
    (taken,) = (line for line in lines if line["event"] == "session_taken_over")
    (ended,) = (line for line in lines if line["event"] == "session_ended")
    assert taken["owner"] == "alice" and taken["by"].startswith("user ") and taken["session"] == ended["session"]
    whys = [line["why"] for line in lines if line["event"] == "client_refused"]
    assert {*whys} == {"unknown key", "no key, or one for another hub"} and whys.count("unknown key") == 1
    assert any(line.get("host", "").startswith(f"localhost:{os.getuid()}:") for line in lines)
    refused = [line for line in lines if line["event"] == "request_refused" and line["client"] == "alice"]
    assert len(refused) == 1  # the others are equal
    assert token not in text
    secrets = keys_of(token_of_alice).secret, keys.secret()
    assert not any(text_of(each.reveal_secret()) in text for each in secrets)


@pytest.mark.long
def test_audit_has_refused_requests_to_the_session_of_another_client(tmp_path: Path, keys: KeyFolder) -> None:
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path)) as hub:
        addresses = [address_of(admitted(keys, name), hub.tcp) for name in ("alice", "eve")]
        with closing(envhub.make_vec("CartPole-v1", 1, hub=addresses[0])) as envs, envhub.connect(addresses[1]) as eve:
            for _ in range(3):
                with pytest.raises(envhub.SessionLost):
                    eve.attach(envs.token, observe=True)
            with pytest.raises(envhub.SessionLost):
                eve.attach(envs.token)
            peer = RawPeer(hub.ipc)  # of the hub's own user, to whom the session does not belong either
            failure = peer.ask(Op.CLOSE, messages.pack(Close()), bytes.fromhex(envs.token), 9).failure
            peer.close()
            assert failure is not None and failure.code == "session_lost"
            envs.reset()
            name = envs.token[:8]
    refused = [line for line in hub.audit if line["event"] == "request_refused" and "owner" in line]
    found = [{key: line[key] for key in ("client", "op", "session", "owner", "why")} for line in refused]
    about = {"session": name, "owner": "alice", "why": "another client's session"}
    asked = ("eve", "OBSERVE"), ("eve", "ATTACH"), ("", "CLOSE")
    assert found == [{"client": client, "op": op, **about} for client, op in asked]


@pytest.mark.long
def test_every_way_to_start_a_hub_listens_where_it_says_and_nowhere_else(tmp_path: Path, keys: KeyFolder) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    default = tmp_path / "envhub/hub.sock"
    with serve(tmp_path, "CartPole-v1", binds=[], environ=environ) as hub:
        assert wait_until(lambda: f"{default}.side" in listening(hub.process.pid))
        assert listening(hub.process.pid) == {str(default), f"{default}.side"}
        assert default.parent.stat().st_mode & 0o777 == 0o700
    with served_hub("CartPole-v1") as shown:  # by `envhub demo` and `envhub bench`
        check_places(shown.pid, shown.tcp, shown.ipc)
        assert shown.tcp.startswith("tcp://127.0.0.1:")
    image = ["tcp://0.0.0.0:0", f"ipc://{tmp_path}/image.sock"]  # as the image's command has them
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path), binds=image) as hub:
        check_places(hub.process.pid, hub.tcp, hub.ipc)
    with serve(tmp_path, "CartPole-v1", "--insecure", binds=["tcp://0.0.0.0:0"]) as hub:
        assert addresses_of(hub.process.pid) == {hub.tcp.removeprefix("tcp://")}
    before = listening(os.getpid())
    for make in (
        lambda: envhub.make_vec("CartPole-v1", 2),
        lambda: envhub.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2),
        lambda: envhub.make("CartPole-v1"),
    ):
        with closing(make()):
            # The sockets of a private hub, which an earlier test may have started, have names that lead nobody to them.
            unreachable = {name for name in listening(os.getpid()) if name.startswith("/proc/self/fd/")}
            assert any(name.endswith("/hub.sock") for name in unreachable)
            assert not any(map(os.path.exists, unreachable))
            assert listening(os.getpid()) - before <= unreachable


def check_places(process: int, tcp: str, ipc: str) -> None:
    """See that a hub, also with workers, listens at its addresses alone, and at the side socket of its ipc address."""
    path = ipc.removeprefix("ipc://")
    with closing(envhub.make_vec("CartPole-v1", 2, hub=ipc)):
        assert addresses_of(process) == {tcp.removeprefix("tcp://"), path, f"{path}.side"}


def addresses_of(process: int) -> set[str]:
    """Where it listens; the socket for its proxy has a name that leads nobody to it."""
    found = listening(process)
    own = {name for name in found if name.startswith("/proc/self/fd/")}
    assert len(own) <= 1 and not any(map(os.path.exists, own))
    return found - own


@pytest.mark.long
def test_command_line_from_key_to_training(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "300"}

    def command(*arguments: str, given: str = "") -> str:
        run = [sys.executable, "-m", "envhub", *arguments]
        found = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environ, input=given)
        assert found.returncode == 0, found.stderr
        return found.stdout.strip()

    keys = str(tmp_path / "keys")
    port = free_port()
    address = command("keys", "add", "alice", "--keys", keys, "--at", f"127.0.0.1:{port}")
    with serve(tmp_path, "CartPole-v1", "--keys", keys, binds=[f"tcp://127.0.0.1:{port}"]):
        assert "the hub answers" in command("login", "simbox", given=address)
        assert "simbox: ok" in command("ls")
        assert command("health", "simbox").startswith("ok")
        public = command("keygen")
        partial = command("keys", "add", "bob", "--keys", keys, "--at", f"127.0.0.1:{port}", "--public", public)
        assert "the hub answers" in command("login", "own", given=partial)
        assert [line.split()[:2] for line in command("keys", "list", "--keys", keys).splitlines()] == [
            ["alice", "use"],
            ["bob", "use"],
        ]
        (tmp_path / "keys/clients/eve.toml").write_text("keys = [")
        listed = subprocess.run([sys.executable, "-m", "envhub", "keys", "list", "--keys", keys], capture_output=True)
        assert listed.returncode == 1 and listed.stdout.startswith(b"alice use") and b"eve.toml" in listed.stderr
        command("keys", "remove", "eve", "--keys", keys)
        command("keys", "remove", "bob", "--keys", keys)
        assert wait_until(lambda: "own: the hub" in (listed := command("ls")) and "does not know this key" in listed)


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts folders")
@pytest.mark.parametrize(("mode", "loads"), [(0o777, False), (0o775, False), (0o1777, True), (0o3777, True)])
def test_folder_on_a_mount_for_reading_only_is_that_of_a_secret(tmp_path: Path, mode: int, loads: bool) -> None:
    """Another mount of the same folder may be for writing, and there only a sticky folder keeps root's files."""
    KeyFolder(tmp_path).add("alice", bytes(range(32)))
    clients = tmp_path / "clients"
    clients.chmod(mode)
    if subprocess.run(["mount", "--bind", "-o", "ro", clients, clients], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this container mounts no folders")
    try:
        with nullcontext() if loads else pytest.raises(KeysError, match="no other user may write to"):
            KeyFolder(tmp_path).load()
        assert os.statvfs(clients).f_flag & os.ST_RDONLY
    finally:
        subprocess.run(["umount", clients], check=True)
