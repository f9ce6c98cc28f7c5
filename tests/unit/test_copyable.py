"""A process is refused a snapshot by the name of each thing that a fork would not copy, and by nothing else."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import pty
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_server.worker import copyable
from envhub_server.worker.copyable import PHRASES_MAX, what_cannot_be_copied

MAPS = b"""\
55d0c8a00000-55d0c8a21000 rw-p 00000000 00:00 0                          [heap]
7f075cf99000-7f075cf9a000 rw-s 00000000 00:01 7070                       /memfd:envhub-arena (deleted)
7f075cf9a000-7f075cf9b000 r--s 00000000 00:01 7079                       /memfd:read (deleted)
7f075cf9b000-7f075cf9c000 rw-s 00000000 00:01 7080                       /memfd:env (deleted)
7f075cf9c000-7f075cf9d000 rw-s 00000000 fe:00 2148660                    /data/two words.npy
7f075cf9d000-7f075cf9e000 rw-s 00001000 fe:00 2148660                    /data/two words.npy
7f075cf9e000-7f075cf9f000 -w-s 00000000 00:05 17                         /dev/nvidia0
7f075dbe8000-7f075dbe9000 rw-s 00000000 00:01 7078                       /dev/zero (deleted)
7f075dbe9000-7f075dbea000 rw-s 00000000 00:1b 256                        /dev/shm/pym-1 (deleted)
7f075dbea000-7f075dbf1000 r--s 00000000 fe:00 338846                     /usr/lib/gconv-modules.cache
7f075e000000-7f075e001000 rw-p 00000000 00:00 0
7f075e100000-7f075e101000 r--p 00000000 fe:00 9                          /torch/lib/libgomp-a34b3233.so.1
7f075e101000-7f075e141000 r-xp 00001000 fe:00 9                          /torch/lib/libgomp-a34b3233.so.1
7f075e200000-7f075e201000 r-xp 00001000 fe:00 10                         /my libs/libiomp5.so
7f075e300000-7f075e301000 r-xp 00001000 fe:00 11                         /usr/lib/libomp.so.5
7f075e400000-7f075e401000 r-xp 00001000 fe:00 12                         /usr/lib/libgomp/libm.so.6
"""


def descriptors() -> set[int]:
    # Without the one by which they are listed.
    return {int(each) for each in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{each}")}


@pytest.fixture
def own() -> set[int]:
    """The descriptors that this process had before the test."""
    return descriptors()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def refused(own: set[int], monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The phrases for what this process did not have before the test."""
    monkeypatch.setattr(copyable, "PHRASES_MAX", 1000)  # some are for what other tests have left
    before = what_cannot_be_copied(own)
    return lambda: [phrase for phrase in what_cannot_be_copied(own) if phrase not in before]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    return path


def test_shared_and_writable_memory_is_named_by_its_mapping() -> None:
    assert copyable._shared_memory(MAPS) == {
        "/memfd:envhub-arena (deleted)": "shared writable memory (/memfd:envhub-arena (deleted))",
        "/memfd:env (deleted)": "shared writable memory (/memfd:env (deleted))",
        "/data/two words.npy": "shared writable memory (/data/two words.npy)",
        "/dev/nvidia0": "the device /dev/nvidia0",
        "/dev/zero (deleted)": "shared writable memory (anonymous)",
        "/dev/shm/pym-1 (deleted)": "shared writable memory (/dev/shm/pym-1 (deleted))",
    }


def test_libraries_of_openmp_are_those_with_code_and_such_a_name() -> None:
    expected = ["/my libs/libiomp5.so", "/torch/lib/libgomp-a34b3233.so.1", "/usr/lib/libomp.so.5"]
    assert copyable._openmp_libraries(MAPS) == expected


@pytest.mark.parametrize("flags, expected", [(0x40, "a) (b"), (0x44, "")])
def test_thread_that_is_exiting_has_ended(flags: int, expected: str) -> None:
    assert copyable._running_thread(b"7 (a) (b) R 1 1 1 0 -1 %d 50 0" % flags) == expected


def test_thread_that_is_gone_has_ended() -> None:
    assert copyable._running_thread(b"") == ""


@pytest.mark.parametrize(
    "text, expected",
    [
        (b"pos:\t17\nflags:\t02100000\nmnt_id:\t24\nino:\t3\n", (0o2100000, 17, False)),
        (b"pos:\t0\nflags:\t00\nino:\t3\nlock:\t1: FLOCK  ADVISORY  WRITE 35 00:13:9 0 EOF\n", (0, 0, True)),
        (b"pos:\t0\nflags:\t02\nino:\t3\nSQEs:\t0\n  user_data=1, res=2\nflags:\t7\n", (2, 0, False)),
    ],
)
def test_flags_offset_and_lock_of_a_descriptor_are_read(text: bytes, expected: tuple[int, int, bool]) -> None:
    assert copyable._parse_fdinfo(text) == expected


