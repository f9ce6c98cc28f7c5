"""Keys as text, the files that keep them, and the folder of a hub's keys."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog  # noqa: F401 - the log imports it, also where another user cannot read its files
from envhub_client.connection import known_hubs
from envhub_server.network import key_folder
from envhub_server.network.key_folder import KeyFolder
from secret_volume import write_volume

from envhub.errors import AddressError, HubUnreachable, KeysError
from envhub.secret import Secret
from envhub.transport import address, sockets
from envhub.transport.address import HubKeys, key_of, read_private, text_of, write_secret

A, B, C = (bytes([number]) * 32 for number in range(1, 4))


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "envhub"


@pytest.mark.parametrize("text", ["", "x", "ä" * 43, text_of(A)[:-1], text_of(A) + "A", text_of(A).replace("A", "!")])
def test_what_is_no_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(KeysError) as raised:
        key_of(text)
    assert not text or len(text) < 2 or text not in str(raised.value)


def test_secret_key_has_one_public_key() -> None:
    public, secret = sockets.new_key_pair()
    assert sockets.public_key(secret) == public and len(public) == len(secret.reveal_secret()) == 32


def test_address_with_keys_is_one_of_tcp_that_shows_no_secret() -> None:
    text = f"envhub://{text_of(A + B)}@simbox:5555"
    found = address.parse(text)
    assert found.text == "tcp://simbox:5555" and found.keys == HubKeys(A, Secret(B))
    assert text_of(B) not in repr(found) and str(B) not in repr(found)


TOKEN = text_of(A + B)


def test_secret_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "secret"
    write_secret(path, "x")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert read_private(path) == "x" and [*path.parent.iterdir()] == [path]
    with pytest.raises(KeysError, match="exists"):
        write_secret(path, "y")
    write_secret(path, "y", replace=True)
    assert read_private(path) == "y"


@pytest.mark.parametrize("mode", [0o604, 0o660, 0o666])
def test_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    write_secret(path, "x")
    path.chmod(mode)
    with pytest.raises(KeysError, match="0600"):
        read_private(path)


def test_secret_behind_a_link_of_ones_own_is_read(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", "x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    assert read_private(tmp_path / "link") == "x"
    (tmp_path / "secret").chmod(0o604)
    with pytest.raises(KeysError, match="0600"):
        read_private(tmp_path / "link")


def test_secret_in_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name in ("link", "pipe", "none"):
        with pytest.raises(KeysError):
            read_private(tmp_path / name)


HUB_USER = 10001


@contextmanager
def volume(files: dict[str, str]) -> Iterator[Path]:
    """The folder of a mounted Secret, read by the user of a pod whose ``fsGroup`` has the user's number."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        write_volume(Path(name) / "secret", files, HUB_USER, 0o400)
        os.setresgid(HUB_USER, HUB_USER, 0)
        os.setresuid(HUB_USER, HUB_USER, 0)
        try:
            yield Path(name) / "secret"
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)


@contextmanager
def root() -> Iterator[None]:
    os.seteuid(0)
    yield
    os.seteuid(HUB_USER)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_secret_of_root_may_be_readable_by_its_group_and_behind_a_link_of_root() -> None:
    with volume({"server.key": "x"}) as folder:
        assert read_private(folder / "server.key") == "x"
        for mode in (0o444, 0o460, 0o450):
            with root():
                (folder / "server.key").chmod(mode)
            with pytest.raises(KeysError, match="0440"):
                read_private(folder / "server.key")
        with root():
            (folder / "server.key").chmod(0o440)
            assert read_private(folder / "server.key") == "x"  # for root, too
            os.chown(folder / "server.key", HUB_USER, HUB_USER)
        with pytest.raises(KeysError, match="0440"):
            read_private(folder / "server.key")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_secret_of_root_behind_a_link_of_another_user_is_refused() -> None:
    with volume({"server.key": "x"}) as folder:
        with root():
            os.lchown(folder / "server.key", HUB_USER + 1, HUB_USER)
        with pytest.raises(KeysError, match="cannot be read"):
            read_private(folder / "server.key")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_clients_of_a_secret_change_with_it() -> None:
    def text(key: bytes) -> str:
        return f'keys = ["{text_of(key)}"]'

    with volume({"alice.toml": text(A)}) as secret, tempfile.TemporaryDirectory() as name:
        (Path(name) / "clients").symlink_to(secret)
        folder = KeyFolder(Path(name))
        assert folder.refresh() == [("alice", "may use; keys added: 1")] and [*folder.holders] == [A]
        assert folder.refresh() == []
        with root():
            write_volume(secret, {"alice.toml": text(B), "bob.toml": text(C)}, HUB_USER, 0o400)
        folder.refresh()
        assert {key: holder.name for key, holder in folder.holders.items()} == {B: "alice", C: "bob"}
        with root():
            write_volume(secret, {"bob.toml": text(C)}, HUB_USER, 0o400)
        assert ("alice", "removed") in folder.refresh() and [*folder.holders] == [C]
        with pytest.raises(KeysError, match="no other user may write to"):
            folder.load()  # the mount of a Secret is read-only, which this folder is not


