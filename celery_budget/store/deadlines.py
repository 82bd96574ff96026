"""Deadlines: kept with the reservation, and in each of its messages as the latest it may start.

A message that must not start after a time is handled by relay, worker and sweep already, whatever
it is for: a deadline is one more bound of that time. What is left to do for itself is to refuse a
claim, by the database's clock, and to say why the request has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.deadlines import earliest
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import ReserveRequest
from celery_budget.core.retries import DEADLINE
from celery_budget.store.schema import now_us

__all__ = ["bounded", "fixed", "left_us", "why"]


def fixed(connection: Connection, requests: Sequence[ReserveRequest]) -> list[ReserveRequest]:
    """Return requests with their deadlines as moments, all counted from one reading of the clock.

    One SELECT, none where no deadline is counted from now; locks nothing.
    """
    if all(one.within_us is None for one in requests):
        return list(requests)
    now = int(connection.execute(sa.select(now_us())).scalar_one())
    return [
        one
        if one.within_us is None
        else replace(
            one, deadline_us=earliest(one.deadline_us, now + one.within_us), within_us=None
        )
        for one in requests
    ]


def bounded(message: WireMessage, deadline_us: int | None) -> WireMessage:
    """Return a message that must not start after its request's deadline."""
    if deadline_us is None:
        return message
    return replace(message, expires_us=earliest(message.expires_us, deadline_us))


def left_us(connection: Connection, row: sa.Row[Any]) -> int | None:
    """Return how long a reservation has until its deadline, negative after it; none without one.

    One SELECT, and none where there is none.
    """
    if row.deadline_us is None:
        return None
    return int(connection.execute(sa.select(row.deadline_us - now_us())).scalar_one())


def why(reason: str, deadline_us: int | None, *over: int | None) -> str:
    """Return why a request ends whose time is over: ``reason``, or its deadline.

    :param over: the moments of which the first has passed.
    """
    first = earliest(*over)
    passed = deadline_us is not None and first is not None and deadline_us <= first
    return DEADLINE if passed else reason
