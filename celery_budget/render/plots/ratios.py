"""The plot of estimators: how much was used of what each had promised."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from celery_budget.reconcile import Drift
from celery_budget.render.grids import DRIFT_LOW, drift_mark
from celery_budget.render.plots.frame import empty, figure, picture
from celery_budget.render.plots.svg import percent, tag, text
from celery_budget.render.plots.ticks import near
from celery_budget.render.text import number, printable

__all__ = ["drift_plot"]

_NAME = "cb-drift"
_ROW = 44.0
_BELOW = 24.0

#: The axis is at least from a fourth to four times, and at most to 64 times.
_LEAST, _MOST = 2, 6

#: So much of a name is written; all of it is in the title and in the table.
_LETTERS = 30


def drift_plot(drifts: Sequence[Drift], most: int = 12) -> Markup:
    """Return actual over estimated, for each stage and estimator, on an axis of doublings.

    Marked as in the tables: above the ceiling of its stage, and under a half. A shadow's mark is
    hollow.

    :param most: so many are drawn, those that are furthest off; the table has all.
    """
    caption = "Used of what was estimated"
    if not drifts:
        return empty(_NAME, caption, "nothing has been measured yet")
    drawn = _furthest(drifts, most)
    note = (
        "by stage and estimator; 1\N{MULTIPLICATION SIGN} is exact, shaded is what counts as good"
    )
    if len(drawn) < len(drifts):
        note += f"; the {len(drawn)} furthest off of {len(drifts)}"
    reach = _reach(drawn)
    parts = [*_axis(reach, _ROW * len(drawn))]
    for at, drift in enumerate(drawn):
        parts.append(_row(drift, at * _ROW, reach))
    off = [_title(drift) for drift in drifts if drift_mark(drift) not in ("", "shadow")]
    told = f"{note}. " + ("All are within bounds." if not off else "; ".join(off) + ".")
    rows = [
        [
            _label(drift),
            number(drift.requests),
            number(drift.estimated),
            number(drift.actual),
            _ratio(drift),
            drift_mark(drift) or "good",
        ]
        for drift in drifts
    ]
    columns = ["stage, estimator", "requests", "estimated", "actual", "ratio", "verdict"]
    drawing = picture(_NAME, caption, told, _ROW * len(drawn) + _BELOW, *parts, wide=True)
    return figure(_NAME, caption, note, drawing, columns, rows, opened=True)


def _furthest(drifts: Sequence[Drift], most: int) -> list[Drift]:
    """Return those that are furthest from 1, in the order in which they were given."""
    far = sorted(range(len(drifts)), key=lambda at: -abs(_doublings(drifts[at])))[:most]
    return [drifts[at] for at in sorted(far)]


def _doublings(drift: Drift) -> float:
    """Return how often what was promised has to be doubled; without end where it was nothing."""
    if not drift.estimated:
        return math.inf if drift.actual else 0.0
    if not drift.actual:
        return -math.inf
    return math.log2(drift.actual) - math.log2(drift.estimated)


def _reach(drifts: Sequence[Drift]) -> int:
    """Return up to how many doublings, and halvings, the axis goes."""
    finite = (abs(one) for one in map(_doublings, drifts) if math.isfinite(one))
    return min(_MOST, max(_LEAST, math.ceil(max(finite, default=0))))


def _x(ratio: float, reach: int) -> float:
    return near(ratio, 2.0**-reach, 2.0**reach)


def _axis(reach: int, height: float) -> list[Markup]:
    found = []
    step = 1 if reach <= 3 else 2
    for power in range(-reach + reach % step, reach + 1, step):
        x = percent(_x(2.0**power, reach))
        kind = "even" if power == 0 else "grid"
        found.append(tag("line", x1=x, x2=x, y1=0, y2=height, class_=f"cb-{kind}"))
        label = f"{2**power}\N{MULTIPLICATION SIGN}" if power >= 0 else f"1/{2**-power}"
        found.append(text(label, x, height + 17, "tick", "middle"))
    return found


def _row(drift: Drift, top: float, reach: int) -> Markup:
    doublings = _doublings(drift)
    x = _x(2.0 ** max(-reach, min(reach, doublings)), reach)
    middle = _x(1, reach)
    end = _x(drift.ceiling, reach) if drift.ceiling is not None else middle
    kind = _kind(drift)
    y = top + 30
    said = f"{_ratio(drift)} {drift_mark(drift)}".strip()
    return tag(
        "g",
        tag("title", _title(drift)),
        tag("rect", x=0, y=top, width="100%", height=_ROW, class_="cb-slot"),
        _band(_x(DRIFT_LOW, reach), end, y),
        tag("line", x1=percent(middle), x2=percent(x), y1=y, y2=y, class_=f"cb-stem cb-{kind}"),
        _shape(kind, drift.shadow, x, y),
        text(_cut(_label(drift)), 0, top + 14, "name"),
        text(said, "100%", top + 14, "name", "end"),
        class_="cb-mark",
    )


def _band(begin: float, end: float, y: float) -> Markup:
    width = percent(max(0.0, end - begin))
    return tag("rect", x=percent(begin), y=y - 8, width=width, height=16, class_="cb-band")


def _shape(kind: str, shadow: bool, x: float, y: float) -> Markup:
    """Return a mark whose form tells what its colour tells."""
    classes = f"cb-{kind} cb-shadow" if shadow else f"cb-{kind}"
    forms = {"well": "M-5,0 a5,5 0 1 0 10,0 a5,5 0 1 0 -10,0", "low": "M-6,5 L6,5 L0,-6 Z",
             "high": "M-6,-5 L6,-5 L0,6 Z"}  # fmt: skip
    form = tag("path", d=forms[kind], class_=classes)
    return tag("svg", form, x=percent(x), y=y, overflow="visible")


def _kind(drift: Drift) -> str:
    mark = drift_mark(drift)
    return "low" if "low" in mark else "high" if "high" in mark else "well"


def _label(drift: Drift) -> str:
    shadow = " (shadow)" if drift.shadow else ""
    return printable(f"{drift.stage}, {drift.estimator}:{drift.version}{shadow}")


def _cut(label: str) -> str:
    return label if len(label) <= _LETTERS else f"{label[: _LETTERS - 1]}…"


def _ratio(drift: Drift) -> str:
    return "-" if drift.ratio is None else f"{drift.ratio:.2f}"


def _title(drift: Drift) -> str:
    mark = drift_mark(drift)
    told = (
        f"{_label(drift)}: {_ratio(drift)}; {number(drift.actual)} used of "
        f"{number(drift.estimated)} estimated"
    )
    return f"{told}, {mark}" if mark and mark != "shadow" else told
