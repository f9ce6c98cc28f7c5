"""Whatever a peer repeats, and however it varies it, the log stays small, and says who it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conformance.kit.raw_peer import RawPeer
from envhub_server.log import LIMIT_S, LINES_MAX
from hubs import serve

from envhub.protocol import messages
from envhub.protocol.messages import Attach, Make, Op

TIMES = 1500
BYTES_MAX = 250_000  # of which a flood of one kind may have some
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
    return int((time.monotonic() - began_s) / LIMIT_S) + 1


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_refusals_of_the_hubs_own_user_are_bounded(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with serve(tmp_path, "CartPole-v1") as hub, closing(RawPeer(hub.ipc)) as peer:
        for number in range(TIMES):
            token = number.to_bytes(16, "big")
            for op, message in ((Op.MAKE, Make(name=f"Nope-{number}", num_envs=1)), (Op.ATTACH, Attach(token))):
                answer = peer.ask(op, messages.pack(message), bytes([op]) + token[1:], 1)
                assert answer.failure is not None, answer
        assert hub.stop() == 0
    periods = periods_since(began_s)
    for event in ("request_refused", "session_unknown"):
        written = [line for line in hub.audit if line["event"] == event]
        assert 0 < len(written) <= periods * LINES_MAX
        assert all(line["host"].startswith(f"localhost:{os.getuid()}:") for line in written)
        assert {line["client"] for line in written} == {""}
    assert any("Nope-0'" in line.get("why", "") for line in hub.audit)
    assert len(hub.log) < periods * BYTES_MAX


@pytest.mark.long
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
    assert len(hub.log) < BYTES_MAX
