"""``budget dashboard``: where it starts and where it does not, as a process and in one."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from celery_budget.cli.dashboard import TOKEN as VARIABLE
from tests.cluster import Cluster, Process
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

SECRET = "not-in-any-log"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv(VARIABLE, raising=False)
    return runner(capsys, monkeypatch)


@pytest.fixture
def serve(
    make_cluster: Callable[..., Cluster], embedded: dict[str, Any]
) -> Callable[..., tuple[Process, str]]:
    """Start ``celery -A … budget dashboard`` and return it, with its address."""
    cluster = make_cluster(**embedded)
    cluster.budget.init()
    cluster.budget.set("tenant:a", limit=10, unit="tokens")

    def start(*arguments: str) -> tuple[Process, str]:
        process = cluster.start("dashboard", "budget", "dashboard", "--port", "0", *arguments)
        process.says("The dashboard is at ")
        [address] = re.findall(r"The dashboard is at (\S+)/ ", process.text())
        return process, str(address)

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_it_serves_until_it_is_told_to_stop(
    serve: Callable[..., tuple[Process, str]], number: signal.Signals
) -> None:
    process, address = serve()
    with httpx.Client(base_url=address) as client:
        assert client.get("/api/overview").json()["budgets"][0]["budget"] == "tenant:a"
        assert "budget relay" in client.get("/").text
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        assert "server" not in client.get("/").headers
        # The connection is kept open: that does not keep the process.
        process.popen.send_signal(number)
        assert process.popen.wait(20) == 0
    assert f"{number.name}: the dashboard is stopped" in process.text()
    assert "Traceback" not in process.text()


def test_its_token_is_in_no_log(
    serve: Callable[..., tuple[Process, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    process, address = serve("--root-path", "/ops")
    address = address.removesuffix("/ops")
    with httpx.Client(base_url=address) as client:
        assert client.get("/").status_code == 401
        opened = client.get("/", params={"token": SECRET})
        assert opened.headers["Location"] == "/ops/"
        bearer = {"Authorization": f"Bearer {SECRET}"}
        assert client.get("/api/overview", headers=bearer).status_code == 200
        assert 'href="/ops/static/' in client.get("/", headers=bearer).text
    assert process.terminate() == 0
    assert SECRET not in process.text()
    assert "It asks for its token once" in process.text()


def test_a_port_in_use_is_said(shop: Shop, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(shop.app, "dashboard", "--port", port).failed(
            1, f"port {port} of 127.0.0.1 is in use"
        )


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - it is refused
def test_elsewhere_it_does_not_start_without_a_token(shop: Shop, run: Run, host: str) -> None:
    done = run(shop.app, "dashboard", "--port", "0", "--host", host)
    assert done.failed(1, f"a dashboard on {host} can be reached from elsewhere and needs a token")
    assert VARIABLE in done.err


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_here_is_said(shop: Shop, run: Run, host: str) -> None:
    done = run(shop.app, "dashboard", "--port", "0", "--host", host, "--token", "x")
    assert done.failed(1, f"cannot listen on port 0 of {host}")


@pytest.mark.parametrize("host", [".local", f"{'a' * 64}.example"])
def test_an_address_that_is_none_is_said(shop: Shop, run: Run, host: str) -> None:
    done = run(shop.app, "dashboard", "--port", "0", "--host", host, "--token", "x")
    assert done.failed(1, f"'{host}' is no address")


def test_a_token_that_is_given_empty_opens_nothing(shop: Shop, run: Run) -> None:
    done = run(shop.app, "dashboard", "--port", "0", "--token", "")
    assert done.failed(1, "the token of a dashboard is empty")


@pytest.mark.parametrize("given", ["ops", "/ops/", "//ops", "ops//"])
def test_a_root_path_is_taken_as_it_is_meant(
    serve: Callable[..., tuple[Process, str]], given: str
) -> None:
    _, address = serve("--root-path", given, "--token", SECRET)
    assert address.endswith("/ops")
    bearer = {"Authorization": f"Bearer {SECRET}"}
    base = address.removesuffix("/ops")
    assert 'href="/ops/static/' in httpx.get(f"{base}/", headers=bearer).text
    opened = httpx.get(f"{base}/plots", params={"token": SECRET})
    assert opened.headers["Location"] == "/ops/plots"


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none(shop: Shop, run: Run, port: str) -> None:
    assert run(shop.app, "dashboard", "--port", port).code == 2


@pytest.mark.parametrize("by", ["option", "variable", "setting"])
def test_a_token_that_cannot_be_one_is_said_however_it_is_given(
    make_shop: Callable[..., Shop], run: Run, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    wrong = "two words"
    if by == "variable":
        monkeypatch.setenv(VARIABLE, wrong)
    shop = make_shop(**({"budget_dashboard_token": wrong} if by == "setting" else {}))
    given = ["--token", wrong] if by == "option" else []
    done = run(shop.app, "dashboard", "--port", "0", *given)
    assert done.failed(1, "the token of a dashboard")
    assert wrong not in done.err


def test_the_setting_is_not_shown(make_shop: Callable[..., Shop]) -> None:
    assert SECRET not in repr(make_shop(budget_dashboard_token=SECRET).budget.settings)


def test_all_its_files_are_in_the_package() -> None:
    folder = Path(__file__).parents[2] / "celery_budget" / "dashboard"
    found = {path.name for kind in ("static", "templates") for path in (folder / kind).iterdir()}
    assert {"dashboard.css", "dashboard.js", "icon.svg", "overview.html"} <= found
