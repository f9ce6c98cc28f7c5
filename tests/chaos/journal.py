"""What a trainer is about to do and what it knew before, kept where the next one finds it if this one is killed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any


class Journal:
    """One entry in a file, of which each new one takes the place of the last; a kill never leaves half of one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def write(self, entry: Any) -> None:
        """Keep this entry. One system call within the page cache: a signal ends it before or after, not in between."""
        blob = pickle.dumps(entry)
        os.pwrite(self._file, len(blob).to_bytes(8, "little") + blob, 0)

    def read(self) -> Any:
        """The entry that was kept last; None if there is none."""
        found = os.pread(self._file, os.fstat(self._file).st_size, 0)
        length = int.from_bytes(found[:8], "little")
        return pickle.loads(found[8 : 8 + length]) if length else None
