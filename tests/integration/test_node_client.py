"""The client in JavaScript, which was written from PROTOCOL.md alone, at a hub with a key."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.kit.client_checks import examine
from conformance.kit.verdict import PASSED
from hubs import serve
from new_keys import address_of, admitted, keys_in

CONFORMANCE = Path(__file__).parents[1] / "conformance"
LEVELS = ("basic", "resilient", "parts")
NODE_MIN = 20
ENVS = ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1", "MountainCarContinuous-v0")


def lack() -> str:
    """The reason why the client cannot run here, or an empty string."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "this machine has no node, or no npm"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.match(r"v(\d+)\.", version)
    assert found is not None, version
    return "" if int(found[1]) >= NODE_MIN else f"node {version.strip()} is older than {NODE_MIN}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_node_client_reads_the_vectors_steps_as_gymnasium_and_passes_the_kit(tmp_path: Path) -> None:
    if why := lack():
        pytest.skip(why)
    place = tmp_path / "conformance/node"
    shutil.copytree(CONFORMANCE / "node", place, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(CONFORMANCE / "golden.json", place.parent)

    def run(*command: str) -> str:
        ran = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    assert "vectors hold" in run("npm", "run", "--silent", "vectors")
    keys = keys_in(tmp_path / "keys")
    with serve(tmp_path, *ENVS, "--keys", str(keys.path), binds=["tcp://127.0.0.1:0"]) as hub:
        address = tmp_path / "address"  # in a file: other users can read the arguments of a process
        address.touch(0o600)
        address.write_text(address_of(admitted(keys, "node"), hub.tcp))
        equal = run(sys.executable, "equal.py", str(address)).splitlines()
        assert len(equal) == len(ENVS) and all(line.endswith(": equal") for line in equal)
    verdicts = [each for each in examine(["node", str(place / "programs.js")], LEVELS) if each.result != PASSED]
    assert verdicts == []
