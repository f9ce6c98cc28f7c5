"""Bytes as an operator writes them: a whole number, or a number with a unit."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}B"], _UNITS[f"{_letter}IB"] = 1000**_power, 1024**_power
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?I?B|)", re.IGNORECASE)


def byte_count(text: str) -> int:
    """Return the bytes that ``text`` names, such as ``2GB`` (2,000,000,000), ``512MiB`` (536,870,912) or ``4096``.

    The units are B; KB, MB, GB and TB, powers of 1000; KiB, MiB, GiB and TiB, powers of 1024. Case does not matter.

    Raises:
        ValueError: it is no number, has another unit, or is no whole number of bytes.
    """
    found = _FORM.fullmatch(text.strip())
    count = Fraction(found[1]) * _UNITS.get(found[2].upper(), 0) if found else Fraction(0)
    if found is None or found[2].upper() not in _UNITS or count.denominator != 1:
        raise ValueError(f"{text!r} is no number of bytes; write it such as 2000000000, 2GB or 512MiB")
    return int(count)
