"""Announcements of hubs: what a file may say, which files count, and which address a client takes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from envhub_client.connection import known_hubs
from envhub_client.fleet.members import members
from envhub_server.loop.clock import Clock
from envhub_server.loop.loop import Loop
from envhub_server.loop.schedule import Schedule
from envhub_server.network import announcer as announcers
from envhub_server.network.announcer import Announcer, announcement_of
from hubs import wait_until
from hypothesis import given
from hypothesis import strategies as st

from envhub.errors import AddressError, HubUnreachable, KeysError
from envhub.protocol.validation import HUB_NAME_CHARS_MAX
from envhub.secret import Secret
from envhub.transport import announcement as announcements
from envhub.transport import sockets
from envhub.transport.announcement import FILE_BYTES_MAX, FILES_MAX, PERIOD_S, PERIODS_MAX, Announcement, Skipped
from envhub.transport.keys import HubKeys, secret_text_of, text_of, token_of

STALE_S = PERIOD_S * PERIODS_MAX
STALL_S = 30.0  # for which a test may stand still between two files
CAPACITY = {"cpus": 2, "envs_max": 8, "sessions_max": 4}
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def announced(name: str = "sim", **fields: Any) -> Announcement:
    """An announcement of a hub that is this process, so that it lives."""
    here = {"boot_id": announcements.boot_id(), "pid_namespace": announcements.namespace("pid"), "pid": os.getpid()}
    network = {"network_namespace": announcements.namespace("net"), "local_addresses": ["tcp://127.0.0.1:5555"]}
    return Announcement(**{"name": name, "hub": "0" * 15 + "1", "host": "box", **here, **network, **fields})


def write(folder: Path, announcement: Announcement, age_s: float = 0.0) -> Path:
    path = folder / announcement.file_name
    path.write_bytes(announcements.encode(announcement))
    os.chmod(path, 0o644)
    if age_s:
        written_s = path.stat().st_mtime - age_s
        os.utime(path, (written_s, written_s))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hubs").mkdir(mode=0o700)
    return tmp_path / "hubs"


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


# --- one file ---------------------------------------------------------------------------------------------------------

names = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=64)
said = st.builds(
    announced,
    names,
    hub=st.integers(0, 2**64 - 1).map("{:016x}".format),
    addresses=st.lists(st.integers(1, 65535).map("tcp://simbox:{}".format), max_size=16),
    local_addresses=st.lists(st.sampled_from(["ipc:///run/hub.sock", "tcp://[::1]:5555"]), max_size=16),
    pid=st.integers(1, 2**31 - 1),
    cpus=st.integers(0, 2**50 - 1),
    period_s=st.floats(0.1, 3600.0),
)


@given(said)
def test_announcement_is_read_as_it_was_written(announcement: Announcement) -> None:
    content = announcements.encode(announcement)
    assert announcements.decode(content) == announcement and len(content) <= FILE_BYTES_MAX
    assert "/" not in announcement.file_name and len(announcement.file_name) <= 255


def test_largest_announcement_fits_in_its_file() -> None:
    places = [f"tcp://{'h' * 63}.{'o' * 63}.{'s' * 63}.{'t' * 60}:{port}" for port in range(40000, 40016)]
    sockets_here = [f"ipc:///{'p' * 106}"] * 16
    largest = announced("/" * 64, addresses=places, local_addresses=sockets_here, server_key="k" * 43, host="h" * 253)
    assert announcements.decode(announcements.encode(largest)) == largest
    assert len(largest.file_name) <= 255


@given(st.binary(max_size=300) | said.map(announcements.encode), st.lists(st.tuples(st.integers(0, 600), st.binary())))
def test_hostile_content_is_refused_in_printable_words(content: bytes, changes: list[tuple[int, bytes]]) -> None:
    for place, put in changes:
        content = content[:place] + put + content[place + len(put) :]
    try:
        announcement = announcements.decode(content)
    except ValueError as error:
        assert str(error).replace("\n", "").isprintable()
    else:
        assert announcements.decode(announcements.encode(announcement)) == announcement


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(Announcement.__struct_fields__), json_values)
def test_field_of_any_value_is_read_or_refused(name: str, value: Any) -> None:
    fields = {**msgspec.to_builtins(announced()), name: value}
    try:
        content = msgspec.json.encode(fields)
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError):
        return
    with contextlib.suppress(ValueError):
        assert getattr(announcements.decode(content), name) == value


@pytest.mark.parametrize(
    "change, why",
    [
        ({"name": ""}, "matching regex"),
        ({"name": "a\n"}, "matching regex"),
        ({"name": "\u202ebox"}, "matching regex"),
        ({"pid": 0}, ">= 1"),
        ({"pid": -1}, ">= 1"),
        ({"addresses": ["tcp://a:1"] * 17}, "length <= 16"),
        ({"addresses": [f"envhub://{text_of(bytes(64))}@a:1"]}, "has keys"),
        ({"addresses": ["ssh://a"]}, "is no address"),
        ({"addresses": ["tcp://a:0"]}, "no hub is at port 0"),
        ({"addresses": ["tcp://a\n:1"]}, "control characters"),
        ({"period_s": 1e9}, "<= 3600"),
        ({"server_key": "short"}, "matching regex"),
    ],
)
def test_value_out_of_bounds_is_refused(change: dict[str, Any], why: str) -> None:
    content = msgspec.json.encode({**msgspec.to_builtins(announced()), **change})
    with pytest.raises(ValueError, match=why):
        announcements.decode(content)


def test_deep_nesting_in_a_field_that_is_not_known_is_refused() -> None:
    content = announcements.encode(announced()).rstrip()[:-1] + b', "later": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    with pytest.raises(ValueError, match="no announcement"):
        announcements.decode(content)


def test_fields_that_are_not_known_are_ignored() -> None:
    content = msgspec.json.encode({**msgspec.to_builtins(announced()), "later": {"a": [1]}})
    assert announcements.decode(content) == announced()


def test_names_of_hubs_have_one_bound() -> None:
    assert announcements.NAME_CHARS_MAX == HUB_NAME_CHARS_MAX


# --- a folder ---------------------------------------------------------------------------------------------------------


def test_hubs_of_a_folder_are_read_by_name_and_nothing_is_left_in_it(folder: Path) -> None:
    hubs = [announced(name) for name in ("a", "a-1", "b/c")]
    for hub in reversed(hubs):
        write(folder, hub)
    (folder / "notes.txt").write_text("not of a hub")
    before = {*os.listdir(folder)}
    assert announcements.read_folder(folder) == (hubs, [])
    assert {*os.listdir(folder)} == before


def test_files_that_say_nothing_are_skipped_each_with_its_reason(folder: Path) -> None:
    good = announced("good")
    write(folder, good)
    write(folder, announced("moved")).rename(folder / "hub-other.json")
    content = announcements.encode(announced("torn"))
    (folder / "hub-torn.json").write_bytes(content[: len(content) // 2])
    (folder / "hub-large.json").write_bytes(b" " * (FILE_BYTES_MAX + 1))
    os.mkfifo(folder / "hub-pipe.json")
    (folder / "hub-folder.json").mkdir()
    (folder / "hub-dangling.json").symlink_to("nowhere")
    os.chmod(write(folder, announced("open")), 0o664)
    hubs, skipped = announcements.read_folder(folder)
    assert hubs == [good] and all(each.stale is None for each in skipped)
    assert {each.file: each.why.partition(":")[0] for each in skipped} == {
        "hub-other.json": "it is of a hub with another name, 'moved'",
        "hub-torn.json": "it is no announcement",
        "hub-large.json": f"it has more than {FILE_BYTES_MAX} bytes",
        "hub-pipe.json": "it cannot be read",
        "hub-folder.json": "it cannot be read",
        "hub-open.json": "others may write to it",
    }


@root_only
def test_file_of_another_user_is_skipped(folder: Path) -> None:
    os.chown(write(folder, announced()), 12345, 12345)
    assert announcements.read_folder(folder) == (
        [],
        [Skipped("hub-sim.json", "it belongs to another user (12345)")],
    )


def test_age_of_a_file_is_by_the_clock_of_its_folder(folder: Path) -> None:
    fresh, old = announced("fresh", period_s=100.0), announced("old", period_s=100.0)
    ahead = announced("ahead")
    write(folder, fresh, PERIODS_MAX * fresh.period_s - STALL_S)
    write(folder, old, old_s := PERIODS_MAX * old.period_s + 2.0)
    write(folder, ahead, -PERIOD_S + 1.0)
    hubs, (skipped,) = announcements.read_folder(folder)
    assert hubs == [ahead, fresh] and skipped.stale == old
    age = re.match(r"it is stale: last renewed (\d+) s ago", skipped.why)
    assert age is not None and old_s <= int(age[1]) <= old_s + STALL_S


def test_file_of_the_future_is_stale(folder: Path) -> None:
    path = write(folder, announced("ahead"), -3600.0)
    ((), (skipped,)) = announcements.read_folder(folder)
    ahead = re.match(r"it is stale: its time is (\d+) s later than now", skipped.why)
    assert ahead is not None and 3600 - STALL_S <= int(ahead[1]) <= 3600
    assert announcements.announced_by(path) is None


def test_dead_hub_is_stale_to_readers_of_the_same_moment(folder: Path) -> None:
    write(folder, announced("dead", boot_id="0-1"), STALE_S + 2.0)

    def read(_: int) -> int:
        return sum(len(announcements.read_folder(folder)[0]) for _ in range(100))

    with ThreadPoolExecutor(4) as readers:
        assert [*readers.map(read, range(4))] == [0] * 4
    assert os.listdir(folder) == ["hub-dead.json"]


@pytest.fixture
def without_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader can make its file in the folder, as where that is for reading only."""
    monkeypatch.setattr(os, "urandom", bytes)  # zeros, so that the name of the clock is taken
    (folder / f".clock-{bytes(8).hex()}").touch()


