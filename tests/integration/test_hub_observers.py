"""An observer of a hub's sessions: what it learns of rows whose process has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from faulty import KILL
from hubs import serve, wait_until

import envhub

# A hub with one more feature, whose observer writes to the file that the first argument names.
OBSERVED = """
import json, sys
from envhub_server.hub.session_features import SessionFeatures
from envhub_server.hub.session_observer import SessionObserver
from envhub.cli import main

file = open(sys.argv.pop(1), "a", buffering=1)

class Noting(SessionObserver):
    def rows_lost(self, process, why):
        print(json.dumps(["lost", process, why]), file=file)

add = SessionFeatures.add

def with_noting(self, runtime):
    add(self, runtime)
    runtime.observe_by(Noting())

SessionFeatures.add = with_noting
main()
"""


@pytest.mark.parametrize("lane", [pytest.param("wire", marks=pytest.mark.long), "shared"])
def test_observer_learns_which_rows_the_hub_completes(tmp_path: Path, lane: str) -> None:
    noted, program = tmp_path / "noted", tmp_path / "observed.py"
    program.write_text(OBSERVED)
    noted.touch()
    with serve(tmp_path, "faulty=faulty:faulty", program=(str(program), str(noted))) as hub:
        address = hub.ipc if lane == "shared" else hub.tcp
        with contextlib.closing(envhub.make_vec("faulty", 4, hub=address, num_workers=2)) as envs:
            envs.reset()
            truncations = envs.step(np.array([0, KILL, 0, 0]))[3]
            assert envs.lane == lane and truncations.tolist() == [False, True, False, True]
            assert wait_until(lambda: bool(noted.read_text()))
            why = "worker 1 (envs 1, 3) was ended by SIGKILL"
            assert noted.read_text() == f'["lost", 1, "{why}"]\n'
