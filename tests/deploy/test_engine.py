"""The compose project itself, where an engine and Compose are there to run it."""

from __future__ import annotations

import os
import shutil
import subprocess

import httpx
import pytest

from tests.cluster import eventually
from tests.deploy.compose import ROOT
from tests.services.base import free_port


def answers(*command: str) -> bool:
    try:
        return not subprocess.run(command, capture_output=True, timeout=30).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_project_comes_up_and_runs_a_request() -> None:
    if shutil.which("docker") is None or not answers("docker", "info"):
        pytest.skip("no Docker engine answers")
    if not answers("docker", "compose", "version"):
        pytest.skip("docker has no compose plugin")
    names = ("API", "DASHBOARD", "PROMETHEUS", "GRAFANA")
    ports = {f"{name}_PORT": str(free_port()) for name in names}
    project = ["docker", "compose", "--project-name", f"budget-test-{os.getpid()}"]
    options = {"cwd": ROOT, "env": {**os.environ, **ports}, "check": True}
    try:
        subprocess.run([*project, "up", "--build", "--detach", "--wait"], **options)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{ports['API_PORT']}",
            headers={"X-API-Key": "key-of-acme"},
            trust_env=False,
        ) as client:
            asked = client.post("/drafts", params={"prompt": "A haiku", "pages": 1})
            assert asked.status_code == 202
            place = asked.headers["Location"]
            eventually(lambda: client.get(place).json()["state"] == "succeeded", what="the draft")
        grafana = f"http://admin:local-only@127.0.0.1:{ports['GRAFANA_PORT']}"
        found = httpx.get(f"{grafana}/api/search?query=celery_budget", trust_env=False)
        assert found.status_code == 200
        query = f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}/api/v1/query?query=celery_budget_up"
        eventually(
            lambda: len(httpx.get(query, trust_env=False).json()["data"]["result"]) == 2,
            what="both targets",
        )
    finally:
        subprocess.run([*project, "down", "--volumes", "--timeout", "20"], **options)
