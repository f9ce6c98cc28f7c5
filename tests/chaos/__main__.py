"""``python -m chaos --seed N --steps N``, in ``tests``: one run of the nemesis, told of as it goes."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from chaos.nemesis import LANES
from chaos.run import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="chaos", description="Kill, stop, cut and crowd a hub while trainers train.")
    parser.add_argument("--seed", type=int, default=None, help="what is done follows from it; drawn where none is told")
    parser.add_argument("--steps", type=int, default=100_000, help="of single envs, to be acknowledged")
    parser.add_argument("--lanes", default=",".join(LANES))
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between two acts, on average")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    seed = secrets.randbits(32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="envhub-chaos-") as folder:
        found = run(
            Path(folder), seed, told.steps, told.lanes.split(","), told.pace, say=lambda text: print(text, flush=True)
        )
    print(found.text())
    sys.exit(1 if found.total.wrong else 0)


if __name__ == "__main__":
    main()
