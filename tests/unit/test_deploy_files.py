"""The image and the manifests of `deploy/` fit the code: settings, commands, ports, probes, versions and rights."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from memq import __version__
from memq.broker.identity.networks import TlsSettings
from memq.cli.commands import COMMANDS
from memq.settings import load_settings, parse_size, read_section

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
IMAGE = ROOT / "deploy" / "Containerfile"
UNIT = {"Mi": 1 << 20, "Gi": 1 << 30}
BEYOND_BUDGET = 400 << 20  # memory of a broker that is not in its budget, with a margin


def objects() -> Iterator[dict[str, Any]]:
    """Yield the objects of all manifests."""
    for path in sorted(MANIFESTS.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def one(kind: str, name: str) -> dict[str, Any]:
    """Return an object by its kind and name."""
    (found,) = [each for each in objects() if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


WITH_PODS = [each for each in objects() if "template" in each.get("spec", {})]
PODS = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in WITH_PODS}


def settings_file(folder: Path) -> Path:
    """Write the settings of the manifests to a file."""
    path = folder / "memq.toml"
    path.write_text(one("ConfigMap", "memq")["data"]["memq.toml"], encoding="utf-8")
    return path


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container, with a name and an address where the cluster puts them in."""
    found = {"NAMESPACE": "default"}
    for each in container.get("env", ()):
        value = each.get("value", "memq-broker-0" if each["name"] == "MEMQ_BROKER_ID" else "default")
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    return found


@pytest.mark.parametrize("pod", PODS)
def test_each_container_runs_a_command_with_known_settings(pod: str, tmp_path: Path) -> None:
    (container,) = PODS[pod]["containers"]
    assert container["image"] == f"memq:{__version__}"
    settings = load_settings({}, variables(container), config=settings_file(tmp_path))
    module, attribute, _ = COMMANDS[container["args"][0]]
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    command.make_context(container["args"][0], container["args"][1:], resilient_parsing=False)
    if pod == "memq-broker":
        broker = settings.broker()
        assert broker.advertise == "memq-broker-0.memq-broker.default.svc:9876"
        assert (broker.port, broker.http_port) == tuple(port["containerPort"] for port in container["ports"])
        assert broker.permissions
        assert not broker.insecure
        assert read_section("tls", settings.parts().section("tls"), TlsSettings).cert_file


@pytest.mark.parametrize("pod", PODS)
def test_each_container_has_no_rights_that_it_does_not_need(pod: str) -> None:
    (container,) = PODS[pod]["containers"]
    assert PODS[pod]["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claimed = {each["metadata"]["name"] for each in one("StatefulSet", "memq-broker")["spec"]["volumeClaimTemplates"]}
    assert mounted <= {volume["name"] for volume in PODS[pod]["volumes"]} | claimed


def test_a_broker_has_memory_for_its_budget_and_time_to_drain(tmp_path: Path) -> None:
    (container,) = PODS["memq-broker"]["containers"]
    number, unit = re.fullmatch(r"(\d+)(\w+)", container["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
    budget = parse_size(tomllib.loads(settings_file(tmp_path).read_text())["memory_bytes_max"])
    assert budget is not None
    assert int(number) * UNIT[unit] >= budget + BEYOND_BUDGET
    assert PODS["memq-broker"]["terminationGracePeriodSeconds"] >= 120


def test_probes_ask_for_pages_that_a_broker_has() -> None:
    (container,) = PODS["memq-broker"]["containers"]
    pages = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    code = (ROOT / "memq" / "broker" / "http.py").read_text(encoding="utf-8")
    assert pages == {"/healthz", "/readyz"}
    assert all(f'b"{page}"' in code for page in pages)


def test_the_image_installs_extras_that_exist_and_has_no_root() -> None:
    text = IMAGE.read_text(encoding="utf-8")
    (extras,) = re.findall(r"/source\[([\w,]+)\]", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert PODS["memq-broker"]["securityContext"]["runAsUser"] == 10001
