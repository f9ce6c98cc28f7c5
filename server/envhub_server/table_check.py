"""The check of what an operator says, by a file or by the command line, against the dataclasses that take it.

An error is one line: where the value is, as the operator wrote it, the value, and what is allowed there.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from envhub.transport import address
from envhub_server.byte_count import byte_count
from envhub_server.operator_bounds import BOUNDS, DISTINCT, OF_BYTES, NumberBounds
from envhub_server.toml_text import key_text, value_text

SINGULAR = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", Path: "a path in quotes"}
PLURAL = {str: "strings", int: "whole numbers", float: "numbers", Path: "paths in quotes"}
Hint = Callable[[str, Any], str]


class TableError(ValueError):
    """A table has a key or a value that is not allowed."""


def expanded(text: str) -> Path:
    """The path that is written so, with ``~`` for a home folder.

    Raises:
        ValueError: there is no such folder, or no path is written so.
    """
    if "\0" in text:
        raise ValueError(f"{text!r} has a null character")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text!r} begins with no known home folder") from error


def parse_arguments(text: str) -> tuple[str, frozenset[str]]:
    """The pattern of names and the arguments of ``name=argument,argument``.

    Raises:
        ValueError: it is not of this form.
    """
    pattern, _, listed = text.rpartition("=")
    names = frozenset(listed.split(","))
    if not pattern or not all(map(str.isidentifier, names)):
        raise ValueError(f"{text!r} should read name=argument,argument")
    return pattern, names


def parse_variable(text: str) -> str:
    """The name of a variable of the environment.

    Raises:
        ValueError: none can have this name.
    """
    if not text or "=" in text or "\0" in text:
        raise ValueError(f"{text!r} is no name of a variable: it is not empty, and has no '=' and no null character")
    return text


TEXTS: Mapping[str, Callable[[str], object]] = {
    "bind": address.parse,
    "allow_arguments": parse_arguments,
    "python": expanded,
    "record": expanded,
    "worker_env": parse_variable,
}


@dataclass(frozen=True)
class Spot:
    """Place of a value.

    Attributes:
        table: the text before the key: the file, and the table's heading.
        key: as it is written there; empty for the table itself.
        name: of the field that takes it, by which its bounds are found.
    """

    table: str
    key: str = ""
    name: str = ""

    def of_key(self, name: str) -> Spot:
        """The spot of a key of the table that is here."""
        return Spot(self.table, f"{self.key}.{key_text(name)}" if self.key else key_text(name), name)

    def of_item(self, index: int) -> Spot:
        """The spot of an item of the list that is here."""
        return Spot(self.table, f"{self.key}[{index}]", self.name)

    def refuse(self, value: object, why: str) -> TableError:
        """The error for this value."""
        return TableError(f"{self.table}{self.key} = {value_text(value)}: {why}")


def checked_table(
    table: Mapping[str, Any], kind: type, spot: Spot, hint: Hint = lambda name, value: ""
) -> dict[str, Any]:
    """The table, with bytes that have a unit as whole numbers, if it is one of this dataclass.

    Args:
        table: as it was read.
        kind: a dataclass; its fields are the keys, and their annotations say what is allowed.
        spot: where the table is.
        hint: of an unknown key and its value, what to say in place of the nearest key; empty for that.

    Raises:
        TableError: with the first key or value that is not allowed.
    """
    hints = get_type_hints(kind)
    allowed = [each.name for each in fields(kind)]
    for name, value in table.items():
        if name not in allowed:
            raise TableError(_unknown(name, allowed, spot, hint(name, value)))
    return {name: _checked(value, hints[name], spot.of_key(name)) for name, value in table.items()}


def check_options(options: Any, spelled: Callable[[str], str]) -> None:
    """Refuse options of the command line, whose types are checked already, that are out of their bounds.

    Args:
        options: a dataclass; None is an option that was not given.
        spelled: an option as the operator wrote it, by its name.

    Raises:
        TableError: with the first one.
    """
    hints = get_type_hints(type(options))
    for name, value in vars(options).items():
        spot = Spot("", spelled(name), name)
        if is_dataclass(value):
            check_options(value, lambda inner, outer=name: spelled(f"{outer}.{inner}"))  # type: ignore[misc]
        elif isinstance(value, list):
            for each in value:
                _check_one(each, get_args(_list_of(hints[name]))[0], spot)
            _check_distinct(value, spot)
        else:
            _check_one(value, hints[name], spot)


def _list_of(hint: Any) -> Any:
    return next(each for each in _alternatives(hint) if get_origin(each) is list)


def _unknown(name: str, allowed: Sequence[str], spot: Spot, hint: str) -> str:
    nearest = get_close_matches(name.casefold().replace("-", "_"), allowed, 1)
    question = hint or (f", did you mean {nearest[0]!r}?" if nearest else ".")
    where = f"{spot.table}{spot.key}: " if spot.key else spot.table
    return f"{where}unknown key {name!r}{question} Keys here are: {', '.join(allowed)}"


def _checked(value: Any, hint: Any, spot: Spot) -> Any:
    """The value, if it fits the annotation."""
    if isinstance(value, str) and spot.name in OF_BYTES:
        with suppress(ValueError):  # it is refused below
            value = byte_count(value)
    fit = next((each for each in _alternatives(hint) if _fits(value, each)), None)
    if fit is None:
        raise spot.refuse(value, f"expected {_described(hint, spot.name)}{_meant(value, hint)}")
    if is_dataclass(fit):
        value = checked_table(value, fit, spot)  # type: ignore[arg-type]
    elif get_origin(fit) is dict:
        for name, each in value.items():
            _checked(each, get_args(fit)[1], replace(spot.of_key(name), name=""))  # no field has this name
    elif get_origin(fit) in (list, tuple):
        for index, each in enumerate(value):
            _checked(each, get_args(fit)[0], spot.of_item(index))
        _check_distinct(value, spot)
    _check_one(value, hint, spot)
    return value


def _check_one(value: Any, hint: Any, spot: Spot) -> None:
    """Refuse a number out of its bounds, and a text that is not of its form."""
    bounds = BOUNDS.get(spot.name)
    if bounds is not None and isinstance(value, (int, float)) and not bounds.admits(value):
        raise spot.refuse(value, f"expected {_described(hint, spot.name)}")
    is_path = Path in _alternatives(hint)
    if is_path and value == "":  # in a file it would stand for the file's folder
        raise spot.refuse(value, "a path is not empty")
    check = expanded if is_path else TEXTS.get(spot.name)
    if check is None or not isinstance(value, str):
        return
    try:
        check(value)
    except ValueError as error:
        # It names the value itself, unless that may have a key in it.
        raise TableError(f"{spot.table}{spot.key}: {error}") from error


def _check_distinct(value: Any, spot: Spot) -> None:
    if spot.name in DISTINCT and isinstance(value, list):
        twice = [each for each, times in Counter(value).items() if times > 1]
        if twice:
            raise spot.refuse(value, f"{value_text(twice[0])} is given twice")


def _alternatives(hint: Any) -> Iterator[Any]:
    """The alternatives of an annotation, besides None."""
    if get_origin(hint) in (Union, types.UnionType):
        yield from (each for each in get_args(hint) if each is not type(None))
    else:
        yield hint


def _fits(value: Any, hint: Any) -> bool:
    """True if a value is of this kind, whatever it has inside."""
    origin = get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin in (list, tuple):
        return isinstance(value, list)
    if origin is dict or is_dataclass(hint):
        return isinstance(value, dict)
    wanted: Any = {float: (int, float), Path: str}.get(hint, hint)
    return isinstance(value, wanted) and isinstance(value, bool) == (hint is bool)


def _described(hint: Any, name: str) -> str:
    """Describe the values that an annotation allows."""
    return ", or ".join(_described_one(each, BOUNDS.get(name)) for each in _alternatives(hint))


def _described_one(hint: Any, bounds: NumberBounds | None) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(f'"{each}"' for each in get_args(hint) if each)
    if origin in (list, tuple):
        return f"a list of {PLURAL[get_args(hint)[0]]}{f' {bounds}' if bounds else ''}"
    if origin is dict:
        return f"a table of {PLURAL[get_args(hint)[1]]}"
    if is_dataclass(hint):
        return f"a table of {', '.join(each.name for each in fields(hint))}"
    return f"{SINGULAR[hint]}{f' {bounds}' if bounds and hint in (int, float) else ''}"


def _meant(value: Any, hint: Any) -> str:
    """The nearest of the words that are allowed, for one that is not."""
    words = [word for each in _alternatives(hint) if get_origin(each) is Literal for word in get_args(each)]
    nearest = get_close_matches(value.casefold(), words, 1) if isinstance(value, str) else []
    return f'; did you mean "{nearest[0]}"?' if nearest else ""
