"""Kinds of the values that an operator gives: an annotation says what is allowed, and how a text is read.

``msgspec.Meta`` of an annotation has the bounds of a number (``ge``, ``le``) and the help of an option
(``description``). Its ``extra`` has what msgspec does not know:

- ``unit``: of a number. ``bytes`` may be written with a unit, such as ``"2GB"``.
- ``least``: the smallest number besides 0, which then is no limit.
- ``read``: a function that makes the value of a text, and of the folder in which a path that is not absolute lies. It
  raises ``ValueError``.
- ``distinct``: true for a list in which nothing may be given twice.
"""

from __future__ import annotations

import os
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Callable, Literal, Mapping, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from envhub.protocol.validation import GPUS_MAX, HUB_NAME_CHARS_MAX, ROWS_MAX, SECONDS_MAX, is_function_name
from envhub.transport import address

PROCESSES_MAX = 1024  # workers or spares of a session, as many as it may have envs
CPUS_MAX = 1 << 16
BYTES_MIN = 16 << 20  # of memory, in which an interpreter just starts
BYTES_MAX = 1 << 50  # of memory or of files: a petabyte
EPISODES_MAX = 1 << 40
FILES_MAX = 1_000_000
COUNT_MAX = 1 << 50

SINGULAR = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", Path: "a path in quotes"}
PLURAL = {str: "strings", int: "whole numbers", float: "numbers", Path: "paths in quotes"}


# --- how a text is read -----------------------------------------------------------------------------------------------


def no_path(text: str) -> str:
    """Say why a text is no path; empty if it may be one."""
    if not text:  # in a file it would stand for the file's folder
        return "a path is not empty"
    return "a path is no URL" if "://" in text else ""


def read_path(text: str, folder: Path) -> Path:
    """Return the path that is written so, with ``~`` for a home folder.

    Raises:
        ValueError: the text is empty, is a URL, or names no path.
    """
    if why := no_path(text):
        raise ValueError(why)
    if "\0" in text:
        raise ValueError(f"{text!r} has a null character")
    try:
        return folder / Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text!r} begins with no known home folder") from error


def read_program(text: str, folder: Path) -> str:
    """Return a program: a path if the text is one or the folder has the program, or else a command.

    Raises:
        ValueError: the text names no path.
    """
    path = os.path.join(folder, read_path(text, Path())) if text else ""
    return path if "/" in text or os.path.exists(path) else text


def read_address(text: str, folder: Path) -> str:
    """Return an address to listen on.

    Raises:
        ValueError: it is none.
    """
    address.parse(text)
    return text


def parse_arguments(text: str) -> tuple[str, frozenset[str]]:
    """Return the pattern of names and the arguments of ``name=argument,argument``.

    Raises:
        ValueError: it is not of this form.
    """
    pattern, _, listed = text.rpartition("=")
    names = frozenset(listed.split(","))
    if not pattern or not all(map(str.isidentifier, names)):
        raise ValueError(f"{text!r} should read name=argument,argument")
    return pattern, names


def read_arguments(text: str, folder: Path) -> str:
    """Return a text that ``parse_arguments`` reads.

    Raises:
        ValueError: it does not.
    """
    parse_arguments(text)
    return text


def read_variable(text: str, folder: Path) -> str:
    """Return the name of a variable of the environment.

    Raises:
        ValueError: none can have this name.
    """
    if not text or "=" in text or "\0" in text:
        raise ValueError(f"{text!r} is no name of a variable: it is not empty, and has no '=' and no null character")
    return text


def read_variable_value(text: str, folder: Path) -> str:
    """Return the value of a variable of the environment.

    Raises:
        ValueError: none can have this value.
    """
    if "\0" in text:
        raise ValueError(f"{text!r} has a null character")
    return text


def read_name(text: str, folder: Path) -> str:
    """Return the name of a hub, or an empty text.

    Raises:
        ValueError: a hub cannot have this name.
    """
    if len(text) > HUB_NAME_CHARS_MAX or not (text.isascii() and text.isprintable()):
        limits = f"at most {HUB_NAME_CHARS_MAX} characters, printable and of ASCII"
        raise ValueError(f"{text!r:.200} is no name of a hub, which has {limits}")
    return text


def read_function(text: str, folder: Path) -> str:
    """Return the name of a function, or an empty text.

    Raises:
        ValueError: it is no name of a function.
    """
    if text and not is_function_name(text):
        raise ValueError(f"{text!r} names no function; expected module:function")
    return text


# --- kinds ------------------------------------------------------------------------------------------------------------


def bounded(low: int, high: int, unit: str = "") -> Meta:
    """Return the bounds of a number, and its unit."""
    return Meta(ge=low, le=high, extra={"unit": unit})


def read_by(function: Callable[[str, Path], Any]) -> Meta:
    """Return the way to read a text."""
    return Meta(extra={"read": function})


