"""The report's page in a real browser: alone, by keyboard, for a screen reader, in any width.

Pictures of it are kept in the folder that BUDGET_SCREENSHOTS names, by default ``.screenshots``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from celery_budget.render.html import report_html
from tests.cluster import ROOT
from tests.unit.sample import BY_TENANT, HOSTILE

SCREENSHOTS = Path(os.environ.get("BUDGET_SCREENSHOTS") or ROOT / ".screenshots")
#: Milliseconds after which a test gives up waiting for a page.
WAIT = 60_000
PHONE, DESK, PAPER = (
    {"width": width, "height": 800} for width in (360, 1280, 700)
)  # fmt: skip

Look = Callable[..., Page]


@pytest.fixture
def look(browser: Browser, tmp_path: Path) -> Iterator[Look]:
    """Open the page of the sample; it must load nothing else and run nothing."""
    file = tmp_path / "report.html"
    file.write_text(report_html(BY_TENANT), "utf-8")
    contexts, asked, wrong = [], [], []

    def opened(size: Any = DESK, media: str = "screen", **options: Any) -> Page:
        context = browser.new_context(viewport=size, offline=True, **options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.emulate_media(media=media)  # type: ignore[arg-type]
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda said: wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert set(asked) == {file.as_uri()}
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("light", DESK, {"color_scheme": "light"}),
        ("dark", DESK, {"color_scheme": "dark"}),
        ("phone", PHONE, {"color_scheme": "dark", "has_touch": True}),
        ("paper", PAPER, {"color_scheme": "dark", "media": "print"}),
    ],
    ids=["light", "dark", "phone", "paper"],
)
def test_it_can_be_used_by_everybody(
    look: Look, name: str, size: dict[str, int], options: dict[str, Any]
) -> None:
    page = look(size, **options)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"report-{name}.png", full_page=True)
    if name != "paper":
        # What is wide scrolls by itself, and not the page.
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
    dark = options["color_scheme"] == "dark" and name != "paper"
    surface = page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor")
    assert surface == ("rgb(23, 27, 33)" if dark else "rgb(255, 255, 255)")
    assert HOSTILE in page.inner_text("main")


def test_the_figures_of_a_plot_open_by_keyboard(look: Look) -> None:
    page = look()
    summary = page.locator("#cb-waits summary")
    table = page.locator("#cb-waits table")
    assert not table.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert table.is_visible()
    assert table.locator("tbody tr").count() == 30
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "cb-scroll"


def test_text_in_plots_keeps_its_size_on_a_phone(look: Look) -> None:
    heights = []
    for size in (PHONE, DESK):
        tick = look(size).locator("#cb-waits .cb-tick").first.bounding_box()
        assert tick is not None
        heights.append(tick["height"])
    assert heights[0] == heights[1] >= 11


def test_plots_stay_inside_of_their_places(look: Look) -> None:
    for size in (PHONE, DESK):
        page = look(size)
        for figure in page.locator(".cb-figure").all():
            box = figure.bounding_box()
            assert box is not None
            for text in figure.locator("svg text").all():
                inside = text.bounding_box()
                assert inside is not None
                assert box["x"] - 1 <= inside["x"]
                assert inside["x"] + inside["width"] <= box["x"] + box["width"] + 1
