"""Sentences for users of macOS and Windows about what only Linux can do."""

from __future__ import annotations

import sys

_NAMES = {"darwin": "macOS", "win32": "Windows"}


def only_linux(what: str) -> str:
    """The sentence that this needs Linux, and what works on this system."""
    system = _NAMES.get(sys.platform, sys.platform)
    works = 'pass the tcp:// or envhub:// address of a hub on Linux, as in make_vec(..., hub="tcp://...")'
    return f"{what} needs Linux, and this is {system}: {works} (client/docs/remote_hubs.md)"
