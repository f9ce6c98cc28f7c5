"""The lines by which workers send their episodes to the process that records."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from envhub.recording import process
from envhub.recording.process import Line, RecorderProcess
from envhub.recording.tape import BLOCKS
from envhub.values import codec


class Taker(RecorderProcess):
    """Notes which line each block came by, in place of recording it."""

    def __init__(self, program: socket.socket) -> None:
        super().__init__(program)
        self.taken: list[int] = []

    def add(self, number: int, env_ids: list[int]) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tape: Any = SimpleNamespace(shape=SimpleNamespace(steps=1))
        theirs.setblocking(False)
        self._lines[number] = Line(theirs, env_ids, [], tape)
        self._selector.register(theirs, 1, partial(self._on_line, number))
        return ours

    def hear(self, number: int) -> bool:
        return self._on_line(number)

    def _open_folder(self) -> None:
        """Nothing is written."""

    def _take(
        self, line: Line, block: int, steps: int, notes: Mapping[tuple[int, int], Any], left: int = BLOCKS
    ) -> None:
        self.taken.append(block)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    program, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield program, far
    program.close()
    far.close()


def send(end: socket.socket, block: int, close: bool = False) -> None:
    order = {"block": block, "steps": 1, "notes": [], "dropped": 0, "left": 7, "close": close}
    end.send(codec.encode(order))


def test_predecessor_that_goes_on_is_heard_again(ends: tuple[socket.socket, socket.socket]) -> None:
    taker = Taker(ends[0])
    old, new = taker.add(0, [0]), taker.add(1, [0])
    send(old, 0)
    send(new, 4)
    assert taker.hear(1) and taker.taken == [0, 4]
    assert not taker.hear(0)
    send(old, 1)
    assert taker.hear(0) and taker.taken == [0, 4, 1]
    old.close()
    assert not taker.hear(0) and not taker.hear(0)
    new.close()


@pytest.mark.parametrize("closes", [True, False])
def test_what_a_predecessor_wrote_is_taken_before_what_its_successor_writes(
    ends: tuple[socket.socket, socket.socket], closes: bool
) -> None:
    taker = Taker(ends[0])
    old, other, new = (taker.add(number, env_ids) for number, env_ids in enumerate(([0, 2], [1, 3], [0, 2])))
    send(new, 6)
    send(other, 4)
    send(old, 0)
    send(old, 1, close=closes)
    if not closes:
        old.close()
        ends[1].send(codec.encode({"say": "ended", "number": 0, "why": "it was killed"}))
    assert taker.hear(2)
    assert taker.taken == [0, 1, 6]
    assert not taker.hear(0)  # of which the same turn of the loop had heard
    assert taker.hear(1)
    assert taker.taken == [0, 1, 6, 4]
    for end in (old, other, new):
        end.close()


def test_line_whose_other_end_takes_over_later_comes_later(ends: tuple[socket.socket, socket.socket]) -> None:
    taker = Taker(ends[0])
    spare, worker = taker.add(0, [0]), taker.add(1, [0])  # the worker was restarted after the spare was made
    send(worker, 0)
    ends[1].send(codec.encode({"say": "next", "number": 0}))
    send(worker, 1)
    send(spare, 2)
    assert taker.hear(0) and taker.taken == [0, 1, 2]
    for end in (spare, worker):
        end.close()


def test_everything_that_waits_at_the_end_is_taken_however_long_that_takes(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LAST_WORDS_S", 0.0)  # which is over before the first block is taken
    taker = Taker(ends[0])
    lines = [taker.add(number, [number]) for number in range(2)]
    for block in range(8):
        for line in lines:
            send(line, block, close=block == 7 and line is lines[0])
    ends[1].send(codec.encode({"say": "close"}))
    taker.run()
    assert sorted(taker.taken) == sorted([*range(8)] * 2)
    for line in lines:
        line.close()
