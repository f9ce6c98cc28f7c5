"""The list of the simulators that were tried, in ``server/docs/simulators.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from packages import PACKAGES, Package

LIST = re.compile(r"(<!-- packages, written by tests/frameworks/simulators -->\n\n).*?(\n<!-- end -->)", re.S)
WAYS = ("private", "private again", "tcp", "tcp again")


def listed(records: Sequence[Mapping[str, str]]) -> str:
    """The list with the last record of each package."""
    last = {record["package"]: record for record in records}
    return "".join(_line(package, last.get(package.name, {})) for package in PACKAGES)


def _line(package: Package, record: Mapping[str, str]) -> str:
    pins = " ".join(f"`{pin}`" for pin in package.pins)
    pins = f"first {' '.join(f'`{pin}`' for pin in package.build)}, then {pins}" if package.build else pins
    python = " ".join(filter(None, ["its own" if package.apart else "", "Python", package.python]))
    python = python if package.apart or package.python else ""
    kind = "" if package.kind == "Gymnasium" else package.kind
    result = "" if (found := _result(record)) == "equal" else found
    needs = "; ".join(filter(None, [python, pins]))
    notes = [kind, result, package.special]
    parts = [f"{package.name}: `{package.env}`", f"needs {needs}" if needs else "", *notes]
    return "- " + "; ".join(filter(None, parts)) + "\n"


def _result(record: Mapping[str, str]) -> str:
    if record.get("why"):
        return f"cannot be installed: {record['why']}"
    results = [record.get(way, "") for way in WAYS]
    if len(set(results)) == 1:
        return results[0] or "not tried"
    return "; ".join(f"{way}: {result}" for way, result in zip(WAYS, results, strict=True) if result)


def write(path: Path, results: Path) -> None:
    """Write the list of the page by the records of ``--json``."""
    written = listed([json.loads(line) for line in results.read_text().splitlines()])
    path.write_text(LIST.sub(lambda found: f"{found[1]}{written}{found[2]}", path.read_text()))
