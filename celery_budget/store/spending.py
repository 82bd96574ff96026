"""What was recorded from providers' replies, reply by reply. Reading only; locks nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.schema import usage

__all__ = ["Recorded", "recorded_between"]

#: How many rows are fetched at a time.
PAGE = 1000
#: The units of one record are written one after another: a day's edge may lie between them.
EDGE_US = 60_000_000


@dataclass(frozen=True)
class Recorded:
    """One usage record.

    :ivar details: what it was read from, as JSON; none where it was recorded by hand.
    :ivar money: what it cost in the unit of money, without what was assumed; none where its request
        draws on no budget in money.
    """

    recorded_us: int
    details: str | None
    money: int | None


def recorded_between(
    connection: Connection, root: str, since_us: int, until_us: int, money_unit: str
) -> Iterator[Recorded]:
    """Yield the usage records of a time, in no order that matters.

    However many there are, a page of them is in memory. To be used up in the transaction it was
    called in.
    """
    rows = connection.execute(
        sa.select(
            usage.c.reservation_id,
            usage.c.key,
            usage.c.unit,
            usage.c.amount,
            usage.c.assumed,
            usage.c.recorded_us,
            usage.c.details,
        )
        .where(
            usage.c.root == root,
            usage.c.recorded_us >= since_us - EDGE_US,
            usage.c.recorded_us < until_us + EDGE_US,
        )
        .order_by(usage.c.reservation_id, usage.c.key, usage.c.unit),
        execution_options={"yield_per": PAGE},
    )
    for _, units in groupby(rows, key=lambda row: (row.reservation_id, row.key)):
        found = _record(list(units), money_unit)
        if since_us <= found.recorded_us < until_us:
            yield found


def _record(units: Sequence[Any], money_unit: str) -> Recorded:
    money = next((row.amount - (row.assumed or 0) for row in units if row.unit == money_unit), None)
    details = next((row.details for row in units if row.details is not None), None)
    return Recorded(min(row.recorded_us for row in units), details, money)
