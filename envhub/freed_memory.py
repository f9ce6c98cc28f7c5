"""Settings with which the C library keeps freed memory for its next use, instead of returning it to the kernel."""

from __future__ import annotations

import ctypes

# The largest values that glibc reaches by itself are 32 MiB and 64 MiB, but only after it has freed such blocks.
MAPPED_FROM_BYTES = 32 << 20  # a larger block has its own mapping, and is returned when it is freed
KEPT_BYTES_MAX = 32 << 20  # at the end of the heap

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def keep_freed_memory() -> None:
    """Keep up to ``KEPT_BYTES_MAX`` of freed memory in this process and in processes that it forks.

    A message with an image takes several blocks of its size. The kernel clears each page of new memory at its first
    access, which takes ten times as long as to copy the message. A C library without ``mallopt`` is left as it is.
    """
    _set({_M_MMAP_THRESHOLD: MAPPED_FROM_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES_MAX})


def keep_large_blocks(kept_bytes: int) -> None:
    """Keep blocks of any size, up to ``kept_bytes`` or ``KEPT_BYTES_MAX``, whichever is more."""
    _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: max(kept_bytes, KEPT_BYTES_MAX)})


def _set(options: dict[int, int]) -> None:
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in options.items():
            mallopt(option, value)
