"""What plots have in common: a figure with its table, the drawing inside, axes, days."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import date

from markupsafe import Markup

from celery_budget.render.plots.svg import percent, tag, text
from celery_budget.render.plots.ticks import day_ticks, short_day

__all__ = [
    "BELOW",
    "HEIGHT",
    "day_axis",
    "days_between",
    "empty",
    "figure",
    "grid",
    "named",
    "picture",
]

#: How high a plot over days is, without what is written below its axis, and that, in pixels.
HEIGHT = 180.0
BELOW = 24.0

#: No plot goes back further than this.
MOST_DAYS = 366


def figure(
    name: str,
    caption: str,
    note: str,
    drawing: Markup,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    opened: bool = False,
) -> Markup:
    """Return a plot with its caption, and the same figures as a table that can be opened.

    :param name: its id on the page.
    :param columns: headings; the first column names its row.
    :param opened: whether the table is open from the beginning.
    """
    head = tag("tr", *(tag("th", one, scope="col") for one in columns))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    ]
    told = tag("caption", f"{caption}: {note}")
    table = tag("table", told, tag("thead", head), tag("tbody", *body))
    return tag(
        "figure",
        _caption(caption, note),
        drawing,
        tag(
            "details",
            tag("summary", "Figures", tag("span", f" of {caption}", class_="cb-unseen")),
            tag("div", table, class_="cb-scroll", tabindex="0", role="group", aria_label=caption),
            **({"open": ""} if opened else {}),
        ),
        class_="cb-figure",
        id=name,
    )


def empty(name: str, caption: str, why: str) -> Markup:
    """Return what stands in the place of a plot where there is nothing to draw."""
    return tag("figure", _caption(caption, why), class_="cb-figure cb-nothing", id=name)


def _caption(caption: str, note: str) -> Markup:
    return tag("figcaption", tag("strong", caption), " ", tag("span", note, class_="cb-note"))


def picture(
    name: str, title: str, told: str, height: float, *inside: Markup, wide: bool = False
) -> Markup:
    """Return the drawing of a plot, with its title and description.

    :param wide: whether nothing is written beside it.
    """
    drawn = tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", told, id=f"{name}-desc"),
        *inside,
        role="img",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-desc",
        width="100%",
        height=height,
        focusable="false",
    )
    return tag("div", drawn, class_="cb-plot cb-plot-wide" if wide else "cb-plot")


def named(kind: str, of: str = "") -> str:
    """Return the id of a plot: the same each time for the same thing."""
    digest = hashlib.blake2b(of.encode(), digest_size=6).hexdigest()
    return f"cb-{kind}-{digest}" if of else f"cb-{kind}"


def days_between(known: Iterable[date]) -> list[date]:
    """Return all days from the first to the last of those that are known."""
    ordinals = [day.toordinal() for day in known]
    if not ordinals:
        return []
    first = max(min(ordinals), max(ordinals) - MOST_DAYS + 1)
    return [date.fromordinal(at) for at in range(first, max(ordinals) + 1)]


def day_axis(dates: Sequence[date]) -> list[Markup]:
    """Return what is written below a plot over days, each of which has a slot of equal width."""
    slot = 1 / len(dates)
    return [
        text(short_day(dates[at]), percent((at + 0.5) * slot), HEIGHT + 17, "tick", "middle")
        for at in day_ticks(dates)
    ]


def grid(places: Iterable[tuple[float, str]]) -> list[Markup]:
    """Return lines across a plot, each at its height and with what is written beside it."""
    found = []
    for height, label in places:
        found.append(tag("line", x1=0, x2="100%", y1=height, y2=height, class_="cb-grid"))
        found.append(text(label, -8, height + 4, "tick", "end"))
    return found
