"""What in a report needs somebody's attention, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from celery_budget.reconcile import Report
from celery_budget.render.tables import FULL, OVERDUE_SECONDS, advice
from celery_budget.render.text import duration, number, printable

__all__ = ["Notice", "notices"]

#: So many budgets, and estimators, are named one by one.
_NAMED = 5


@dataclass(frozen=True)
class Notice:
    """One thing to look at.

    :ivar kind: ``bad`` where work stands still or more was used than allowed, else ``odd``.
    """

    kind: str
    text: str


def notices(report: Report) -> tuple[Notice, ...]:
    """Return what needs attention, the worst first."""
    return tuple(sorted(_notices(report), key=lambda one: one.kind))


def _notices(report: Report) -> Iterator[Notice]:
    if report.overdue_seconds >= OVERDUE_SECONDS:
        since = duration(report.overdue_seconds)
        yield Notice("bad", f"The oldest message has been due for {since}: is a relay running?")
    if report.quarantine_full:
        yield Notice("bad", f"Q{FULL[1:]}.")
    yield from _over(report)
    for relay in report.relays:
        if relay.gone:
            who = printable(f"{relay.host}, process {relay.pid}")
            seen = duration(relay.seconds)
            yield Notice("odd", f"The relay on {who}, was last seen {seen} ago.")
    if not report.relays:
        yield Notice("bad", "No relay runs: what is admitted is published once one does.")
    above = [drift for drift in report.drift if drift.above]
    for drift in above[:_NAMED]:
        told = advice(drift).plain
        yield Notice("odd", f"{told[0].upper()}{told[1:]}.")
    if above[_NAMED:]:
        more = number(len(above) - _NAMED)
        yield Notice("odd", f"{more} more estimators promise too little.")
    if report.counts.get("lost"):
        lost = number(report.counts["lost"])
        yield Notice("odd", f"{lost} ran with an unknown outcome (lost), and were charged.")


def _over(report: Report) -> Iterator[Notice]:
    """Yield what to say of budgets of which more was used than their limits allow, the worst."""
    over = [one for one in report.balances if one.available is not None and one.available < 0]
    over.sort(key=lambda one: (one.available or 0, one.budget))
    for one in over[:_NAMED]:
        beyond = number(-(one.available or 0))
        name, unit = printable(one.budget), printable(one.unit)
        yield Notice("bad", f"Budget {name} is {beyond} {unit} over its limit.")
    if over[_NAMED:]:
        more = len(over) - _NAMED
        yield Notice("bad", f"{number(more)} more budgets are over their limits.")
