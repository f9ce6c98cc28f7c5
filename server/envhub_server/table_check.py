"""The check of what an operator says, by a file or by the command line, against the tables that take it.

A table is a dataclass whose annotations are those of ``envhub.option_kinds``. An error is one line: where the value is,
as the operator wrote it, the value, and what is allowed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from envhub.option_kinds import Kind, allowed, kinds_of, options_of
from envhub_server.byte_count import byte_count
from envhub_server.toml_text import key_text, value_text

Hint = Callable[[str, Any], str]
Table = TypeVar("Table")


class TableError(ValueError):
    """A table has a key or a value that is not allowed."""


@dataclass(frozen=True)
class Spot:
    """Place of a value in a file.

    Attributes:
        table: the text before the key: the file, and the table's heading.
        folder: the folder of paths that are not absolute.
        key: as it is written there; empty for the table itself.
    """

    table: str
    folder: Path = Path()
    key: str = ""

    def __str__(self) -> str:
        return f"{self.table}{self.key}"

    def of_key(self, name: str) -> Spot:
        """Return the spot of a key of the table that is here."""
        return replace(self, key=f"{self.key}.{key_text(name)}" if self.key else key_text(name))

    def of_item(self, index: int) -> Spot:
        """Return the spot of an item of the list that is here."""
        return replace(self, key=f"{self.key}[{index}]")

    def refuse(self, value: object, why: str) -> TableError:
        """Return the error for this value."""
        return TableError(f"{self} = {value_text(value)}: {why}")


class ArgumentSpot(Spot):
    """Place of a value on the command line."""

    def of_key(self, name: str) -> Spot:
        """Return the spot of an option, or of an option of the table that is here."""
        option = name.replace("_", "-")
        return replace(self, key=f"{self.key}.{option}" if self.key else f"--{option}")

    def of_item(self, index: int) -> Spot:
        """Return the spot of the option, which may be given more than once."""
        return self


def table_from(
    table: Mapping[str, Any], kind: Callable[..., Table], spot: Spot, hint: Hint = lambda name, value: ""
) -> Table:
    """Return the table as one of this kind; arguments and errors are those of ``values_from``.

    Raises:
        TableError: also where a key is missing, or values do not go together.
    """
    values, options = values_from(table, kind, spot, hint), options_of(kind)
    if missing := [name for name, option in options.items() if option.default is MISSING and name not in values]:
        raise TableError(f"{_place(spot)}{missing[0]} is missing. Keys here are: {', '.join(options)}")
    try:
        return kind(**values)
    except ValueError as error:
        raise TableError(f"{_place(spot)}{error}") from error


def values_from(table: Mapping[str, Any], kind: Any, spot: Spot, hint: Hint = lambda name, value: "") -> dict[str, Any]:
    """Return the values of the keys that a table has, as its fields take them.

    Args:
        table: as it was read.
        kind: a dataclass; its fields are the keys, and their annotations say what is allowed.
        spot: where the table is.
        hint: of an unknown key and its value, what to say in place of the nearest key; empty for that.

    Raises:
        TableError: with the first key or value that is not allowed.
    """
    options = options_of(kind)
    for name, value in table.items():
        if name not in options:
            raise TableError(_unknown(name, list(options), spot, hint(name, value)))
    return {name: _read(value, options[name].annotation, spot.of_key(name)) for name, value in table.items()}


def check(table: Any, kind: type) -> None:
    """Check the values of a table that a program has made.

    Raises:
        TableError: with the first value that is not allowed.
    """
    values = {name: value for name in options_of(kind) if (value := getattr(table, name)) is not None}
    values_from(msgspec.to_builtins(values, enc_hook=str), kind, Spot(""))


def _place(spot: Spot) -> str:
    return f"{spot}: " if spot.key else spot.table


def _unknown(name: str, options: Sequence[str], spot: Spot, hint: str) -> str:
    nearest = get_close_matches(name.casefold().replace("-", "_"), options, 1)
    question = hint or (f", did you mean {nearest[0]!r}?" if nearest else ".")
    return f"{_place(spot)}unknown key {name!r}{question} Keys here are: {', '.join(options)}"


def _read(value: Any, annotation: Any, spot: Spot) -> Any:
    """Return the value as its field takes it."""
    if value is None and type(None) in get_args(annotation):  # of a program: no file has it
        return None
    for kind in kinds_of(annotation):
        if isinstance(value, dict) and kind.is_table:
            return table_from(value, kind.base, spot)
        if isinstance(value, dict) and kind.value is not None:
            name_kind, value_kind = get_args(kind.base)
            return {
                _read(name, name_kind, spot.of_key(name)): _read(each, value_kind, spot.of_key(name))
                for name, each in value.items()
            }
        if isinstance(value, (list, tuple)) and kind.item is not None:
            return _read_list(value, kind, spot)
        with suppress(msgspec.ValidationError):
            return _read_one(value, kind, spot)
    raise spot.refuse(value, f"expected {allowed(annotation)}{_meant(value, annotation)}")


def _read_list(values: Sequence[Any], kind: Kind, spot: Spot) -> tuple[Any, ...]:
    items = tuple(_read(each, kind.item, spot.of_item(index)) for index, each in enumerate(values))
    twice = [each for each, times in Counter(items).items() if times > 1]
    if kind.distinct and twice:
        raise spot.refuse(values, f"{value_text(twice[0])} is given twice")
    return items


def _read_one(value: Any, kind: Kind, spot: Spot) -> Any:
    """Return a value that is no table and no list.

    Raises:
        msgspec.ValidationError: it is of another kind, or out of bounds.
        TableError: a text cannot be read; the error has that text itself, unless it may have a key in it.
    """
    if kind.is_table or kind.item is not None or kind.value is not None:
        raise msgspec.ValidationError
    if kind.unit == "bytes" and isinstance(value, str):
        with suppress(ValueError):  # it is no number then
            value = byte_count(value)
    base = str if kind.base is Path else kind.base
    converted = msgspec.convert(str(value) if isinstance(value, Path) else value, kind.limited(base))
    if kind.least is not None and 0 < converted < kind.least:
        raise msgspec.ValidationError
    if kind.read is None:
        return converted
    try:
        return kind.read(converted, spot.folder)
    except ValueError as error:
        raise TableError(f"{spot}: {error}") from error


def _meant(value: Any, annotation: Any) -> str:
    """Return the nearest of the words that are allowed, for one that is not."""
    words = [word for kind in kinds_of(annotation) if get_origin(kind.base) is Literal for word in get_args(kind.base)]
    nearest = get_close_matches(value.casefold(), words, 1) if isinstance(value, str) else []
    return f'; did you mean "{nearest[0]}"?' if nearest else ""
