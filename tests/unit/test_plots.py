"""Plots: exact in their titles, told in words and tables, readable in each theme, well-formed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from xml.etree import ElementTree as ET

import pytest
from markupsafe import Markup

from celery_budget.core.budgets import Balance
from celery_budget.reconcile import Drift
from celery_budget.reconcile.figures import Amounts, Day, Spread
from celery_budget.render.plots import (
    PLOT_CSS,
    balance_bar,
    drift_plot,
    runs_plot,
    spend_plot,
    top_budgets,
    waits_plot,
)
from celery_budget.render.plots.spreads import _apart
from celery_budget.render.plots.ticks import (
    amount_ticks,
    day_ticks,
    near,
    seconds_ticks,
    short,
    short_day,
)
from celery_budget.render.text import duration
from tests.unit.sample import BALANCES, BIG, DRIFT, HOSTILE, MONTH_US, NEXT_US, REPORT

MONTHLY = Balance("acme", "tokens", 1000, 50, 600, None, "month", MONTH_US, NEXT_US)


def day(key: str, charged: int, budget: str = "acme", waits: Spread | None = None) -> Day:
    amounts = (Amounts(budget, "tokens", 1, charged, charged, 0, 0),)
    return Day(key, {}, amounts=amounts, waits=waits or Spread())


def parsed(markup: Markup) -> ET.Element:
    """Return the markup as a tree: it is XML as well as HTML."""
    return ET.fromstring(str(markup))  # noqa: S314 (made by us)


def titles(plot: ET.Element) -> list[str]:
    """What a browser shows beside the pointer, mark by mark."""
    return [one.text or "" for one in plot.findall(".//svg/g/title")]


def rows(plot: ET.Element) -> list[list[str]]:
    return [[cell.text or "" for cell in row] for row in plot.findall(".//tbody/tr")]


def bars(plot: ET.Element, kind: str) -> list[dict[str, str]]:
    return [one.attrib for one in plot.iter("rect") if one.get("class") == f"cb-{kind}"]


# Axes.


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (0, (0, 1)),
        (1, (0, 1)),
        (3, (0, 1, 2, 3)),
        (10, (0, 5, 10)),
        (12, (0, 5, 10, 15)),
        (1001, (0, 500, 1000, 1500)),
        (40_000_000, (0, 10_000_000, 20_000_000, 30_000_000, 40_000_000)),
        (BIG, (0, 5 * 10**18, 10 * 10**18)),
    ],
)
def test_ticks_of_amounts_are_round_and_enclose_them(most: int, ticks: tuple[int, ...]) -> None:
    assert amount_ticks(most) == ticks


@pytest.mark.parametrize(
    ("amount", "written"),
    [(0, "0"), (999, "999"), (1000, "1k"), (1500, "1.5k"), (250_000, "250k"), (12_500, "12.5k"),
     (1_999_999, "1.99M"), (10**9, "1G"), (999_999, "999k"), (BIG, "9.22E"), (-2500, "-2.5k")],
)  # fmt: skip
def test_amounts_are_short_at_an_axis(amount: int, written: str) -> None:
    assert short(amount) == written


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0 s"), (2e-6, "2 µs"), (0.001, "1 ms"), (0.0126, "12.6 ms"), (0.9999, "1 s"),
     (1.25, "1.25 s"), (59.99, "1 min"), (90, "1.5 min"), (3600, "1 h"), (5400, "1.5 h"),
     (86_400, "1 d"), (86_400 * 400, "400 d")],
)  # fmt: skip
def test_lengths_of_time_are_written_in_their_best_unit(seconds: float, written: str) -> None:
    assert duration(seconds) == written


@pytest.mark.parametrize(
    ("least", "most"), [(0.01, 0.02), (1e-9, 1e-8), (0, 0), (0.08, 31), (5, 5), (3e9, 4e9)]
)
def test_ticks_of_times_enclose_what_is_measured(least: float, most: float) -> None:
    ticks = seconds_ticks(least, most)
    assert len(ticks) >= 2
    assert list(ticks) == sorted(set(ticks))
    assert ticks[0] <= least or ticks[0] == 1e-6
    assert ticks[-1] >= most or ticks[-1] == 31_536_000.0
    assert 0 <= near(least, ticks[0], ticks[-1]) <= near(most, ticks[0], ticks[-1]) <= 1


@pytest.mark.parametrize("number", [1, 2, 5, 6, 31, 100])
def test_a_few_days_have_ticks_and_the_last_one_does(number: int) -> None:
    dates = [date(2030, 1, 1) + timedelta(days=at) for at in range(number)]
    ticks = day_ticks(dates)
    assert ticks[-1] == number - 1
    assert 1 <= len(ticks) <= 5
    assert len({after - before for before, after in itertools.pairwise(ticks)}) <= 1
    assert short_day(dates[0]) == "1 Jan"


# Spend.


def test_spend_adds_up_to_what_is_spent_within_the_window() -> None:
    days = [day("2029-12-31", 900), day("2030-01-01", 100), day("2030-01-03", 300)]
    plot = parsed(spend_plot(days, MONTHLY))
    assert titles(plot) == [
        "31 Dec: 900 tokens",
        # 200 were spent before the first day, or are corrections.
        "1 Jan: 100 tokens, 300 in all",
        "2 Jan: 0 tokens, 300 in all",
        "3 Jan: 300 tokens, 600 in all, 50 held",
        "limit: 1,000",
    ]
    assert rows(plot) == [
        ["2030-01-03", "300", "600"],
        ["2030-01-02", "0", "300"],
        ["2030-01-01", "100", "300"],
        ["2029-12-31", "900", "-"],
    ]
    assert "600 of 1,000 tokens spent this month, 50 held" in str(spend_plot(days, MONTHLY))


def test_bars_are_as_high_as_their_amounts() -> None:
    days = [day("2030-01-01", 100), day("2030-01-02", 500)]
    plot = parsed(spend_plot(days, MONTHLY))
    [before] = bars(plot, "before")
    first, second = bars(plot, "spent")
    [held] = bars(plot, "held")
    # The axis goes to 1000, which is 180 pixels high.
    assert [float(one["height"]) for one in (before, first, second, held)] == [18, 18, 90, 9]
    assert float(held["y"]) + 9 == float(second["y"])
    [limit] = [one for one in plot.iter("line") if one.get("class") == "cb-limit"]
    assert (limit.get("x1"), limit.get("y1")) == ("0%", "0")


def test_days_of_a_part_are_drawn_by_themselves() -> None:
    days = [day("2030-01-01", 100), day("2030-01-02", 500)]
    plot = parsed(spend_plot(days, MONTHLY, running=False))
    assert titles(plot) == ["1 Jan: 100 tokens", "2 Jan: 500 tokens"]
    assert "limit 1,000 tokens a month" in str(spend_plot(days, MONTHLY, running=False))
    assert not bars(plot, "held")
    daily = replace(MONTHLY, period="day")
    assert titles(parsed(spend_plot(days, daily)))[-1] == "limit: 1,000"


def test_a_limit_far_above_does_not_flatten_what_is_spent() -> None:
    days = [day("2030-01-01", 600)]
    plot = parsed(spend_plot(days, replace(MONTHLY, limit=10**9)))
    assert max(float(one["height"]) for one in bars(plot, "spent")) > 90
    assert "limit 1G is far above" in [one.text for one in plot.iter("text")]
    assert titles(plot)[-1] == "limit: 1,000,000,000"


@pytest.mark.parametrize("limit", [0, 599, None, BIG])
def test_every_limit_can_be_drawn(limit: int | None) -> None:
    plot = parsed(spend_plot([day("2030-01-01", 600)], replace(MONTHLY, limit=limit)))
    assert all(float(one.get("height", 1)) >= 0 for one in plot.iter("rect"))
    assert all(-12 <= float(one.get("y", 0)) <= 204 for one in plot.iter("text"))


def test_amounts_beyond_what_a_float_can_hold_are_exact() -> None:
    odd = 2**53 + 1
    plot = spend_plot([day("2030-01-01", odd)], replace(MONTHLY, limit=BIG, spent=odd))
    assert f"{odd:,}" in titles(parsed(plot))[0]
    assert rows(parsed(plot))[0][1:] == [f"{odd:,}"] * 2


def test_more_corrected_than_spent_is_no_bar_below_the_axis() -> None:
    plot = parsed(spend_plot([day("2030-01-01", 600)], replace(MONTHLY, spent=0)))
    assert all(float(one["y"]) + float(one["height"]) <= 180 for one in bars(plot, "spent"))


def test_nothing_charged_is_said_and_not_drawn() -> None:
    for days in ([], [day("2030-01-01", 0)], [day("2030-01-01", 5, budget="other")]):
        plot = spend_plot(days, MONTHLY)
        assert "nothing was charged in this time" in str(plot)
        assert "<svg" not in str(plot)


def test_the_budgets_nearest_to_their_limits_come_first() -> None:
    names = [one.budget for one in top_budgets(BALANCES, 4)]
    assert names == ["tenant:initech", "tenant:acme", "org", HOSTILE]


# Times.


def test_times_are_three_lines_with_gaps_where_nothing_was_measured() -> None:
    spread = Spread(7, 0.5, 1.5, 61.0)
    keys = ("2030-01-01", "2030-01-02", "2030-01-04", "2030-01-05")
    plot = parsed(waits_plot([day(key, 0, waits=spread) for key in keys]))
    lines = [one.get("class") for one in plot.iter("polyline")]
    assert lines == [f"cb-line cb-{of}" for of in ("p50", "p50", "p95", "p95", "p99", "p99")]
    assert len(titles(plot)) == 12
    assert titles(plot)[0] == "1 Jan: p50 500 ms, 7 measured"
    assert rows(plot)[0] == ["2030-01-05", "7", "500 ms", "1.5 s", "1.02 min"]
    assert "nothing was measured" in str(runs_plot([day("2030-01-01", 0)]))


def test_a_single_day_and_a_wait_of_nothing_can_be_drawn() -> None:
    plot = parsed(waits_plot([day("2030-01-01", 0, waits=Spread(1, 0.0, 0.0, 0.0))]))
    assert titles(plot) == [f"1 Jan: {of} 0 s, 1 measured" for of in ("p50", "p95", "p99")]


def test_names_of_lines_do_not_cover_each_other() -> None:
    placed = sorted(_apart({"p50": 180.0, "p95": 179.0, "p99": 178.0}).values())
    assert all(after - before >= 13 for before, after in itertools.pairwise(placed))
    assert placed[-1] <= 180


# Drift.


def test_drift_is_marked_by_form_and_word() -> None:
    plot = parsed(drift_plot(DRIFT))
    kinds = [one.get("class") for one in plot.iter("path")]
    assert kinds == ["cb-well", "cb-well cb-shadow", "cb-low", "cb-high", "cb-low"]
    forms = {one.get("class"): one.get("d") for one in plot.iter("path")}
    assert len({forms["cb-well"], forms["cb-low"], forms["cb-high"]}) == 3
    words = [one.text for one in plot.iter("text")]
    assert {"1.95 estimated too low", "0.26 estimated too high", "1.08 shadow"} <= set(words)
    assert titles(plot)[2] == (
        "embed, chars/4:1: 1.95; 3,900,000 used of 2,000,000 estimated, estimated too low"
    )
    assert [row[-2:] for row in rows(plot)] == [
        ["0.97", "good"],
        ["1.08", "shadow"],
        ["1.95", "estimated too low"],
        ["0.26", "estimated too high"],
        ["-", "estimated too low"],
    ]


@pytest.mark.parametrize(("estimated", "actual"), [(0, 0), (1, 0), (0, 1), (1, BIG), (BIG, 1)])
def test_every_ratio_can_be_drawn(estimated: int, actual: int) -> None:
    plot = parsed(drift_plot([Drift("s", "e", "1", 1, estimated, actual, ceiling=1.5)]))
    [mark] = [one for one in plot.iter("svg") if one.find("path") is not None]
    assert 0 <= float((mark.get("x") or "").rstrip("%")) <= 100


def test_of_many_estimators_the_furthest_off_are_drawn_and_all_are_in_the_table() -> None:
    many = [Drift(f"s{at}", "e", "1", 1, 100, 100 + at, ceiling=1.5) for at in range(20)]
    plot = parsed(drift_plot(many, most=3))
    assert [one.split(",")[0] for one in titles(plot)] == ["s17", "s18", "s19"]
    assert len(rows(plot)) == 20
    assert "the 3 furthest off of 20" in str(drift_plot(many, most=3))


# Bars.


@pytest.mark.parametrize(
    ("balance", "told"),
    [
        (MONTHLY, "60% spent, 5% held"),
        (replace(MONTHLY, limit=500), "over its limit: 120% spent, 10% held"),
        (replace(MONTHLY, limit=None), "no limit"),
        (replace(MONTHLY, limit=0, spent=0, reserved=0), "0% spent, 0% held"),
        (replace(MONTHLY, limit=0), "over its limit: 100% spent, 100% held"),
        (replace(MONTHLY, limit=BIG, spent=BIG), "over its limit: 100% spent, 0% held"),
        (replace(MONTHLY, spent=-5, reserved=0), "0% spent, 0% held"),
    ],
)
def test_a_bar_tells_how_full_a_budget_is(balance: Balance, told: str) -> None:
    bar = parsed(balance_bar(balance))
    assert bar.findtext("title") == told
    widths = [float((one.get("width") or "").rstrip("%")) for one in bar.iter("rect")]
    assert all(0 <= width <= 100 for width in widths)


# All of them.


def everything() -> Iterator[Markup]:
    for balance in BALANCES:
        yield spend_plot(REPORT.days, balance)
        yield balance_bar(balance)
    yield drift_plot(DRIFT)
    yield waits_plot(REPORT.days)
    yield runs_plot(REPORT.days)


def test_each_plot_has_a_title_a_description_and_a_table() -> None:
    figures = [parsed(one) for one in everything() if "cb-plot" in one]
    assert len(figures) == 7
    for figure in figures:
        svg = figure.find("./div/svg")
        assert svg is not None
        assert svg.get("role") == "img"
        for attribute, element in (("aria-labelledby", "title"), ("aria-describedby", "desc")):
            found = svg.find(element)
            assert found is not None
            assert found.get("id") == svg.get(attribute)
            assert found.text
        assert figure.find("./details/summary") is not None
        assert rows(figure)
        assert {one.get("scope") for one in figure.iter("th")} == {"row", "col"}


def test_ids_of_a_page_are_told_apart() -> None:
    ids = [one.get("id") for plot in everything() for one in parsed(plot).iter() if one.get("id")]
    assert len(ids) == len(set(ids))
    assert all(str(one).startswith("cb-") for one in ids)


def test_plots_have_no_style_of_their_own_and_name_no_address() -> None:
    for plot in everything():
        for one in parsed(plot).iter():
            assert {"style", "href", "src", "onclick"} & set(one.attrib) == set()
            assert one.tag not in ("script", "style", "a", "image", "use")


def test_names_are_escaped() -> None:
    plot = str(spend_plot(REPORT.days, next(one for one in BALANCES if one.budget == HOSTILE)))
    assert "<script" not in plot
    assert "&lt;script&gt;" in plot
    assert HOSTILE in [one.text for one in parsed(Markup(plot)).iter("strong")]  # noqa: S704
    odd = replace(MONTHLY, budget="a\u202eb")
    assert "a\\u202eb" in str(spend_plot([day("2030-01-01", 1, "a\u202eb")], odd))


# Colours.


def themes() -> dict[str, dict[str, str]]:
    """The variables of the style sheet, by theme."""
    light, dark, printed = re.findall(r":root \{(.*?)\}", PLOT_CSS, re.DOTALL)
    read = re.compile(r"--cb-([\w-]+): (#[0-9a-f]{6});")
    return {name: dict(read.findall(one)) for name, one in
            (("light", light), ("dark", dark), ("print", printed))}  # fmt: skip


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_and_marks_have_contrast(theme: str) -> None:
    colours = themes()[theme]
    assert set(colours) == set(themes()["light"])
    for name in ("text", "muted", "good", "warn", "bad", "spent", "limit"):
        assert contrast(colours[name], colours["surface"]) >= 4.5, name
    for name in ("p50", "p95", "p99"):
        assert contrast(colours[name], colours["surface"]) >= 3, name
    # Lightness alone tells what was charged from what was before it.
    assert contrast(colours["spent"], colours["before"]) >= 2
    assert themes()["print"] == themes()["light"]


def test_every_variable_that_is_used_is_there() -> None:
    used = set(re.findall(r"var\(--cb-([\w-]+)\)", PLOT_CSS))
    assert used <= set(themes()["light"])
