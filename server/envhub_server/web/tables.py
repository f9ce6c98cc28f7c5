"""Tables and charts of the page, and the texts in them, made of rows that the hub answers with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nicegui import ui
from nicegui.element import Element

from envhub.diagnosis import Finding
from envhub_server.web.contents import HUB
from envhub_server.web.metrics import Row, client_of

# By format of a value, which rows.js has, the fields that have it; all others are texts.
UNITS = {
    "bytes": ("memory_bytes",),
    "ms": ("p50", "p99", "env_p99", "ms"),
    "number": ("num_envs", "steps_per_s", "cpu", "restarts", "steps"),
    "seconds": ("idle_s", "age_s", "since_s", "ended_s", "ago_s"),
}
LABELS = {"num_envs": "Envs", "steps_per_s": "Steps/s", "p50": "Step p50", "p99": "Step p99", "env_p99": "Env p99"}
LABELS |= {"cpu": "CPUs", "memory_bytes": "Memory", "idle_s": "Idle", "age_s": "Age", "pid": "Process", "doing": "Does"}
LABELS |= {"since_s": "Since", "ended_s": "Ended ago", "how": "Envs were", "ago_s": "Ago", "ms": "Took"}
SESSIONS = (
    *("session", "trouble", "env", "client", "num_envs", "phase", "steps_per_s", "p50", "p99", "env_p99", "cpu"),
    *("memory_bytes", "restarts", "idle_s", "age_s"),
)
WORKERS = "worker", "pid", "envs", "doing", "since_s", "env_p99", "cpu", "memory_bytes", "restarts"
ENDED = "session", "env", "client", "ended_s", "by", "why", "how", "age_s", "steps", "restarts"
SLOW = "session", "env", "worker", "envs", "verb", "ms", "ago_s"
REPLAYS = "name", "time", "failure"


class RowTable(Element, component="rows.js"):
    """A table; fields of its rows have the columns."""

    def __init__(self, fields: Iterable[str], key: str, empty: str) -> None:
        super().__init__()
        units = {field: unit for unit, fields in UNITS.items() for field in fields}
        labels = {field: LABELS.get(field) or field.replace("_", " ").capitalize() for field in fields}
        columns = [{"name": field, "label": label, "unit": units.get(field)} for field, label in labels.items()]
        self._props.update({"columns": columns, "rows": [], "row-key": key, "empty": empty, "filter": ""})

    def show(self, rows: Sequence[Row]) -> None:
        self._props["rows"] = rows

    def choose(self, text: str) -> None:
        self._props["filter"] = text


def session_row(row: Row, troubles: Sequence[Finding]) -> dict[str, Any]:
    texts = {each.trouble: str(each) for each in troubles if each.session == row["session"]}
    return {
        **{name: row.get(name) for name in (*SESSIONS, *ENDED)},
        "env": " · ".join(filter(None, (row["label"], row["env"]))),
        "client": client_of(row),
        **row["step_ms"],
        "env_p99": row["env_ms"]["p99"],
        "trouble": ", ".join(texts),
        "why_trouble": "\n".join(texts.values()),
    }


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def worker_rows(sessions: Iterable[Row]) -> list[dict[str, Any]]:
    return [
        {
            **{name: each.get(name) for name in WORKERS},
            "session": session["session"],
            "key": f"{session['session']}-{each['pid']}",
            "envs": listed(each["envs"]),
            "doing": each["doing"] + ("" if each["env"] is None else f" of env {each['env']}"),
            "env_p99": each["env_ms"]["p99"],
        }
        for session in sessions
        for each in session["processes"]
    ]


def facts_of(row: Row) -> dict[str, str]:
    """Facts of a session that the tables do not have, or that stand out."""
    owner, steps = row["owner"], f"{row['steps']:,}"
    if row["steps_per_s"] is not None:
        steps += f", {row['steps_per_s']:,.0f}/s"
    facts = {
        "env": f"{row['env']} x {row['num_envs']}",
        "label": row["label"],
        "arguments": row["kwargs"],
        "client": " ".join(str(owner[each]) for each in ("key", "user", "host") if owner.get(each)),
        "program": " ".join(str(owner[each]) for each in ("program", "pid") if owner.get(each)),
        "phase": row["phase"] + (", its client is out of reach" if row["leased"] else ""),
        "lane": row["lane"],
        "steps": steps,
        "restarts, recycled": f"{row['restarts']}, {row['recycled']}",
        "workers": row["sizing"],
    }
    if "by" in row:
        facts["ended"] = f"{row['ended_s']:.0f} s ago by {row['by']}: {row['why']}; its envs were {row['how']}"
    return {name: text for name, text in facts.items() if text}


def log_text(line: Row) -> str:
    head = ("timestamp", "event", "level")
    rest = " ".join(f"{name}={value}" for name, value in line.items() if name not in head)
    return f"{str(line.get('timestamp', ''))[11:19]} {line.get('event', '')} {rest}"


# By title of a chart, its lines, each with its field of the history and a factor.
CURVES: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "Steps per second": {"steps/s": ("steps_per_s", 1)},
    "Milliseconds of a step": {"p50": ("p50_ms", 1), "p99": ("p99_ms", 1), "env's p99": ("env_p99_ms", 1)},
    "CPUs": {"CPUs": ("cpu", 1)},
    "Memory of workers in GB": {"GB": ("memory_bytes", 1e-9)},
}


class Curves:
    """The charts of one session, or of the hub: sums, and times of its slowest session."""

    def __init__(self, session: str = HUB) -> None:
        self._charts = []
        with ui.element("div").classes("curves"):
            for title, lines in CURVES.items():
                with ui.card().props("flat bordered").classes("q-pa-sm").style("gap: 4px"):
                    note = ", of the slowest session" if session == HUB and len(lines) > 1 else ""
                    ui.label(title + note).classes("text-weight-medium")
                    self._charts.append((ui.echart(_chart(lines)).style("height: 190px; width: 100%"), lines))

    def show(self, curves: Mapping[str, Sequence[Sequence[float | None]]]) -> None:
        for chart, lines in self._charts:
            for series, (field, factor) in zip(chart.options["series"], lines.values(), strict=True):
                points = curves[field]
                series["data"] = [[at, None if value is None else round(value * factor, 4)] for at, value in points]
                chart.options["xAxis"]["min"] = min(-1, math.floor(points[0][0] or 0) if points else 0)
            chart.update()


def _chart(lines: Iterable[str]) -> dict[str, Any]:
    gray, faint = {"color": "#888"}, {"lineStyle": {"color": "rgba(128,128,128,.25)"}}
    series = [{"type": "line", "name": name, "showSymbol": False, "data": []} for name in lines]
    label = {**gray, "formatter": "{value} min", "hideOverlap": True}
    return {
        "animation": False,
        "color": ["#1e88e5", "#fb8c00", "#8e6cc0"],
        "grid": {"left": 8, "right": 26, "top": 26 if len(series) > 1 else 10, "bottom": 4, "containLabel": True},
        "legend": {"show": len(series) > 1, "textStyle": gray, "top": 0, "icon": "roundRect"},
        "tooltip": {"trigger": "axis"},
        "xAxis": {"type": "value", "min": -1, "max": 0, "axisLabel": label, "splitLine": faint},
        "yAxis": {"type": "value", "min": 0, "axisLabel": gray, "splitLine": faint},
        "series": series,
    }
