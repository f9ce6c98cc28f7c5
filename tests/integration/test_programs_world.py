"""What envs see of the program that they are made for, in the workers of its hub, and of a served one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sims
from hubs import serve

import envhub

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
SUPPORT = str(Path(sims.__file__).parent)


def run(
    folder: Path, program: str, *arguments: str, flags: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this text as a program of this folder."""
    script = folder / "program.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, *flags, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={**os.environ, **(environ or {})},
    )


def printed(ran: subprocess.CompletedProcess[str]) -> Any:
    """The JSON of the last line of what it printed."""
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


# --- numbers of threads -----------------------------------------------------------------------------------------------

OF_THREADS = """
import json, sys
sys.path.append({support!r})
import sims, envhub
envs = envhub.make_vec(sims.Counter, 1, num_workers={workers})
print(json.dumps([envs.call("environment", name)[0] for name in {names}]))
envs.close()
"""


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.long)])
def test_numbers_of_threads_that_the_program_has_set_are_kept(tmp_path: Path, workers: int) -> None:
    program = OF_THREADS.format(support=SUPPORT, workers=workers, names=THREADS)
    own = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": ""}
    found = dict(zip(THREADS, printed(run(tmp_path, program, environ=own)), strict=True))
    assert {name: found[name] for name in own} == own
    assert found["NUMEXPR_NUM_THREADS"] == ("1" if workers else os.environ.get("NUMEXPR_NUM_THREADS"))


def test_numbers_of_threads_that_the_operator_has_set_are_kept(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "3", "VECLIB_MAXIMUM_THREADS": "2"}
    binds = [f"ipc://{tmp_path}/hub.sock"]
    with serve(tmp_path, "counter=sims:counter", "--worker-env", "OMP_NUM_THREADS", binds=binds, environ=own) as hub:
        envs = envhub.make_vec("counter", 1, hub=hub.ipc)
        assert [envs.call("environment", name)[0] for name in own] == ["3", "2"]
        assert envs.call("environment", "MKL_NUM_THREADS") == ("1",)
        envs.close()
