"""Several hubs at a time, each with a name of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from hubs import ServedHub, serve

LANES = {"shared": ["ipc"], "wire": ["tcp"], "shared+wire": ["tcp", "ipc"]}


@contextlib.contextmanager
def served_hubs(
    folders: pytest.TempPathFactory, count: int, offered: Sequence[str], *options: str
) -> Iterator[list[ServedHub]]:
    """Hubs of the names ``hub-0``, ``hub-1`` and so on."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(serve(folders.mktemp("hub"), *offered, "--name", f"hub-{number}", *options))
            for number in range(count)
        ]


def addresses(hubs: Sequence[ServedHub], lanes: str, count: int) -> list[str]:
    """The addresses of so many hubs, by which envs are stepped on these lanes."""
    kinds = LANES[lanes]
    return [getattr(hub, kinds[place % len(kinds)]) for place, hub in enumerate(hubs[:count])]
