"""Clients on macOS and Windows, as near as Linux comes to them: ``other_platform`` hides what they lack."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hubs import HERE, ServedHub, serve
from new_keys import address_of, admitted, keys_in

ROOT = HERE.parents[1]
# The hub is reached by tcp in those whose names have it; on these the rest needs a hub of the program's own.
FILES, MORE = ["drop_in", "equality", "single_env"], ["any_space", "truncations"]

PROGRAM = """
import io, sys
import other_platform

platform, plain, local, guarded = sys.argv[1:]
other_platform.become(platform)
other_platform.hide_proc()

import envhub
from envhub import cli

with envhub.connect(plain) as client:
    print(client.health()["status"], "counter" in client.envs())
    envs = client.make_vec("counter", 2)
    envs.reset(seed=1)
    with client.attach(envs.token, observe=True) as observer:
        observer.observe()
    print(envs.lane, *envs.step([3, 4])[1])
    token = envs.detach()
with envhub.connect(plain) as client:
    envs = client.attach(token)
    print(*envs.step([5, 6])[1])
    envs.close()
env = envhub.make("counter", hub=plain)
env.reset()
print(env.step(7)[1])
env.close()

envs = envhub.make_vec("counter", 4, hub=[plain, guarded])
envs.reset()
print(*envs.step([1, 2, 3, 4])[1])
envs.close()


def command(*arguments, stdin=""):
    sys.argv, sys.stdin = ["envhub", *arguments], io.StringIO(stdin)
    try:
        cli.main()
    except SystemExit as error:
        print("status", error.code)


command("login", "box", stdin=guarded + chr(10))
envs = envhub.make_vec("counter", 2, hub="box")
envs.reset()
print(*envs.step([1, 2])[1])
envs.close()
command("health", "box")
command("envs", "box")
command("ls")
command("logout", "box")
command("serve", "CartPole-v1")

for make in (
    lambda: envhub.make_vec("CartPole-v1", 2),
    lambda: envhub.AsyncVectorEnv([lambda: None]),
    lambda: print(envhub.make_vec("counter", 1, hub=local).lane),
    lambda: envhub.connect("ssh://box"),
    lambda: envhub.connect(),
    lambda: envhub.make_vec("CartPole-v1", 2, hub=plain, record="somewhere"),
    lambda: envhub.serve,
):
    try:
        make()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
PRINTED = """\
ok True
wire 3.0 4.0
5.0 6.0
7.0
1.0 2.0 3.0 4.0
the hub answers
kept: hub="box"
status 0
1.0 2.0
ok: 0 sessions
status 0
counter Box
status 0
box: ok
status 0
status 0
status 2
HubUnreachable: a hub of the program's own needs Linux, and this is SYSTEM
HubUnreachable: a hub of the program's own needs Linux, and this is SYSTEM
LOCALAddressError: a hub that is found without an address needs Linux, and this is SYSTEM
ValueError: record= needs Linux, and this is SYSTEM
AttributeError: envhub.serve needs Linux, and this is SYSTEM
"""

LOCAL = {
    "darwin": """\
wire
HubUnreachable: ssh does not reach box: there is no command 'no-ssh'; ENVHUB_SSH names another
""",
    "win32": """\
AddressError: the address IPC needs Linux, and this is Windows
AddressError: an ssh:// address needs Linux, and this is Windows
""",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a hub with keys, with a client's key."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = keys_in(folder / "keys")
    token = admitted(keys, "alice")
    with serve(folder, "counter=sims:counter", "--keys", str(keys.path), binds=["tcp://127.0.0.1:0"]) as hub:
        yield address_of(token, hub.tcp)


@pytest.mark.long
@pytest.mark.parametrize("platform", ["darwin", pytest.param("win32", marks=pytest.mark.long)])
def test_client_does_what_the_page_says(platform: str, hub: ServedHub, guarded: str, tmp_path: Path) -> None:
    run = [sys.executable, "-c", PROGRAM, platform, hub.tcp, hub.ipc, guarded]
    environ = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "XDG_CONFIG_HOME": str(tmp_path),
        "ENVHUB_LOG": "error",
        "ENVHUB_SSH": "no-ssh",
    }
    environ.pop("ENVHUB_ADDRESS", None)
    result = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environ)
    system = {"darwin": "macOS", "win32": "Windows"}[platform]
    lines = [line.partition(": pass the tcp://")[0] for line in result.stdout.splitlines()]
    lines = [re.sub(r"^(ok: 0 sessions|counter\tBox).*", r"\1", line).replace("\t", " ") for line in lines]
    expected = PRINTED.replace("LOCAL", LOCAL[platform]).replace("SYSTEM", system).replace("IPC", hub.ipc)
    assert "\n".join(lines) + "\n" == expected, result.stderr
    assert result.returncode == 0 and f"envhub serve: this command needs Linux, and this is {system}" in result.stderr


def passed_there(platform: str, chosen: str, *files: str) -> int:
    """The number of tests in these files that are chosen and pass on the platform; fails if one of them fails."""
    paths = [f"tests/integration/test_{name}.py" for name in files]
    run = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", chosen, *paths]
    environ = {**os.environ, "ENVHUB_TEST_PLATFORM": platform}
    result = subprocess.run(run, capture_output=True, text=True, timeout=580, env=environ, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    return int(re.findall(r"(\d+) passed", result.stdout)[-1])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("platform", "chosen", "files"),
    [
        ("win32", "tcp", FILES),
        ("darwin", "ipc or ssh", [*FILES, "ssh", "ssh_tunnel"]),
        pytest.param("win32", "tcp", MORE, marks=pytest.mark.chaos),
        pytest.param("darwin", "tcp or ipc", [*FILES, *MORE], marks=pytest.mark.chaos),
    ],
)
def test_tests_pass_there(platform: str, chosen: str, files: list[str]) -> None:
    assert passed_there(platform, chosen, *files) > 5


def test_socket_on_macos_is_in_a_folder_that_others_cannot_write_to(tmp_path: Path) -> None:
    addresses = []
    for mode in (0o700, 0o755, 0o757, 0o1777):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        addresses.append(str(folder / "hub.sock"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(addresses[-1])
        folder.chmod(mode)
    program = (
        "import other_platform, sys; other_platform.become('darwin')\n"
        "from envhub_client.connection.local_sockets import LocalSockets\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(LocalSockets(path).path())\n"
        "    except Exception as error: print(error)"
    )
    environ = {**os.environ, "PYTHONPATH": str(HERE)}
    run = [sys.executable, "-c", program, *addresses]
    printed = subprocess.run(run, stdout=subprocess.PIPE, text=True, timeout=60, env=environ).stdout.splitlines()
    assert printed[:2] == addresses[:2]
    refused = "another user could replace it, since {} can be written to by every user"
    assert all(refused.format(Path(path).parent) in line for path, line in zip(addresses[2:], printed[2:], strict=True))
