"""A provider's own export beside the ledger, by day and model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any

from celery_budget.core.invoices import EXACT, MEASURES, Billed, read
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, spending

__all__ = ["Compared", "Comparison", "Difference", "compare"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
#: Zones change their days at no finer times.
QUARTER_US = 900_000_000

#: By what name of the genai-prices package the ledger counts a measure.
_COUNTED = {"input": "input_tokens", "cached": "cache_read_tokens", "output": "output_tokens"}

MICRO = Decimal(1_000_000)

#: A day, and a model; empty where all models are taken together.
Key = tuple[date, str]


@dataclass(frozen=True)
class Compared:
    """One measure of both.

    :ivar invoice: by the provider's export; none where that does not tell.
    :ivar ledger: by the ledger; none where that does not tell.
    """

    invoice: Decimal | None
    ledger: Decimal | None

    @property
    def difference(self) -> Decimal:
        """By how much the export is above the ledger."""
        return EXACT.subtract(self.invoice or Decimal(0), self.ledger or Decimal(0))

    @property
    def percent(self) -> Decimal | None:
        """The same in per cent of the export, to two places; none where that says 0."""
        if not self.invoice:
            return None
        part = EXACT.divide(EXACT.multiply(self.difference, Decimal(100)), self.invoice)
        return part.quantize(Decimal("0.01"), context=EXACT)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, with decimals as text."""
        values = {
            "invoice": self.invoice,
            "ledger": self.ledger,
            "difference": self.difference,
            "percent": self.percent,
        }
        return {name: None if value is None else f"{value:f}" for name, value in values.items()}


@dataclass(frozen=True)
class Difference:
    """A day and a model of which export and ledger do not say the same.

    :ivar model: empty where the export names none.
    :ivar where: ``both``, ``invoice`` or ``ledger``: who knows of it at all.
    :ivar measures: those that differ, by name.
    """

    day: date
    model: str
    where: str
    measures: Mapping[str, Compared]

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "day": self.day.isoformat(),
            "model": self.model,
            "where": self.where,
            "measures": {name: one.as_dict() for name, one in self.measures.items()},
        }


