"""Choice of the replays that a full folder removes: a client has a part of it while others want the rest. Pure."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from hashlib import sha256
from operator import itemgetter
from typing import NamedTuple

PART_MAX = 0.25  # of a full folder, for one share
NAME_CHARS_MAX = 60  # of an env, in the name of a file
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")
_SHARE = re.compile(r"-([0-9a-f]{8})[0-9a-f]{8}-(?:env|worker)[0-9]+--?[0-9]+$")


def name_beginning(env: str, client: str, drawn: str) -> str:
    """Beginning of the names of a session's replays.

    Args:
        env: the name of the session's env.
        client: the name of its client; empty for one without a key, whose sessions have shares of their own.
        drawn: 16 random hexadecimal digits, for no two sessions the same.
    """
    share = sha256(client.encode()).hexdigest()[:8] if client else drawn[:8]
    return f"{_OTHER.sub('-', env).strip('-.')[:NAME_CHARS_MAX] or 'env'}-{share}{drawn[8:]}"


class Kept(NamedTuple):
    """A file of the folder.

    Attributes:
        written_ns: when it was written.
        name: without its suffix.
        nbytes: its size.
    """

    written_ns: int
    name: str
    nbytes: int


def share_of(name: str) -> str:
    """The share to which the file of this name belongs; empty for that of all files that no hub has named."""
    match = _SHARE.search(name)
    return match.group(1) if match else ""


class _Share:
    """The files of one share, the oldest first."""

    def __init__(self) -> None:
        self.files: deque[Kept] = deque()
        self.nbytes = 0

    def add(self, file: Kept) -> None:
        self.files.append(file)
        self.nbytes += file.nbytes

    def remove_oldest(self) -> Kept:
        file = self.files.popleft()
        self.nbytes -= file.nbytes
        return file

    def part(self, count_max: int, bytes_max: int) -> float:
        """Its share of the folder: of the files or of the bytes, whichever is more."""
        return max(len(self.files) / max(1, count_max), self.nbytes / max(1, bytes_max))


def giving_way(files: Iterable[Kept], count_max: int, bytes_max: int) -> list[str]:
    """The names of the files that are too many: the oldest of the largest share beyond ``PART_MAX``, else of all.

    So a share may have the whole folder while no other wants it. The last file of a share does not count as too large.
    """
    shares: dict[str, _Share] = defaultdict(_Share)
    for file in sorted(files):
        shares[share_of(file.name)].add(file)
    count, nbytes = sum(len(share.files) for share in shares.values()), sum(share.nbytes for share in shares.values())
    names = []
    while count and (count > count_max or nbytes > bytes_max):
        parts = [(share.part(count_max, bytes_max), share) for share in shares.values() if len(share.files) > 1]
        part, share = max(parts, key=itemgetter(0), default=(0.0, _Share()))
        if part <= PART_MAX:
            share = min((each for each in shares.values() if each.files), key=lambda each: each.files[0])
        file = share.remove_oldest()
        count, nbytes = count - 1, nbytes - file.nbytes
        names.append(file.name)
    return names