@pytest.mark.usefixtures("without_clock")
def test_without_a_clock_the_newest_file_is_the_measure(folder: Path) -> None:
    newer, old = announced("newer"), announced("old")
    write(folder, newer, 1000.0)
    write(folder, old, 1000.0 + STALE_S + STALL_S)
    hubs, (skipped,) = announcements.read_folder(folder)
    assert hubs == [newer] and skipped.stale == old


@pytest.mark.usefixtures("without_clock")
@pytest.mark.parametrize("ahead_s", [90.0, 3600.0, 1e9])
def test_without_a_clock_a_file_of_the_future_makes_no_living_hub_stale(folder: Path, ahead_s: float) -> None:
    living, old, ahead = announced("living"), announced("old"), announced("ahead")
    write(folder, living, PERIOD_S)
    write(folder, old, STALE_S + PERIOD_S + STALL_S)
    write(folder, ahead, -ahead_s)
    hubs, skipped = announcements.read_folder(folder)
    assert hubs == [living] and [each.stale for each in skipped] == [ahead, old]


@pytest.mark.usefixtures("without_clock")
@pytest.mark.parametrize("error_s", [-1e9, -3600.0, -62.0, -58.0, 58.0, 62.0, 3600.0])
def test_reader_whose_machine_has_a_wrong_clock_takes_no_living_hub_for_stale(folder: Path, error_s: float) -> None:
    fresh, fresher, old = announced("fresh"), announced("fresher"), announced("old")
    write(folder, fresh, error_s + PERIOD_S)
    write(folder, fresher, error_s)
    write(folder, old, error_s + 2 * 3600.0)
    hubs, (skipped,) = announcements.read_folder(folder)
    assert hubs == [fresh, fresher] and skipped.stale == old


