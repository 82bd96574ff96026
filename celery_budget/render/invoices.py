"""A provider's export beside the ledger, for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.reconcile.invoices import Compared, Comparison, Difference
from celery_budget.render.text import literal, number, table_of

__all__ = ["comparison_view"]

_BAD = "bold red"
_GOOD = "green"

_WHERE = {"invoice": "not in the ledger", "ledger": "not in the export", "both": ""}


def comparison_view(found: Comparison) -> RenderableType:
    """The verdict, each difference, totals, and what could not be compared."""
    parts: list[RenderableType] = [_verdict(found)]
    if found.differences:
        rows = [row for one in found.differences for row in _rows(one)]
        columns = ["day", "model", "", "export", "ledger", "difference", "per cent", "where"]
        parts += [Text(), table_of(columns, rows, numbers=columns[3:7])]
    if found.totals:
        rows = [[name, *_amounts(one)] for name, one in found.totals.items()]
        columns = ["total", "export", "ledger", "difference", "per cent"]
        parts += [Text(), table_of(columns, rows, numbers=columns[1:])]
    notes = list(_notes(found))
    return Group(*parts, Text(), *notes) if notes else Group(*parts)


def _verdict(found: Comparison) -> Text:
    whose = "" if found.provider is None else f" of {found.provider}"
    if found.first is None or found.last is None:
        return Text(f"the export ({found.shape}) has no days: there is nothing to compare", _BAD)
    days = f"{found.first.isoformat()} to {found.last.isoformat()} ({found.shape}{whose})"
    if found.ok:
        return literal(f"export and ledger say the same of {_pairs(found.same)}, {days}", _GOOD)
    differ = f"export and ledger differ in {_pairs(len(found.differences))}, {days}"
    return literal(f"{differ}; {number(found.same)} are the same", _BAD)


def _pairs(count: int) -> str:
    return "1 day and model" if count == 1 else f"{number(count)} days and models"


def _rows(one: Difference) -> Iterator[list[Text | str]]:
    for name, compared in one.measures.items():
        model = literal(one.model or "all models")
        yield [one.day.isoformat(), model, name, *_amounts(compared), Text(_WHERE[one.where], _BAD)]


def _amounts(one: Compared) -> list[Text | str]:
    percent = "" if one.percent is None else f"{one.percent:+f}"
    return [
        *(_decimal(value) for value in (one.invoice, one.ledger)),
        f"{one.difference:+,f}",
        percent,
    ]


def _decimal(value: Decimal | None) -> str:
    return "none" if value is None else f"{value:,f}"


def _notes(found: Comparison) -> Iterator[Text]:
    for count, said in (
        (found.unnamed, "recorded by hand, with no model, and not compared"),
        (found.unpriced, "without a cost, since their tasks draw on no budget in money"),
        (found.partial, "of replies that did not tell all they used"),
    ):
        if count:
            yield Text(f"records of these days {said}: {number(count)}", "dim")
