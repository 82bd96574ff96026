"""The manifests of docs/howto/kubernetes.md: what refers to what, and whether commands are ones."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.compose import services
from tests.docs.commands import check
from tests.docs.pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "howto" / "kubernetes.md"
BLOCKS = list(blocks_of(PAGE))
MANIFESTS: dict[str, dict[str, Any]] = {
    f"{one['kind']}-{one['metadata']['name']}": one
    for block in BLOCKS
    if block.language == "yaml"
    for one in yaml.safe_load_all(block.text)
}
VERSIONS = {
    "Job": "batch/v1", "Deployment": "apps/v1", "StatefulSet": "apps/v1", "Service": "v1",
}  # fmt: skip
PODS = {name: one["spec"]["template"] for name, one in MANIFESTS.items() if "Service-" not in name}


def containers() -> Iterator[dict[str, Any]]:
    for pod in PODS.values():
        yield from pod["spec"]["containers"]


def commands() -> Iterator[str]:
    for one in containers():
        yield shlex.join(one["command"])
        for probe in ("livenessProbe", "readinessProbe"):
            words = one.get(probe, {}).get("exec", {}).get("command")
            if words:
                yield words[2] if words[:2] == ["sh", "-c"] else shlex.join(words)
    yield from re.findall(r"^\| .* \| `(celery [^`]+)` \|$", PAGE.read_text("utf-8"), re.MULTILINE)


def test_they_are_what_is_run() -> None:
    assert {*MANIFESTS} == {
        "Job-budget-init", "Deployment-relay", "StatefulSet-worker", "Deployment-dashboard",
        "Service-dashboard",
    }  # fmt: skip
    for one in MANIFESTS.values():
        assert one["apiVersion"] == VERSIONS[one["kind"]]


@pytest.mark.parametrize("command", list(dict.fromkeys(commands())))
def test_a_command_is_one_there_is(command: str) -> None:
    assert command.startswith("celery -A proj ")
    check(command)


def test_selectors_find_their_pods() -> None:
    labels = [pod["metadata"]["labels"] for name, pod in PODS.items() if "Job-" not in name]
    for name, one in MANIFESTS.items():
        selector = one["spec"].get("selector")
        if selector is not None:
            assert selector.get("matchLabels", selector) in labels, name
        elif "Job-" not in name:
            pytest.fail(f"{name} has no selector")


def test_ports_are_those_that_are_listened_on() -> None:
    for one in containers():
        words = one["command"]
        for port in one.get("ports", []):
            listened = [
                words[at + 1]
                for at, word in enumerate(words)
                if word.endswith("-port") or word == "--port"
            ]
            assert [str(port["containerPort"])] == listened
            host = [words[at + 1] for at, word in enumerate(words) if word.endswith("host")]
            assert host == ["0.0.0.0"]  # noqa: S104
        named = {port["name"] for port in one.get("ports", [])}
        if "readinessProbe" in one:
            assert one["readinessProbe"]["tcpSocket"]["port"] in named
    [port] = MANIFESTS["Service-dashboard"]["spec"]["ports"]
    [dashboard] = PODS["Deployment-dashboard"]["spec"]["containers"]
    assert port["targetPort"] in {one["name"] for one in dashboard["ports"]}


def test_the_spool_is_on_its_volume() -> None:
    manifest = MANIFESTS["StatefulSet-worker"]["spec"]
    claims = {one["metadata"]["name"] for one in manifest["volumeClaimTemplates"]}
    [worker] = manifest["template"]["spec"]["containers"]
    assert {one["name"] for one in worker["volumeMounts"]} == claims
    [set_] = [
        ast.literal_eval(block.text.partition(" = ")[2])
        for block in BLOCKS
        if block.text.startswith("app.conf.budget_spool")
    ]
    assert [one["mountPath"] for one in worker["volumeMounts"]] == [set_]


def test_pods_are_no_root_and_end_in_time_as_on_one_machine() -> None:
    for one in containers():
        assert one["securityContext"] == {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    # At least what docker-compose.yml gives.
    minutes = int(services["worker"]["stop_grace_period"].removesuffix("m"))
    worker = PODS["StatefulSet-worker"]["spec"]
    assert worker["terminationGracePeriodSeconds"] >= 60 * minutes