def test_hub_whose_process_on_this_machine_has_ended_is_stale_at_once(folder: Path) -> None:
    pid = 2**31 - 1  # more than the kernel gives
    write(folder, announced("ended", pid=pid))
    write(folder, announced("elsewhere", pid=pid, boot_id="0-1"))
    write(folder, announced("contained", pid=pid, pid_namespace=1))
    hubs, (skipped,) = announcements.read_folder(folder)
    assert [each.name for each in hubs] == ["contained", "elsewhere"]
    assert skipped.why == f"its hub, process {pid} of this machine, has ended"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_folder_that_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    write(folder, announced())
    folder.chmod(mode)
    with pytest.raises(AddressError, match=r"would decide where .* and code go, and .* can be written to by every"):
        announcements.read_folder(folder)


def test_too_many_announcements_are_refused(folder: Path) -> None:
    for number in range(FILES_MAX + 1):
        (folder / f"hub-{number}.json").touch()
    with pytest.raises(AddressError, match=f"more than {FILES_MAX} announcements"):
        announcements.read_folder(folder)


# --- members ----------------------------------------------------------------------------------------------------------


def test_any_other_address_is_one_member_itself() -> None:
    assert members("tcp://simbox:5555") == (("tcp://simbox:5555", "tcp://simbox:5555"),)
    assert members("simbox") == (("simbox", "simbox"),)
    ((name, address),) = members(f"envhub://{text_of(bytes(64))}@simbox:5555")
    assert name == "envhub://***@simbox:5555" and isinstance(address, Secret)
    assert members(address) == ((name, address),)


