"""Whatever a peer repeats, and however it varies it, log and audit stay small, and say who it was and how often."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from envhub_client.tools.conformance.raw_peer import RawPeer
from envhub_server.network.key_folder import KeyFolder
from envhub_server.repeats import LINES_MAX, REPEAT_S
from hubs import ServedHub, serve, wait_until

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import Attach, Make, Op

TIMES = 1500
BYTES_MAX = 120_000  # of which a flood of one kind may have some
STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
for _ in range(int(sys.argv[2])):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(sys.argv[1])
        stranger.recv(1)
"""


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0, without a key


def periods_since(began_s: float) -> int:
    """The number of periods in which there may have been lines since then: a flood takes long on a busy machine."""
    return int((time.monotonic() - began_s) / REPEAT_S) + 1


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[tuple[ServedHub, Path]]:
    """A hub, and its audit."""
    with serve(tmp_path, "CartPole-v1", "--audit", str(tmp_path / "audit")) as hub:
        yield hub, tmp_path / "audit"


@pytest.mark.long
def test_refusals_of_the_hubs_own_user_are_bounded_and_counted(audited: tuple[ServedHub, Path]) -> None:
    hub, audit = audited
    began_s = time.monotonic()
    with closing(RawPeer(hub.ipc)) as peer:
        for number in range(TIMES):
            token = number.to_bytes(16, "big")
            for op, message in ((Op.MAKE, Make(name=f"Nope-{number}", num_envs=1)), (Op.ATTACH, Attach(token))):
                answer = peer.ask(op, messages.pack(message), bytes([op]) + token[1:], 1)
                assert answer.failure is not None, answer
    assert hub.stop() == 0
    lines, periods = lines_of(audit.read_text()), periods_since(began_s)
    for op, event in (("MAKE", "refused"), ("ATTACH", "session_unknown")):
        written = [line for line in lines if line["event"] == event and line["op"] == op]
        assert 0 < len(written) <= periods * LINES_MAX
        told = [line for line in lines if line["event"] == "lines_left_out" and line["op"] == op]
        assert sum(line["lines"] for line in told) == TIMES - len(written)
        assert {line["from"] for line in told} == {f"localhost:{os.getuid()}"} and {
            line["client"] for line in told
        } == {""}
    assert any("Nope-0'" in line.get("why", "") for line in lines)
    assert len(audit.read_bytes()) < periods * BYTES_MAX and len(hub.log) < BYTES_MAX


@pytest.mark.skipif(os.geteuid() != 0, reason="is another user, too")
def test_other_users_at_the_side_socket_have_a_line_in_a_while(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with serve(tmp_path, "CartPole-v1", binds=[f"ipc://{folder}/hub.sock"]) as hub:
            os.chmod(f"{folder}/hub.sock.side", 0o777)
            arguments = [f"{folder}/hub.sock.side", str(TIMES)]
            assert subprocess.run([sys.executable, "-c", STRANGER, *arguments], timeout=60).returncode == 0
            assert hub.stop() == 0
    refused = [line for line in lines_of(hub.log) if line["event"] == "side_socket_refused"]
    assert 0 < len(refused) <= periods_since(began_s) and {line["uid"] for line in refused} == {54321}
    told = [line for line in lines_of(hub.log) if line["event"] == "lines_left_out"]
    assert {(line["of"], line["origin"]) for line in told} == {("side_socket_refused", "54321")}
    assert sum(line["lines"] for line in told) == TIMES - len(refused)
    assert len(hub.log) < BYTES_MAX


@pytest.mark.long
def test_connections_that_come_and_go_are_counted_and_no_attempts_to_get_in(tmp_path: Path) -> None:
    keys, audit = KeyFolder(tmp_path / "keys"), tmp_path / "audit"
    keys.make_secret()
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path), "--audit", str(audit)) as hub:
        port = int(hub.tcp.rpartition(":")[2])
        for _ in range(100):
            socket.create_connection(("127.0.0.1", port)).close()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                assert stranger.recv(1)
                stranger.sendall(GREETING)  # which the reset that follows may have thrown away
        with envhub.connect(hub.ipc) as client:
            assert wait_until(lambda: client.stats()["handshakes_unfinished"] == 100)
            assert wait_until(lambda: client.stats()["handshakes_refused"] == 20)
        assert hub.stop() == 0
    lines = [line for line in lines_of(audit.read_text()) if line["event"] not in ("connected", "disconnected")]
    assert {line["from"] for line in lines} == {"127.0.0.1"}
    whys = ("handshake_unfinished", "it sent nothing", 100), ("refused", "no key, or one for another hub", 20)
    for event, why, count in whys:
        written = [line for line in lines if line["event"] == event]
        told = [line for line in lines if line.get("of") == event]
        assert {line["why"] for line in written} == {why} and len(written) <= 6
        assert len(written) + sum(line["lines"] for line in told) == count
    logged = [line for line in lines_of(hub.log) if line["event"] == "lines_left_out"]
    assert {line["of"] for line in logged} == {"handshake_unfinished", "client_refused"}


@pytest.mark.long
def test_what_was_left_out_is_told_though_nothing_follows(audited: tuple[ServedHub, Path]) -> None:
    hub, audit = audited
    with closing(RawPeer(hub.ipc)) as peer:
        for number in range(1, 4):
            assert (
                peer.ask(Op.MAKE, messages.pack(Make(name="Nope", num_envs=1)), bytes([number]) * 16, 1).failure
                is not None
            )
    assert wait_until(lambda: "lines_left_out" in audit.read_text())
    (told,) = (line for line in lines_of(audit.read_text()) if line["event"] == "lines_left_out")
    assert told["of"] == "refused" and told["lines"] == 2
