"""Memory that a peer gives can neither be made smaller while it is mapped, nor be smaller from the start."""

from __future__ import annotations

import fcntl
import os

import pytest

from envhub.arena.layout import Layout
from envhub.arena.memory import Arena, allocate
from envhub.transport.descriptors import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK
from envhub.values.leaf import Leaf

LAYOUT = Layout(2, (Leaf("<f4", (2,)),), (Leaf("<i8", ()),), 16)


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