DISTINCT = Meta(extra={"distinct": True})
Address = Annotated[str, read_by(read_address)]
Arguments = Annotated[str, read_by(read_arguments)]
Bytes = Annotated[int, bounded(0, BYTES_MAX, "bytes")]
SomeBytes = Annotated[int, bounded(1, BYTES_MAX, "bytes")]
Count = Annotated[int, bounded(0, COUNT_MAX)]
Cpus = Annotated[int, bounded(1, CPUS_MAX, "CPUs")]
Envs = Annotated[int, bounded(1, ROWS_MAX, "envs")]
Function = Annotated[str, read_by(read_function)]
Gpu = Annotated[int, bounded(0, GPUS_MAX - 1)]
HubName = Annotated[str, read_by(read_name)]
Memory = Annotated[int, Meta(ge=0, le=BYTES_MAX, extra={"unit": "bytes", "least": BYTES_MIN})]
Program = Annotated[str, read_by(read_program)]
Seconds = Annotated[float, bounded(0, SECONDS_MAX, "seconds")]
Spares = Annotated[int, bounded(0, PROCESSES_MAX, "workers")]
VariableName = Annotated[str, read_by(read_variable)]
VariableValue = Annotated[str, read_by(read_variable_value)]
Workers = Annotated[int, bounded(1, PROCESSES_MAX, "workers")]


# --- what an annotation says ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One kind of value, of which an annotation has one or several.

    Attributes:
        base: the type.
        low, high: the bounds of a number; None for none.
        description: the help of an option; empty for none.
        unit, least, read, distinct: as in the module's text.
    """

    base: Any
    low: float | None = None
    high: float | None = None
    description: str = ""
    unit: str = ""
    least: int | None = None
    read: Callable[[str, Path], Any] | None = None
    distinct: bool = False

    def limited(self, base: Any) -> Any:
        """Return an annotation of this base with the bounds."""
        return base if self.high is None else Annotated[base, Meta(ge=self.low, le=self.high)]

    @property
    def is_table(self) -> bool:
        """True if the value is a table with options of its own."""
        return is_dataclass(self.base)

    @property
    def item(self) -> Any:
        """Annotation of the items of a list; None for no list."""
        return get_args(self.base)[0] if get_origin(self.base) is tuple else None

    @property
    def value(self) -> Any:
        """Annotation of the values of a table with any keys; None for no such table."""
        return get_args(self.base)[1] if get_origin(self.base) is dict else None

    @property
    def span(self) -> str:
        """The bounds as a text that begins with a space; empty for none."""
        if self.high is None:
            return ""
        low = self.low if self.least is None else self.least
        span = f" from {low:.0f} to {self.high:.0f}{self.unit and f' {self.unit}'}"
        span += "" if self.least is None else ", or 0 for no limit"
        return f'{span}, written such as 2000000000 or "2GB"' if self.unit == "bytes" else span

    def __str__(self) -> str:
        if get_origin(self.base) is Literal:
            return " or ".join(f'"{each}"' for each in get_args(self.base))
        if self.item is not None:
            item = kind_of(self.item)
            return f"a list of {PLURAL[item.base]}{item.span}"
        if self.value is not None:
            return f"a table of {PLURAL[kind_of(self.value).base]}"
        if self.is_table:
            return f"a table of {', '.join(options_of(self.base))}"
        return f"{SINGULAR[self.base]}{self.span}"


def kind_of(annotation: Any) -> Kind:
    """Return the kind that an annotation without alternatives says."""
    if get_origin(annotation) is not Annotated:
        return Kind(annotation, read=read_path if annotation is Path else None)
    base, *metas = get_args(annotation)
    extra = {name: value for meta in metas for name, value in (meta.extra or {}).items()}
    described = replace(kind_of(base), **extra)
    for meta in metas:
        if meta.ge is not None:
            described = replace(described, low=meta.ge, high=meta.le)
        if meta.description is not None:
            described = replace(described, description=meta.description)
    return described


def kinds_of(annotation: Any) -> list[Kind]:
    """Return the kinds that an annotation allows, besides None."""
    whole = kind_of(annotation)
    if get_origin(whole.base) in (Union, types.UnionType):
        return [kind_of(each) for each in get_args(whole.base) if each is not type(None)]
    return [whole]


def allowed(annotation: Any) -> str:
    """Describe the values that an annotation allows."""
    return ", or ".join(map(str, kinds_of(annotation)))


@dataclass(frozen=True)
class Option:
    """A key of a table.

    Attributes:
        annotation: of the field.
        default: ``dataclasses.MISSING`` where it has to be given.
    """

    annotation: Any
    default: Any

    @property
    def description(self) -> str:
        """The help of the option."""
        return kind_of(self.annotation).description

    @property
    def default_text(self) -> str:
        """The default of a number with its unit; empty where the description says what happens without one."""
        if isinstance(self.default, bool) or not isinstance(self.default, (int, float)) or not self.default:
            return ""
        kind = next(kind for kind in kinds_of(self.annotation) if kind.high is not None)
        return _bytes_text(self.default) if kind.unit == "bytes" else f"{self.default:,.10g}"


def _bytes_text(count: float) -> str:
    for power, unit in enumerate(("GiB", "MiB", "KiB")):
        size = 1 << (30 - 10 * power)
        if count % size == 0:
            return f"{count / size:,.0f} {unit}"
    return f"{count:,.0f}"


@cache
def options_of(table: Any) -> Mapping[str, Option]:
    """Return the keys of a table, which is a dataclass, by their names."""
    hints = get_type_hints(table, include_extras=True)
    return {
        each.name: Option(hints[each.name], each.default if each.default_factory is MISSING else each.default_factory())
        for each in fields(table)
    }
