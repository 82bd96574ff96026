"""``usage.record(…)``: what the running task really used."""

from __future__ import annotations

import logging

from celery_budget.integration.context import current_attempt

__all__ = ["record"]

logger = logging.getLogger(__name__)


def record(amount: int, key: str | None = None) -> bool:
    """Record that the task this thread runs has used ``amount``, in its budget's unit.

    It is in the ledger when this returns, whatever becomes of the task. A fault of the ledger's
    database is waited out. More than was reserved is recorded in full, added to the hold at once
    and flagged.

    :param amount: an integer from 0 to 2^63-1; several records add up.
    :param key: what makes this record one and the same when it is made again: best the provider's
        id of the response. Without it each call counts anew.
    :return: false where ``key`` was recorded before, and nothing was added. Also false, with a
        warning in the log, where no budgeted task runs (a task's function called directly).
    :raises InvalidAmount: for anything else; nothing was recorded.
    """
    attempt = current_attempt()
    if attempt is None:
        logger.warning(
            "usage of %r was recorded outside a budgeted task; it counts nowhere", amount
        )
        return False
    return attempt.record(amount, key)
