"""The page of the simulators that were tried: ``server/docs/simulators.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from packages import PACKAGES, Package

HEAD = """# Simulators

`python tests/frameworks/simulators` tries packages of the registry. It makes a virtual environment for each, installs
it there, and steps an env of it by seeded actions: each env alone in a plain loop, by a private hub, and over tcp by a
served one, in a first and a second session. *Equal* says that observations, rewards and ends of episodes were those of
the plain loop, bit for bit in the dtypes of the spaces, in all four. Vector envs are compared with
themselves without a hub.

Where there are pins, `pip install` gets them besides the package. A package with a Python of *its own* needs another
Gymnasium, gym or Python than EnvHub. It is in an environment without EnvHub, which has numpy and msgpack besides, and
which `--python` names ([Other Pythons](other_pythons.md)). What is installed *first* is
there when `pip install --no-build-isolation --no-deps` gets the package and its pins. Ids are offered as
`envhub serve MODULE:ID`, functions as `envhub serve NAME=MODULE:FUNCTION`; those in the table are in
`tests/frameworks/simulators/factories.py`.

| package | env | its interface | Python | pins | result | special |
|---|---|---|---|---|---|---|
"""
WAYS = ("private", "private again", "tcp", "tcp again")


def page(records: Sequence[Mapping[str, str]]) -> str:
    """The page with the last record of each package."""
    last = {record["package"]: record for record in records}
    return HEAD + "".join(_line(package, last.get(package.name, {})) for package in PACKAGES)


def _line(package: Package, record: Mapping[str, str]) -> str:
    pins = " ".join(f"`{pin}`" for pin in package.pins)
    pins = f"first {' '.join(f'`{pin}`' for pin in package.build)}, then {pins}" if package.build else pins
    python = " ".join(filter(None, ["its own" if package.apart else "", package.python]))
    cells = [package.name, f"`{package.env}`", package.kind, python, pins, _result(record), package.special]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _result(record: Mapping[str, str]) -> str:
    if record.get("why"):
        return f"cannot be installed: {record['why']}"
    results = [record.get(way, "") for way in WAYS]
    if len(set(results)) == 1:
        return results[0] or "not tried"
    return "; ".join(f"{way}: {result}" for way, result in zip(WAYS, results, strict=True) if result)


def write(path: Path, results: Path) -> None:
    """Write the page by the records of ``--json``."""
    path.write_text(page([json.loads(line) for line in results.read_text().splitlines()]))
