"""Has the C library keep freed memory for the next use, instead of giving it back to the kernel each time."""

from __future__ import annotations

import ctypes

# The largest values that glibc reaches by itself are 32 MiB and 64 MiB, but only after it has freed such blocks.
MAPPED_FROM_BYTES = 32 << 20  # a larger block is mapped for itself, and given back when it is freed
KEPT_BYTES_MAX = 32 << 20  # at the end of the heap

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def keep_freed_memory() -> None:
    """Keep up to ``KEPT_BYTES_MAX`` that this process, and those that it forks, have used and freed.

    A message of an image or a frame takes several blocks of its size. Of memory that is new, the kernel makes and
    clears each page at the first access, which takes ten times as long as to copy a message. A C library without
    ``mallopt`` is left as it is.
    """
    _set({_M_MMAP_THRESHOLD: MAPPED_FROM_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES_MAX})


def keep_large_blocks(kept_bytes: int) -> None:
    """Keep blocks of any size, up to ``kept_bytes`` or ``KEPT_BYTES_MAX``, whichever is more."""
    _set({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: max(kept_bytes, KEPT_BYTES_MAX)})


def _set(options: dict[int, int]) -> None:
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in options.items():
            mallopt(option, value)
