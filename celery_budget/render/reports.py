"""A report for people at a terminal, and what in it needs attention."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.reconcile import Report
from celery_budget.render.budgets import balances_table
from celery_budget.render.grids import (
    Grid,
    amounts_grid,
    failures_grid,
    group_grids,
    lanes_grid,
    refusals_grid,
    times_grid,
    waived_grid,
    windows_grid,
)
from celery_budget.render.tables import (
    counts_table,
    drift_table,
    grid_table,
    quarantine_counts,
    queued_table,
    relays_table,
    still_open,
)
from celery_budget.render.text import instant, literal

__all__ = ["period", "report_view"]


def report_view(report: Report) -> RenderableType:
    """Return all that a report says, section by section, and in its last line what is open."""
    return Group(
        *_head(report),
        *(part for title, body in _sections(report) for part in _titled(title, body)),
        still_open(report.counts["admitted"], report.open_work, report.overdue_seconds),
    )


def _titled(title: str, body: RenderableType) -> tuple[RenderableType, ...]:
    return Text(title, "bold"), body, Text()


def _head(report: Report) -> list[RenderableType]:
    """Say what the report is of, where that is not everything."""
    told = period(report)
    return [literal(told, "bold"), Text()] if told else []


def period(report: Report) -> str:
    """Return which requests a report is of, in words; nothing where it is of all."""
    parts = []
    if report.since_us is not None:
        parts.append(f"since {instant(report.since_us)}")
    if report.until_us is not None:
        parts.append(f"before {instant(report.until_us)}")
    when = [f"admitted {' and '.join(parts)} (UTC)"] if parts else []
    drawn = [] if report.budget is None else [f"that draw on {report.budget}"]
    of = [] if report.stage is None else [f"of stage {report.stage}"]
    return "Requests " + ", ".join([*when, *drawn, *of]) if when or drawn or of else ""


def _sections(report: Report) -> Iterator[tuple[str, RenderableType]]:
    """Yield titles and tables; what has nothing to say is left out, unless that is news."""
    yield "Budgets", balances_table(report.balances)
    yield from _unless_empty(windows_grid(report.balances))
    yield "Requests", counts_table(report.counts)
    yield from _unless_empty(refusals_grid(report.refusals))
    yield from _unless_empty(waived_grid(report.waived))
    if report.parked:
        yield "Parked", queued_table(report.parked)
    failures = {name: count for name, count in report.failures.items() if count}
    yield from _unless_empty(failures_grid(failures))
    yield from _unless_empty(lanes_grid(report.lanes))
    yield from _unless_empty(amounts_grid(report.amounts))
    yield "Estimated and actual", drift_table(report.drift)
    if report.waits.count or report.runs.count:
        times = times_grid(report.waits, report.runs)
        yield times.title, grid_table(times)
    if report.by is not None:
        for grid in group_grids(report.by, report.groups):
            yield from _unless_empty(grid)
    yield "Relays", relays_table(report.relays)
    yield "Quarantine", quarantine_counts(report.quarantine, report.quarantine_full)


def _unless_empty(grid: Grid) -> Iterator[tuple[str, RenderableType]]:
    if grid.rows:
        yield grid.title, grid_table(grid)
