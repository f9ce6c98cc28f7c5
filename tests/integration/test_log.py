"""What the hub's log writes, each in a process of its own, since structlog is imported once."""

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
from envhub_server.log import LIMIT_S, LINES_MAX, LogFile
from hubs import serve

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import Attach, Make, Op

BEGIN = """
import logging, resource, sys
from envhub_server import log
logger = log.Logger('envhub.hub').bind(session='s')
"""
FULL = """
log.configure("error")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(open('/dev/null'))
except OSError:
    pass
try:
    1 / 0
except ZeroDivisionError:
    logger.exception('internal_error', number=1)
"""
ERRORS_ONLY = """
log.configure("error")
logger.warning('left_out')
assert 'structlog' not in sys.modules
try:
    1 / 0
except ZeroDivisionError:
    logger.exception('internal_error', number=1)
"""
REPEATED = """
log.configure("info")
for built in (1, 1, 1, 2):
    logger.info('session_making', phase='building', built=built, num_envs=3)
"""
OF_A_PROGRAM = """
import structlog
structlog.configure(
    processors=[lambda _, method, line: f"{{method}} {{sorted(line.items())}}"],
    wrapper_class={wrapper},
    logger_factory=lambda *names: structlog.PrintLogger() if names == ('envhub.hub',) else None,
)
logger.info('session_ready', rows=2)
logger.exception('internal_error')
"""
AFTERWARDS = """
log.configure("error")
import structlog
structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
logger.error('of_the_hub')
structlog.get_logger().info('of_the_program')
"""


def written(script: str) -> tuple[str, str]:
    ran = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr


def test_hub_that_logs_errors_only_imports_structlog_with_the_first() -> None:
    line = json.loads(written(ERRORS_ONLY)[1])
    assert line["exception"].endswith("ZeroDivisionError: division by zero")
    found = {key: line[key] for key in ("event", "level", "session", "number")}
    assert found == {"event": "internal_error", "level": "error", "session": "s", "number": 1}


def test_exception_is_written_where_no_descriptor_is_left_to_import_structlog_with() -> None:
    stderr = written(FULL)[1]
    assert stderr.startswith("internal_error {'session': 's', 'number': 1}\n")
    assert "ZeroDivisionError: division by zero\n" in stderr and "Too many open files" in stderr


@pytest.mark.parametrize("wrapper", ["None", "structlog.BoundLogger"])
def test_program_that_configures_structlog_has_the_lines_by_name_and_method(wrapper: str) -> None:
    stdout, _ = written(OF_A_PROGRAM.format(wrapper=wrapper))
    info, error = stdout.splitlines()
    assert info == "info [('event', 'session_ready'), ('rows', 2), ('session', 's')]"
    assert error.startswith(("error [('event', 'internal_error')", "exception [('event', 'internal_error')"))


def test_progress_is_logged_once_however_often_a_client_asks_after_it() -> None:
    assert [json.loads(line)["built"] for line in written(REPEATED)[1].splitlines()] == [1, 2]


def test_hubs_log_is_not_the_programs() -> None:
    stdout, stderr = written(AFTERWARDS)
    assert json.loads(stderr)["event"] == "of_the_hub"
    assert stdout == "event='of_the_program'\n"


IN_A_FILE = """
import os, pathlib
file = pathlib.Path(sys.argv[1])
log.configure("info", file)
logger.info('first')
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, hard))  # as a disk that is full
logger.info('second')
logger.info('third')
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
logger.info('fourth')
"""


@pytest.mark.parametrize("way", ["create", "nocreate", "copytruncate"])
def test_log_file_is_followed_through_a_rotation(way: str, tmp_path: Path) -> None:
    path, old = tmp_path / "hub.log", tmp_path / "hub.log.1"
    file = LogFile(path)
    file.write(b"before\n")
    assert path.stat().st_mode & 0o777 == 0o600
    if way == "copytruncate":
        old.write_bytes(path.read_bytes())
        os.truncate(path, 0)
    else:
        path.rename(old)
        if way == "create":
            path.touch(0o640)
    file.write(b"after\n")
    assert (old.read_text(), path.read_text()) == ("before\n", "after\n")
    assert path.stat().st_mode & 0o777 == (0o640 if way == "create" else 0o600)
    os.close(file.descriptor)


def test_line_that_the_disk_has_no_room_for_goes_to_stderr(tmp_path: Path) -> None:
    path = tmp_path / "hub.log"
    ran = subprocess.run([sys.executable, "-c", BEGIN + IN_A_FILE, path], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["event"] for line in ran.stderr.splitlines()] == ["second", "third"]
    first, torn, fourth = path.read_text().splitlines()
    assert (json.loads(first)["event"], json.loads(fourth)["event"], len(torn)) == ("first", "fourth", 10)


@pytest.mark.long
def test_file_has_the_lines_of_the_hub_and_of_its_workers(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter", "--log", str(tmp_path / "hub.json")) as hub:
        with closing(envhub.make_vec("counter", num_envs=1, hub=hub.ipc)) as envs:
            envs.call("say", "word")
        hub.stop()
        lines = [json.loads(line) for line in (tmp_path / "hub.json").read_text().splitlines()]
        assert {"hub_started", "session_made", "output", "session_ended"} <= {line["event"] for line in lines}
        assert hub.log == ""


@pytest.mark.parametrize("path", [".", pytest.param("none/hub.log", marks=pytest.mark.long)])
def test_hub_whose_log_cannot_be_written_does_not_start(path: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "envhub", "serve", "CartPole-v1", "--log", str(tmp_path / path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"envhub serve: log = {tmp_path / path}: "), ran.stderr


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
