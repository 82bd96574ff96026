"""The dashboard's pages and documents over a real ledger, as they are served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from celery_budget import budgeted
from celery_budget.dashboard import create_app, looks
from celery_budget.dashboard.guard import HEADERS
from celery_budget.errors import InvalidAmount, MissingExtra, StoreError
from celery_budget.store import schema
from tests.integration.support import Shop
from tests.messages import Told

HOSTILE = "tenant:<script>alert(1)</script>\"'&"

Open = Callable[..., TestClient]


@pytest.fixture
def open_page() -> Iterator[Open]:
    """Open the dashboard of a shop to everybody."""
    clients: list[TestClient] = []

    def make(shop: Shop, **options: Any) -> TestClient:
        app = create_app(shop.budget, authenticate=lambda request: True, **options)
        clients.append(TestClient(app, raise_server_exceptions=False))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def task(shop: Shop, name: str, budget: str, estimate: int, **terms: Any) -> Any:
    def body() -> None:
        pass

    made = shop.app.task(name=name, shared=False)(body)
    return budgeted(budget=budget, estimate=estimate, **terms)(made)


def fill(shop: Shop) -> str:
    """Have something of everything; return the id of a task that was admitted."""
    shop.budget.set("org", limit=1000, unit="tokens", period="month")
    shop.budget.set("tenant:acme", limit=100, unit="tokens", parent="org", soft_stop=0.8)
    shop.budget.set("tenant:free", limit=None, unit="tokens")
    shop.budget.set("tenant:none", limit=0, unit="tokens")
    shop.budget.set(HOSTILE, limit=10, unit="tokens")
    shop.budget.set("user:*", limit=5, unit="tokens")
    shop.budget.lanes.set("paid", queues=["paid"])
    shop.budget.lanes.pause("paid")
    draft = task(shop, "shop.draft", "tenant:acme", 60)
    admitted = draft.delay()
    task(shop, "shop.paid", "tenant:free", 7).apply_async(queue="paid")
    task(shop, "shop.patient", "tenant:acme", 30, on_refused="park").delay()
    task(shop, "shop.broken", "tenant:free", 3).delay()
    shop.sql(
        schema.outbox.update()
        .where(schema.outbox.c.envelope.contains("shop.broken"))
        .values(envelope="{")
    )
    assert shop.relay().quarantined == 1
    return str(admitted.id)


def test_the_overview_shows_everything(on_both: Shop, open_page: Open) -> None:
    fill(on_both)
    client = open_page(on_both, project="my.proj")
    page = client.get("/").text
    for told in (
        "60% held, soft stop at 80%",
        "month, ends",
        "blocked: a limit of 0",
        "no limit",
        "paused",
        "celery -A my.proj budget lane resume paid",
        "shop.patient",
        "30 more of",
        "celery -A my.proj budget parked discard",
        "shop.broken",
        "its stored form cannot be read",
        "celery -A my.proj budget quarantine requeue",
        "celery -A my.proj budget quarantine discard",
        "No relay was seen lately",
    ):
        assert told in page, told
    assert "user:*" not in page
    document = client.get("/api/overview").json()
    assert document["open_work"]["held"] == document["open_work"]["parked"] == 1
    acme = next(one for one in document["budgets"] if one["budget"] == "tenant:acme")
    assert (acme["reserved"], acme["available"], acme["soft_at"]) == (60, 40, 80)
    assert (acme["full"], acme["overcommitted"]) == (False, False)
    assert [one["task_name"] for one in document["parked"]] == ["shop.patient"]
    assert [one["task_name"] for one in document["quarantine"]] == ["shop.broken"]
    assert [one["name"] for one in document["lanes"]] == ["paid"]
    assert document["lanes"][0]["waiting"] == {"jobs": 1, "units": 7}
    assert abs(document["updated_at"] - document["at_us"] / 1e6) < 60


def test_an_empty_ledger_says_how_to_begin(shop: Shop, open_page: Open) -> None:
    shop.sql(schema.balances.delete())
    shop.sql(schema.journal.delete())
    shop.sql(schema.budgets.delete())
    page = open_page(shop).get("/").text
    assert "There are no budgets yet" in page
    assert "budget set NAME --limit N --unit UNIT" in page
    assert "Nothing waits for budget." in page


def test_filters_and_sorting(on_both: Shop, open_page: Open) -> None:
    fill(on_both)
    client = open_page(on_both)

    def names(query: str) -> list[str]:
        return [one["budget"] for one in client.get(f"/api/overview?{query}").json()["budgets"]]

    assert names("q=ACME") == ["tenant:acme"]
    assert names("q=50%25_off") == names("q=_") == []
    assert names("state=closed") == []
    assert names("state=full") == ["tenant:none"]
    on_both.budget.close("tenant:free", drain=True)
    assert names("state=draining&q=free") == ["tenant:free"]
    assert names("sort=used&q=tenant")[0] == "tenant:acme"
    assert names("sort=used&q=tenant")[-1] == "tenant:free"
    assert names("sort=available&q=tenant:")[0] == "tenant:none"
    assert names("state=nonsense&sort=nonsense&page=nonsense&q=%00acme") == ["tenant:acme"]
    filtered = client.get("/api/overview?q=patient").json()
    assert [one["task_name"] for one in filtered["parked"]] == ["shop.patient"]
    assert filtered["quarantine"] == filtered["lanes"] == []
    page = client.get("/?q=nobody").text
    for told in ("No budget matches.", "Nothing that is parked matches.", "No lane matches."):
        assert told in page
    assert 'value="nobody"' in page


def test_many_budgets_come_in_pages(
    shop: Shop, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "PAGE", 2)
    for number in range(4):
        shop.budget.set(f"b{number}", limit=1, unit="tokens")
    client = open_page(shop)
    found = client.get("/api/overview?page=2").json()
    assert [one["budget"] for one in found["budgets"]] == ["b2", "b3"]
    assert (found["found"], found["page"], found["pages"]) == (5, 2, 3)
    page = client.get("/?page=2&q=b").text
    assert 'rel="prev"' in page
    assert "Page 2 of 2" in page
    assert client.get("/api/overview?page=99").json()["page"] == 3
    monkeypatch.setattr(looks, "MOST_BUDGETS", 3)
    assert "There are more budgets than are read at once" in client.get("/?sort=used").text


def test_what_is_no_number_of_budgets_is_said(shop: Shop) -> None:
    wrong: list[dict[str, Any]] = [{"limit": 0}, {"limit": True}, {"page": -1}, {"size": 1.5}]
    for given in wrong:
        with pytest.raises(InvalidAmount, match="is an integer from 1 on"):
            shop.budget.overview(**given)


def test_a_budget_s_page(on_both: Shop, open_page: Open) -> None:
    fill(on_both)
    client = open_page(on_both)
    page = client.get("/budget?name=tenant:acme").text
    for told in ("room for new work", "80%: 80", "shop.patient", "+60", "60 then", "org", "1,000"):
        assert told in page, told
    document = client.get("/api/budget?name=tenant:acme").json()
    assert (document["room"], document["room_of"]) == (20, "tenant:acme")
    assert [one["what"] for one in document["journal"]] == ["reserve"]
    assert [one["task_name"] for one in document["waiting"]] == ["shop.patient"]
    assert [(one["task_name"], one["held"]) for one in document["holds"]] == [("shop.draft", 60)]
    template = client.get("/budget?name=user:*").text
    assert "Template user:*" in template
    assert "0 budgets" in template


@pytest.mark.parametrize("name", ["nobody", "", "a\0b", "x" * 300, "%"])
def test_a_budget_that_is_none(on_both: Shop, open_page: Open, name: str) -> None:
    client = open_page(on_both)
    done = client.get("/budget", params={"name": name})
    assert done.status_code == 404
    assert "There is no budget named" in done.text
    assert client.get("/api/budget", params={"name": name}).status_code == 404


def test_the_life_of_a_request(on_both: Shop, open_page: Open) -> None:
    task_id = fill(on_both)
    client = open_page(on_both, project="proj")
    page = client.get(f"/request?id={task_id}").text
    for told in (
        "shop.draft",
        "admitted",
        "tenant:acme",
        f"celery -A proj budget explain {task_id}",
    ):
        assert told in page, told
    document = client.get("/api/request", params={"id": f" {task_id} "}).json()
    assert [one["reservation"]["task_id"] for one in document["requests"]] == [task_id]
    assert "Type the id" in client.get("/request").text
    for unknown in ("nobody", "a\0b", "'; DROP TABLE budget_budgets"):
        done = client.get("/request", params={"id": unknown})
        assert done.status_code == 404
        assert "No request" in done.text
        assert client.get("/api/request", params={"id": unknown}).status_code == 404


def test_the_plots(shop: Shop, open_page: Open) -> None:
    fill(shop)
    client = open_page(shop)
    page = client.get("/plots").text
    assert "cb-drift" in page
    assert "cb-waits" in page
    assert '<option value="31">' in page
    assert '<option value="31" selected>' in client.get("/plots?days=31").text
    document = client.get("/api/report?days=31").json()
    assert {"days", "drift", "waits", "counts", "updated_at"} <= set(document)
    assert client.get("/api/report?days=nonsense").status_code == 200


def test_metrics_are_served_beside_it(
    shop: Shop, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_page(shop)
    answer = client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    assert 'celery_budget_limit{budget="tenant:a",unit="tokens"} 10.0' in answer.text
    opened = client.get(
        "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert opened.text.endswith("# EOF\n")

    def missing(*args: Any) -> Any:
        raise MissingExtra("a Prometheus metric", "prometheus")

    monkeypatch.setattr("celery_budget.dashboard.app.exposition", missing)
    without = open_page(shop).get("/metrics")
    assert without.status_code == 404
    assert "celery-budget[prometheus]" in without.text.replace("&#39;", "'")


def test_hostile_names_are_text(shop: Shop, open_page: Open) -> None:
    fill(shop)
    task(shop, "shop.<img src=x onerror=alert(1)>", HOSTILE, 100, on_refused="park").delay()
    client = open_page(shop, project="<b>")
    for path in (
        "/",
        "/?q=<script>",
        f"/budget?name={quote(HOSTILE)}",
        "/budget?name=<script>alert(2)</script>",
        "/request?id=<script>alert(2)</script>",
        "/plots",
        "/<script>",
    ):
        page = client.get(path).text
        assert "<script>" not in page, path
        assert "<img" not in page, path
        assert "<b>" not in page, path
    assert "&lt;script&gt;alert(1)" in client.get("/").text


def test_every_answer_has_the_headers_and_no_inline_code(shop: Shop, open_page: Open) -> None:
    task_id = fill(shop)
    client = open_page(shop)
    paths = ["/", "/budget?name=tenant:a", f"/request?id={task_id}", "/plots", "/nope", "/api/nope"]
    for path in (*paths, "/static/dashboard.css", "/static/nope", "/api/overview"):
        answer = client.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, path
        cached = "max-age" if path == "/static/dashboard.css" else "no-store"
        assert cached in answer.headers["Cache-Control"], path
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    for path in paths:
        page = client.get(path).text
        assert " style=" not in page, path
        assert " on" not in {part[:3] for part in page.split('"')}, path
        assert "http://" not in page.replace("http://www.w3.org", ""), path
        assert "https://" not in page, path
        assert page.count("<script") == page.count("<script src="), path


def test_a_ledger_that_is_away_is_told_and_not_what_it_said(
    shop: Shop, open_page: Open, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    client = open_page(shop)

    def away(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("postgresql://me@secret-host/ledger: connection refused", True)

    with monkeypatch.context() as patched:
        patched.setattr(type(shop.budget.store), "read", away)
        for path in ("/", "/api/overview"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "database does not answer" in answer.text
            # Without scripts it is loaded again all the same.
            assert ('http-equiv="refresh"' in answer.text) is (path == "/")
            assert "secret-host" not in answer.text
            assert answer.headers["Retry-After"] == "5"
    deadline = time.monotonic() + 60
    while client.get("/").status_code != 200:
        assert time.monotonic() < deadline
    assert {one["consequence"] for one in told("store.unreachable")} == {"the page says so"}


def test_without_tables_it_says_what_to_do(make_shop: Callable[..., Shop], open_page: Open) -> None:
    answer = open_page(make_shop(init=False), project="proj").get("/")
    assert answer.status_code == 503
    assert "celery -A proj budget init" in answer.text


def test_a_fault_is_no_traceback(
    shop: Shop, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("the secret is sesame")

    monkeypatch.setattr(looks, "overview", broken)
    client = open_page(shop)
    for path in ("/", "/api/overview"):
        answer = client.get(path)
        assert answer.status_code == 500
        assert "sesame" not in answer.text
        assert "Traceback" not in answer.text
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_ledger_is_read_in_other_threads_and_once(
    shop: Shop, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    read = type(shop.budget.store).read

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(type(shop.budget.store), "read", counted)
    monkeypatch.setattr("celery_budget.dashboard.reads.FRESH_SECONDS", 3600.0)
    client = open_page(shop)
    answers = [client.get("/").text for _ in range(5)]
    assert len(set(answers)) == 1
    [name] = threads
    assert name.startswith("budget-dashboard")


def test_an_error_of_ours_is_a_fault_whose_traceback_is_logged(
    shop: Shop, open_page: Open, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise InvalidAmount("the ledger has an amount that is none")

    monkeypatch.setattr(looks, "overview", broken)
    assert open_page(shop).get("/api/overview").status_code == 500
    assert told("page.failed") == [{"path": "/api/overview"}]
