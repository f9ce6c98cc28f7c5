"""The bounds of every number and the choices of every text in a message, and their check.

The hub checks a request before it executes the request. A number that is not finite or not within its bounds would harm
other sessions too: a deadline of NaN is never due, and hides their deadlines from ``min``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from envhub.arena.spin import SPIN_US_MAX
from envhub.errors import shortened
from envhub.protocol import messages
from envhub.values.codec import DecodeError

ROWS_MAX = 1 << 20  # of a session: the arena's progress words have 20 bits for a row
SECONDS_MAX = 7 * 24 * 3600
RESTARTS_MAX = 1_000_000
SEED_MAX = 1 << 256
COMPRESSION_NS_MAX = 1_000_000_000  # for each byte that is saved
GPUS_MAX = 1024  # devices of a machine
INFO_BYTES_MAX = 1 << 20  # of a row
HUB_NAME_CHARS_MAX = 64
TEXT_CHARS_MAX = 4096  # of a text of a hub, in an error, a log or the infos of each env
ORIGIN_CHARS_MAX = 100  # of a text by which a client describes itself
ORDER_ID_BYTES_MAX = 16
FAILURE_CHARS_MAX = 1 << 16  # of the text or the traceback of what an env raised
MESSAGE_BYTES_MIN = 1 << 12  # of what a hub says that it accepts in a message

ROW = (0, ROWS_MAX - 1)
GPU = (0, GPUS_MAX - 1)
SECONDS = (0, SECONDS_MAX)
COUNT = (0, (1 << 63) - 1)
WORD = (-1 << 63, (1 << 63) - 1)  # a word of an arena; a client may have written any number into it

Bounds = Mapping[type, Mapping[str, tuple[int, int]]]
M = TypeVar("M")

# By message and field, the smallest and the largest number; a list's bounds apply to each item.
REQUEST_BOUNDS: Bounds = {
    messages.Make: {
        "num_envs": (1, ROWS_MAX),
        "num_workers": (0, ROWS_MAX),
        "spin_us": (0, SPIN_US_MAX),
        "compression_ns": (0, COMPRESSION_NS_MAX),
        "heartbeat_s": SECONDS,
        "row_offset": ROW,
        "seeds": (-SEED_MAX, SEED_MAX),
    },
    messages.ProgramOrigin: {"pid": (0, (1 << 31) - 1)},
    messages.Attach: {"compression_ns": (0, COMPRESSION_NS_MAX)},
    messages.Faults: {
        **dict.fromkeys(("restart_wait_s", "init_s", "reset_s", "step_s", "call_s", "close_s"), SECONDS),
        "restarts_max": (0, RESTARTS_MAX),
    },
    messages.Hosting: {"gpus": GPU, "memory_max": COUNT, "spares": (0, ROWS_MAX)},
    messages.Recycle: {"episodes": COUNT, "age_s": SECONDS, "memory_bytes": COUNT},
    messages.Reset: {"seeds": (-SEED_MAX, SEED_MAX)},  # the env itself refuses a negative seed
    messages.Call: {"rows": ROW},
    messages.SetAttr: {"rows": ROW},
    messages.SnapshotRequest: {"rows": ROW, "sources": ROW},
    messages.Collect: {"rows": ROW},
    messages.Send: {"rows": ROW, "min_envs": (0, ROWS_MAX)},
    messages.Receive: {"min_envs": (1, ROWS_MAX)},
    messages.TemplatesRequest: {"numbers": COUNT},
    messages.Operate: {"env": (-1, ROWS_MAX - 1), "deadline_s": SECONDS},
}

_POLICIES = ("truncate", "raise")

# By message and field, the allowed texts.
REQUEST_CHOICES: Mapping[type, Mapping[str, tuple[str, ...]]] = {
    messages.Make: {
        "autoreset_mode": ("NextStep", "SameStep", "Disabled"),
        "observation_mode": ("same", "different", "first", "any"),
        "snapshots": ("", "safe", "unsafe"),
    },
    messages.Faults: {
        **dict.fromkeys(("on_timeout", "on_exception"), _POLICIES),
        "on_crash": (*_POLICIES, "restore"),
        "on_invalid": (*_POLICIES, "pass"),
    },
    messages.Call: {"question": ("", "exists", "wrapped")},
    messages.SnapshotRequest: {"action": ("take", "restore", "prepare", "commit", "list")},
    messages.Status: {"what": ("sessions", "ended", "slow")},
}

# The bounds of a hub's replies; a client refuses a reply that exceeds them.
REPLY_BOUNDS: Bounds = {
    messages.Capacity: dict.fromkeys(("cpus", "cpus_free", "envs_free", "sessions_free"), COUNT),
    messages.Failure: {"env_index": ROW},
    messages.Made: {"num_envs": (1, ROWS_MAX), "num_workers": (1, ROWS_MAX), "steps": WORD, "window": (1, 255)},
    messages.Observed: {"num_envs": (1, ROWS_MAX), "steps": WORD},
    messages.Shared: {"info_bytes": (0, INFO_BYTES_MAX), "workers": (1, ROWS_MAX), "spin_us": (0, SPIN_US_MAX)},
}


def shorten_texts(message: M) -> M:
    """The message, or a copy with shorter texts if a hub has sent longer ones than an honest one does."""
    of_env = getattr(message, "scope", "") == "env"
    texts = {
        name: shortened(text, FAILURE_CHARS_MAX if of_env and name in ("message", "traceback") else TEXT_CHARS_MAX)
        for name, text in vars(message).items()
        if isinstance(text, str) and len(text) > TEXT_CHARS_MAX
    }
    return dataclasses.replace(message, **texts) if texts else message  # type: ignore[type-var]


class OutOfBounds(DecodeError):
    """A number in a message is out of its bounds, or a text is not one of its field's choices."""


def is_function_name(text: str) -> bool:
    module, _, name = text.partition(":")
    return all(part.isidentifier() for whole in (module, name) for part in whole.split("."))


def is_short_line(text: object) -> bool:
    """True if this may be in an ``ProgramOrigin``."""
    return not isinstance(text, str) or (len(text) <= ORIGIN_CHARS_MAX and text.isprintable())


def check(message: Any, bounds: Bounds = REQUEST_BOUNDS) -> None:
    """Refuse a message with a number or a text that is not allowed, its nested messages too; raises ``OutOfBounds``."""
    for value in vars(message).values():
        if dataclasses.is_dataclass(value):
            check(value, bounds)
    for name, (low, high) in bounds.get(type(message), {}).items():
        value = getattr(message, name)
        for number in value if isinstance(value, list) else (value,):
            if number is not None and not low <= number <= high:  # false for NaN too
                kind = type(message).__name__
                raise OutOfBounds(f"{kind}.{name} is {number}, which is not between {low} and {high}")
    if isinstance(message, messages.ProgramOrigin) and not all(map(is_short_line, vars(message).values())):
        raise OutOfBounds(f"a text of ProgramOrigin is no line of at most {ORIGIN_CHARS_MAX} printable characters")
    if isinstance(message, messages.Operate) and len(message.id) > ORDER_ID_BYTES_MAX:
        raise OutOfBounds(f"the id of an order has {len(message.id)} bytes, of at most {ORDER_ID_BYTES_MAX}")
    for name, allowed in REQUEST_CHOICES.get(type(message), {}).items():
        if (text := getattr(message, name)) not in allowed:
            kind, listed = type(message).__name__, ", ".join(map(repr, allowed))
            raise OutOfBounds(f"{kind}.{name} is {text!r:.100}, which is none of {listed}")
