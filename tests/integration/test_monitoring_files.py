"""The files for Prometheus and Grafana agree with the metrics and with one another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from pages import ROOT

FOLDER = ROOT / "docker/monitoring"
METRICS = ROOT / "server/envhub_server/web/metrics.py"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "envhub.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
PROMTOOL = shutil.which("promtool")


def test_metrics_that_are_named_exist() -> None:
    exist = {*re.findall(r'"(envhub_[a-z0-9_]+)"', METRICS.read_text())}
    for name, texts in {"dashboard": EXPRESSIONS, "alerts": [(FOLDER / "alerts.yml").read_text()]}.items():
        named = {metric for text in texts for metric in re.findall(r"\benvhub_[a-z0-9_]+", text)}
        assert named and named <= exist, (name, named - exist)


def test_panels_of_the_dashboard_stand_side_by_side() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not own & cells, panel["title"]
        cells |= own
    assert all("$instance" in expression for expression in EXPRESSIONS)


def test_compose_mounts_what_is_there() -> None:
    compose = (FOLDER / "compose.yaml").read_text()
    mounted = re.findall(r"- \./(\S+):\S+:ro", compose)
    assert mounted and all((ROOT / "docker" / path).is_file() for path in mounted)
    web = re.search(r"ENVHUB_WEB: \S+:(\d+)", compose)
    assert web is not None and f'targets: ["hub:{web[1]}"]' in (FOLDER / "prometheus.yml").read_text()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--syntax-only", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_understands_the_files(arguments: tuple[str, ...]) -> None:
    ran = subprocess.run([str(PROMTOOL), *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_understands_every_expression_of_the_dashboard(tmp_path_factory: pytest.TempPathFactory) -> None:
    variables = {"$__rate_interval": "1m", "$instance": ".*"}
    rules = []
    for number, expression in enumerate(EXPRESSIONS):
        for name, value in variables.items():
            expression = expression.replace(name, value)
        rules.append({"record": f"panel:{number}", "expr": expression})
    file = tmp_path_factory.mktemp("rules") / "rules.yml"  # JSON is YAML, too
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    ran = subprocess.run([str(PROMTOOL), "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