@pytest.mark.parametrize("form", ["file://{}", "file:{}", "FILE://localhost{}", " file://{}/ "])
def test_members_are_the_hubs_of_the_folder_by_name(folder: Path, form: str) -> None:
    write(folder, announced("b", local_addresses=["tcp://127.0.0.1:6666"]))
    write(folder, announced("a"))
    assert members(form.format(folder)) == (("a", "tcp://127.0.0.1:5555"), ("b", "tcp://127.0.0.1:6666"))


def test_folder_may_have_any_name_and_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my hubs%").mkdir(mode=0o700)
    write(tmp_path / "my hubs%", announced("a"))
    assert [each.name for each in members("file:~/my%20hubs%25")] == ["a"]


@pytest.mark.parametrize("hub", ["file:", "file://", "file:///%00", "file://otherhost/hubs", "file://hubs"])
def test_address_that_names_no_folder_is_refused(hub: str) -> None:
    with pytest.raises(AddressError, match="names no folder of this machine; write file:///FOLDER"):
        members(hub)


def test_skipped_files_are_named_in_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, announced("good"))
    write(folder, announced("old"), STALE_S + 2.0)
    (folder / "hub-torn\x1b\n.json").write_text("{")
    with caplog.at_level(logging.WARNING, "envhub"):
        assert [each.name for each in members(f"file://{folder}")] == ["good"]
    (record,) = caplog.records
    text = record.getMessage()
    assert f"announcements in {folder} are skipped: " in text and "hub-old.json: it is stale" in text
    assert r"hub-torn\x1b\n.json: it is no announcement" in text


def test_skipped_file_is_warned_of_again_only_after_it_was_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, announced("good"))
    for age_s in (STALE_S + 2.0, STALE_S + 3.0, 0.0, STALE_S + 2.0):
        write(folder, announced("old"), age_s)
        members(f"file://{folder}")
    assert len(caplog.records) == 2
    write(folder, announced("other"), STALE_S + 2.0)
    members(f"file://{folder}")
    assert len(caplog.records) == 3


@pytest.mark.parametrize("content", [None, "{"])
def test_folder_without_a_hub_says_how_to_announce_one(folder: Path, content: str | None) -> None:
    if content is not None:
        (folder / "hub-torn.json").write_text(content)
    why = "" if content is None else r" \(hub-torn.json: it is no announcement.*\)"
    with pytest.raises(HubUnreachable, match=f"no hub is announced in {folder}{why}: .*--announce {folder}"):
        members(f"file://{folder}")


def test_folder_that_does_not_exist_has_no_hub_yet(folder: Path) -> None:
    with pytest.raises(HubUnreachable, match=f"announcements in {folder}/none cannot be read: No such file"):
        members(f"file://{folder}/none")


