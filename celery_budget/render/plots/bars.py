"""How full a budget is, as a bar."""

from __future__ import annotations

from markupsafe import Markup

from celery_budget.core.budgets import Balance
from celery_budget.render.plots.svg import percent, tag

__all__ = ["balance_bar", "share"]

_HEIGHT = 10.0


def balance_bar(balance: Balance) -> Markup:
    """Return what is spent and then what is held of a budget's limit, as a bar.

    Where more is used than the limit allows, the bar is as long as what is used, and the limit is
    a line in it.
    """
    used, limit = balance.spent + balance.reserved, balance.limit
    if limit is None:
        return _bar("no limit", "free")
    told = f"{share(balance.spent, limit)} spent, {share(balance.reserved, limit)} held"
    whole = max(limit, used, 1)
    spent = max(0, balance.spent) / whole
    parts = [
        _part("spent", 0, spent),
        _part("held", spent, balance.reserved / whole),
    ]
    if used <= limit:
        return _bar(told, "within", *parts)
    at = percent(limit / whole)
    line = tag("line", x1=at, x2=at, y1=-2, y2=_HEIGHT + 2, class_="cb-limit")
    return _bar(f"over its limit: {told}", "over", *parts, line)


def _bar(told: str, kind: str, *parts: Markup) -> Markup:
    track = tag("rect", x=0, y=0, width="100%", height=_HEIGHT, class_="cb-track")
    drawn = [tag("title", told), track, *filter(None, parts)]
    return tag(
        "svg",
        *drawn,
        role="img",
        width="100%",
        height=_HEIGHT,
        class_=f"cb-bar cb-bar-{kind}",
        focusable="false",
    )


def _part(kind: str, begin: float, width: float) -> Markup:
    if width <= 0:
        return Markup("")
    return tag(
        "rect", x=percent(begin), y=0, width=percent(width), height=_HEIGHT, class_=f"cb-{kind}"
    )


def share(amount: int, limit: int) -> str:
    """Return a share of a limit in whole per cent, rounded down; of a limit of nothing, all."""
    if limit:
        return f"{max(0, amount) * 100 // limit}%"
    return "100%" if amount > 0 else "0%"
