"""Mutants that once were not noticed, each with the tests that notice it now; ``python -m mutation --named``."""

from __future__ import annotations

from dataclasses import dataclass

HUB = "envhub/protocol/hub.py"
RIGHTS = "server/envhub_server/network/rights.py"
ACCESS = "server/envhub_server/network/access.py"
STAND_INS = "server/envhub_server/memory/stand_ins.py"
ENV_HISTORY = "server/envhub_server/session/env_history.py"
SESSIONS = "server/envhub_server/hub/directory.py"
CHAOS = "chaos/test_chaos.py"


@dataclass(frozen=True)
class Named:
    """A mutant of some changes: of a file, what is there and what is put in its place.

    Attributes:
        killed_by: a test of ``tests``; those of the default run need no marker.
        marker: of that test, if it is of none of the default run's.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    killed_by: str
    marker: str = ""


NAMED = [
    Named(
        "another client's HEARTBEAT takes a session's peer",
        ((HUB, "if link is not None and link.owner == owner:", "if link is not None:"),),
        "unit/test_exactly_once.py",
    ),
    Named(
        "a key to deploy sees and takes all sessions",
        ((RIGHTS, "owner == self.name or self.administers", "owner == self.name or self.deploys"),),
        "unit/test_access.py",
    ),
    Named(
        "the reply of an ended session goes to another client",
        ((HUB, "(prelude.seq, owner) == (ended.seq, ended.owner)", "prelude.seq == ended.seq"),),
        "unit/test_protocol.py",
    ),
    Named(
        "the last of four or more lost rows is not truncated",
        (
            (
                STAND_INS,
                "        reports: list[Stimulus] = []\n        for row in rows.tolist():",
                "        reports: list[Stimulus] = []\n        for row in rows.tolist()[: max(3, rows.size - 1)]:",
            ),
        ),
        "unit/test_stand_ins.py",
    ),
    Named(
        "connections_max is not enforced",
        ((ACCESS, "if why := self.connections.why_refused(holder):", 'if why := "":'),),
        "unit/test_access_rules.py",
    ),
    Named(
        "seeds are forgotten by an unseeded reset",
        ((ENV_HISTORY, "seed if chosen and seed is not None else last", "seed if chosen else last"),),
        "unit/test_session_workers.py",
    ),
    Named(
        "a repeated number runs again",
        (
            (HUB, "if prelude.seq == link.seq:", "if prelude.seq == link.seq and link.running:"),
            (HUB, "follows = prelude.seq > link.seq and", "follows = prelude.seq >= link.seq and"),
        ),
        "chaos/test_relay.py",
    ),
    Named(
        "a session whose lease has run out leaves its workers",
        ((SESSIONS, "self._events.append((runtime.number, stimuli.LeaseExpired(runtime.quiescent)))", "pass"),),
        CHAOS,
        "long",
    ),
    Named(
        "objects of an earlier step stand for the last ones",
        ((STAND_INS, "if number != arena.done[row]:", "if number < 0:"),),
        CHAOS,
        "long",
    ),
    Named(
        "a lost row is done before its results are there",
        (
            (
                STAND_INS,
                "        reports: list[Stimulus] = []\n        for row in rows.tolist():",
                "        reports: list[Stimulus] = []\n        self._done(rows)\n        for row in rows.tolist():",
            ),
            (
                STAND_INS,
                "                truncate(arena, row, length, template)\n        self._done(rows)\n",
                "                truncate(arena, row, length, template)\n",
            ),
        ),
        CHAOS,
        "long",
    ),
    Named(
        "a step during a lease does not end the lease",
        ((HUB, "if link.peer != peer or token in self.leases or len", "if link.peer != peer or len"),),
        CHAOS,
        "long",
    ),
]
