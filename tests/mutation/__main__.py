"""``python -m mutation`` in ``tests``: the mutants that no unit test notices; see README.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from mutation import runner
from mutation.copies import copied, tested
from mutation.named import NAMED
from mutation.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutation", description="Which changes of a module does no unit test notice?")
    parser.add_argument("modules", nargs="*", help="parts of their paths; all of targets.py where none is given")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module, drawn; 0 for all")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at one time")
    parser.add_argument("--minutes", type=float, default=60.0, help="after these, no more mutants are begun")
    parser.add_argument("--results", type=Path, default=runner.ROOT / "build/mutation.jsonl", help="to go on from")
    parser.add_argument("--again", action="store_true", help="judge those that survived the last time once more")
    parser.add_argument("--named", action="store_true", help="try those of named.py in place of these, by their tests")
    told = parser.parse_args()
    os.nice(10)
    sys.exit(1 if (_named(told.modules) if told.named else _all(told)) else 0)


def _all(told: argparse.Namespace) -> int:
    """Judge the mutants of the modules; returns how many survive without a reason."""
    runner.preload()
    results, kept = runner.Results(told.results), runner.kept()
    until_s = time.monotonic() + 60 * told.minutes
    survived = 0
    for path in TARGETS:
        if told.modules and not any(part in path for part in told.modules):
            continue
        wanted = runner.chosen(path, told.sample, told.seed)
        known = results.verdicts
        again = [each for each in wanted if told.again and each.name in known and not known[each.name].killed]
        left = [each for each in wanted if each.name not in known] + again
        if left and time.monotonic() < until_s:
            for verdict in runner.run(path, left, told.jobs, until_s):
                results.add(verdict)
        judged = [results.verdicts[each.name] for each in wanted if each.name in results.verdicts]
        alive = [each.name for each in judged if not each.killed and each.name not in kept]
        argued = sum(not each.killed and each.name in kept for each in judged)
        print(f"{path}: {len(judged)} of {len(wanted)} judged, {len(alive)} survive, {argued} are argued", flush=True)
        for name in alive:
            print(f"  {name.partition('::')[2]}")
        names = {each.name for each in runner.chosen(path, 0, 0)}
        for name in kept:
            if name.startswith(f"{path}::") and name not in names:
                print(f"  kept.txt argues for a mutant that is none any more: {name}")
        survived += len(alive)
    return survived


def _named(parts: list[str]) -> int:
    """Try the mutants of named.py whose names have one of these parts; returns how many are not noticed."""
    survived = 0
    for mutant in NAMED:
        if parts and not any(part in mutant.name for part in parts):
            continue
        with copied(mutant) as folder:
            passed = tested(folder, [mutant.killed_by], mutant.marker)
        print(f"{'SURVIVES' if passed else 'killed'}: {mutant.name}, by {mutant.killed_by}", flush=True)
        survived += passed
    return survived


if __name__ == "__main__":
    main()
