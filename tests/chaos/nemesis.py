"""The nemesis: what it does to whom and when follows from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

EMBEDDED, IPC, TCP, RELAY = "embedded", "ipc", "tcp", "relay"
LANES = (EMBEDDED, IPC, TCP, RELAY)
SERVED = (IPC, TCP, RELAY)

# How often what, beside the others, and for how long at most.
_EVERYWHERE = {"kill worker": (6, 0.0), "stop worker": (3, 3.0), "kill trainer": (1, 0.0), "stop trainer": (2, 8.0)}
_ON_HUBS = {"kill hub": (1, 2.0), "stop hub": (1, 6.0)}
_SERVED_ONLY = {
    "flood": (1, 3.0),
    "starve": (1, 3.0),
    "hoard": (1, 0.0),
    "take over": (1, 0.0),
    "abandon": (1, 0.0),
    "meddle": (1, 0.0),
}
_BY_LANE = {
    EMBEDDED: {},
    IPC: {},
    TCP: {
        "cut": (3, 0.0),
        "half-close": (2, 0.0),
        "truncate": (2, 0.0),
        "hold": (1, 6.0),
        "lag": (1, 3.0),
        "trickle": (1, 2.0),
        "narrow": (1, 3.0),
    },
    RELAY: {
        "double": (2, 3.0),
        "repeat": (2, 3.0),
        "delay": (2, 3.0),
        "drop": (2, 2.0),
        "return late": (1, 0.0),
    },
}


@dataclass(frozen=True)
class Act:
    """One thing the nemesis does.

    Attributes:
        what: such as ``"kill worker"``.
        lane: of the trainer that is concerned.
        pick: which of several; to be taken modulo their number.
        seconds: for how long.
    """

    what: str
    lane: str
    pick: int
    seconds: float


def acts(seed: int, lanes: Sequence[str], pace_s: float) -> Iterator[tuple[float, Act]]:
    """For ever: how many seconds to wait, ``pace_s`` on average, and what to do then."""
    chance = random.Random(seed)
    while True:
        lane = chance.choice(lanes)
        choices = {**_EVERYWHERE, **_ON_HUBS, **(_SERVED_ONLY if lane in SERVED else {}), **_BY_LANE[lane]}
        what = chance.choices(list(choices), [weight for weight, _ in choices.values()])[0]
        # Mostly short, now and then long.
        seconds = choices[what][1] * chance.random() ** 3
        yield chance.uniform(0, 2 * pace_s), Act(what, lane, chance.getrandbits(16), seconds)
