"""A replay has what an env was asked until it failed, however late its file is written."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from envhub_server.hub.replay_keeper import ReplayKeeper
from envhub_server.hub.session_observer import Recipient
from envhub_server.ipc import control, replay_file
from envhub_server.ipc.journal import BY_REQUEST, RESET, History, Journal, Note
from envhub_server.ipc.replay_file import Replay
from envhub_server.log import Logger
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.replay import listed
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


def failed_replay() -> tuple[Replay, History]:
    """What is kept of an env that raised in its first step, and went on for so long that its journal begins later."""
    leaves = [[leaf.wire() for leaf in found] for found in (LAYOUT.observations, LAYOUT.actions)]
    built = control.Built([], b"", *leaves, b"", None, b"")
    writer, of_any_writer = Writer(), cast(Any, ReplayKeeper)
    keeper: ReplayKeeper = of_any_writer(writer, 1, InterpreterKey(), Faults())
    keeper.worker_built(1, replace(built, action_space=b"of the first", plain_spec=b"its spec"))
    keeper.worker_built(0, replace(built, plain_spec=None))
    given = control.MapArena(1, *leaves, 64, b"", b"", "same", 0)
    recipient = Recipient(0, 0, [0], LAYOUT, Logger("test"))
    mapped, descriptors = keeper.arena_given(recipient, given)
    descriptor = descriptors["journal"]
    assert mapped.journal and keeper.arena_given(recipient, given) == (given, {})
    journal = Journal(keeper.journals[0].layout, descriptor)
    os.close(descriptor)
    journal.format()
    journal.note(Note(0, 0, BY_REQUEST, 1))
    go_on(journal, RESET, 0)
    go_on(journal, 0, 5)
    build = control.Build(0, [0], "", b"", b"", "sims:make", [], "NextStep", True)
    wanted = KeepReplay(0, 0, 0, 1, EnvFailure("exception", "", replay="x"), build, mapped)
    keeper.env_failed(wanted, [0], cast(Any, None), "", "alice")
    for _ in range(2 * journal.layout.ticks):
        go_on(journal, 0, -1)
    (made,) = writer.waiting
    replay = replay_file.unpack(made())
    return replay, replay.calls()


def test_list_has_name_failure_time_and_client_of_a_replay(tmp_path: Path) -> None:
    replay, _ = failed_replay()
    raised = {**replay.failure, "exception": "builtins.AssertionError"}
    path = tmp_path / "arm-1.replay"
    for failure, client, text in (
        (raised, "alice", "AssertionError"),
        ({**raised, "message": "'pose'"}, "", "AssertionError: 'pose'"),
        ({**raised, "message": "two\n  lines"}, "", "AssertionError: two lines"),
        ({**replay.failure, "message": "worker 0 exited"}, "", "worker 0 exited"),
    ):
        path.write_bytes(replay_file.pack(replace(replay, failure=failure, client=client)))
        row = listed(path)
        assert (row.name, row.client, row.failure) == ("arm-1", client, text)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row.time)
    path.write_bytes(b"")
    assert listed(path).failure.startswith(f"{path} is no replay: ")


def test_env_that_goes_on_after_its_failure_has_a_replay_although_its_file_is_written_late() -> None:
    replay, history = failed_replay()
    assert replay.spec == b"its spec"
    assert replay.client == "alice"
    assert (history.unrepeatable, history.calls) == ("", 2)
    assert np.frombuffer(history.actions[0], np.int64)[1] == 5
