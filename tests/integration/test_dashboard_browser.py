"""The dashboard in a real browser: live, by keyboard, for a screen reader, on a phone.

Pictures of it are kept in the folder that BUDGET_SCREENSHOTS names, by default ``.screenshots``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from celery_budget.cli.dashboard import TOKEN as VARIABLE
from celery_budget.store import schema
from tests.cluster import ROOT, Cluster
from tests.services.postgres import PostgresServer

SECRET = "a-long-sesame"
SCREENSHOTS = Path(os.environ.get("BUDGET_SCREENSHOTS") or ROOT / ".screenshots")
#: Milliseconds after which a test gives up waiting for a page.
WAIT = 60_000
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 800}
LONG = "w" * 248
HOSTILE = "tenant:<img src=x onerror=alert(1)>"

expect.set_options(timeout=WAIT)


def serve(cluster: Cluster, *arguments: str) -> str:
    """Start ``celery -A … budget dashboard`` and return its address."""
    process = cluster.start("dashboard", "budget", "dashboard", "--port", "0", *arguments)
    process.says("The dashboard is at ")
    [address] = re.findall(r"The dashboard is at (\S+) ", process.text())
    return str(address)


def conf(url: str) -> dict[str, Any]:
    """Settings of an application that only publishes."""
    return {
        "broker_url": "memory://",
        "result_backend": "cache+memory://",
        "budget_database_url": url,
    }


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An application with a ledger that has something of everything in it."""
    folder = tmp_path_factory.mktemp("browser")
    cluster = Cluster(folder, conf(f"sqlite:///{folder / 'budget.db'}"))
    budget = cluster.budget
    budget.set("org", limit=1_000_000, unit="tokens", period="month")
    budget.set("tenant:acme", limit=1000, unit="tokens", parent="org", soft_stop=0.9)
    budget.set("tenant:globex", limit=200, unit="tokens", parent="org", period="day")
    budget.set("tenant:free", limit=None, unit="tokens")
    budget.set("tenant:none", limit=0, unit="tokens")
    budget.set(HOSTILE, limit=50, unit="tokens")
    budget.lanes.set("batch", queues=["batch"], max_running_jobs=4, max_waiting_jobs=50)
    budget.lanes.pause("batch")
    draft = cluster.task("draft")
    for size in (300, 250):
        draft.delay(size, "acme")
    draft.apply_async((60, "globex"), queue="batch")
    draft.apply_async((180, "globex"), on_refused="park")
    # In place, so that something was used.
    draft.apply((120, "acme"), {"used": 150})
    draft.apply((40, "globex"))
    # As long as names may be, and nowhere to be broken.
    budget.set(f"tenant:{LONG}", limit=2**63 - 1, unit="tokens", soft_stop=0.5)
    cluster.task("quiet").delay(LONG)
    cluster.task("quiet").delay("free")
    cluster.task("quiet").delay(HOSTILE.removeprefix("tenant:"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def address(shop: Cluster) -> str:
    """Where the dashboard of that ledger is, open to this machine."""
    return serve(shop)


Look = Callable[..., Page]


@pytest.fixture
def look(browser: Browser, address: str) -> Iterator[Look]:
    """Open a page in a context of its own; it must not have logged an error."""
    contexts, errors = [], []

    def opened(path: str = "/", size: Any = DESK, **options: Any) -> Page:
        context = browser.new_context(viewport=size, base_url=address, **options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.goto(path.lstrip("/"))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def keep(page: Page, name: str) -> None:
    """Keep a picture of the whole page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"dashboard-{name}.png", full_page=True)


def paths(shop: Cluster) -> dict[str, str]:
    task_id = shop.budget.parked(1)[0].task_id
    held = shop.budget.journal("tenant:acme", 1)[0].reservation_id
    return {
        "overview": "/",
        "budget": "/budget?name=tenant:globex",
        "long": f"/budget?name=tenant:{LONG}",
        "request": f"/request?id={held}",
        "parked": f"/request?id={task_id}",
        "plots": "/plots",
    }


def row(page: Page, name: str) -> Any:
    """Return the row of a budget."""
    return page.locator("#budgets tbody tr").filter(has=page.get_by_role("link", name=name))


def test_it_shows_the_ledger_and_follows_it(shop: Cluster, look: Look) -> None:
    page = look()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(row(page, "tenant:acme")).to_contain_text("15% spent, 55% held")
    expect(page.locator("#lanes")).to_contain_text("paused")
    expect(page.locator("#parked")).to_contain_text("tenant:globex")
    updated = page.locator("#updated time").get_attribute("datetime")
    row(page, "tenant:free").get_by_role("link").focus()
    shop.task("draft").delay(100, "acme")
    expect(row(page, "tenant:acme")).to_contain_text("65% held")
    assert page.locator("#updated time").get_attribute("datetime") != updated
    shop.budget.lanes.resume("batch")
    expect(page.locator("#lanes")).not_to_contain_text("paused")
    shop.budget.lanes.pause("batch")
    expect(page.locator("#lanes")).to_contain_text("paused")
    shop.budget.set("tenant:new", limit=5, unit="tokens")
    expect(row(page, "tenant:new")).to_be_visible()
    # What was changed under it did not take the focus away, and nothing was loaded anew.
    expect(row(page, "tenant:free").get_by_role("link")).to_be_focused()
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1
    shop.budget.close("tenant:new")
    expect(row(page, "tenant:new")).to_contain_text("closed")


def test_it_can_be_paused(shop: Cluster, look: Look) -> None:
    page = look("/?q=free")
    with page.expect_response(re.compile(r"q=free")):
        pass
    page.get_by_role("button", name="Pause").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    shop.task("quiet").delay("free")
    other = look("/?q=free")
    expect(row(other, "tenant:free")).to_contain_text("12")
    page.get_by_role("button", name="Go on").click()
    expect(row(page, "tenant:free")).to_contain_text("12")
    assert asked


def test_a_hidden_tab_asks_for_nothing(look: Look) -> None:
    page = look()
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", { value: true, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
            window.fetched = 0;
            const fetch = window.fetch;
            window.fetch = (...given) => { window.fetched += 1; return fetch(...given); };
            window.planned = 0;
            const plan = window.setTimeout;
            window.setTimeout = (...given) => { window.planned += 1; return plan(...given); };
            window.dispatchEvent(new Event("online"));
        }"""
    )
    assert page.evaluate("[window.fetched, window.planned]") == [0, 0]
    with page.expect_response("**/*"):
        page.evaluate(
            """() => {
                Object.defineProperty(document, "hidden", { value: false, configurable: true });
                document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
    assert page.evaluate("window.fetched") == 1


def test_it_filters_and_sorts(look: Look) -> None:
    page = look()
    page.get_by_label("Budget, tenant or task").fill("TENANT:")
    page.get_by_label("Sorted by").select_option("used")
    page.get_by_role("button", name="Apply").click()
    links = page.locator("#budgets tbody th a")
    expect(links.first).to_have_text("tenant:acme")
    expect(row(page, "org")).to_have_count(0)
    page.get_by_label("Budgets that are").select_option("full")
    page.get_by_role("button", name="Apply").click()
    expect(links).to_have_text(["tenant:none"])
    page.get_by_role("link", name="Show all").click()
    expect(row(page, "org")).to_have_count(1)


def test_what_is_hostile_is_only_text(look: Look) -> None:
    page = look()
    link = page.get_by_role("link", name=HOSTILE)
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Budget {HOSTILE}")
    assert page.locator("main img").count() == 0


def test_a_command_can_be_copied(look: Look) -> None:
    page = look(permissions=["clipboard-read", "clipboard-write"])
    button = page.locator("#parked").get_by_role("button", name="cancel it")
    expect(button).to_be_visible()
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_contain_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert re.fullmatch(r"celery -A tests\.apps\.shop budget parked discard [0-9a-f-]{36}", copied)


def test_by_keyboard_alone(shop: Cluster, look: Look) -> None:
    page = look()

    def tab_to(wanted: Any) -> None:
        """Press Tab until it has the focus, which has to be seen."""
        for _ in range(100):
            page.keyboard.press("Tab")
            if wanted.evaluate("element => element === document.activeElement"):
                outline = wanted.evaluate("element => getComputedStyle(element).outlineStyle")
                assert outline == "solid"
                return
        raise AssertionError(f"no Tab leads to {wanted}")

    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    tab_to(page.get_by_label("Budget, tenant or task"))
    page.keyboard.type("acme")
    page.keyboard.press("Enter")
    expect(row(page, "org")).to_have_count(0)
    tab_to(page.get_by_role("link", name="tenant:acme"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Budget tenant:acme")
    request = page.locator("#journal a").first
    name = request.text_content()
    tab_to(request)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Request {name}")
    tab_to(page.get_by_label("Find a request by its id"))
    page.keyboard.press("Control+A")
    page.keyboard.type(shop.budget.parked(1)[0].task_id)
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("parked")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["overview", "budget", "long", "request", "parked", "plots"])
def test_it_can_be_read_by_anybody_anywhere(
    shop: Cluster, look: Look, name: str, scheme: Any
) -> None:
    page = look(paths(shop)[name], color_scheme=scheme, reduced_motion="reduce")
    keep(page, f"{name}-{scheme}")
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, found.generate_report()
    page.set_viewport_size(PHONE)
    keep(page, f"{name}-{scheme}-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    if scheme == "light":
        found = Axe().run(page, options={"resultTypes": ["violations"]})
        assert found.violations_count == 0, found.generate_report()


def test_without_scripts_all_of_it_is_there(shop: Cluster, look: Look) -> None:
    page = look(java_script_enabled=False)
    expect(row(page, "tenant:acme")).to_be_visible()
    expect(page.get_by_role("button", name="Copy")).to_have_count(0)
    page.get_by_label("Budget, tenant or task").fill("globex")
    page.get_by_role("button", name="Apply").click()
    expect(row(page, "tenant:acme")).to_have_count(0)
    page.get_by_role("link", name="tenant:globex").first.click()
    expect(page.get_by_role("heading", name="Parked behind it")).to_be_visible()
    page.get_by_role("link", name="Plots").click()
    expect(page.locator("#cb-waits")).to_be_visible()


def test_it_opens_to_its_token_alone(
    shop: Cluster, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    context = browser.new_context(base_url=serve(shop), viewport=DESK)
    page = context.new_page()
    page.goto("")
    expect(page.get_by_role("heading", name="A token is needed")).to_be_visible()
    keep(page, "token")
    assert Axe().run(page).violations_count == 0
    expect(page.locator("body")).not_to_contain_text("tenant:")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("heading", name="A token is needed")).to_be_visible()
    page.get_by_label("Token").fill(SECRET)
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert SECRET not in page.url
    assert SECRET not in str(context.cookies())
    assert SECRET not in page.evaluate("document.cookie")
    # Its script is let in by the same session.
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch") as answered:
        pass
    assert answered.value.status == 200
    context.clear_cookies()
    expect(page.locator("#connection")).to_contain_text("The session is over")
    context.close()


@pytest.mark.postgres
@pytest.mark.fault
def test_it_outlives_the_ledger_s_database(
    own_postgres: PostgresServer, make_cluster: Callable[..., Cluster], browser: Browser
) -> None:
    cluster = make_cluster(**conf(own_postgres.create_database()))
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    context = browser.new_context(base_url=serve(cluster), viewport=DESK)
    context.set_default_timeout(WAIT)
    page, late = context.new_page(), context.new_page()
    page.goto("")
    expect(row(page, "tenant:a")).to_be_visible()
    own_postgres.kill()
    told = page.locator("#connection")
    expect(told).to_contain_text("The ledger's database does not answer")
    expect(row(page, "tenant:a")).to_be_visible()
    keep(page, "outage")
    late.goto("")
    expect(late.get_by_role("heading", name="The ledger does not answer")).to_be_visible()
    own_postgres.restart()
    cluster.budget.store.run(
        lambda connection: connection.execute(schema.budgets.update().values(limit_amount=400))
    )
    late.bring_to_front()
    expect(row(late, "tenant:a")).to_contain_text("400")
    page.bring_to_front()
    expect(row(page, "tenant:a")).to_contain_text("400")
    expect(told).to_be_hidden()
    context.close()
