"""Figures in words, and as bars, for pages; the filters of their templates."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_budget.core.budgets import MILLION
from celery_budget.reconcile import BudgetSeen
from celery_budget.render.budgets import ratio
from celery_budget.render.text import moment, number, printable

__all__ = ["FILTERS", "Bar", "ago", "bar", "clock", "command", "lasting"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: How wide a bar is, in parts; amounts are exact integers, and no float would hold them.
WIDTH = 1000

_STEPS = ((86_400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class Bar:
    """How full a budget is, in thousandths of the bar's width.

    :ivar spent: where what is spent ends; what is held follows, to ``total``.
    :ivar limit: where the limit is: at the end, unless more is used than it allows.
    :ivar stops: where work stops before the limit, by which stop.
    :ivar label: the same in words.
    """

    spent: int
    total: int
    limit: int
    stops: tuple[tuple[str, int], ...]
    label: str


def bar(seen: BudgetSeen) -> Bar | None:
    """Return the bar of a budget; none where it has no limit, or one of nothing."""
    balance, limit = seen.balance, seen.balance.limit
    if not limit:
        return None
    total = balance.spent + balance.reserved
    whole = max(limit, total)
    marks = {"soft stop": seen.soft_at, "hard stop": seen.hard_at}
    stops = tuple(
        (name, at * WIDTH // whole) for name, at in marks.items() if at is not None and at < limit
    )
    told = [f"{_percent(balance.spent, limit)} spent", f"{_percent(balance.reserved, limit)} held"]
    declared = {"soft stop": seen.budget.soft_stop, "hard stop": seen.budget.hard_stop}
    told += [f"{name} at {ratio(stop)}" for name, stop in declared.items() if stop < MILLION]
    return Bar(
        balance.spent * WIDTH // whole,
        total * WIDTH // whole,
        limit * WIDTH // whole,
        stops,
        ", ".join(told),
    )


def _percent(part: int, whole: int) -> str:
    """Return how much that is; a little is not nothing, and almost all is not all."""
    tenths = part * 1000 // whole
    if part and not tenths:
        return "under 0.1%"
    return f"{tenths // 10}%" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10}%"


def clock(microseconds: int) -> str:
    """Return microseconds since the epoch as people read it, in UTC, to the second."""
    try:
        when = _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return str(microseconds)
    return f"{when:%Y-%m-%d %H:%M:%S}"


def lasting(seconds: float) -> str:
    """Return how long something lasts, in its two largest units."""
    left = max(0, int(seconds))
    for at, (size, name) in enumerate(_STEPS):
        if left >= size:
            more, below = left % size, _STEPS[at + 1 :]
            rest = f" {more // below[0][0]} {below[0][1]}" if below and more >= below[0][0] else ""
            return f"{left // size} {name}{rest}"
    return f"{left} s"


def ago(microseconds: int, now_us: int) -> str:
    """Return how long ago that was; how long until then where it is still to come."""
    seconds = (now_us - microseconds) / 1_000_000
    return f"in {lasting(-seconds)}" if seconds < 0 else f"{lasting(seconds)} ago"


def command(project: str) -> Callable[..., str]:
    """Return what writes a command of ``budget`` for a shell, with its arguments quoted."""

    def written(words: str, *arguments: str) -> str:
        quoted = (shlex.quote(argument) for argument in arguments)
        return printable(" ".join(["celery -A", shlex.quote(project), "budget", words, *quoted]))

    return written


def _signed(amount: int) -> str:
    """Return by how much something changed; a dash for not at all."""
    return f"{amount:+,}" if amount else "-"


def _told(value: Any) -> str:
    """Return what a row has under a name: amounts with separators, nothing for none."""
    if value is None:
        return ""
    return number(value) if type(value) is int else printable(str(value))


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "bar": bar,
    "clock": clock,
    "iso": moment,
    "lasting": lasting,
    "number": number,
    "printable": printable,
    "signed": _signed,
    "told": _told,
}
