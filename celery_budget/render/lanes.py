"""Lanes: how they stand, as a table and one by one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.core.lanes import Lane, Load
from celery_budget.reconcile import LaneStanding, TenantShare
from celery_budget.render.text import facts, literal, moment, number, table_of

__all__ = ["lane_view", "lanes_table"]

#: Why a lane lets go nothing, in words.
WHY = {
    "paused": "paused",
    "asleep": "asleep",
    "running": "full: running",
    "queued": "full: queued",
}
_COUNTED = ("waiting", "queued", "running")


def lanes_table(lanes: Sequence[LaneStanding]) -> RenderableType:
    """One row for each lane: what waits, is queued and runs, and why it holds work back."""
    if not lanes:
        return Text(
            "There are no lanes: what is admitted is published at once. Make one with "
            "'celery -A PROJ budget lane set NAME --queue QUEUE'."
        )
    rows: list[list[Text | str]] = [
        [
            literal(one.lane.name),
            literal(", ".join(one.lane.queues)),
            *(_load(getattr(one, name)) for name in _COUNTED),
            _oldest(one),
            _why(one),
        ]
        for one in lanes
    ]
    return table_of(
        ["lane", "queues", *_COUNTED, "oldest wait", "held back"],
        rows,
        numbers=[*_COUNTED, "oldest wait"],
    )


def _load(load: Load) -> Text:
    return Text(f"{number(load.jobs)} ({number(load.units)})")


def _oldest(one: LaneStanding) -> str:
    return f"{one.oldest_seconds:,.0f} s" if one.waiting.jobs else "-"


def _why(one: LaneStanding) -> Text:
    if one.why is None:
        return Text("-")
    told = WHY[one.why]
    if one.why == "asleep":
        told += f": {one.asleep or 'its workers were not asked lately'}"
    return Text(told, "yellow")


def lane_view(one: LaneStanding) -> RenderableType:
    """One lane: how it stands, then its limits."""
    lane, wait = one.lane, one.lane.max_wait_us
    limits = {
        f"most {kind}": f"{_limit(lane, f'max_{kind}_jobs')} jobs, "
        f"{_limit(lane, f'max_{kind}_units')} units"
        for kind in ("queued", "running", "waiting")
    }
    return Group(
        lanes_table([one]),
        *([Text(), _shares_table(one.shares)] if one.shares else []),
        Text(),
        facts(
            {
                "budgets": ", ".join(map(str, lane.budgets)) or None,
                **limits,
                "burst": f"{_limit(lane, 'burst_units')} units a second",
                "longest wait": "any" if wait is None else f"{wait / 1_000_000:,g} s",
                "preflight": "on" if lane.preflight else "off",
                "ageing": f"{number(lane.ageing)} units a second",
            }
        ),
    )


def _shares_table(shares: Sequence[TenantShare]) -> RenderableType:
    """Who shares a lane: whose turn comes next, and what each has had."""
    rows: list[list[Text | str]] = [
        [
            "-" if one.turn is None else number(one.turn),
            literal(one.tenant),
            literal(one.above or ""),
            number(one.weight),
            _load(one.waiting),
            f"{one.oldest_seconds:,.0f} s" if one.waiting.jobs else "-",
            number(one.ahead),
            "-" if one.served_us is None else moment(one.served_us),
        ]
        for one in shares
    ]
    columns = ["turn", "tenant", "below", "weight", "waiting", "oldest wait", "ahead", "served"]
    numbers = ["turn", "weight", "waiting", "oldest wait", "ahead", "served"]
    return table_of(columns, rows, numbers=numbers)


def _limit(lane: Lane, key: str) -> str:
    limit = getattr(lane, key)
    return "any" if limit is None else str(number(limit))
