"""A report as one page of HTML: no network, no script, its style and plots inside.

Names come from outside, so every text is escaped by the template engine, invisible characters are
written as their escapes, and the page forbids itself to load or run anything.
"""

from __future__ import annotations

import functools
from datetime import datetime, timezone
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from celery_budget.core.budgets import Balance
from celery_budget.reconcile import Report
from celery_budget.render.budgets import tree
from celery_budget.render.grids import (
    amounts_grid,
    counts_grid,
    failures_grid,
    group_grids,
    lanes_grid,
    parked_grid,
    quarantine_grid,
    refusals_grid,
    relays_grid,
    some_of,
    times_grid,
    waived_grid,
    windows_grid,
)
from celery_budget.render.notices import notices
from celery_budget.render.plots import (
    PLOT_CSS,
    balance_bar,
    drift_plot,
    runs_plot,
    spend_plot,
    top_budgets,
    waits_plot,
)
from celery_budget.render.reports import period
from celery_budget.render.sources import replica_of
from celery_budget.render.tables import still_open
from celery_budget.render.text import number, printable

__all__ = ["report_html"]

#: So many budgets have a plot; the others are named.
PLOTTED = 6


#: States of requests that have not ended.
_OPEN = ("planned", "reserved", "published", "running", "waiting")


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("celery_budget.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(number=number, printable=printable)
    return made


def report_html(report: Report) -> str:
    """Return a report as one self-contained page."""
    plotted = top_budgets(_drawable(report), PLOTTED)
    names = {balance.budget for balance in plotted}
    # The days of one stage, or up to a time that is over, do not add up to what is spent now.
    running = report.stage is None and report.until_us is None
    page: dict[str, Any] = {
        "report": report,
        "made": datetime.fromtimestamp(report.at_us / 1_000_000, timezone.utc),
        "period": period(report) or "All requests of the ledger",
        "read_from": replica_of(report),
        "css": PLOT_CSS,
        "notices": notices(report),
        "tiles": _tiles(report),
        "open": still_open(report.counts["admitted"], report.open_work, report.overdue_seconds),
        "balances": [(one, depth, balance_bar(one)) for one, depth in tree(report.balances)],
        "windows": windows_grid(report.balances),
        "spend": [spend_plot(report.days, one, running=running) for one in plotted],
        "not_plotted": some_of([one.budget for one in report.balances if one.budget not in names]),
        "requests": [
            counts_grid(report.counts),
            refusals_grid(report.refusals),
            waived_grid(report.waived),
            failures_grid(report.failures),
            parked_grid(report.parked),
            lanes_grid(report.lanes),
        ],
        "amounts": amounts_grid(report.amounts),
        "drift": drift_plot(report.drift),
        "times": times_grid(report.waits, report.runs),
        "time_plots": [waits_plot(report.days), runs_plot(report.days)],
        "groups": () if report.by is None else group_grids(report.by, report.groups),
        "work": [relays_grid(report.relays), quarantine_grid(report.quarantine)],
    }
    return _environment().get_template("report.html").render(page)


def _drawable(report: Report) -> list[Balance]:
    """Return the budgets for which the days have anything to draw."""
    charged = {one.budget for day in report.days for one in day.amounts if one.charged}
    return [balance for balance in report.balances if balance.budget in charged]


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """Return what is looked at first: what, how many, and what to say of it."""
    counts = report.counts
    admitted, refused = counts.get("admitted", 0), counts.get("refused", 0)
    asked = admitted + refused
    open_now = sum(report.open_work.get(state, 0) for state in _OPEN)
    return [
        ("admitted", number(admitted), "requests that reserved budget"),
        ("refused", number(refused), f"{refused / asked:.1%} of what was asked" if asked else ""),
        ("settled", number(counts.get("settled", 0)), "ran and were charged"),
        ("open", number(open_now), "not ended yet"),
        ("parked", number(counts.get("parked", 0)), "waiting for budget"),
        ("lost", number(counts.get("lost", 0)), "ran, outcome unknown"),
    ]