def test_address_is_the_best_that_this_machine_reaches(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "hub.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        both = [f"ipc://{path}", "tcp://127.0.0.1:5555"]
        elsewhere = ["tcp://no-such-host.invalid:5555", "tcp://192.0.2.7:5555"]
        for name, fields in {
            "contained": {"network_namespace": 1, "local_addresses": both[1:]},
            "gone": {"local_addresses": [f"ipc://{path}.old", both[1]]},
            "here": {"local_addresses": both},
            "other": {"boot_id": "0-1", "local_addresses": both},
        }.items():
            write(folder, announced(name, addresses=elsewhere, **fields))
        reached = {each.name: each.address for each in members(f"file://{folder}")}
    assert reached == {"contained": elsewhere[1], "gone": both[1], "here": both[0], "other": elsewhere[1]}


def test_hub_without_an_address_for_this_machine_says_what_to_bind(folder: Path) -> None:
    write(folder, announced("far", boot_id="0-1"))
    with pytest.raises(HubUnreachable, match=r"'far' of the machine 'box', .*\(tcp://127.0.0.1:5555\): bind it to tcp"):
        members(f"file://{folder}")


def test_connection_goes_to_one_hub(folder: Path) -> None:
    write(folder, announced("a"))
    assert known_hubs.resolve(f"file://{folder}").text == "tcp://127.0.0.1:5555"
    write(folder, announced("b"))
    with pytest.raises(AddressError, match=r"2 hubs are announced in .* \(a, b\), and one connection goes to one hub"):
        known_hubs.resolve(f"file://{folder}")


def test_key_is_that_of_a_kept_address_with_the_same_server_key(folder: Path) -> None:
    (server, _), (_, secret), (_, other) = (sockets.new_key_pair() for _ in range(3))
    write(folder, announced(server_key=text_of(server)))
    with pytest.raises(KeysError, match=r"the hub 'sim' at tcp://127.0.0.1:5555 wants a key, and none is here: run"):
        members(f"file://{folder}")
    own = known_hubs.make_own_key()
    ((_, address),) = members(f"file://{folder}")
    keys = known_hubs.resolve(address).keys
    assert keys is not None and keys.server == server
    assert text_of(sockets.public_key(keys.secret)) == own
    known_hubs.keep("elsewhere", Secret(f"envhub://{token_of(HubKeys(bytes(32), other)).reveal_secret()}@a:1"))
    known_hubs.keep("fleet", Secret(f"envhub://{token_of(HubKeys(server, secret)).reveal_secret()}@a:1"))
    ((_, address),) = members(f"file://{folder}")
    kept = known_hubs.resolve(address)
    assert kept.keys == HubKeys(server, secret) and kept.text == "tcp://127.0.0.1:5555"
    assert secret_text_of(secret).reveal_secret() not in repr(address)


# --- the hub's side ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def announcer(
    folder: Path, bound: str = "tcp://127.0.0.1:5555", hub: int = 1, name: str = "sim"
) -> Iterator[Announcer]:
    clock = Clock()
    loop = Loop(clock, Schedule(clock))
    one = Announcer(folder, announcement_of(name, [bound], hub, b"", **CAPACITY), loop, lambda name: None)
    try:
        one.open()
        yield one
    finally:
        one.close()
        if one._thread.ident is not None:
            one._thread.join(20)  # a hub waits for its file for two seconds, in which a thread may not have its turn
        loop.poller.close()


def renew(one: Announcer) -> None:
    """Renew it, as its thread does once the loop asks for it."""
    one._renew()


def test_announcement_is_renewed_and_removed(folder: Path) -> None:
    path = folder / "hub-sim.json"
    with announcer(folder) as one:
        first, _ = announcements.read(path)
        assert first == one.announcement and first.local_addresses == ["tcp://127.0.0.1:5555"]
        write(folder, first, STALE_S + 2.0)
        assert announcements.announced_by(path) is None
        one.renew()
        assert wait_until(lambda: announcements.announced_by(path) == first)
        assert os.listdir(folder) == [path.name] and path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(folder) == []


