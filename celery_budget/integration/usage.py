"""``usage.record(…)`` and ``usage.extend(…)``: what the running task really uses."""

from __future__ import annotations

import logging

from celery_budget.core.reservations import Closed, Extended, Refused
from celery_budget.errors import ClaimLost
from celery_budget.integration.context import current_attempt

__all__ = ["extend", "record"]

logger = logging.getLogger(__name__)


def record(amount: int, key: str | None = None, unit: str | None = None) -> bool:
    """Record that the task this thread runs has used ``amount`` of a unit.

    It is in the ledger when this returns, whatever becomes of the task. A fault of the ledger's
    database is waited out. More than was reserved is recorded in full, added to the hold at once
    and flagged.

    :param amount: an integer from 0 to 2^63-1; several records add up.
    :param key: what makes this record one and the same when it is made again: best the provider's
        id of the response. Text of 1 to 255 characters. Without it each call counts
        anew. One key may have a record in each unit.
    :param unit: which of the units is counted that the task's budgets count; that of the first
        budget that is charged by use unless given. Every budget in it is charged that the task
        draws on.
    :return: false where ``key`` was recorded before, and nothing was added. Also false, with a
        warning in the log, where no budgeted task runs (a task's function called directly).
    :raises InvalidAmount: for what is no amount; nothing was recorded.
    :raises ValueError: for what is no key; nothing was recorded.
    :raises PolicyError: for a unit in which the task draws on no budget that is charged by use.
    """
    attempt = current_attempt()
    if attempt is None:
        logger.warning(
            "usage of %r was recorded outside a budgeted task; it counts nowhere", amount
        )
        return False
    return attempt.record(amount, key, unit)


def extend(amount: int, key: str | None = None, unit: str | None = None) -> bool:
    """Reserve ``amount`` more for the task this thread runs, on all of its budgets or on none.

    For work that turns out larger than estimated and would rather stop than go over: what was
    started may use what is above the soft stops. The hold lasts until the attempt ends; then what
    was recorded is charged, as always, and a success that recorded nothing is charged estimate and
    extensions.

    :param key: what makes this extension one and the same when the call is repeated.
    :param unit: as for :func:`record`.
    :return: false where the same extension was made before, and outside of budgeted tasks.
    :raises BudgetExceeded: where it does not fit; nothing was changed.
    :raises ClaimLost: where another attempt has taken this one's place.
    :raises InvalidAmount, PolicyError: as :func:`record`.
    """
    attempt = current_attempt()
    if attempt is None:
        logger.warning("%r was to be reserved outside a budgeted task; nothing was", amount)
        return False
    outcome = attempt.extend(amount, key, unit)
    if isinstance(outcome, Refused):
        raise outcome.error()
    if isinstance(outcome, Closed):
        raise ClaimLost(str(attempt.reservation_id))
    return isinstance(outcome, Extended)