# --- the folder of a hub's keys ---------------------------------------------------------------------------------------


def test_server_key_is_made_once(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    with pytest.raises(KeysError, match=r"server\.key"):
        folder.secret()
    assert folder.make_secret() == folder.make_secret() == KeyFolder(tmp_path / "keys").secret()


def test_client_has_a_right_and_up_to_two_keys(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.add("alice", A, "use")
    folder.add("alice", B, "observe")
    folder.add("bob", C, "admin")
    folder.load()
    assert {key: (holder.name, holder.right) for key, holder in folder.holders.items()} == {
        A: ("alice", "observe"),
        B: ("alice", "observe"),
        C: ("bob", "admin"),
    }
    with pytest.raises(KeysError, match="remove one first"):
        folder.add("alice", bytes(32), "use")
    folder.remove("alice", A)
    folder.remove("bob")
    assert folder.refresh() and [*folder.holders] == [B] and not folder.refresh()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "a b", "x" * 65])
def test_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeysError, match="no name"):
        KeyFolder(tmp_path).add(name, A, "use")


def test_quotas_are_read_and_kept(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.add("alice", A, "use")
    path = tmp_path / "clients/alice.toml"
    path.write_text(path.read_text() + "\n[quotas]\nsessions_max = 3\narena_bytes_max = '2GiB'\n")
    folder.add("alice", B)
    holder, keys = folder.holder("alice")
    assert holder.right == "use"
    assert holder.quotas is not None and (holder.quotas.sessions_max, holder.quotas.envs_max) == (3, 2048)
    assert holder.quotas.arena_bytes_max == 2 << 30
    assert keys == [A, B]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("may = 'use'", "bob.toml: keys is a list of 1 or 2 keys"),
        ("", "bob.toml"),
        ('keys = ["x"]', "bob.toml"),
        ("keys = [", "bob.toml"),
        ("keys = 3", "bob.toml: keys = 3: expected `array`, got `int`"),
        ('keys = ["{key}"]\nmya = "use"', "bob.toml: unknown key 'mya', did you mean 'may'? Keys here are: keys, may,"),
        (
            'keys = ["{key}"]\nmay = "all"',
            'bob.toml: may = "all": invalid enum value \'all\'; allowed: "observe" or "use" or "deploy" or "admin"',
        ),
        ('keys = ["{key}"]\n[quotas]\nsession_max = 3', "bob.toml: quotas: unknown key 'session_max', did you mean"),
        ('keys = ["{key}"]\n[quotas]\nworker_memory_bytes_max = 1', "memory_max limits each"),
        (
            'keys = ["{key}"]\n[quotas]\nsessions_max = -1',
            "bob.toml: quotas.sessions_max = -1: expected `int` >= 0; allowed: 0 to 1125899906842624",
        ),
        (
            'keys = ["{key}"]\n[quotas]\nenvs_max = 2000000000000000',
            "bob.toml: quotas.envs_max = 2000000000000000: expected `int` <= 1125899906842624; allowed: 0 to",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told_by_its_key(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "clients").mkdir()
    write_secret(tmp_path / "clients/bob.toml", text.replace("{key}", text_of(B)))
    with pytest.raises(KeysError) as caught:
        KeyFolder(tmp_path).load()
    assert why in str(caught.value)


def test_key_of_two_clients_is_refused(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.add("alice", A, "use")
    for name in ("alice", "bob"):
        with pytest.raises(KeysError, match="alice has this key already"):
            folder.add(name, A)
    write_secret(tmp_path / "clients/bob.toml", f'keys = ["{text_of(A)}"]')
    with pytest.raises(KeysError, match="same key"):
        KeyFolder(tmp_path).load()
    assert folder.refresh() and folder.holders[A].name == "alice"


def test_unusable_file_keeps_its_own_keys_only(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.add("alice", A)
    folder.add("bob", B)
    folder.load()
    (tmp_path / "clients/alice.toml").chmod(0o644)
    folder.refresh()
    assert {*folder.holders} == {A, B}
    (tmp_path / "clients/bob.toml").unlink()
    assert folder.refresh() and {*folder.holders} == {A}
    (tmp_path / "clients/alice.toml").chmod(0o600)
    (tmp_path / "clients/.#alice.toml").symlink_to("nowhere")  # an editor's lock
    assert folder.refresh() and not folder.refresh() and {*folder.holders} == {A}


def test_file_whose_name_is_no_clients_is_passed_over_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(key_folder.log, "warning", lambda event, why, note: logged.append(why))
    KeyFolder(tmp_path).add("alice", A)
    hubs = KeyFolder(tmp_path)
    hubs.load()
    assert not logged
    write_secret(tmp_path / "clients/my laptop.toml", f'keys = ["{text_of(B)}"]')
    for _ in range(3):
        hubs.refresh()
    assert [*hubs.holders] == [A]
    (why,) = logged
    assert why.startswith(f"'{tmp_path}/clients/my laptop.toml': 'my laptop' is no name: letters, digits")


def test_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    with pytest.raises(KeysError, match="no folder"):
        KeyFolder(tmp_path / "keys").make_secret()


# --- hubs by name -----------------------------------------------------------------------------------------------------


def test_hub_is_kept_by_its_host_or_a_name(config: Path) -> None:
    text = f"envhub://{text_of(A + B)}@simbox:5555"
    known_hubs.keep(known_hubs.name_of(text), text)
    known_hubs.keep("other", "tcp://127.0.0.1:1")
    assert known_hubs.names() == ["other", "simbox"]
    assert known_hubs.resolve("simbox").keys == HubKeys(A, Secret(B))
    assert (config / "hubs/simbox").stat().st_mode & 0o777 == 0o600
    with pytest.raises(AddressError, match="known: other, simbox"):
        known_hubs.resolve("nobody")


def test_name_of_a_hub_is_its_hosts_if_that_can_be_one() -> None:
    for text in ("tcp://simbox:5555", "ssh://me@simbox:22/tmp/hub.sock", "ssh://simbox"):
        assert known_hubs.name_of(text) == "simbox"
    for text in ("tcp://[::1]:5555", "ipc:///tmp/hub.sock"):
        with pytest.raises(AddressError, match="envhub login NAME"):
            known_hubs.name_of(text)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("no-such-ssh -v", "no command 'no-such-ssh'; ENVHUB_SSH names another"),
        ("ssh -F 'my config", "ENVHUB_SSH is no command: No closing quotation"),
    ],
)
def test_ssh_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, command: str, why: str) -> None:
    monkeypatch.setenv("ENVHUB_SSH", command)
    with pytest.raises(HubUnreachable, match=why):
        known_hubs.resolve("ssh://simbox")


def test_hub_of_another_place_or_key_is_another(config: Path) -> None:
    kept = f"envhub://{text_of(A + B)}@simbox:5555"
    assert not known_hubs.keeps_another("simbox", kept)
    known_hubs.keep("simbox", kept)
    for text in (kept, f"envhub://{text_of(A + C)}@simbox:5555"):  # and another key of the client
        assert not known_hubs.keeps_another("simbox", text)
    for text in (f"envhub://{text_of(A + B)}@simbox:5556", f"envhub://{text_of(C + B)}@simbox:5555",
                 "tcp://simbox:5555", "ssh://simbox"):  # fmt: skip
        assert known_hubs.keeps_another("simbox", text)
    known_hubs.keep("simbox", "tcp://simbox:5555")
    assert not known_hubs.keeps_another("simbox", kept)  # which has no secret to lose
    known_hubs.keep("simbox", "ssh://simbox")
    assert known_hubs.keeps_another("simbox", kept) and not known_hubs.keeps_another("simbox", "ssh://simbox")


def test_own_key_is_joined_to_an_address_that_has_the_hubs_only(config: Path) -> None:
    with pytest.raises(KeysError, match="envhub keygen"):
        known_hubs.add_own_key(f"envhub://{text_of(A)}@simbox:5555")
    old = known_hubs.make_own_key()
    assert known_hubs.make_own_key() == old
    public = known_hubs.make_own_key(new=True)
    assert known_hubs.make_own_key() == public != old
    known_hubs.keep("simbox", known_hubs.add_own_key(f"envhub://{text_of(A)}@simbox:5555"))
    found = known_hubs.resolve("simbox").keys
    assert found is not None and found.server == A and text_of(sockets.public_key(found.secret)) == public


@pytest.mark.parametrize("spoil", ["mode", "text"])
def test_client_whose_file_cannot_be_used_is_removed_and_keeps_no_other_out(tmp_path: Path, spoil: str) -> None:
    folder = KeyFolder(tmp_path)
    folder.add("eve", A)
    path = tmp_path / "clients/eve.toml"
    path.chmod(0o644) if spoil == "mode" else path.write_text("keys = [")
    folder.add("alice", B)
    with pytest.raises(KeysError):
        folder.remove("eve", A)
    folder.remove("eve")
    assert folder.names() == ["alice"]
    with pytest.raises(KeysError, match="no client 'eve'"):
        folder.remove("eve")


def test_changes_of_each_client_are_told(tmp_path: Path) -> None:
    folder, hubs = KeyFolder(tmp_path), KeyFolder(tmp_path)
    folder.add("alice", A)
    folder.add("bob", B)
    assert hubs.refresh() == [("alice", "may use; keys added: 1"), ("bob", "may use; keys added: 1")]
    assert hubs.refresh() == []
    folder.add("alice", bytes([7]) * 32, "admin")
    assert hubs.refresh() == [("alice", "may admin, not use; keys added: 1")]
    folder.remove("alice", A)
    folder.remove("bob")
    assert hubs.refresh() == [("alice", "keys removed: 1"), ("bob", "removed")]


def test_file_that_breaks_is_told_as_such(tmp_path: Path) -> None:
    folder, hubs = KeyFolder(tmp_path), KeyFolder(tmp_path)
    folder.add("alice", A)
    hubs.refresh()
    for name in ("alice", "eve"):
        write_secret(tmp_path / f"clients/{name}.toml", "keys = [", replace=True)
    assert hubs.refresh() == [("alice", "cannot be read; as before"), ("eve", "cannot be read; as before")]
    assert A in hubs.holders


def test_no_client_is_added_beyond_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_folder, "CLIENTS_MAX", 1)
    folder = KeyFolder(tmp_path)
    folder.add("alice", A)
    with pytest.raises(KeysError, match="1 clients, the most that are read"):
        folder.add("bob", B)
    folder.add("alice", B)