def test_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    with announcer(tmp_path / "new/hubs"):
        assert (tmp_path / "new/hubs").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_hub_is_not_announced_where_others_may_write(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(AddressError, match="would decide where actions and code go"), announcer(folder):
        pass
    assert os.listdir(folder) == []


@root_only
def test_hub_is_not_announced_in_the_folder_of_another_user(folder: Path) -> None:
    os.chown(folder, 12345, 12345)
    with pytest.raises(AddressError, match="belongs to the user 12345"), announcer(folder):
        pass


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hubs").touch()
    with (
        pytest.raises(AddressError, match=r"cannot be announced in .*/hubs: File exists"),
        announcer(tmp_path / "hubs"),
    ):
        pass


def renew_both(first: Announcer, second: Announcer) -> None:
    """Renew the first, and then the second, which so learns that the first lives."""
    write(first._folder, first.announcement, -0.01)
    renew(second)


def test_second_hub_of_a_name_has_its_port_in_it_and_a_third_is_refused(folder: Path) -> None:
    with announcer(folder) as first, announcer(folder, "tcp://127.0.0.1:6666", hub=2) as second:
        assert os.listdir(folder) == ["hub-sim.json"]
        renew_both(first, second)
        assert second.announcement.name == "sim-6666"
        assert sorted(os.listdir(folder)) == ["hub-sim-6666.json", "hub-sim.json"]
        with (
            pytest.raises(AddressError, match=r"other hubs are announced in .* as sim-6666: give this one another"),
            announcer(folder, "tcp://127.0.0.1:6666", hub=3),
        ):
            pass
        assert sorted(os.listdir(folder)) == ["hub-sim-6666.json", "hub-sim.json"]


def test_name_with_the_port_is_no_longer_than_a_name(folder: Path) -> None:
    long = "n" * 64
    with announcer(folder, name=long) as first, announcer(folder, "tcp://127.0.0.1:6666", hub=2, name=long) as second:
        renew_both(first, second)
        assert second.announcement.name == "n" * 59 + "-6666"


def test_hub_takes_the_name_of_one_that_cannot_be_there_any_more(folder: Path) -> None:
    wild = "tcp://192.0.2.7:5555"  # where this hub is bound, so that no other one is
    write(folder, announced("sim", addresses=[wild], boot_id="0-1"))
    with announcer(folder, wild, hub=2) as one:
        assert one.announcement.name == "sim" and announcements.read(folder / "hub-sim.json")[0].hub[-1] == "2"


def test_hub_takes_the_name_of_a_stale_announcement(folder: Path) -> None:
    write(folder, announced("sim", boot_id="0-1"), STALE_S + 2.0)
    with announcer(folder, hub=2) as one:
        assert one.announcement.name == "sim"


def test_hub_is_announced_by_no_other_name_before_it_takes_that_of_its_last_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, later_s = announcements._clock, 0.0
    monkeypatch.setattr(announcements, "_clock", lambda folder: (clock(folder) or 0.0) + later_s)
    last = announced("sim", boot_id="0-1")  # of another machine, or of another container as well
    path = write(folder, last)
    with announcer(folder, hub=2) as one:
        renew(one)
        assert announcements.read_folder(folder) == ([last], []) and os.listdir(folder) == [path.name]
        later_s = STALE_S + 2.0
        assert announcements.announced_by(path) is None
        renew(one)
        later_s = 0.0  # as the hub has written its file by the folder's own clock
        assert one.announcement.name == "sim" and os.listdir(folder) == [path.name]
        assert announcements.read_folder(folder) == ([one.announcement], [])
    assert os.listdir(folder) == []


def test_hub_does_not_take_the_name_of_one_that_ran_beside_it(folder: Path) -> None:
    with announcer(folder) as first, announcer(folder, "tcp://127.0.0.1:6666", hub=2) as second:
        renew_both(first, second)
        (folder / "hub-sim.json").unlink()
        renew(second)
        assert second.announcement.name == "sim-6666"


def test_hub_that_waits_for_a_name_leaves_no_file_and_not_that_of_the_other(folder: Path) -> None:
    with announcer(folder) as first:
        with announcer(folder, "tcp://127.0.0.1:6666", hub=2):
            pass
        assert announcements.read_folder(folder) == ([first.announcement], [])
        assert os.listdir(folder) == ["hub-sim.json"]


def test_renewal_needs_no_space_and_leaves_no_other_file(folder: Path) -> None:
    path = folder / "hub-sim.json"
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with announcer(folder) as one:
        write(folder, one.announcement, STALE_S + 2.0)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk, no file can get a byte
        try:
            renew(one)
            assert announcements.announced_by(path) == one.announcement
            path.unlink()
            with pytest.raises(OSError, match="too large"):
                renew(one)
            assert os.listdir(folder) == []
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        renew(one)
        assert os.listdir(folder) == [path.name]


@pytest.mark.parametrize("bound", ["tcp://127.0.0.1:5555", "tcp://192.0.2.7:5555"])
def test_hub_that_loses_a_race_for_a_free_name_takes_another_one(folder: Path, bound: str) -> None:
    with announcer(folder, bound) as one:
        winner = announced("sim", hub="0" * 15 + "9", addresses=one.announcement.addresses)
        write(folder, winner)
        renew(one)
        assert one.announcement.name == "sim-5555"
    assert os.listdir(folder) == ["hub-sim.json"] and announcements.read(folder / "hub-sim.json")[0] == winner


def test_file_of_another_hub_outlives_this_one(folder: Path) -> None:
    with announcer(folder):
        write(folder, announced("sim", hub="0" * 15 + "9"))
    assert os.listdir(folder) == ["hub-sim.json"]


def test_announcement_that_somebody_removed_is_written_again(folder: Path) -> None:
    with announcer(folder) as one:
        (folder / "hub-sim.json").unlink()
        renew(one)
        assert os.listdir(folder) == ["hub-sim.json"]


def test_what_killed_hubs_and_readers_have_left_is_removed_after_a_day(folder: Path) -> None:
    old = write(folder, announced("old"), announcements.KEPT_S + 60.0)
    temporary = old.rename(folder / ".hub-old.json.0000000000000001")
    write(folder, announced("old"), announcements.KEPT_S + 60.0)
    kept = write(folder, announced("kept", boot_id="0-1"), announcements.KEPT_S - 60.0)
    clock = folder / ".clock-0123456789abcdef"
    clock.touch()
    os.utime(clock, (0, 0))
    (folder / "notes.txt").touch()
    os.utime(folder / "notes.txt", (0, 0))
    with announcer(folder):
        assert {*os.listdir(folder)} == {"hub-sim.json", kept.name, "notes.txt"}
    assert not temporary.exists()


def test_reader_never_sees_a_part_of_an_announcement(folder: Path) -> None:
    ended, problems, count = threading.Event(), [], 0

    def read() -> None:
        nonlocal count
        while not ended.is_set():
            hubs, skipped = announcements.read_folder(folder)
            count += 1
            if [each.name for each in hubs] != ["sim"] or skipped:
                problems.append((hubs, skipped))

    with announcer(folder) as one:
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(300):
            renew(one)
        assert wait_until(lambda: count >= 100)
        ended.set()
        reader.join()
    assert problems == []


def test_wildcard_is_announced_as_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcers.socket, "gethostname", lambda: "localhost")  # a name that resolves
    bound = ["tcp://0.0.0.0:5555", "tcp://127.0.0.1:6666", "tcp://10.0.0.1:7777", "ipc://hub.sock"]
    one = announcement_of("sim", bound, 1, bytes(32), **CAPACITY)
    assert one.addresses[0] == "tcp://localhost:5555" and "tcp://10.0.0.1:7777" in one.addresses
    assert not [each for each in one.addresses if "0.0.0.0" in each or "127.0.0.1" in each]
    assert one.local_addresses == [f"ipc://{os.getcwd()}/hub.sock", "tcp://127.0.0.1:5555", "tcp://127.0.0.1:6666"]
    assert one.server_key == text_of(bytes(32)) and announcements.decode(announcements.encode(one)) == one
