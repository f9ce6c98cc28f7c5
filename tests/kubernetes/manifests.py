"""The manifests of docker/kubernetes, as they lie there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from image_files import ROOT

FOLDER = ROOT / "docker" / "kubernetes"
KUSTOMIZATION: Mapping[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
FILES = [FOLDER / name for name in KUSTOMIZATION["resources"]]


def objects(file: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def one(kind: str) -> dict[str, Any]:
    """Return the one object of this kind."""
    (found,) = (each for file in FILES for each in objects(file) if each["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    """Return the spec of a hub's pod."""
    return dict(one("StatefulSet")["spec"]["template"]["spec"])


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def probes() -> dict[str, list[str]]:
    """Return the command of each probe, by the probe's name."""
    return {name: value["exec"]["command"] for name, value in container().items() if name.endswith("Probe")}


def trainer() -> dict[str, Any]:
    """Return the Job of the page."""
    return dict(yaml.safe_load((FOLDER / "trainer.yaml").read_text()))


def trainer_program() -> str:
    return (FOLDER / "trainer.py").read_text()
