"""The manifests are valid, agree with one another, and suit the image and the hub's file."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from envhub_server.config import HubConfig
from envhub_server.serve import check_config
from image_files import HEALTH, config, instruction
from manifests import FILES, FOLDER, KUSTOMIZATION, container, objects, one, pod, probes, trainer
from pages import blocks

from envhub.transport import address

VERSIONS = ["1.25", kubernetes_validate.latest_version()]  # the oldest that the page names
PAGE = FOLDER / "README.md"
README = PAGE.read_text()
UNIT = {"Mi": 2**20, "Gi": 2**30}
SPARE_S = 5  # of the grace period, for a kubelet and a hub that are slow


def check(manifest: dict[str, Any], version: str) -> None:
    """Raise for a kind that the version does not have, and for a field that the kind does not have."""
    kubernetes_validate.validate(manifest, version, strict=True)


def size(text: str) -> int:
    return int(text[:-2]) * UNIT[text[-2:]]


@pytest.fixture
def hub() -> HubConfig:
    """Configuration of the hub in a pod, by the pod's arguments and the file in its ConfigMap."""
    arguments = container()["args"]
    assert arguments[:2] == ["serve", "--config"] and mounts()[arguments[2]]["subPath"] == "hub.toml"
    return config([*arguments[:2], str(FOLDER / "hub.toml"), *arguments[3:]])


def mounts() -> dict[str, dict[str, Any]]:
    return {each["mountPath"]: each for each in container()["volumeMounts"]}


