"""What docker-compose.yml runs, started here as processes: a request through all of them.

The commands, health checks and files are those of the compose file, in a folder that has what the
image has; servers, ports and volumes are this test's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import WAIT, eventually
from tests.deploy.compose import ROOT, copy_to, services
from tests.services.base import free_port
from tests.services.guardian import guardian

BIN = Path(sys.executable).parent
#: Which ports services listen on inside of their containers.
PORTS = {"api": "8000", "dashboard": "8765", "beat": "9464", "prometheus": "9090"}
PORT = re.compile(rf"\b({'|'.join(PORTS.values())})\b")
HOST = re.compile(rf"\b(0\.0\.0\.0\b|({'|'.join(PORTS)})(?=:\d))")
#: Folders of volumes and in memory.
FOLDER = re.compile(r"(?<![\w/.])/(var/lib/beat|var/spool/budget|etc/prometheus|prometheus|tmp)\b")
TOKEN = "a-token"
pytestmark = [pytest.mark.postgres, pytest.mark.redis, pytest.mark.rabbitmq]


class Deployment:
    """The services of the compose file as processes of one test."""

    def __init__(self, folder: Path, servers: dict[str, str]) -> None:
        self.folder = folder
        self.image = folder / "app"
        self.image.mkdir()
        copy_to("runtime", self.image)
        self.ports = {name: str(free_port()) for name in PORTS}
        self._servers = servers
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def here(self, text: str) -> str:
        """Put the ports and folders of this test in the place of a container's."""
        ports = {PORTS[name]: port for name, port in self.ports.items()}
        text = PORT.sub(lambda found: ports[found[0]], HOST.sub("127.0.0.1", text))
        return FOLDER.sub(lambda found: f"{self.folder}{found[0]}", text)

    def environment(self, name: str) -> dict[str, str]:
        inside = services[name].get("environment", {})
        given = {key: self.here(value) for key, value in inside.items()}
        given |= {key: url for key, url in self._servers.items() if key in given}
        given |= {key: TOKEN for key in given if key.endswith("DASHBOARD_TOKEN")}
        assert not [key for key, value in given.items() if "local-only" in value]
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CELERY_", "BUDGET_"))
        }
        return {
            **kept, **given, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "HOSTNAME": socket.gethostname(), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def words(self, name: str) -> list[str]:
        service = services[name]
        return [self.here(word) for word in [*service.get("entrypoint", []), *service["command"]]]

    def run(self, name: str) -> None:
        """Run one that ends."""
        done = subprocess.run(
            self.words(name), cwd=self.image, env=self.environment(name), capture_output=True,
            text=True, timeout=WAIT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self, name: str) -> None:
        """Start one that lasts."""
        for path in ("var/lib/beat", "var/spool/budget", "tmp", "prometheus"):
            (self.folder / path).mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.words(name), cwd=self.image, env=self.environment(name),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        guardian.watch_process(process.pid, signal.SIGTERM)
        self._running[name] = process

    def is_well(self, name: str) -> bool:
        """Run the health check of one; fail where it has ended."""
        process = self._running.get(name)
        assert process is None or process.poll() is None, self.log(name)
        kind, *words = services[name]["healthcheck"]["test"]
        words = ["sh", "-c", *words] if kind == "CMD-SHELL" else words
        done = subprocess.run(
            [self.here(word) for word in words], cwd=self.image, env=self.environment(name),
            capture_output=True, timeout=WAIT,
        )  # fmt: skip
        return done.returncode == 0

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def stop(self, name: str) -> int:
        """Send the signal that an engine sends; return the exit status."""
        process = self._running.pop(name)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAIT)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        guardian.forget_process(process.pid)
        return process.returncode

    def stop_all(self) -> None:
        for name in reversed(list(self._running)):
            self.stop(name)


@pytest.fixture
def deployment(
    tmp_path: Path, postgres_url: str, rabbitmq_url: str, redis_url: str
) -> Iterator[Deployment]:
    made = Deployment(
        tmp_path,
        {
            "CELERY_BROKER_URL": rabbitmq_url,
            "CELERY_RESULT_BACKEND": redis_url,
            "CELERY_BUDGET_DATABASE_URL": postgres_url,
        },
    )
    yield made
    made.stop_all()


def test_a_request_goes_through_all_of_them(deployment: Deployment) -> None:
    deployment.run("setup")
    started = ["api", "worker", "beat", "dashboard"]
    assert not deployment.is_well("api"), "nothing listens yet"
    for name in started:
        deployment.start(name)
    for name in started:
        eventually(lambda name=name: deployment.is_well(name), what=f"{name}: its health")
    with httpx.Client(
        base_url=deployment.url("api", ""), headers={"X-API-Key": "key-of-acme"}, trust_env=False
    ) as client:
        asked = client.post("/drafts", params={"prompt": "A haiku", "pages": 2})
        assert asked.status_code == 202
        place = asked.headers["Location"]
        eventually(lambda: client.get(place).json()["state"] == "succeeded", what="the draft")
        assert client.get(place + "/text").json() == "A haiku, page 1\nA haiku, page 2"
        assert client.post("/drafts", params={"prompt": "A", "pages": 600}).status_code == 429
        assert client.get("/health").json() == {"relays": 1}
    with httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        look = deployment.url("dashboard", "/api/overview")
        eventually(lambda: spent(client.get(look).json()) == 180, what="what was used")
        assert "tenant:acme" in client.get(deployment.url("dashboard", "/")).text
        for name in ("dashboard", "beat"):
            eventually(
                lambda name=name: (
                    'celery_budget_spent{budget="tenant:acme",unit="tokens"} 180.0'
                    in client.get(deployment.url(name, "/metrics")).text
                ),
                what=f"the metrics of {name}",
            )
    assert httpx.get(look, trust_env=False).status_code == 401
    # As a stop of the project does; a worker ends warmly.
    ended = {name: deployment.stop(name) for name in started}
    # Newer releases of uvicorn end in good order, and then by the signal.
    assert ended.pop("api") in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in deployment.log("api")
    assert ended == dict.fromkeys(ended, 0)


def spent(overview: Any) -> int:
    [budget] = [one for one in overview["budgets"] if one["budget"] == "tenant:acme"]
    return int(budget["spent"])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on PATH")
def test_prometheus_reaches_what_it_scrapes(deployment: Deployment) -> None:
    deployment.run("setup")
    for name in ("beat", "dashboard"):
        deployment.start(name)
    folder = deployment.folder / "etc" / "prometheus"
    folder.mkdir(parents=True)
    for volume in services["prometheus"]["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("./"):
            text = (
                (ROOT / source)
                .read_text("utf-8")
                .replace("scrape_interval: 15s", "scrape_interval: 1s")
            )
            (folder / Path(target).name).write_text(
                "".join(map(deployment.here, text.splitlines(keepends=True)))
            )
    for name in ("beat", "dashboard"):
        eventually(lambda name=name: deployment.is_well(name), what=f"{name}: its health")
    deployment.start("prometheus")
    eventually(lambda: deployment.is_well("prometheus"), what="its health")
    asked = deployment.url("prometheus", "/api/v1/query?query=celery_budget_up")

    def seen() -> list[tuple[str, str]]:
        found = json.loads(httpx.get(asked, trust_env=False).text)["data"]["result"]
        return [(one["metric"]["job"], one["value"][1]) for one in found]

    eventually(lambda: seen() == [("celery_budget", "1")] * 2, what="both, as one job")
