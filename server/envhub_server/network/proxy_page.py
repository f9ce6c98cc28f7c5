"""The memory that a hub shares with its proxy: for each connection, what has come and what the hub has read.

The hub's loop reads and writes it without a system call. Each word has one writer, and each side's have a cache line.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from envhub.transport.descriptors import new_memory

SLOTS = 1 << 14
WORD, WORDS = 8, 16  # bytes of a word, and words of a slot
# Written by the proxy. A slot keeps them after the connection has ended, until it is another's.
NUMBER, RECEIVED, RECEIVED_NS, STATE, UNREAD_BYTES = range(5)
# Written by the hub; they hold for the connection whose number is in ``OWNER``.
OWNER, FRAMES_READ, BYTES_READ = range(8, 11)
# Bits of ``STATE``.
PARTIAL, FULL_FRAMES, FULL_BYTES, FULL_HANDSHAKE = 1, 2, 4, 8
FULL = FULL_FRAMES | FULL_BYTES | FULL_HANDSHAKE


class EndedHandshake(Struct, frozen=True):
    """A connection that ended before the hub had let its client in, as the proxy tells the hub."""

    host: str  # the address of the client
    spoke: bool  # whether the client had flags something
    answered: bool  # whether the hub had
    welcomed: bool  # whether the client had shown that it knows the hub's public key
    denied: bool  # whether it was told that its own key is not known

    @property
    def why_unfinished(self) -> str:
        """The reason why it proves no attempt to get in without a key; empty if it is one."""
        if not self.spoke:
            return "it sent nothing"
        if not self.answered:
            return "it ended before the hub had answered"
        return "it ended before the hub had let it in" if self.welcomed else ""


def make_page() -> int:
    return new_memory("envhub-proxy", SLOTS * WORDS * WORD)


def words_of(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, SLOTS * WORDS * WORD)).cast("q")


def _proxy_word(word: int) -> Any:
    """A word that the proxy writes; 0 once the slot is another connection's."""
    return property(lambda entry: entry._own[word] if entry._own[NUMBER] == entry.number else 0)


@dataclass(eq=False)
class PageEntry:
    """Page's facts of one connection, for the hub. ``host``: the address of its client."""

    words: memoryview = field(repr=False)
    slot: int
    number: int
    host: str

    received, received_ns, state, unread_bytes = map(_proxy_word, (RECEIVED, RECEIVED_NS, STATE, UNREAD_BYTES))

    def __post_init__(self) -> None:
        self._own = self.words[self.slot * WORDS : (self.slot + 1) * WORDS]
        self._own[FRAMES_READ] = self._own[BYTES_READ] = 0
        self._own[OWNER] = self.number

    @property
    def frames_read(self) -> int:
        return self._own[FRAMES_READ]

    def read(self, frames: int, nbytes: int) -> None:
        if self._own[OWNER] == self.number:
            self._own[BYTES_READ] += nbytes
            self._own[FRAMES_READ] += frames