@dataclass(frozen=True)
class Comparison:
    """A provider's export beside the ledger.

    :ivar shape: what kind of export it was taken for.
    :ivar provider: whose records it was compared with; none for all.
    :ivar first: the first day of the export; none of an empty one.
    :ivar last: the last one.
    :ivar same: of how many days and models both say the same.
    :ivar differences: by day, then by model.
    :ivar totals: of all days, by measure.
    :ivar unnamed: how many records of these days name no model: they were recorded by hand, and
        compared with nothing.
    :ivar partial: how many were read from replies that did not tell all they used.
    :ivar unpriced: how many have no cost in the ledger, since their tasks draw on no budget in
        money. Where no record of a day and model has one, its cost is not compared, unless the
        export has nothing else.
    """

    shape: str
    provider: str | None
    first: date | None
    last: date | None
    same: int
    differences: tuple[Difference, ...]
    totals: Mapping[str, Compared]
    unnamed: int = 0
    partial: int = 0
    unpriced: int = 0

    @property
    def ok(self) -> bool:
        """Whether both say the same."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "ok": self.ok,
            "shape": self.shape,
            "provider": self.provider,
            "first": None if self.first is None else self.first.isoformat(),
            "last": None if self.last is None else self.last.isoformat(),
            "same": self.same,
            "differences": [one.as_dict() for one in self.differences],
            "totals": {name: one.as_dict() for name, one in self.totals.items()},
            "unnamed": self.unnamed,
            "partial": self.partial,
            "unpriced": self.unpriced,
        }


@dataclass
class _Sums:
    """What was used of one model on one day.

    :ivar priced: how many records had a cost, which is rounded up to the next millionth.
    """

    amounts: dict[str, Decimal] = field(default_factory=dict)
    priced: int = 0

    def add(self, amounts: Mapping[str, Decimal]) -> None:
        for name, amount in amounts.items():
            self.amounts[name] = EXACT.add(self.amounts.get(name, Decimal(0)), amount)


@dataclass
class _Ledger:
    sums: dict[Key, _Sums] = field(default_factory=dict)
    unnamed: int = 0
    partial: int = 0
    unpriced: int = 0


def compare(
    store: Store,
    settings: Settings,
    lines: Iterable[str | bytes],
    *,
    name: str,
    zone: tzinfo,
    columns: Mapping[str, str] | None = None,
    provider: str | None = None,
    models: Mapping[str, str] | None = None,
    tolerance: Decimal = Decimal(0),
) -> Comparison:
    """Compare a provider's export with what the ledger has recorded, by day and model.

    Only what the export has columns for is compared. Its days are those from its first to its last.
    In memory are the sums by day and model, and of an export whose lines are all different a number
    for each.

    :param provider: compare with the records of this provider only; none for that of the export,
        where it tells, and else for all; ``any`` for all.
    :param models: the ledger's names of models by those of the export.
    :param tolerance: up to how many per cent of the export a difference counts as none.
    :raises InvoiceError: where the export cannot be read.
    """
    shape, billed = read(lines, name, zone, columns)
    invoice, days = _by_key(billed, models or {})
    whose = None if provider == "any" else provider or shape.provider
    measures = [one for one in MEASURES if one in shape.columns]
    if not days:
        return Comparison(shape.name, whose, None, None, 0, (), {})
    first, last = min(days), max(days)
    has_models = any(model for _, model in invoice)
    ledger = store.read(
        _recorded, settings.root, settings.money_unit, first, last, zone, whose, has_models
    )
    differences, same = [], 0
    for key in sorted({*invoice, *ledger.sums}):
        found = _difference(key, invoice.get(key), ledger.sums.get(key), measures, tolerance)
        if found is None:
            same += 1
        else:
            differences.append(found)
    return Comparison(
        shape.name,
        whose,
        first,
        last,
        same,
        tuple(differences),
        {one: Compared(_total(invoice, one), _total(ledger.sums, one)) for one in measures},
        ledger.unnamed,
        ledger.partial,
        ledger.unpriced,
    )


def _by_key(
    billed: Iterator[Billed], models: Mapping[str, str]
) -> tuple[dict[Key, _Sums], set[date]]:
    sums: dict[Key, _Sums] = {}
    days = set()
    for one in billed:
        days.add(one.day)
        if one.amounts:
            key = one.day, models.get(one.model, one.model)
            sums.setdefault(key, _Sums()).add(one.amounts)
    return sums, days


def _recorded(
    connection: Connection,
    root: str,
    money_unit: str,
    first: date,
    last: date,
    zone: tzinfo,
    provider: str | None,
    has_models: bool,
) -> _Ledger:
    found = _Ledger()
    days: dict[int, date] = {}
    for one in spending.recorded_between(
        connection,
        root,
        _midnight_us(first, zone),
        _midnight_us(last + timedelta(days=1), zone),
        money_unit,
    ):
        details = {} if one.details is None else json.loads(one.details)
        model = details.get("model")
        if not model:
            found.unnamed += 1
            continue
        if provider is not None and details.get("provider") != provider:
            continue
        found.partial += details.get("whole") is False
        quarter = one.recorded_us // QUARTER_US
        if quarter not in days:
            days[quarter] = _day_of(quarter * QUARTER_US, zone)
        sums = found.sums.setdefault((days[quarter], model if has_models else ""), _Sums())
        counts = details.get("usage") or {}
        sums.add({name: Decimal(counts.get(counted, 0)) for name, counted in _COUNTED.items()})
        if one.money is None:
            found.unpriced += 1
        else:
            sums.add({"cost": EXACT.divide(Decimal(one.money), MICRO)})
            sums.priced += 1
    return found


def _midnight_us(day: date, zone: tzinfo) -> int:
    return (datetime.combine(day, time(), zone) - _EPOCH) // _MICROSECOND


def _day_of(microseconds: int, zone: tzinfo) -> date:
    return (_EPOCH + timedelta(microseconds=microseconds)).astimezone(zone).date()


def _difference(
    key: Key,
    invoice: _Sums | None,
    ledger: _Sums | None,
    measures: Sequence[str],
    tolerance: Decimal,
) -> Difference | None:
    """Return of what export and ledger do not say the same; none where they do."""
    if ledger is not None and not ledger.priced and len(measures) > 1:
        measures = [one for one in measures if one != "cost"]
    told = {
        one: Compared(
            None if invoice is None else invoice.amounts.get(one),
            None if ledger is None else ledger.amounts.get(one),
        )
        for one in measures
    }
    priced = 0 if ledger is None else ledger.priced
    differ = {name: one for name, one in told.items() if not _is_same(name, one, priced, tolerance)}
    if not differ:
        return None
    where = "ledger" if invoice is None else "invoice" if ledger is None else "both"
    return Difference(*key, where, differ)


def _is_same(name: str, one: Compared, priced: int, tolerance: Decimal) -> bool:
    # Each record's cost was rounded up to the next millionth.
    rounded = EXACT.divide(Decimal(priced), MICRO) if name == "cost" else Decimal(0)
    allowed = EXACT.divide(EXACT.multiply(abs(one.invoice or Decimal(0)), tolerance), Decimal(100))
    return abs(one.difference) <= max(allowed, rounded)


def _total(sums: Mapping[Key, _Sums], measure: str) -> Decimal | None:
    told = [one.amounts[measure] for one in sums.values() if measure in one.amounts]
    total = Decimal(0)
    for one in told:
        total = EXACT.add(total, one)
    return total if told else None
