"""Folders of a hub that another user could replace: ``serve``, ``connect`` and fleets refuse them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from envhub_server.ipc.replay_file import FILE_BYTES_MAX
from envhub_server.network.key_folder import KeyFolder
from hubs import below, serve, wait_until
from test_kept_hub import await_, kept

import envhub
from envhub.cli.commands import app
from envhub.errors import AddressError, KeysError
from envhub.files import open_regular_file, read_regular_file, weakness_of
from envhub.fleet import hub_actor
from envhub.fleet.hub_actor import HubFolder, KeptHub

NOBODY = 65534
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to other users")


def of_another(shared: Path) -> Path:
    """A folder that another user has made where one's own was to be made, and that has one's own in it."""
    (shared / "run").mkdir()
    os.chown(shared / "run", NOBODY, NOBODY)
    return shared / "run"


def by_a_link_of_another(shared: Path) -> Path:
    """A link of another user, which leads to one's own folder until he changes it."""
    (shared / "own").mkdir(mode=0o700)
    (shared / "run").symlink_to(shared / "own")
    os.chown(shared / "run", NOBODY, NOBODY, follow_symlinks=False)
    return shared / "run"


def that_all_may_write_to(shared: Path) -> Path:
    (shared / "run").mkdir()
    (shared / "run").chmod(0o777)
    return shared / "run"


@pytest.mark.parametrize(
    "run",
    [that_all_may_write_to, *(pytest.param(each, marks=root_only) for each in (of_another, by_a_link_of_another))],
    ids=lambda run: run.__name__,
)
def test_own_folder_in_one_of_another_user_is_refused(
    tmp_path: Path, run: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run(tmp_path)))
    (tmp_path / "run/envhub").mkdir(mode=0o700)
    why = f"another user could replace {tmp_path}/run/envhub, since {tmp_path}/run "
    with pytest.raises(AddressError, match=why):
        HubFolder()
    with pytest.raises(AddressError, match=why):
        envhub.connect()
    with pytest.raises(KeysError, match=why):
        KeyFolder(tmp_path / "run/envhub").load()
    with pytest.raises(KeysError, match=why):
        KeyFolder(tmp_path / "run/envhub").make_secret()
    with pytest.raises(KeysError, match=why):
        KeyFolder(tmp_path / "run/envhub").add("me", bytes(32))
    with pytest.raises(SystemExit, match="2"):
        app(("serve", "CartPole-v1"))
    assert why in capfd.readouterr().err
    assert not [*(tmp_path / "run/envhub").iterdir()]


@root_only
def test_way_to_a_folder_has_its_links_and_a_sticky_folder_keeps_its_entries(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/../a/b")
    tmp_path.chmod(0o1777)
    assert weakness_of(str(tmp_path / "link")) is weakness_of(str(tmp_path / "none/../link")) is None
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    assert str(weakness_of(f"{tmp_path}/link/")) == f"{tmp_path}/link belongs to the user nobody"
    (tmp_path / "loop").symlink_to("loop")
    assert weakness_of(str(tmp_path / "loop")) is None  # it leads nowhere
    assert str(weakness_of(f"{tmp_path}/a/..")) == f"{tmp_path} can be written to by every user (mode 1777)"


IN_A_CONTAINER = """
import ctypes, os, pathlib, sys
from envhub.files import weakness_of
libc, root = ctypes.CDLL(None), sys.argv[1].encode()
if os.getuid() == 0:
    os.setgroups([]), os.setresgid(1001, 1001, 1001), os.setresuid(1001, 1001, 1001)
user, group = os.getuid(), os.getgid()
libc.prctl(4, 1, 0, 0, 0)  # else its files of /proc are root's
if libc.unshare(0x10020000):
    sys.exit("this machine allows no user namespace")
pathlib.Path("/proc/self/setgroups").write_text("deny")
pathlib.Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
pathlib.Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
os.chdir("/")
assert not libc.mount(b"none", root, b"tmpfs", 0, None)
for each in ("/tmp", "/proc"):
    os.mkdir(root.decode() + each)
    assert not libc.mount(each.encode(), root + each.encode(), None, 4096 | 16384, None)
os.chroot(root)
print(os.stat("/").st_uid == user, os.stat("/tmp").st_uid == user, weakness_of("/tmp/x"))
"""


def test_container_that_does_not_know_root_trusts_roots_folders() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chmod(root, 0o777)
        command = [sys.executable, "-c", IN_A_CONTAINER, root]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "no user namespace" in ran.stderr:
        pytest.skip(ran.stderr.strip())
    assert ran.stdout == "True False None\n", ran.stderr


def test_folders_are_removed_by_descriptor_and_none_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "home/results").mkdir(parents=True)
    own = HubFolder()
    (own.path / "link").symlink_to(tmp_path / "home")
    fleets = own.path.parent
    (fleets / "left/by").mkdir(parents=True)
    (fleets / "link").symlink_to(tmp_path / "home")
    fleets.rename(tmp_path / "moved")
    with hub_actor._all_folders() as parent:
        fleets.rmdir()
        fleets.symlink_to(tmp_path / "home")
        hub_actor.remove_unowned(parent)
    assert (tmp_path / "home/results").is_dir()
    fleets.unlink()
    (tmp_path / "moved").rename(fleets)
    own.remove()
    assert (tmp_path / "home/results").is_dir()
    assert [path.name for path in fleets.iterdir()] == ["link"]


