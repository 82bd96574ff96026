"""The page: self-contained, escaped, well-formed, and with every figure of the report."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from celery_budget.reconcile import Report
from celery_budget.reconcile.figures import Group
from celery_budget.render.grids import group_grids
from celery_budget.render.html import report_html
from celery_budget.render.notices import notices
from celery_budget.render.text import number
from tests.unit.sample import (
    BALANCES,
    BY_TENANT,
    COUNTS,
    DRIFT,
    FORMULA,
    HOSTILE,
    REPORT,
    amounts,
)

#: Elements that have no end.
VOID = {"meta", "br", "hr", "img", "input", "link"}
EMPTY = Report((), {"admitted": 0})


class Page(HTMLParser):
    """A page as a browser reads it: elements that are opened and closed in turn, and their text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data.strip())

    def all(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.elements if (value := attrs.get(attribute))]


def page(report: Report = REPORT) -> Page:
    return Page(report_html(report))


@pytest.mark.parametrize("report", [REPORT, BY_TENANT, EMPTY], ids=["full", "grouped", "empty"])
def test_the_page_is_well_formed_and_ids_are_unique(report: Report) -> None:
    ids = page(report).all("id")
    assert len(ids) == len(set(ids))
    for attribute in ("aria-labelledby", "aria-describedby"):
        assert {one for names in page(report).all(attribute) for one in names.split()} <= set(ids)
    assert {one.removeprefix("#") for one in page(report).all("href")} <= set(ids)


def test_nothing_is_loaded_and_nothing_runs() -> None:
    found = page(BY_TENANT)
    assert "script" not in {tag for tag, _ in found.elements}
    assert {"src", "srcset", "action", "data"} & {
        name for _, attrs in found.elements for name in attrs
    } == set()
    assert not [name for _, attrs in found.elements for name in attrs if name.startswith("on")]
    assert not re.search(r"@import|url\(", report_html(BY_TENANT))
    [policy] = [one for tag, one in found.elements if one.get("http-equiv")]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_names_are_text_and_nothing_else() -> None:
    grouped = replace(
        BY_TENANT, stage=HOSTILE, budget=HOSTILE, lanes={HOSTILE: 1}, quarantine={HOSTILE: 1}
    )
    source = report_html(grouped)
    assert "<script" not in source
    texts = " ".join(Page(source).texts)
    assert texts.count("alert(1)") > 20
    assert f"Requests admitted since 2029-12-27 (UTC), that draw on {HOSTILE}" in texts
    assert FORMULA in texts
    hidden = replace(REPORT, balances=(replace(BALANCES[0], budget="a\u202eb\x1b"),))
    assert "a\\u202eb\\x1b" in report_html(hidden)
    assert "\u202e" not in report_html(hidden)


def test_every_figure_of_the_report_is_there() -> None:
    texts = set(page(BY_TENANT).texts)
    for balance in BALANCES:
        figures = (balance.limit, balance.reserved, balance.spent, balance.available)
        assert {balance.budget, *map(number, figures)} <= texts
    assert {*COUNTS, *map(number, COUNTS.values())} <= texts
    for one in (*BY_TENANT.amounts, *(two for group in BY_TENANT.groups for two in group.amounts)):
        for figure in (one.requests, one.estimated, one.charged, one.over, one.requests_over):
            assert number(figure) in texts
    for drift in DRIFT:
        assert {number(drift.estimated), number(drift.actual)} <= texts
    for refused in REPORT.refusals:
        assert {refused.budget, refused.reason, number(refused.count)} <= texts
    assert {*REPORT.failures, *map(number, REPORT.failures.values())} <= texts
    assert {"31 s", "4.4 s", "20.8 min", "web-1", "free", "12,000"} <= texts
    assert {"2030-01-01", "2030-02-01", "org, tenant:acme, tenant:initech"} <= texts
    assert "9,007,199,254,740,993" in texts


