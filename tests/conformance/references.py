"""Writes the references in the pages: options, from what takes them, and the public names, from their docstrings.

cd tests && python -m conformance.references
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from conformance.option_keywords import OF_A_SESSION, described
from envhub_client.make import make_vec
from envhub_client.session.options import FaultOptions, HostingOptions
from envhub_server.catalog.registry import EnvSettings

import envhub
from envhub.options import HubOptions, kinds_of
from envhub.options import described as described_with_default

ROOT = Path(__file__).parents[2]
PAGES = (*(ROOT / f"client/docs/{name}.md" for name in ("api", "failures", "options")), ROOT / "server/docs/options.md")
REFERENCE = re.compile(r"(<!-- (\w+), written by tests/conformance/references\.py -->\n)(.*?)(<!-- end -->)", re.S)
INTERNAL = ("close_extras", "drop_pending", "refuse_reward_axes")  # methods for EnvHub's own modules


def updated(page: str) -> str:
    """The text of a page with its references as the code has them."""
    return REFERENCE.sub(lambda found: f"{found[1]}\n{REFERENCES[found[2]]()}\n{found[4]}", page)


def reference(texts: Mapping[str, str], defaults: Mapping[str, str]) -> str:
    """A list with each text."""
    lines = [
        f"- `{name}`{defaults.get(name, '')}: {sentence(re.sub('`+', '`', text)).rstrip('.')}."
        for name, text in texts.items()
    ]
    return "\n".join([*lines, ""])


def sentence(text: str) -> str:
    """The text with its first letter as at the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def value(default: Any) -> str:
    """A default as a program writes it."""
    return f" (`{default.value if hasattr(default, 'value') else default!r}`)"


def of_client(options: Any) -> str:
    """The fields of a dataclass of the client's."""
    return reference(described(options), {each.name: value(each.default) for each in dataclasses.fields(options)})


def of_make_vec() -> str:
    """The keywords of ``make_vec`` itself."""
    parameters = inspect.signature(make_vec).parameters
    names = ("hub", "split", "autoreset_mode", "info_mode", "env_kwargs", *OF_A_SESSION)
    texts = described(make_vec)
    return reference({name: texts[name] for name in names}, {name: value(parameters[name].default) for name in names})


def of_hub() -> str:
    """The options of ``envhub serve`` that are keys of its file."""
    return of_table(HubOptions)


def of_envs() -> str:
    """The keys of the table of an environment."""
    return of_table(EnvSettings)


def of_table(table: Any) -> str:
    """The keys of a table of a hub's file, with their help."""
    return reference({name: described_with_default(table, name) for name in kinds_of(table)}, {})


def of_functions() -> str:
    """The functions of ``envhub``."""
    functions = {name: each for name, each in public().items() if inspect.isfunction(each)}
    rows = [f"| `envhub.{name}` | {beginning(each)} |" for name, each in functions.items()]
    return "\n".join(["| function | |", "|---|---|", *rows, ""])


def of_classes() -> str:
    """The classes of ``envhub`` but its errors, each with its own public methods and properties."""
    classes = {name: each for name, each in public().items() if isinstance(each, type)}
    kept = {name: each for name, each in classes.items() if not issubclass(each, Exception)}
    rows = [
        f"| `envhub.{name}` | {beginning(each)} | {', '.join(f'`{member}`' for member in own_members(each))} |"
        for name, each in kept.items()
    ]
    return "\n".join(["| class | | its own members |", "|---|---|---|", *rows, ""]).replace("|  |", "| |")


def public() -> dict[str, Any]:
    """The public names of ``envhub`` that are functions or classes."""
    return {name: getattr(envhub, name) for name in envhub.__all__ if callable(getattr(envhub, name))}


def own_members(kind: type) -> dict[str, Any]:
    """The public methods and properties that a class has from EnvHub alone, and not from another public class."""
    if dataclasses.is_dataclass(kind):
        return {}  # its docstring has its fields
    classes = [each for each in public().values() if isinstance(each, type) and each is not kind]
    others = {base for each in classes if each in kind.__mro__ for base in each.__mro__}
    places = [vars(each) for each in kind.__mro__ if each.__module__.startswith("envhub") and each not in others]
    from_others = {name for each in kind.__mro__ if not each.__module__.startswith("envhub") for name in vars(each)}
    hidden = {*INTERNAL, *from_others}
    found = {name: each for place in reversed(places) for name, each in place.items() if name not in hidden}
    return {
        name: each
        for name, each in sorted(found.items())
        if not name.startswith("_") and isinstance(each, (FunctionType, property)) and inspect.getdoc(each)
    }


def beginning(documented: Any) -> str:
    """The first sentence of a docstring."""
    first = " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
    return re.sub("`+", "`", re.split(r"[.](?=\s|$)", first)[0]).replace("|", "\\|")


REFERENCES = {
    "functions": of_functions,
    "classes": of_classes,
    "session": of_make_vec,
    "hosting": lambda: of_client(HostingOptions),
    "faults": lambda: of_client(FaultOptions),
    "hub": of_hub,
    "envs": of_envs,
}


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(updated(path.read_text()))
