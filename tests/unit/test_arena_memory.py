"""What an arena tells of its rows, without a worker."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envhub.arena.layout import MESSAGE_BYTES, Layout
from envhub.arena.memory import DRIVER_CLIENT, LARGE, STATUS_INFO, STATUS_RAISED, Arena, allocate
from envhub.transport.descriptors import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK
from envhub.values.leaf import Leaf

LAYOUT = Layout(3, (Leaf("<f4", (2,)),), (Leaf("<i8", ()),), 64)


@pytest.fixture
def arena() -> Iterator[Arena]:
    descriptor = allocate(LAYOUT, 1 << 20)
    try:
        yield Arena(LAYOUT, descriptor)
    finally:
        os.close(descriptor)


def test_arena_of_a_process_that_may_have_no_large_file_has_no_large_infos() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LAYOUT.nbytes(), before[1]))
    try:
        descriptor = allocate(LAYOUT, 1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.fstat(descriptor).st_size == LAYOUT.nbytes()
    arena = Arena(LAYOUT, descriptor)
    os.close(descriptor)
    assert arena.large_infos.shape[1] == 0


def test_process_without_addresses_for_large_infos_maps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = allocate(LAYOUT, 1 << 20)
    lengths, mapped = [], mmap.mmap

    class Short(mapped):
        """Memory in a process that has no addresses for more than an arena without large infos."""

        def __new__(cls, fileno: int, length: int) -> Short:
            lengths.append(length)
            if length > LAYOUT.nbytes():
                raise OSError("Cannot allocate memory")
            return mapped.__new__(cls, fileno, length)

    monkeypatch.setattr(mmap, "mmap", Short)
    arena = Arena(LAYOUT, descriptor)
    os.close(descriptor)
    assert lengths[0] > lengths[1] == LAYOUT.nbytes() and arena.large_infos.shape[1] == 0


def test_observations_are_those_of_each_rows_last_step(arena: Arena) -> None:
    (leaf,) = arena.observations
    leaf[:] = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    for done, slots in (([2, 2, 2], [0, 0, 0]), ([1, 2, 3], [1, 0, 1])):
        arena.done[:] = done
        steps, given, (copied,) = arena.last_observations()
        assert given.all() and steps.tolist() == done
        np.testing.assert_array_equal(copied, leaf[slots, range(3)])


def test_row_that_steps_all_the_while_is_not_given(arena: Arena) -> None:
    class Stepping(np.ndarray):
        """The words of which row 1 is done once more whenever anybody looks."""

        def __getitem__(self, key: object) -> np.ndarray:
            arena.done.view(np.ndarray)[1] += 1
            return np.array(super().__getitem__(key))

    arena.done = arena.done.view(Stepping)
    _, given, _ = arena.last_observations()
    assert given.tolist() == [True, False, True]


def test_client_may_post_until_it_is_told_otherwise(arena: Arena) -> None:
    assert not arena.client_may_post and not arena.revoked
    arena.set_driver(DRIVER_CLIENT)
    assert arena.client_may_post
    arena.wind_up()
    assert not arena.client_may_post and not arena.revoked
    arena.revoke()
    assert arena.revoked
    arena.restore()
    assert not arena.revoked


def test_rows_of_which_the_hub_has_heard_more(arena: Arena) -> None:
    assert not arena.sent_by_channel() and not arena.has_infos()
    arena.status[0] = STATUS_RAISED
    arena.info_length[1:] = LAYOUT.info_bytes + 1
    arena.info_template[2], arena.rooms[2] = LARGE, LAYOUT.info_bytes + 1
    assert arena.has_infos() and arena.sent_by_channel() == [0, 1]


def test_message_and_results_are_where_there_is_room_for_them_and_else_nowhere(arena: Arena) -> None:
    large = bytes([1]) * (MESSAGE_BYTES + 1)
    assert arena.put_message(large[1:]) and arena.message() == large[1:] and not arena.put_message(large)
    arena.give_room(LAYOUT.rows, len(large))
    assert arena.put_message(large) and arena.message() == large
    for nonsense in (-1, len(large) + 1):
        arena._message_length[0] = nonsense
        assert arena.message() == b""
    arena.status[1:], arena.info_length[1:] = (STATUS_RAISED, STATUS_INFO), 5
    arena.infos[2, :5] = range(5)
    assert arena.result(0) == b"" and arena.result(1) is None and arena.result(2) == bytes(range(5))


def test_infos_of_one_form_are_read_at_once_and_others_by_template(arena: Arena) -> None:
    arena.status[:], arena.info_template[:], arena.info_length[:] = STATUS_INFO, 7, 8
    arena.infos[:, :8] = np.arange(3, dtype=np.uint8)[:, None]
    assert arena.info_form() == (7, 8)
    small, (rows,) = arena.all_infos()
    assert not small and rows.template == 7 and rows.data.tolist() == arena.infos[:, :8].tolist()
    arena.info_template[0], arena.info_template[2] = 0, 9
    assert arena.info_form() is None
    small, columns = arena.all_infos()
    assert [(row, bytes(blob)) for row, blob in small] == [(0, bytes(8))]
    assert [(each.template, each.rows.tolist()) for each in columns] == [(7, [1]), (9, [2])]
    arena.info_length[1] = 0
    assert [each.template for each in arena.columns(np.arange(3))] == [9]
    arena.info_template[:] = 0
    assert arena.columns(np.arange(3)) == []


def test_rows_of_which_one_has_another_length_have_no_form(arena: Arena) -> None:
    arena.status[:], arena.info_template[:], arena.info_length[:] = STATUS_INFO, 7, 8
    arena.info_length[1] = 4
    assert arena.info_form() is None


@pytest.mark.parametrize("in_children", [False, True])
def test_children_of_a_process_get_its_arena_only_where_that_is_wanted(in_children: bool) -> None:
    descriptor = allocate(LAYOUT, 0)
    arena = Arena(LAYOUT, descriptor, in_children)
    inode = os.fstat(descriptor).st_ino
    os.close(descriptor)
    mappings = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (flags,) = [each.rpartition("VmFlags:")[2].split() for each in mappings if f" {inode} " in each.partition("\n")[0]]
    assert ("dc" not in flags) is in_children  # Linux: the mapping is not copied at a fork
    assert arena.done.tolist() == [0, 0, 0]


# --- seals ------------------------------------------------------------------------------------------------------------


def memory(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize("seals", [0, F_SEAL_GROW], ids=["not at all", "against growth"])
def test_memory_that_is_not_sealed_against_shrinking_is_not_mapped(seals: int) -> None:
    fd = memory(LAYOUT.nbytes(), seals)
    with pytest.raises(ValueError, match="sealed"):
        Arena(LAYOUT, fd)
    os.close(fd)


def test_sealed_memory_that_is_too_small_is_not_mapped() -> None:
    fd = memory(LAYOUT.nbytes() - 1, F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="length"):
        Arena(LAYOUT, fd)
    os.close(fd)


def test_file_that_cannot_be_sealed_is_not_mapped() -> None:
    with pytest.raises(OSError, match="argument"), open("/dev/zero", "r+b") as zero:
        Arena(LAYOUT, zero.fileno())


def test_memory_that_the_hub_allocates_can_be_neither_cut_nor_unsealed() -> None:
    fd = allocate(LAYOUT)
    Arena(LAYOUT, fd).close()
    for cut in (lambda: os.ftruncate(fd, 0), lambda: fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_GROW)):
        with pytest.raises(PermissionError):
            cut()
    os.close(fd)
