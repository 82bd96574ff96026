"""Alerts: at which part of its limit a budget gives one, and what an alert says.

Thresholds are kept in parts per million of the limit in force, as stops are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from celery_budget.core.budgets import DEFAULT, MILLION, MOST_THRESHOLDS, NONE, TOP, percent
from celery_budget.errors import InvalidBudget

__all__ = [
    "KINDS",
    "Alert",
    "StandingAlert",
    "is_over",
    "is_reached",
    "parse_thresholds",
    "share_of",
]

#: What alerts are about; see docs/alerts.md.
KINDS = (
    "budget",
    "parked",
    "quarantine_growth",
    "quarantine_full",
    "drift",
    "reconcile",
    "overdue",
)

#: By how much a share has to fall below its threshold before that can be reached anew.
MARGIN = 20_000


@dataclass(frozen=True)
class Alert:
    """What has happened, as the callable of ``budget_on_alert`` and the signal are told.

    :ivar id: the same each time this alert is told, for who wants it once.
    :ivar kind: one of :data:`KINDS`.
    :ivar subject: the budget's name; of ``drift`` stage, estimator and version; else empty.
    :ivar threshold: what was reached: a share of the limit (0.8), or a number of seconds, requests
        or mismatches, or a ratio.
    :ivar value: what it was when it was seen, in the same measure.
    :ivar root: the ledger's.
    :ivar since: when it was seen first, by the database's clock.
    :ivar window: when the budget's window began; none where the alert belongs to none.
    :ivar window_end: when that ends; none where it never does.
    :ivar message: the same in words, on one line.
    :ivar details: exact figures; of a budget ``unit``, ``limit``, ``reserved`` and ``spent``.
    """

    id: str
    kind: str
    subject: str
    threshold: float
    value: float
    root: str
    since: datetime
    window: datetime | None
    window_end: datetime | None
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, times in ISO 8601."""
        return {
            "id": self.id,
            "kind": self.kind,
            "subject": self.subject,
            "threshold": self.threshold,
            "value": self.value,
            "root": self.root,
            "since": self.since.isoformat(),
            "window": None if self.window is None else self.window.isoformat(),
            "window_end": None if self.window_end is None else self.window_end.isoformat(),
            "message": self.message,
            "details": self.details,
        }


@dataclass(frozen=True)
class StandingAlert:
    """An alert that is not over.

    :ivar state: ``due`` (has still to be told), ``told``, or ``failed`` (told so often as it is
        tried, and the callable raised or hung each time).
    :ivar tries: how often the callable was called.
    :ivar told: when it was told; none where it was not.
    """

    alert: Alert
    state: str
    tries: int
    told: datetime | None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        told = None if self.told is None else self.told.isoformat()
        return {**self.alert.as_dict(), "state": self.state, "tries": self.tries, "told": told}


def parse_thresholds(value: object, what: str) -> tuple[int, ...] | None:
    """Return thresholds in parts per million, rising; none for ``"default"``.

    :param value: shares as ``0.8``, ``"0.8"`` or ``"80%"``: a sequence of them, or a text with
        commas; ``"none"``, none or an empty sequence for no alert.
    :raises InvalidBudget: for anything else, more than ten, or one above 1000%.
    """
    if isinstance(value, str):
        if value.strip() == DEFAULT:
            return None
        given: Iterable[object] = () if value.strip() == NONE else value.split(",")
    elif value is None:
        given = ()
    elif isinstance(value, Sequence):
        given = value
    else:
        raise _wrong(value, what)
    found = tuple(sorted({_parts(one, what) for one in given}))
    if len(found) > MOST_THRESHOLDS:
        raise InvalidBudget(
            f"{what} are {len(found)} thresholds; give at most {MOST_THRESHOLDS} of them"
        )
    return found


def _parts(value: object, what: str) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, str)):
            raise InvalidOperation
        text = str(value).strip()
        number = Decimal(text[:-1]) / 100 if text.endswith("%") else Decimal(text)
        parts = number * MILLION
        if not 0 < parts <= TOP or parts != int(parts):
            raise InvalidOperation
    # Also what a decimal number cannot hold.
    except (ArithmeticError, ValueError):
        raise _wrong(value, what) from None
    return int(parts)


def _wrong(value: object, what: str) -> InvalidBudget:
    return InvalidBudget(
        f"{what} has {value!r}; give shares of the limit such as '80%,95%' or 0.8, above 0 and up "
        f"to {percent(TOP)}, '{NONE}' for no alert or '{DEFAULT}' for those of budget_alert_at"
    )


def is_reached(used: int, limit: int, threshold: int) -> bool:
    """Tell whether what is reserved and spent has come to a threshold; decided exactly.

    Of a limit of 0 nothing is reached by nothing, and everything by anything.
    """
    return used > 0 and used * MILLION >= threshold * limit


def is_over(used: int, limit: int | None, threshold: int) -> bool:
    """Tell whether it has fallen so far below a threshold that this can be reached anew."""
    if limit is None or used == 0:
        return True
    return used * MILLION < (threshold - min(MARGIN, threshold // 2)) * limit


def share_of(used: int, limit: int) -> float:
    """Return what part of its limit is used; 1 where anything is of a limit of 0."""
    return round(used / limit, 6) if limit else 1.0
