"""Plots of how long things took: p50, p95 and p99 of each day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

from markupsafe import Markup

from celery_budget.reconcile.figures import Day, Spread
from celery_budget.render.plots import svg
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
from celery_budget.render.plots.ticks import near, seconds_ticks, short_day
from celery_budget.render.text import duration, number

__all__ = ["runs_plot", "waits_plot"]

_QUANTILES = ("p50", "p95", "p99")

#: How far apart the names of lines are at least, in pixels.
_GAP = 13.0


def waits_plot(days: Sequence[Day]) -> Markup:
    """Return from when requests were due to their first start: p50, p95 and p99 of each day."""
    return _plot(
        "waits", "Waits", "from due to first start", [(day.key, day.waits) for day in days]
    )


def runs_plot(days: Sequence[Day]) -> Markup:
    """Return how long attempts ran: p50, p95 and p99 of each day."""
    return _plot(
        "runs", "Running times", "of single attempts", [(day.key, day.runs) for day in days]
    )


def _plot(kind: str, caption: str, what: str, days: Sequence[tuple[str, Spread]]) -> Markup:
    """Return three lines over days, on a logarithmic axis; a day without measures is a gap."""
    name = named(kind)
    known = {date.fromisoformat(key): spread for key, spread in days if _values(spread)}
    if not known:
        return empty(name, caption, f"{what}; nothing was measured in this time")
    dates = days_between(known)
    last = known[dates[-1]]
    note = f"{what}; on the last day " + ", ".join(
        f"{quantile} {duration(value)}" for quantile, value in _values(last).items()
    )
    measured = [value for spread in known.values() for value in _values(spread).values()]
    told = (
        f"{note}. From {dates[0].isoformat()} to {dates[-1].isoformat()}, between "
        f"{duration(min(measured))} and {duration(max(measured))}; the axis is logarithmic."
    )
    drawing = picture(name, caption, told, HEIGHT + BELOW, *_drawn(dates, known, measured))
    rows = [
        [
            day.isoformat(),
            number(known[day].count),
            *(_or_dash(getattr(known[day], quantile)) for quantile in _QUANTILES),
        ]
        for day in reversed(dates)
        if day in known
    ]
    return figure(name, caption, note, drawing, ["day (UTC)", "measured", *_QUANTILES], rows)


def _values(spread: Spread) -> dict[str, float]:
    both = ((quantile, getattr(spread, quantile)) for quantile in _QUANTILES)
    return {quantile: value for quantile, value in both if value is not None}


def _or_dash(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _drawn(
    dates: Sequence[date], known: Mapping[date, Spread], measured: Sequence[float]
) -> list[Markup]:
    ticks = seconds_ticks(min(measured), max(measured))

    def y(seconds: float) -> float:
        return HEIGHT * (1 - near(seconds, ticks[0], ticks[-1]))

    found = [*grid((y(tick), duration(tick)) for tick in ticks), *day_axis(dates)]
    ends: dict[str, float] = {}
    for quantile in _QUANTILES:
        line: list[list[tuple[float, float]]] = [[]]
        marks = []
        for at, day in enumerate(dates):
            value = getattr(known.get(day), quantile, None)
            if value is None:
                line.append([])
                continue
            x, height = (at + 0.5) / len(dates), y(value)
            line[-1].append((x, height))
            ends[quantile] = height
            count = number(known[day].count)
            told = f"{short_day(day)}: {quantile} {duration(value)}, {count} measured"
            marks.append(_mark(x, height, quantile, told))
        found.append(svg.stretched(HEIGHT, *(svg.line(one, quantile) for one in line if one[1:])))
        found += marks
    found += [
        text(quantile, "100%", height + 4, f"name cb-name-{quantile}")
        for quantile, height in _apart(ends).items()
    ]
    return found


def _mark(x: float, height: float, quantile: str, told: str) -> Markup:
    """Return a point, with a place around it that answers the pointer."""
    dot = tag("circle", cx=percent(x), cy=height, r=2.5, class_=f"cb-dot cb-{quantile}")
    around = tag("circle", cx=percent(x), cy=height, r=8, class_="cb-slot")
    return tag("g", tag("title", told), dot, around, class_="cb-mark")


def _apart(heights: Mapping[str, float]) -> dict[str, float]:
    """Return heights at which names do not cover each other, inside of the picture."""
    found: dict[str, float] = {}
    above = -_GAP
    for name, height in sorted(heights.items(), key=lambda one: (one[1], one[0])):
        found[name] = above = max(height, above + _GAP)
    below = HEIGHT + _GAP
    for name in reversed(list(found)):
        found[name] = below = min(found[name], below - _GAP)
    return found