def volume(path: str) -> dict[str, Any]:
    """Return the volume that is mounted at a path."""
    (found,) = (each for each in pod()["volumes"] if each["name"] == mounts()[path]["name"])
    return dict(found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_manifest_is_valid(file: Path, version: str) -> None:
    assert objects(file)
    for manifest in objects(file):
        check(manifest, version)


# --- with one another -------------------------------------------------------------------------------------------------


def test_kustomization_lists_every_manifest() -> None:
    assert {*KUSTOMIZATION} == {"apiVersion", "kind", "resources", "configMapGenerator", "images"}
    assert KUSTOMIZATION["kind"] == "Kustomization"
    others = {FOLDER / "kustomization.yaml", FOLDER / "trainer.yaml"}
    assert sorted(FILES) == sorted({*FOLDER.glob("*.y*ml")} - others)


def test_kustomization_makes_the_config_map_and_sets_the_image() -> None:
    (generator,) = KUSTOMIZATION["configMapGenerator"]
    assert generator == {"name": volume(container()["args"][2])["configMap"]["name"], "files": ["hub.toml"]}
    (image,) = KUSTOMIZATION["images"]
    assert image["name"] == container()["image"] and {*image} == {"name", "newName", "newTag"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_kustomization() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    found = [*yaml.safe_load_all(built.stdout)]
    for manifest in found:
        check(manifest, VERSIONS[-1])
    by_kind = {each["kind"]: each for each in found}
    assert by_kind.keys() == {"ConfigMap", *(each["kind"] for file in FILES for each in objects(file))}
    assert by_kind["ConfigMap"]["data"] == {"hub.toml": (FOLDER / "hub.toml").read_text()}
    volumes = by_kind["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
    assert {"configMap": {"name": by_kind["ConfigMap"]["metadata"]["name"]}, "name": "config"} in volumes


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_commands_of_the_page_make_the_secrets_that_are_mounted(tmp_path: Path) -> None:
    (block,) = (each for each in blocks("sh", [PAGE]) if "generic hub-key" in each)
    without_cluster = (
        'kubectl() { echo ---; [ "$1" != create ] || command kubectl "$@" --dry-run=client --output=yaml; }'
    )
    program = f"{without_cluster}\n{block}"
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", "-ec", program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    made = [each for each in yaml.safe_load_all(ran.stdout) if each]
    secrets = {each["metadata"]["name"]: each["data"] for each in made if each["kind"] == "Secret"}
    files = {"hub-key": ["server.key"], "hub-clients": ["trainer.toml"], "trainer": ["hubs"]}
    assert {name: [*data] for name, data in secrets.items()} == files
    assert base64.b64decode(secrets["trainer"]["hubs"]).endswith(b"@hubs:5555\n")


def test_each_manifest_selects_the_hubs_pods() -> None:
    labels = one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert one("StatefulSet")["spec"]["selector"]["matchLabels"] == labels
    assert one("Service")["spec"]["selector"] == labels
    assert one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    (spread,) = pod()["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels


def test_pods_have_names_by_a_headless_service() -> None:
    service = one("Service")
    assert service["metadata"]["name"] == one("StatefulSet")["spec"]["serviceName"]
    assert service["spec"]["clusterIP"] == "None"


def test_port_is_that_of_the_image_everywhere(hub: HubConfig) -> None:
    (port,) = container()["ports"]
    (served,) = one("Service")["spec"]["ports"]
    (rule,) = one("NetworkPolicy")["spec"]["ingress"]
    assert port["containerPort"] == served["port"] == int(instruction("EXPOSE"))
    assert served["targetPort"] == port["name"] and rule["ports"] == [{"port": port["name"]}]
    assert [address.parse(bind).port for bind in hub.bind if bind.startswith("tcp:")] == [port["containerPort"]]


def test_pods_with_the_label_of_the_page_reach_the_hubs_alone() -> None:
    spec = one("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"] and spec["egress"] == []
    (rule,) = spec["ingress"]
    ((key, value),) = rule["from"][0]["podSelector"]["matchLabels"].items()
    assert len(rule["from"]) == 1 and f'{key}: "{value}"' in (FOLDER / "trainer.yaml").read_text()


def test_trainer_of_the_page_is_valid_and_reaches_the_hubs() -> None:
    job = trainer()
    for version in VERSIONS:
        check(job, version)
    (rule,) = one("NetworkPolicy")["spec"]["ingress"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    (address,) = (each["secret"] for each in job["spec"]["template"]["spec"]["volumes"] if "secret" in each)
    assert f"kubectl create secret generic {address['secretName']} " in README


# --- with the image and the hub ---------------------------------------------------------------------------------------


def test_pod_is_run_by_the_user_of_the_image_without_rights() -> None:
    user, group = map(int, instruction("USER").split(":"))
    assert pod()["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "fsGroup": group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["automountServiceAccountToken"] is False
    assert "command" not in container()  # the image's entry point is tini, which passes SIGTERM on
    assert json.loads(instruction("ENTRYPOINT"))[0] == "tini"


def test_probes_ask_as_the_image_does_where_the_hub_listens(hub: HubConfig) -> None:
    assert probes() == dict.fromkeys(["startupProbe", "readinessProbe", "livenessProbe"], HEALTH)
    assert HEALTH[2] in hub.bind
    for name in probes():
        assert container()[name]["timeoutSeconds"] > int(HEALTH[-1])


def test_hub_drains_within_the_grace_period(hub: HubConfig) -> None:
    assert instruction("STOPSIGNAL") == "SIGTERM" and "lifecycle" not in container()
    most_s = hub.drain_timeout + hub.drain_close_timeout
    assert most_s + SPARE_S <= pod()["terminationGracePeriodSeconds"]


def test_hub_finds_its_keys_which_only_its_group_can_read(hub: HubConfig) -> None:
    key, clients = f"{hub.keys}/server.key", f"{hub.keys}/clients"
    assert mounts()[key]["subPath"] == "server.key" and "subPath" not in mounts()[clients]
    for path, name in ((key, "hub-key"), (clients, "hub-clients")):
        secret = volume(path)["secret"]
        assert secret["secretName"] == name and secret["defaultMode"] == 0o440
        assert re.search(rf"kubectl create secret generic {name} ", README)
    assert not hub.insecure


def test_hub_writes_to_an_empty_folder_only(hub: HubConfig) -> None:
    (written,) = (each for each in pod()["volumes"] if "emptyDir" in each)
    (path,) = (path for path in mounts() if volume(path) == written)
    assert instruction("RUN useradd").split("--home-dir ")[1].split()[0] == path == "/tmp"
    assert address.parse(HEALTH[2]).path.startswith(f"{path}/")
    assert written["emptyDir"]["medium"] == "Memory"
    assert 2 * hub.replays_bytes_max <= size(written["emptyDir"]["sizeLimit"])


def test_limits_are_the_requests() -> None:
    resources = container()["resources"]
    assert resources["requests"] == resources["limits"] and {*resources["limits"]} == {"cpu", "memory"}
    assert int(resources["limits"]["cpu"]) > 0 and size(resources["limits"]["memory"]) >= 2**30


def test_hub_offers_what_the_image_offers(hub: HubConfig) -> None:
    check_config(hub)
    assert {*hub.tables} == {*config(json.loads(instruction("CMD"))).envs}
