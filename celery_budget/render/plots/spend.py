"""The plot of a budget: what it was charged day by day, against its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from fractions import Fraction

from markupsafe import Markup

from celery_budget.core.budgets import Balance
from celery_budget.reconcile.figures import Day
from celery_budget.render.plots.frame import (
    BELOW,
    HEIGHT,
    day_axis,
    days_between,
    empty,
    figure,
    grid,
    named,
    picture,
)
from celery_budget.render.plots.svg import percent, tag, text
from celery_budget.render.plots.ticks import amount_ticks, short, short_day
from celery_budget.render.text import number, printable

__all__ = ["spend_plot", "top_budgets"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: Under a limit so many times as high what is drawn would be too low to be seen.
_TOO_HIGH = 8

#: Windows that are longer than a day: what was spent in one before counts as well.
_LONG = ("total", "week", "month")


def top_budgets(balances: Sequence[Balance], most: int = 6) -> tuple[Balance, ...]:
    """Return the budgets to look at first: those nearest to their limits, then the largest."""

    def key(balance: Balance) -> tuple[Fraction, int, str]:
        used = balance.spent + balance.reserved
        share = Fraction(used, max(balance.limit, 1)) if balance.limit is not None else Fraction(0)
        return -share, -used, balance.budget

    return tuple(sorted(balances, key=key)[:most])


def spend_plot(days: Sequence[Day], balance: Balance, *, running: bool = True) -> Markup:
    """Return what was charged to a budget day by day, against its limit.

    Where its window is longer than a day, what was spent before in the window stands below what was
    charged that day: the last day reaches up to what is spent, with what is held above it.

    :param running: whether ``days`` have all that was charged, up to now. Otherwise, as with those
        of one stage, each day is drawn by itself.
    """
    plot = _Spend.of(days, balance, running)
    name, caption = named("spend", balance.budget), printable(balance.budget)
    note = _note(balance, plot)
    if not plot.charged:
        return empty(name, caption, f"{note}; nothing was charged in this time")
    dates = list(plot.charged)
    peak = max(dates, key=lambda day: plot.charged[day])
    told = (
        f"{note}. From {dates[0].isoformat()} to {dates[-1].isoformat()}; most was charged on "
        f"{peak.isoformat()}: {number(plot.charged[peak])}."
    )
    drawing = picture(name, f"Spend of {caption}", told, HEIGHT + BELOW, *_drawn(plot))
    columns = ["day (UTC)", f"charged ({plot.unit})", *(["in all"] if plot.before else [])]
    rows = [
        [
            day.isoformat(),
            number(plot.charged[day]),
            *([_in_all(plot, day)] if plot.before else []),
        ]
        for day in reversed(dates)
    ]
    return figure(name, caption, note, drawing, columns, rows)


@dataclass(frozen=True)
class _Spend:
    """What is drawn of a budget.

    :ivar charged: on each day, without a gap; no day where nothing was charged at all.
    :ivar before: what was spent in the window before each of its days; none where each day stands
        by itself.
    """

    unit: str
    charged: dict[date, int]
    before: dict[date, int]
    held: int
    limit: int | None

    @classmethod
    def of(cls, days: Sequence[Day], balance: Balance, running: bool) -> _Spend:
        found = {
            date.fromisoformat(day.key): sum(
                one.charged for one in day.amounts if one.budget == balance.budget
            )
            for day in days
        }
        charged = {day: found.get(day, 0) for day in days_between(found)}
        if not any(charged.values()):
            charged = {}
        running = running and balance.period in _LONG
        return cls(
            printable(balance.unit),
            charged,
            _before(charged, balance) if running else {},
            balance.reserved if running else 0,
            balance.limit if running or balance.period == "day" else None,
        )

    def top(self, day: date) -> int:
        return self.before.get(day, 0) + self.charged[day]


def _before(charged: dict[date, int], balance: Balance) -> dict[date, int]:
    """Return what was spent in the window before each of its days, counted back from what is now.

    That has in it what was spent before the first day that is shown, and corrections.
    """
    begin = (_EPOCH + timedelta(microseconds=balance.start_us)).date()
    found: dict[date, int] = {}
    left = balance.spent
    for day in sorted(charged, reverse=True):
        if day < begin:
            break
        left -= charged[day]
        found[day] = left
    return found


def _in_all(plot: _Spend, day: date) -> str:
    return number(plot.top(day)) if day in plot.before else "-"


def _note(balance: Balance, plot: _Spend) -> str:
    limit = "no limit" if balance.limit is None else f"limit {number(balance.limit)} {plot.unit}"
    if not plot.before:
        per = "" if balance.period == "total" else f" a {balance.period}"
        return f"{plot.unit} charged day by day; {limit}{per if balance.limit is not None else ''}"
    this = "" if balance.period == "total" else f" this {balance.period}"
    held = f", {number(plot.held)} held" if plot.held else ""
    if balance.limit is None:
        return f"{number(balance.spent)} {plot.unit} spent{this}{held}; no limit"
    return f"{number(balance.spent)} of {number(balance.limit)} {plot.unit} spent{this}{held}"


def _drawn(plot: _Spend) -> list[Markup]:
    dates = list(plot.charged)
    most = max(*map(plot.top, dates), plot.top(dates[-1]) + plot.held, 1)
    too_high = plot.limit is not None and plot.limit > _TOO_HIGH * most
    ticks = amount_ticks(most if plot.limit is None or too_high else max(most, plot.limit))

    def y(amount: int) -> float:
        return HEIGHT * (1 - max(0, amount) / ticks[-1])

    slot = 1 / len(dates)
    found = [*grid((y(tick), short(tick)) for tick in ticks), *day_axis(dates)]
    for at, day in enumerate(dates):
        below, top = plot.before.get(day, 0), plot.top(day)
        held = plot.held if at == len(dates) - 1 else 0
        parts = [
            _column(at, slot, y(0), y(below), "before"),
            _column(at, slot, y(below), y(top), "spent"),
            _column(at, slot, y(top), y(top + held), "held"),
        ]
        found.append(
            tag(
                "g",
                tag("title", _told(plot, day, held)),
                # The whole slot answers the pointer, not only a column that may be a pixel high.
                tag("rect", x=percent(at * slot), width=percent(slot), y=0, height=HEIGHT,
                    class_="cb-slot"),
                *filter(None, parts),
                class_="cb-mark",
            )
        )  # fmt: skip
    if plot.limit is not None:
        # It counts from the beginning of the window.
        first = next((at for at, day in enumerate(dates) if day in plot.before), 0)
        found.append(_limit(plot.limit, first * slot, y(plot.limit), too_high))
    return found


def _told(plot: _Spend, day: date, held: int) -> str:
    told = f"{short_day(day)}: {number(plot.charged[day])} {plot.unit}"
    if day in plot.before:
        told += f", {number(plot.top(day))} in all"
    return f"{told}, {number(held)} held" if held else told


def _column(at: int, slot: float, base: float, top: float, kind: str) -> Markup | None:
    if top >= base:
        return None
    gap = 0.12 * slot
    return tag(
        "rect",
        x=percent(at * slot + gap),
        width=percent(slot - 2 * gap),
        y=top,
        height=base - top,
        class_=f"cb-{kind}",
    )


def _limit(limit: int, begin: float, y: float, too_high: bool) -> Markup:
    exact = tag("title", f"limit: {number(limit)}")
    if too_high:
        label = text(f"limit {short(limit)} is far above", "100%", -8, "name", "end")
        return tag("g", exact, label)
    line = tag("line", x1=percent(begin), x2="100%", y1=y, y2=y, class_="cb-limit")
    return tag("g", exact, line, text(f"limit {short(limit)}", "100%", y - 6, "name", "end"))
