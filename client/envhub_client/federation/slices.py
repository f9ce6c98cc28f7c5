"""The rows of one hub, taken out of a request for all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from envhub.protocol.messages import Call, Reset, SetAttr, pack_rows, unpack_rows


def reset_of(reset: Reset, rows: range) -> Reset | None:
    """The reset of these rows, numbered from 0; None if its mask leaves all of them out."""
    mask = reset.mask[rows.start : rows.stop]
    if reset.mask and not any(mask):
        return None
    own = slice(rows.start, rows.stop)
    mask = [] if all(mask) else mask
    return replace(reset, seeds=reset.seeds[own], mask=mask, options_each=reset.options_each[own])


def call_of(call: Call, rows: range) -> Call | None:
    """The call of these rows, numbered from 0; None if it names some rows, and none of them."""
    if not call.rows:
        return call
    named = [row - rows.start for row in call.rows if row in rows]
    return replace(call, rows=named) if named else None


def set_attr_of(message: SetAttr, rows: range, num_envs: int) -> SetAttr | None:
    """The attribute of these rows of ``num_envs``, numbered from 0; None if it names some rows, and none of them."""
    named = message.rows or range(num_envs)
    places = [place for place, row in enumerate(named) if row in rows]
    if not places:
        return None
    values = message.values if len(message.values) == 1 else [message.values[place] for place in places]
    return SetAttr(message.name, values, [named[place] - rows.start for place in places] if message.rows else [])


def out_of_band_of(packed: bytes, parts: Sequence[range]) -> Iterator[bytes]:
    """The packed actions of the rows of each part, numbered from 0."""
    entries = unpack_rows(packed, parts[-1].stop)
    for rows in parts:
        yield pack_rows((row - rows.start, bytes(blob)) for row, blob in entries if row in rows)
