"""Who is let in to the dashboard, by which name, and for what; where it is mounted."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.conf import settings
from django.test.utils import override_settings
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from celery_budget.dashboard import create_app
from celery_budget.dashboard.guard import COOKIE
from tests.integration.support import Shop

TOKEN = "a-long-sesame"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def client_of(app: Any, base: str = "http://testserver", **options: Any) -> TestClient:
    return TestClient(app, base_url=base, follow_redirects=False, **options)


@pytest.fixture
def client(shop: Shop) -> TestClient:
    """The dashboard behind a token."""
    return client_of(create_app(shop.budget, TOKEN))


PATHS = [
    "/",
    "/budget?name=tenant:a",
    "/request",
    "/plots",
    "/metrics",
    "/api/overview",
    "/nope",
    "/api/nope",
]


def test_without_the_token_nothing_is_shown(client: TestClient) -> None:
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code == 401, path
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="budget dashboard"'
        assert "tenant:a" not in answer.text
        is_json = "application/json" in answer.headers["Content-Type"]
        assert is_json is path.startswith("/api/"), path
        assert "refresh" not in answer.headers


def test_the_page_that_asks_for_the_token_looks_as_the_others(client: TestClient) -> None:
    page = client.get("/").text
    assert 'type="password"' in page
    assert "Find a request" not in page
    for name in ("dashboard.css", "plots.css", "dashboard.js", "icon.svg"):
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200, name
        assert f"/static/{name}?" in page
    assert client.get("/static/..%2fpages.py").status_code == 404


def test_a_wrong_token_is_none(client: TestClient) -> None:
    almost = (f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}")
    for given in ("Bearer wrong", "Bearer", "Bearer ", "Bearer \xfc", *almost):
        headers = {"Authorization": given.encode("latin-1")}
        assert client.get("/api/overview", headers=headers).status_code == 401, given


def test_the_token_in_a_header_opens(client: TestClient) -> None:
    for given in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
        assert client.get("/api/overview", headers={"Authorization": given}).status_code == 200
        assert COOKIE not in client.cookies


def test_the_token_in_an_address_opens_once_and_leaves_it(client: TestClient) -> None:
    answer = client.get(f"/?q=tenant&token={TOKEN}&sort=used")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/?q=tenant&sort=used")
    cookie = answer.headers["Set-Cookie"]
    assert TOKEN not in cookie
    for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert part in cookie
    assert "Secure" not in cookie
    assert answer.headers["Cache-Control"] == "no-store"
    assert client.get("/?q=tenant").status_code == 200
    forged = client.cookies[COOKIE][:-1] + "~"
    client.cookies.clear()
    assert client.get("/", headers={"Cookie": f"{COOKIE}={forged}"}).status_code == 401


def test_over_https_the_session_stays_there(shop: Shop) -> None:
    client = client_of(create_app(shop.budget, TOKEN), "https://testserver")
    assert "Secure" in client.get(f"/?token={TOKEN}").headers["Set-Cookie"]


def test_a_wrong_token_in_an_address_opens_nothing(client: TestClient) -> None:
    answer = client.get("/?token=wrong")
    assert answer.status_code == 401
    assert "Set-Cookie" not in answer.headers


def test_the_way_on_leads_nowhere_else(client: TestClient) -> None:
    for path in ("//evil.example/", "///evil.example/x", "/\\evil.example"):
        answer = client.get(f"http://testserver{path}?token={TOKEN}")
        location = answer.headers["Location"]
        assert answer.status_code == 303, path
        assert location.startswith("/"), path
        assert not location.startswith(("//", "/\\")), path


def test_who_comes_by_a_link_of_another_site_is_led_on(client: TestClient) -> None:
    answer = client.get("/", headers={"Sec-Fetch-Site": "cross-site"})
    assert (answer.status_code, answer.headers["Refresh"]) == (401, "0")


def test_it_is_only_to_look_at(client: TestClient) -> None:
    for path in ("/", "/api/overview", "/static/dashboard.css"):
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "NONSENSE"):
            answer = client.request(method, path, headers=BEARER)
            assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD"), method
        assert client.head(path, headers=BEARER).status_code == 200


def test_no_websocket(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/", headers=BEARER):
        pass


def test_by_another_name_it_is_not_reached(shop: Shop) -> None:
    hosts = ("localhost", "127.0.0.1", "[::1]")
    app = create_app(shop.budget, authenticate=lambda request: True, hosts=hosts)
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
        assert client_of(app).get("/", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "::1", "["):
        for path in ("/", "/api/overview", "/static/dashboard.css"):
            answer = client_of(app).get(path, headers={"Host": host})
            assert answer.status_code == 403, host
            assert "tenant:a" not in answer.text


def test_an_application_decides_by_itself(shop: Shop) -> None:
    asked: list[str] = []

    def plain(request: Request) -> bool:
        asked.append(request.url.path)
        return request.headers.get("X-User") == "root"

    async def later(request: Request) -> bool:
        return plain(request)

    for authenticate in (plain, later):
        client = client_of(create_app(shop.budget, authenticate=authenticate))
        assert client.get("/").status_code == 401
        assert client.get("/", headers={"X-User": "root"}).status_code == 200
    both = client_of(create_app(shop.budget, TOKEN, authenticate=plain))
    assert both.get("/").status_code == 401
    assert both.get("/", headers={"X-User": "root"}).status_code == 200
    assert both.get("/", headers=BEARER).status_code == 200
    assert set(asked) == {"/"}


def test_a_fault_of_who_decides_lets_nobody_in(shop: Shop) -> None:
    def broken(request: Request) -> bool:
        raise RuntimeError("no session store")

    client = client_of(create_app(shop.budget, authenticate=broken), raise_server_exceptions=False)
    answer = client.get("/")
    assert answer.status_code == 500
    assert "tenant:a" not in answer.text


def as_documented(shop: Shop, framework: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the page's own code that mounts the dashboard, and return the application it makes."""
    page = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text(encoding="utf-8")
    [code] = re.findall(rf"```python\n(# {framework}.*?)```", page, re.DOTALL)
    monkeypatch.setenv("BUDGET_TOKEN", TOKEN)
    project = ModuleType("proj.celery")
    project.budget = shop.budget  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "proj", ModuleType("proj"))
    monkeypatch.setitem(sys.modules, "proj.celery", project)
    known: dict[str, Any] = {"FastAPI": FastAPI, "os": os, "budget": shop.budget}
    exec(code, known)  # noqa: S102 - it is our own page
    return known["application" if framework == "Django" else "app"]


