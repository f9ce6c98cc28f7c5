"""A replay has what an env was asked until it failed, however late its file is written."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import numpy as np
from envhub_server.hub.replay_keeper import ReplayKeeper
from envhub_server.ipc import control, replay_file
from envhub_server.ipc.journal import BY_REQUEST, RESET, Journal, Note
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.session.instructions import KeepReplay

from envhub.arena.layout import Layout
from envhub.env_failure import EnvFailure
from envhub.protocol.messages import Faults
from envhub.values.leaf import Leaf

LAYOUT = Layout(1, (Leaf("<f8", (2,)),), (Leaf("<i8", ()),), 64)


class Writer:
    """Writes nothing until it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def write(self, session: int, name: str, journal_bytes: int, made: Any) -> None:
        self.waiting.append(made)


def go_on(journal: Journal, kind: int, action: int) -> None:
    """Write one tick, as a worker does."""
    place = journal.words[1] % journal.layout.ticks
    journal.kinds[place] = kind
    journal.actions[0][place, 0] = np.array([action]).view(np.uint8)
    journal.words[1] += 1


def test_env_that_goes_on_after_its_failure_has_a_replay_although_its_file_is_written_late() -> None:
    leaves = [[leaf.wire() for leaf in found] for found in (LAYOUT.observations, LAYOUT.actions)]
    built = control.Built([], b"", *leaves, b"", None, b"")
    writer, of_any_writer = Writer(), cast(Any, ReplayKeeper)
    keeper: ReplayKeeper = of_any_writer(writer, 1, InterpreterKey())
    keeper.note(1, replace(built, action_space=b"of the first", plain_spec=b"its spec"))
    keeper.note(0, replace(built, plain_spec=None))
    descriptor = keeper.make_journal(0, 1, LAYOUT)
    assert descriptor is not None and keeper.make_journal(0, 1, LAYOUT) is None
    journal = Journal(keeper.journals[0].layout, descriptor)
    os.close(descriptor)
    journal.format()
    journal.note(Note(0, 0, BY_REQUEST, 1))
    go_on(journal, RESET, 0)
    go_on(journal, 0, 5)
    build = control.Build(0, [0], "", b"", b"", "sims:make", [], "NextStep", True)
    mapped = control.MapArena(1, *leaves, 64, b"", b"", "same", 0)
    wanted = KeepReplay(0, 0, 1, EnvFailure("exception", "", replay="x"), build, mapped)
    keeper.keep(wanted, [0], cast(Any, None), Faults(), "")
    for _ in range(2 * journal.layout.ticks):
        go_on(journal, 0, -1)
    (made,) = writer.waiting
    replay = replay_file.unpack(made())
    assert replay.spec == b"its spec"
    history = replay.calls()
    assert (history.cut, history.calls) == ("", 2)
    assert np.frombuffer(history.actions[0], np.int64)[1] == 5