def test_files_that_are_only_read_are_copied(file: Path, refused: Callable[[], list[str]], opened: ExitStack) -> None:
    deleted = file.with_name("deleted")
    deleted.write_bytes(b"x")
    for path in (file, deleted, Path("/proc/meminfo"), *map(Path, copyable.HARMLESS_DEVICES)):
        opened.enter_context(path.open("rb"))
    deleted.unlink()
    os.mkfifo(file.with_name("fifo"))
    for descriptor in (
        os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW),
        os.open(file.with_name("fifo"), os.O_PATH),
        os.open("/dev/null", os.O_RDWR),
    ):
        opened.callback(os.close, descriptor)
    np.memmap(file, mode="r")
    assert refused() == []


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b"])
def test_file_that_is_written_is_refused_by_its_path(
    mode: str, file: Path, refused: Callable[[], list[str]], opened: ExitStack
) -> None:
    opened.enter_context(file.open(mode))
    assert refused() == [f"the file {file}, open for writing"]
    file.unlink()
    assert refused() == [f"the file {file} (deleted), open for writing"]


def test_file_that_is_locked_is_refused(file: Path, refused: Callable[[], list[str]], opened: ExitStack) -> None:
    read = opened.enter_context(file.open("rb"))
    fcntl.flock(read, fcntl.LOCK_SH)
    assert refused() == [f"the file {file}, locked"]
    fcntl.flock(read, fcntl.LOCK_UN)
    assert refused() == []


def test_file_about_the_process_itself_is_refused(refused: Callable[[], list[str]]) -> None:
    with Path("/proc/self/status").open("rb"):
        assert refused() == [f"the file /proc/{os.getpid()}/status, which is about this process"]


def memory(opened: ExitStack) -> int:
    descriptor = os.memfd_create("env")
    opened.callback(os.close, descriptor)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


def test_memory_file_is_refused_as_a_file_until_it_is_mapped(
    refused: Callable[[], list[str]], opened: ExitStack
) -> None:
    descriptor = memory(opened)
    assert refused() == ["the file /memfd:env (deleted), open for writing"]
    with mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ):
        assert refused() == ["the file /memfd:env (deleted), open for writing"]
    with mmap.mmap(descriptor, mmap.PAGESIZE):
        assert refused() == ["shared writable memory (/memfd:env (deleted))"]


def test_own_descriptors_and_memory_are_left_out(
    own: set[int], opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copyable, "OWN_MEMORY", "/memfd:env")
    monkeypatch.setattr(copyable, "PHRASES_MAX", 1000)
    before = {*what_cannot_be_copied(own)}
    descriptor, pipe = memory(opened), os.pipe()
    for end in pipe:
        opened.callback(os.close, end)
    with mmap.mmap(descriptor, mmap.PAGESIZE):
        assert {*what_cannot_be_copied({*own, *pipe})} <= before
    assert {*what_cannot_be_copied({*own, *pipe})} <= before
    assert f"the pipe {pipe[1]}" in what_cannot_be_copied(own)


def test_shared_memory_of_python_is_refused(file: Path, refused: Callable[[], list[str]]) -> None:
    # Its descriptor is of the same memory. So large an array has memory of its own.
    array = multiprocessing.RawArray("b", 1 << 23)
    (phrase,) = refused()
    assert phrase.startswith("shared writable memory (/") and phrase.endswith(" (deleted))")
    del array
    written = np.memmap(file, mode="r+")
    assert f"shared writable memory ({file})" in refused()
    del written
    copied = np.memmap(file, mode="c")
    copied[0] = 1
    assert f"shared writable memory ({file})" not in refused()


def test_semaphore_is_refused(refused: Callable[[], list[str]]) -> None:
    lock = multiprocessing.get_context("fork").Lock()  # by "spawn", Python starts a process for it
    (phrase,) = refused()
    assert phrase.startswith("the semaphore /dev/shm/sem.")
    del lock
    assert refused() == []


def test_anonymous_shared_memory_is_refused(own: set[int]) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE):
        assert "shared writable memory (anonymous)" in what_cannot_be_copied(own)
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE):
        assert "shared writable memory (anonymous)" not in what_cannot_be_copied(own)


def test_pipes_are_refused(file: Path, refused: Callable[[], list[str]], opened: ExitStack) -> None:
    pipe, named = os.pipe(), file.with_name("named")
    os.mkfifo(named)
    ends = [*pipe, os.open(named, os.O_RDWR)]
    for end in ends:
        opened.callback(os.close, end)
    assert sorted(refused()) == sorted([*(f"the pipe {end}" for end in pipe), f"the pipe {ends[2]} ({named})"])


def test_device_is_refused(refused: Callable[[], list[str]], opened: ExitStack) -> None:
    ends = pty.openpty()
    for end in ends:
        opened.callback(os.close, end)
    assert refused() == ["the device /dev/ptmx", f"the device {os.ttyname(ends[1])}"]