def test_key_that_is_kept_by_now_is_read_without_ssh(config: Path) -> None:
    text = f"envhub://{text_of(A + B)}@simbox:5555"
    known_hubs.keep("simbox", text)
    found = known_hubs.kept_now("simbox")
    assert found is not None and found.keys == HubKeys(A, Secret(B))
    assert known_hubs.kept_now("tcp://simbox:5555") is None
    known_hubs.keep("simbox", "ssh://nohost.invalid")
    assert known_hubs.kept_now("simbox") is None


def test_key_that_is_removed_is_admitted_no_more_beside_too_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, hubs = KeyFolder(tmp_path), KeyFolder(tmp_path)
    folder.add("alice", A)
    folder.add("bob", B)
    hubs.load()
    folder.add("carol", C)
    monkeypatch.setattr(key_folder, "CLIENTS_MAX", 2)
    assert hubs.refresh() == [] and [*hubs.holders] == [A, B]
    monkeypatch.setattr(key_folder, "CLIENTS_MAX", 1)
    folder.remove("alice")
    assert hubs.refresh() == [("alice", "removed")] and [*hubs.holders] == [B]
    with pytest.raises(KeysError, match="has 2 files of clients; at most 1 are read"):
        KeyFolder(tmp_path).load()


def test_server_key_that_several_make_at_one_time_is_one(tmp_path: Path) -> None:
    for number in range(50):
        folder = tmp_path / str(number)
        start = threading.Barrier(4)

        def make(folder: Path = folder, start: threading.Barrier = start) -> Secret[bytes]:
            start.wait()
            return KeyFolder(folder).make_secret()

        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(make) for _ in range(4)]
            assert len({each.result().reveal_secret() for each in made}) == 1


def test_changes_at_one_time_are_all_made(tmp_path: Path) -> None:
    KeyFolder(tmp_path).add("alice", A)
    for _ in range(20):
        KeyFolder(tmp_path).add("alice", B)
        with ThreadPoolExecutor() as pool:
            changes = [
                pool.submit(KeyFolder(tmp_path).remove, "alice", B),
                pool.submit(KeyFolder(tmp_path).add, "bob", C),
                pool.submit(KeyFolder(tmp_path).remove, "alice", A),
            ]
            for each in changes:
                each.result()
        assert KeyFolder(tmp_path).names() == ["bob"]
        KeyFolder(tmp_path).remove("bob")
        KeyFolder(tmp_path).add("alice", A)


@pytest.mark.parametrize("name", [".", "clients"])
def test_folder_that_others_can_write_to_is_refused(tmp_path: Path, name: str) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.add("alice", A)
    (tmp_path / "keys" / name).chmod(0o777)
    with pytest.raises(KeysError, match="no other user may write to"):
        folder.load()


def test_file_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    (tmp_path / "clients/alice.toml").mkdir(parents=True)
    with pytest.raises(KeysError, match="cannot be changed"):
        folder.remove("alice")
