"""Events of the hub's log, as its calls have them, and the list that is made of them.

``python tests/support/logged_events.py`` writes the list of ``server/docs/monitoring.md``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# By the function whose first argument is an event: its levels.
LEVELS = {
    **{name: (name,) for name in ("debug", "info", "warning", "error")},
    "exception": ("error",),
    "warn": ("warning",),
    "notify": ("warning",),
    "json_line": ("info",),
    **dict.fromkeys(("tell", "log"), ()),  # variables that are one of two methods
}
BEGIN = "# Event: "
PAGE = ROOT / "server/docs/monitoring.md"
LIST = re.compile(r"(<!-- events, written by tests/support/logged_events\.py -->\n\n).*?(\n<!-- end -->)", re.S)
COMMON = ("session", "worker", "client", "host", "why", "note")  # fields of which the page says that any line may have


@dataclass
class Event:
    """An event: sentences of its calls, their levels, and the fields that they name."""

    sentences: list[str] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    once_per: set[tuple[str, ...]] = field(default_factory=set)

    def once(self) -> list[str]:
        """The fields of which equal ones have one line."""
        return [name for names in self.once_per for name in names]


@cache
def events() -> dict[str, Event]:
    """All events by name, in the order of the files."""
    found: dict[str, Event] = {}
    for file in sorted((ROOT / "server/envhub_server").rglob("*.py")):
        source = file.read_text()
        lines, tree = source.splitlines(), ast.parse(source)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: node.lineno):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name not in LEVELS or not call.args or not isinstance(call.args[0], ast.Constant):
                continue
            if not isinstance(text := call.args[0].value, str) or not re.fullmatch("[a-z_]+", text):
                continue
            event = found.setdefault(text, Event())
            event.sentences += sentences_above(lines, call.lineno - 1)
            event.levels += [level for level in levels_of(name, tree) if level not in event.levels]
            for keyword in call.keywords:
                if keyword.arg == "once_per":
                    event.once_per.add(tuple(ast.literal_eval(keyword.value)))
            named = [name for name in fields_of(call, tree) if name not in {*event.fields, "once_per", "exc_info"}]
            event.fields += dict.fromkeys(named)
    return found


def fields_of(call: ast.Call, tree: ast.Module) -> list[str]:
    """The fields that a call names by keywords, by a map, or by variables that are maps."""
    fields, maps = [], [*call.args[1:]]
    for keyword in call.keywords:
        if keyword.arg is not None:
            fields.append(keyword.arg)
        else:
            maps.append(keyword.value)
    for node in maps:
        if isinstance(node, ast.Name):
            maps += [value for value in values_of(node.id, tree) if not isinstance(value, ast.Name)]
        elif isinstance(node, ast.Dict):
            fields += [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return fields


def sentences_above(lines: list[str], at: int) -> list[str]:
    """The sentence in the comment above this line, if there is one."""
    first = at
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    comment = " ".join(line.strip().removeprefix("# ") for line in lines[first:at])
    return [comment.removeprefix(BEGIN.removeprefix("# "))] if comment.startswith(BEGIN.removeprefix("# ")) else []


def levels_of(name: str, tree: ast.Module) -> list[str]:
    """The levels of a function, or of those that a variable stands for."""
    if LEVELS[name]:
        return [*LEVELS[name]]
    attributes = {
        node.attr for value in values_of(name, tree) for node in ast.walk(value) if isinstance(node, ast.Attribute)
    }
    return sorted(attributes & {name for name in LEVELS if LEVELS[name]})


def values_of(name: str, tree: ast.Module) -> list[ast.expr]:
    """The values that the file assigns to a variable of this name."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    named = [(node.targets if isinstance(node, ast.Assign) else [node.target], node.value) for node in assigned]
    return [value for targets, value in named if value is not None and name in map(ast.unparse, targets)]


def updated(page: str) -> str:
    """The text of a page with the list of all events; fields of which equal ones have one line are bold."""
    written = "".join(
        f"- `{name}` ({' or '.join(event.levels)}{fields_text(event)}): {' '.join(event.sentences)}\n"
        for name, event in sorted(events().items())
    )
    return LIST.sub(lambda found: f"{found[1]}{written}{found[2]}", page)


def fields_text(event: Event) -> str:
    """The fields of an event, after its level, but those that any line may have."""
    once = event.once()
    names = [name for name in dict.fromkeys([*event.fields, *once]) if name in once or name not in COMMON]
    listed = ", ".join(f"**`{name}`**" if name in once else f"`{name}`" for name in names)
    return f"; {listed}" if listed else ""


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
