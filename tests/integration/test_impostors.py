"""Another user of the machine who listens where a hub did is not taken for the hub: no client connects there.

The impostor takes every name at which the hub listened, at once when the hub is killed, while its program computes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import sims
from envhub_client.private_hub.process import private_hub
from hubs import listening, serve, wait_until

import envhub

NOBODY = 65534
LISTEN_S = 3.0  # libzmq connects again within 0.5 s
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")

# Takes the names, once a line says so, and prints of which of them somebody has connected, and what was said then.
_IMPOSTOR = """
import os, select, socket, sys, time
os.setgid({nobody}); os.setuid({nobody})
print("ready", flush=True)
sys.stdin.readline()
listeners, until_s = {{}}, time.monotonic() + {listen_s}
while time.monotonic() < until_s:
    for name in set(sys.argv[1:]) - {{*listeners.values()}}:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(name.replace("@", chr(0), 1))
            listener.listen()
            if name[0] != "@":
                os.chmod(name, 0o777)
        except OSError:
            continue
        listeners[listener] = name
    for listener in select.select([*listeners], [], [], 0.01)[0]:
        peer = listener.accept()[0]
        print("connected", listeners[listener], flush=True)
print("end", len(listeners), flush=True)
"""


@contextlib.contextmanager
def impostor(names: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process of another user that takes these names once it is told to."""
    program = _IMPOSTOR.format(nobody=NOBODY, listen_s=LISTEN_S)
    process = subprocess.Popen(
        [sys.executable, "-c", program, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def told(process: subprocess.Popen[str]) -> list[str]:
    """Tell the impostor to begin, and return what it has seen once its time is over."""
    return process.communicate("begin\n", timeout=60)[0].splitlines()


@pytest.mark.long
@pytest.mark.parametrize("lane", [pytest.param("wire", marks=pytest.mark.chaos), "auto"])
def test_nobody_is_taken_for_a_private_hub_that_has_ended(lane: str) -> None:
    with closing(envhub.make_vec(sims.Counter, 2, lane=lane)) as envs:
        envs.reset()
        hub = private_hub()
        with impostor(sorted(listening(hub.pid))) as process:
            os.kill(hub.pid, signal.SIGKILL)
            assert wait_until(lambda: not hub.alive)
            assert told(process) == ["end 0"]  # there is no name to take, and nobody has connected
        with pytest.raises(envhub.HubLost):
            envs.step([0, 0])


def test_other_users_cannot_take_the_names_of_a_private_hub_before_it_starts() -> None:
    with closing(envhub.make_vec(sims.Counter, 1)):
        for name in listening(private_hub().pid):  # each is of a folder that only the hub has, and is removed by now
            assert name.startswith("/proc/self/fd/")


@pytest.fixture
def foreign_folder() -> Iterator[Path]:
    """A folder of another user, which is not below the tests' own: that one is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(folder, NOBODY, NOBODY)
        yield folder


@pytest.mark.long
def test_socket_that_another_user_puts_at_the_path_of_a_hub_is_not_used(tmp_path: Path, foreign_folder: Path) -> None:
    """The owner of the folder may put what it likes there, after the client has checked the first socket."""
    path = foreign_folder / "hub.sock"
    address = f"ipc://{path}"
    with (
        serve(tmp_path, "counter=sims:counter", binds=[address]) as hub,
        closing(envhub.make_vec("counter", 1, hub=address, lane="wire", reconnect_timeout=LISTEN_S)) as envs,
        impostor([str(path), f"{path}.side"]) as process,
    ):
        envs.reset()
        hub.stop(signal.SIGKILL)
        for left in foreign_folder.iterdir():
            left.unlink()
        assert told(process) == ["end 2"]  # it has both names, and nobody has connected
        with pytest.raises(envhub.HubLost):
            envs.step([0])
        with pytest.raises(envhub.AddressError) as raised:
            envhub.connect(address)
        assert str(raised.value).startswith(f"{address} belongs to user {NOBODY} (nobody), and a hub's socket serves")
        assert "ask that user for a key (`envhub keys add`, `envhub serve --keys`), or start a hub" in str(raised.value)


def test_socket_in_a_folder_that_this_user_may_not_enter_is_told_in_a_sentence() -> None:
    with tempfile.TemporaryDirectory() as folder:  # of mode 0700
        program = (
            f"import os, envhub, envhub_client.client; os.setuid({NOBODY})\n"
            f"try: envhub.connect('ipc://{folder}/hub.sock')\n"
            "except envhub.AddressError as error: print(error)"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    why = f"cannot be reached: user {NOBODY} (nobody) may not enter {folder}, which belongs to user 0 (root); ask that"
    assert ran.stdout.startswith(f"ipc://{folder}/hub.sock {why}") and "Traceback" not in ran.stderr, ran.stderr


PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP = 28, 4  # linux/prctl.h, linux/securebits.h

_FOREIGN_HUB = f"""
import ctypes, os
from envhub.cli import commands
# The process keeps root's capabilities: another user may not be able to read this environment's files.
assert ctypes.CDLL(None, use_errno=True).prctl({PR_SET_SECUREBITS}, {SECBIT_NO_SETUID_FIXUP}, 0, 0, 0) == 0
os.setgid({NOBODY}); os.setuid({NOBODY})
commands.app(["serve", "CartPole-v1", "--bind", "tcp://127.0.0.1:0", "--replays-bytes-max", "0"])
"""


@contextlib.contextmanager
def foreign_hub() -> Iterator[str]:
    """The address on loopback of another user's hub, which makes no envs."""
    command = [sys.executable, "-c", _FOREIGN_HUB]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipes: Mapping[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd="/", env=environ, text=True, **pipes) as hub:
        try:
            assert hub.stdout is not None
            line = hub.stdout.readline()
            assert line.startswith("listening on "), f"the hub ended before it listened: {hub.communicate()}"
            yield line.removeprefix("listening on ").strip()
        finally:
            hub.terminate()


@pytest.mark.long
def test_hub_of_another_user_on_loopback_is_told_with_what_to_do() -> None:
    with foreign_hub() as address, pytest.raises(envhub.HubUnreachable) as raised:
        envhub.connect(address, timeout=2.0)
    whose = f"or a hub that belongs to user {NOBODY} (nobody), and without keys serves that user alone"
    assert whose in str(raised.value)
    assert "ask that user for a key (`envhub keys add`, `envhub serve --keys`), or start a hub" in str(raised.value)