@pytest.mark.long
def test_hub_starts_again_with_the_files_of_the_folder_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = HubFolder()
    (folder.path / "hub.toml").write_text('name = "held"')
    config = f"/proc/self/fd/{folder.descriptor}/hub.toml"
    hub = KeptHub(["CartPole-v1", "--config", config], ["tcp://127.0.0.1:0"], os.environ, [folder.descriptor])
    with kept(hub):
        await_(lambda: bool(hub.addresses))
        folder.path.rename(tmp_path / "moved")
        folder.path.mkdir()
        (folder.path / "hub.toml").write_text('name = "swapped"')
        first = hub.pid
        os.kill(first, signal.SIGKILL)
        await_(lambda: hub.pid not in (0, first) and bool(hub.addresses))
        with envhub.connect(hub.addresses[0]) as client:
            assert client._connection.hub == "held"


# --- odd files --------------------------------------------------------------------------------------------------------


KINDS = ("pipe", "socket", "folder", "device", "link to a pipe")


@pytest.fixture(params=KINDS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The path of something that is no regular file."""
    path = tmp_path / "odd"
    with socket.socket(socket.AF_UNIX) as bound:
        match request.param:
            case "pipe":
                os.mkfifo(path)
            case "socket":
                bound.bind(str(path))
            case "folder":
                path.mkdir()
            case "device":
                path = Path("/dev/zero")
            case _:
                os.mkfifo(tmp_path / "pipe")
                path.symlink_to("pipe")
        yield path


def test_only_regular_files_are_opened_and_no_descriptor_is_left(odd: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError):
            open_regular_file(odd)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular_file(tmp_path / "file", 4)


def refused(*words: str, **environ: str) -> str:
    """What a command says that ends at once with status 2."""
    line = [sys.executable, "-m", "envhub", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, env={**os.environ, **environ})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    return done.stderr


@pytest.mark.long
def test_replay_of_a_pipe_or_of_an_endless_file_ends_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.replay")
    assert "no regular file" in refused("replay", str(tmp_path / "pipe.replay"), "--trust")
    assert "no regular file" in refused("replay", "/dev/zero", "--trust")
    with (tmp_path / "huge.replay").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    assert f"more than {FILE_BYTES_MAX} bytes" in refused("replay", str(tmp_path / "huge.replay"), "--trust")


@pytest.mark.long
def test_pipe_is_no_hub_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused("serve", "--config", str(tmp_path / "pipe"))


def soft_limits(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_CORE)


@pytest.mark.long
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0, reason="no process may write a core file here")
def test_hub_zygote_and_commands_with_keys_write_no_core_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        with serve(tmp_path, "CartPole-v1") as hub:
            envhub.make_vec("CartPole-v1", 1, hub=hub.ipc).close()
            pids = [hub.process.pid, *(pid for pid, _ in below(psutil.Process(hub.process.pid)))]
            assert len(pids) == 2 and {soft_limits(pid)[0] for pid in pids} == {0}
        line = [sys.executable, "-m", "envhub", "login"]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as login:
            assert wait_until(lambda: soft_limits(login.pid)[0] == 0)  # while it waits for the address
            login.communicate(b"")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