@pytest.mark.parametrize(
    "family, address",
    [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "path"), (socket.AF_UNIX, "\0envhub-test-copyable")],
)
def test_stream_is_refused_by_what_it_is_connected_with(
    family: socket.AddressFamily, address: Any, tmp_path: Path, refused: Callable[[], list[str]], opened: ExitStack
) -> None:
    address = str(tmp_path / "socket") if address == "path" else address
    listening, connecting = (opened.enter_context(socket.socket(family)) for _ in range(2))
    listening.bind(address)
    listening.listen()
    connecting.connect(listening.getsockname())
    text = f"{family.name}, SOCK_STREAM, {connecting.getpeername()}"
    # The one that listens has the same address as its own.
    assert refused() == [f"the socket {each.fileno()} ({text})" for each in (listening, connecting)]


def test_other_socket_is_refused_by_its_kind_and_its_own_address(
    refused: Callable[[], list[str]], opened: ExitStack
) -> None:
    udp = opened.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    udp.bind(("127.0.0.1", 0))
    netlink = opened.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
    opened.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15))  # news of devices, which are harmless
    assert refused() == [
        f"the socket {udp.fileno()} (AF_INET, SOCK_DGRAM, {udp.getsockname()})",
        f"the socket {netlink.fileno()} (AF_NETLINK, SOCK_RAW, (0, 0))",
    ]


def test_pair_of_sockets_is_refused_and_left_as_it_is(refused: Callable[[], list[str]], opened: ExitStack) -> None:
    pair = socket.socketpair()
    for end in pair:
        opened.enter_context(end)
    opened.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
    socket.setdefaulttimeout(5.0)  # it would make what is made of a descriptor non-blocking
    assert refused() == [f"the socket {end.fileno()} (AF_UNIX, SOCK_STREAM)" for end in pair]
    assert [os.get_blocking(end.fileno()) for end in pair] == [True, True]
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"


@pytest.mark.parametrize(
    "kind, call, args",
    [
        ("timerfd", "timerfd_create", (1, 0)),
        ("inotify", "inotify_init", ()),
        ("eventfd", "eventfd", (0, 0)),
        ("eventpoll", "epoll_create", (1,)),
    ],
)
def test_object_of_the_kernel_is_refused_by_its_kind(
    kind: str, call: str, args: tuple[int, ...], refused: Callable[[], list[str]], opened: ExitStack
) -> None:
    descriptor = getattr(ctypes.CDLL(None), call)(*args)
    opened.callback(os.close, descriptor)
    assert refused() == [f"the {kind} {descriptor}"]


def test_timer_is_refused_while_it_runs(refused: Callable[[], list[str]], opened: ExitStack) -> None:
    opened.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0.0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e6)
    assert refused() == ["the timer ITIMER_VIRTUAL"]
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    assert refused() == []


def test_phrases_are_few(own: set[int], opened: ExitStack) -> None:
    for _ in range(PHRASES_MAX):
        for end in os.pipe():
            opened.callback(os.close, end)
    phrases = what_cannot_be_copied(own)
    assert len(phrases) == PHRASES_MAX + 1
    assert int(phrases[-1].removeprefix("and ").removesuffix(" more")) >= PHRASES_MAX  # with what other tests have left


def test_files_are_opened_again_as_they_were(own: set[int], file: Path, opened: ExitStack) -> None:
    kept = opened.enter_context(file.open("rb", buffering=0))
    inherited = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    opened.callback(os.close, inherited)
    os.set_inheritable(inherited, True)
    shared = os.dup(inherited)
    opened.callback(os.close, shared)
    kept.seek(7)
    os.lseek(inherited, 9, os.SEEK_SET)
    copyable.reopen_files(own)
    assert [os.get_inheritable(each) for each in (kept.fileno(), inherited, shared)] == [False, True, False]
    assert [os.lseek(each, 0, os.SEEK_CUR) for each in (kept.fileno(), inherited, shared)] == [7, 9, 9]
    assert not os.get_blocking(inherited)
    os.read(shared, 2)
    assert [os.lseek(each, 0, os.SEEK_CUR) for each in (kept.fileno(), inherited, shared)] == [7, 11, 11]
    assert descriptors() - own == {kept.fileno(), inherited, shared}
    assert stat.S_ISREG(os.fstat(inherited).st_mode)


def test_files_of_the_worker_and_paths_are_not_opened_again(own: set[int], file: Path, opened: ExitStack) -> None:
    first = opened.enter_context(file.open("rb", buffering=0))
    second = os.dup(first.fileno())
    opened.callback(os.close, second)
    path = os.open(file, os.O_PATH)  # it has no offset
    opened.callback(os.close, path)
    copyable.reopen_files({*own, first.fileno()})
    first.read(5)
    assert os.lseek(second, 0, os.SEEK_CUR) == 0


def test_pausing_openmp_does_no_harm_where_it_is_not() -> None:
    copyable.pause_openmp()
    assert np.ones((64, 64)).dot(np.ones((64, 64))).sum() == 64**3


def test_cost_is_that_of_reading_the_mappings(own: set[int]) -> None:
    def cpu_s(call: Callable[[], object]) -> float:
        def once() -> float:
            start = time.process_time()
            call()
            return time.process_time() - start

        return min(once() for _ in range(20))

    assert cpu_s(lambda: what_cannot_be_copied(own)) < 5 * cpu_s(lambda: copyable._read("/proc/self/maps"))