#: Of the Django project in which it is mounted.
urlpatterns: list[Any] = []


@pytest.fixture
def django_project() -> Iterator[None]:
    """Have Django be of this project, whatever it was of for an earlier test of this process."""
    if not settings.configured:
        settings.configure()
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"]):
        yield


@pytest.mark.usefixtures("django_project")
@pytest.mark.parametrize("framework", ["FastAPI", "Django"])
def test_mounted_it_knows_where_it_is(
    shop: Shop, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(as_documented(shop, framework, monkeypatch))
    assert client.get("/ops/budgets/").status_code == 401
    assert client.get("/elsewhere").status_code == 404
    opened = client.get(f"/ops/budgets/?token={TOKEN}")
    assert opened.headers["Location"] == "/ops/budgets/"
    assert "Path=/ops/budgets" in opened.headers["Set-Cookie"]
    page = client.get("/ops/budgets/")
    assert page.status_code == 200
    links = [part.split('"')[0] for part in page.text.split('href="')[1:]]
    links += [part.split('"')[0] for part in page.text.split('src="')[1:]]
    links += [part.split('"')[0] for part in page.text.split('action="')[1:]]
    for link in links:
        assert link.startswith(("/ops/budgets/", "#")), link
        if link.startswith("/"):
            assert client.get(link).status_code == 200, link
    assert client.get("/ops/budgets/api/overview").json()["budgets"][0]["budget"] == "tenant:a"
    assert client.post("/ops/budgets/").status_code == 405