def test_budgets_without_a_plot_are_named() -> None:
    found = page()
    plotted = [one for one in found.all("id") if re.fullmatch(r"cb-spend-\w+", one)]
    assert len(plotted) == 4
    assert f"Without a plot: tenant:initech, tenant:umbrella, {FORMULA}." in found.texts
    many = tuple(replace(BALANCES[2], budget=f"b{at:02}") for at in range(40))
    texts = page(replace(REPORT, balances=(*BALANCES, *many))).texts
    [told] = [one for one in texts if one.startswith("Without a plot")]
    assert told.endswith(", b08 and 31 more.")
    assert sum(one.endswith("b10, b11 and 31 more") for one in texts) == 1


def test_days_of_one_stage_are_not_taken_for_all_that_was_spent() -> None:
    whole = "9,911,404 of 12,000,000 tokens spent this month, 800,000 held"
    by_day = "tokens charged day by day; limit 12,000,000 tokens a month"
    assert whole in page().texts
    for part in ({"stage": "draft"}, {"until_us": 1_893_556_000_000_000}):
        texts = page(replace(REPORT, **part)).texts
        assert by_day in texts
        assert whole not in texts
    assert whole in page(replace(REPORT, budget="tenant:acme")).texts


def test_the_page_says_what_it_is_of_and_when() -> None:
    source = report_html(replace(BY_TENANT, stage="draft"))
    assert "Requests admitted since 2029-12-27 (UTC), of stage draft, by tenant." in source
    assert "As of 2030-01-27 15:30:00 UTC." in source
    assert "All requests of the ledger" in report_html(EMPTY)
    assert page().elements[0] == ("html", {"lang": "en"})


def test_the_page_fits_phones_dark_rooms_and_paper() -> None:
    source = report_html(REPORT)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in source
    for query in ("(prefers-color-scheme: dark)", "print", "(max-width: 560px)"):
        assert f"@media {query}" in source


def test_an_empty_ledger_has_a_page_that_says_so() -> None:
    texts = page(EMPTY).texts
    assert {"There are no budgets yet.", "Nothing was charged in this time."} <= set(texts)
    assert {"Nothing has ended yet.", "No relay runs.", "nothing has been measured yet"} <= {*texts}


def test_what_needs_attention_comes_first_and_the_worst_of_it() -> None:
    found = notices(REPORT)
    assert [one.kind for one in found] == ["bad"] * 3 + ["odd"] * 4
    told = [one.text for one in found]
    assert told[:3] == [
        "The oldest message has been due for 1.58 min: is a relay running?",
        "Quarantine is full: what fails for good is not kept.",
        "Budget tenant:initech is 210,000 tokens over its limit.",
    ]
    assert "The relay on web-2, process 4712, was last seen 25 min ago." in told
    assert any(one.startswith("Stage embed used 1.95 times") for one in told)
    quiet = replace(
        REPORT, balances=BALANCES[:2], counts={"admitted": 1}, drift=DRIFT[:2], overdue_seconds=9,
        quarantine={}, relays=REPORT.relays[:1],
    )  # fmt: skip
    assert notices(quiet) == ()
    assert "Needs attention" not in page(quiet).texts
    many = tuple(replace(BALANCES[2], budget=str(at)) for at in range(8))
    assert (
        notices(replace(quiet, balances=many))[-1].text == "3 more budgets are over their limits."
    )
    drifting = tuple(replace(DRIFT[2], stage=str(at)) for at in range(7))
    told = [one.text for one in notices(replace(quiet, drift=drifting))]
    assert (len(told), told[-1]) == (6, "2 more estimators promise too little.")


def test_groups_have_no_column_for_what_is_nothing_in_all_of_them() -> None:
    groups = (
        Group("a", {"admitted": 2, "lost": 0, "over": 1}, {"refused": 1, "transient": 0}),
        Group("b", {"admitted": 3, "lost": 0}, amounts=amounts(1)),
    )
    requests, charged = group_grids("stage", groups)
    assert requests.columns == ("stage", "admitted", "over")
    assert [[cell.text for cell in row] for row in requests.rows] == [
        ["a", "2", "1"],
        ["b", "3", "0"],
    ]
    assert {row[0].text for row in charged.rows} == {"b"}
