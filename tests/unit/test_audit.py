"""The audit file, whatever becomes of its disk and of its name."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from envhub_server.network.audit import Audit, AuditError


def clients(path: Path) -> list[str]:
    """The client that each whole line names."""
    return [json.loads(line)["client"] for line in path.read_text().splitlines() if line.endswith("}")]


def test_last_line_of_a_clients_keys_says_whether_it_is_admitted(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(path)
    changes = ["keys added: 1", "removed", "keys added: 1", "removed"]
    for change in changes:
        audit.write("keys_read", "alice", why=change)
    audit.close()
    assert [json.loads(line)["why"] for line in path.read_text().splitlines()] == changes


def test_line_that_an_earlier_hub_left_half_stays_one_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    path.write_text('{"event": "conn')
    for client in ("alice", "bob"):
        audit = Audit(path)
        audit.write("connected", client)
        audit.close()
    assert path.read_text().startswith('{"event": "conn\n{') and clients(path) == ["alice", "bob"]


def test_file_that_is_renamed_or_removed_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(path)
    audit.write("connected", "alice")
    path.rename(tmp_path / "audit.1")
    audit.write("connected", "bob")
    audit.write("connected", "carol")
    assert clients(tmp_path / "audit.1") == ["alice"] and clients(path) == ["bob", "carol"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    audit.write("connected", "dave")
    assert clients(path) == ["dave"]
    path.rename(tmp_path / "audit.2")
    path.write_text("")  # as logrotate's `create` makes it
    audit.write("connected", "eve")
    assert clients(path) == ["eve"]
    audit.close()


def test_old_file_is_written_to_while_its_name_can_be_no_file(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(path)
    path.rename(tmp_path / "audit.1")
    os.mkfifo(path)
    audit.write("connected", "alice")
    assert clients(tmp_path / "audit.1") == ["alice"]
    audit.close()


@pytest.mark.parametrize("reader", [True, False])
def test_pipe_is_refused_at_once(tmp_path: Path, reader: bool) -> None:
    path = tmp_path / "audit"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if reader else -1
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(AuditError, match=f"^audit {path}: this is no regular file$"):
        Audit(path)
    assert {*os.listdir("/proc/self/fd")} <= {*descriptors}  # others may have been collected meanwhile
    if reader:
        os.close(reading)


def test_device_socket_link_and_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    for place in (Path(os.devnull), tmp_path / "socket", tmp_path / "link", tmp_path):
        with pytest.raises(AuditError, match=f"^audit {place}: "):
            Audit(place)
