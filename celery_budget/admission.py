"""Admission: a request is reserved together with its message, refused, or parked.

One transaction in each case, and one round trip on PostgreSQL where it is reserved or refused.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence

from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Admitted, Parked, Reserved, ReserveRequest, Tried
from celery_budget.errors import BudgetError
from celery_budget.settings import Settings
from celery_budget.store import (
    Store,
    attempts,
    batch,
    continuations,
    outbox,
    parked,
    refusals,
    requests,
)

__all__ = ["admit", "admit_many", "admit_parked", "count_refusal", "enqueue", "retry"]

logger = logging.getLogger(__name__)


def admit(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    message: WireMessage,
    *,
    continuation: bool = False,
    delivered: bool = False,
    stop: threading.Event | None = None,
) -> Admitted:
    """Reserve ``request`` with ``message`` in the outbox, or refuse it, or park it.

    :param continuation: it continues work that runs: what does not fit is parked instead of
        refused, and a fault of the store is waited out instead of raised.
    :param delivered: a worker has the message already; it is kept, not published.
    :raises UnknownBudget, RequestConflict, StoreError: nothing was changed.
    """
    delivered_us = settings.republish_us if delivered else None
    if continuation:
        return store.wait_out(
            stop,
            continuations.reserve_or_park,
            request,
            message,
            delivered_us=delivered_us,
            lock_ms=settings.lock_ms,
            park_us=settings.park_us,
        )
    return store.run_statement(
        requests.reserve, request, message, delivered_us=delivered_us, lock_ms=settings.lock_ms
    )


def admit_many(
    store: Store,
    settings: Settings,
    asked: Sequence[tuple[ReserveRequest, WireMessage]],
    *,
    best_effort: bool = False,
) -> list[Tried]:
    """Reserve several requests in one transaction and a fixed number of statements.

    All or none; with ``best_effort`` each that fits, in their order.

    :return: what came of each. An error of one is an outcome here: none raises but where the whole
        batch fails.
    :raises StoreError: nothing was changed.
    """
    if not asked:
        return []
    return store.run(batch.reserve_many, settings.root, asked, best_effort=best_effort)


def retry(
    store: Store,
    settings: Settings,
    request: ReserveRequest,
    message: WireMessage,
    attempt: int,
    claim_id: uuid.UUID,
    stop: threading.Event | None = None,
) -> Reserved | Parked | None:
    """Write the message of a running attempt's retry, blocked until that attempt ends.

    Raises the hold to what was used plus the estimate; what does not fit is parked. None, and
    nothing changed, where the attempt has lost its fence. Waits out faults of the store.

    :param request: carries the reservation's own id and the retry's number.
    """
    return store.wait_out(
        stop, attempts.write_retry, request, message, attempt, claim_id, settings.park_us
    )


def enqueue(
    store: Store,
    settings: Settings,
    message: WireMessage,
    parent: uuid.UUID | None = None,
    stop: threading.Event | None = None,
) -> bool:
    """Write a message that draws on no budget; false where its parent has written it before.

    :param parent: the reservation whose attempt publishes it after its call.
    """
    return store.wait_out(stop, outbox.enqueue, settings.root, message, parent_id=parent)


def count_refusal(
    store: Store, settings: Settings, budget: str, stage: str, task_name: str, requested: int
) -> None:
    """Count a request that was turned away for another reason than its budget's balance."""
    store.wait_out(
        None,
        refusals.note_turned_away,
        settings.root,
        new_id(),
        budget,
        stage,
        task_name,
        requested,
    )


def admit_parked(
    store: Store, settings: Settings, ended: Callable[[str, str], None], limit: int = 100
) -> int:
    """Look at parked work, what waited longest since its last look first, and admit what fits.

    Each in a transaction of its own, so that what is admitted does not wait for the others. What
    cannot be decided (a budget that is gone, an id that is in use for something else) changes
    nothing and waits until its time is over. What waited longer than it may is given up: the result
    is stored first, so that a crash in between comes back here.

    :param ended: called with the task id and the reason for each that is given up.
    :return: how much was admitted.
    """
    admitted = 0
    for row in store.read(parked.waiting, settings.root, limit):
        if row.over:
            try:
                ended(row.task_id, continuations.GIVEN_UP)
            except Exception:
                logger.exception("the result of task %s could not be stored", row.task_id)
                continue
            store.run(continuations.give_up, settings.root, row.parked_id, row.reservation_id)
            continue
        try:
            admitted += store.run(
                continuations.try_parked,
                settings.root,
                row.parked_id,
                row.reservation_id,
                settings.lock_ms,
            )
        except Exception as error:
            # Told with every pass: an error of ours says enough in one line.
            ours = isinstance(error, BudgetError)
            logger.log(
                logging.INFO if ours else logging.ERROR,
                "task %s stays parked: %s",
                row.task_id,
                error,
                exc_info=not ours,
            )
            store.run(parked.touch, settings.root, row.parked_id)
    return admitted
