"""A report as CSV (RFC 4180), in the long form that spreadsheets and data frames take.

One row for each budget, or for each group and budget. What is counted of the whole, or of the
group, stands in each of its rows, and is not to be added up over them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping

from celery_budget.core.budgets import Balance
from celery_budget.reconcile import Report
from celery_budget.reconcile.figures import FAILURES, Amounts, Group, Spread
from celery_budget.render.grids import MEANING, REFUSED

__all__ = ["COLUMNS", "report_csv"]

_BALANCE = ("limit", "reserved", "spent", "available", "period", "start_us", "end_us")
_AMOUNTS = ("requests", "estimated", "charged", "over_use", "requests_over")
_TIMES = tuple(
    f"{what}_{figure}"
    for what in ("waits", "runs")
    for figure in ("measured", "p50_seconds", "p95_seconds", "p99_seconds")
)
_REFUSED = tuple(f"refusals_{reason}" for reason in REFUSED)

#: The columns, always all of them, in this order.
COLUMNS = (
    "by",
    "group",
    "budget",
    "unit",
    *_AMOUNTS,
    *MEANING,
    *(f"failed_{how}" for how in FAILURES),
    *_TIMES,
    "refusals",
    *_REFUSED,
    "waived",
    "waived_amount",
    *(f"balance_{name}" for name in _BALANCE),
)

#: What makes a spreadsheet take a text for a formula, at its beginning.
_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")

Row = dict[str, object]


def report_csv(report: Report) -> str:
    """Return a report as CSV: a head, then a row for each budget, of each group where it has any.

    Amounts are exact integers. A name that a spreadsheet would take for a formula has an apostrophe
    before it. What is not known, or not of a row, is empty.
    """
    written = io.StringIO(newline="")
    rows = csv.DictWriter(written, COLUMNS, restval="")
    rows.writeheader()
    for row in _whole(report) if report.by is None else _grouped(report.by, report.groups):
        rows.writerow({name: _cell(value) for name, value in row.items()})
    return written.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _whole(report: Report) -> Iterator[Row]:
    """Yield a row for each budget that has a balance, or was drawn on."""
    shared = _figures(report.counts, report.failures, report.waits, report.runs)
    amounts = {one.budget: one for one in report.amounts}
    refused = {one.budget: _refused(report, one.budget) for one in report.refusals}
    never = _refused(report, None)
    balances = {one.budget: one for one in report.balances}
    waived = [one.budget for one in report.waived]
    names = list(dict.fromkeys([*balances, *amounts, *refused, *waived])) or [""]
    for name in names:
        balance = balances.get(name)
        yield {
            "budget": name,
            **_amounts(amounts.get(name)),
            **({} if balance is None else _balance(balance)),
            **shared,
            **refused.get(name, never),
            "waived": sum(one.count for one in report.waived if one.budget == name),
            "waived_amount": sum(one.amount for one in report.waived if one.budget == name),
        }


def _refused(report: Report, budget: str | None) -> Row:
    """Return how often a budget was short, in all and by reason."""
    found = {one.reason: one.count for one in report.refusals if one.budget == budget}
    by_reason = {f"refusals_{reason}": found.get(reason, 0) for reason in REFUSED}
    return {"refusals": sum(found.values()), **by_reason}


def _grouped(by: str, groups: tuple[Group, ...]) -> Iterator[Row]:
    for group in groups:
        shared = _figures(group.counts, group.failures, group.waits, group.runs)
        for one in group.amounts or (None,):
            yield {"by": by, "group": group.key, **_amounts(one), **shared}


def _figures(
    counts: Mapping[str, int], failures: Mapping[str, int], waits: Spread, runs: Spread
) -> Row:
    return {
        **{name: counts.get(name) for name in MEANING},
        **{f"failed_{how}": failures.get(how, 0) for how in FAILURES},
        **_spread("waits", waits),
        **_spread("runs", runs),
    }


def _spread(what: str, spread: Spread) -> Row:
    return {
        f"{what}_measured": spread.count,
        f"{what}_p50_seconds": spread.p50,
        f"{what}_p95_seconds": spread.p95,
        f"{what}_p99_seconds": spread.p99,
    }


def _amounts(one: Amounts | None) -> Row:
    if one is None:
        return dict.fromkeys(_AMOUNTS, 0)
    figures = (one.requests, one.estimated, one.charged, one.over, one.requests_over)
    return {"budget": one.budget, "unit": one.unit, **dict(zip(_AMOUNTS, figures, strict=True))}


def _balance(balance: Balance) -> Row:
    return {
        "unit": balance.unit,
        **{f"balance_{name}": getattr(balance, name) for name in _BALANCE},
    }
