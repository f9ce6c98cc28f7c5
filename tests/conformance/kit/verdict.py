"""The verdict on a hub or a client by one rule."""

from __future__ import annotations

from dataclasses import dataclass

PASSED, FAILED, NOT_SHOWN = "passed", "failed", "not shown"


class Broken(AssertionError):
    """Why a rule was broken."""


class NotShown(Exception):
    """Why a rule could not be put to the test."""


@dataclass(frozen=True)
class Verdict:
    """``result`` is PASSED, FAILED or NOT_SHOWN; ``why`` is empty for what passed. The case of a hub is its env."""

    case: str
    rule: str
    result: str
    why: str = ""
