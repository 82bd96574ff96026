"""Parked work: admitted in fair order when its budget has room again, given up when it is over.

A pass looks at the budgets that something waits for, in a fixed number of statements however much
that is, and tries what :func:`celery_budget.core.parking.plan` says of those that have room.
Several may run at once: what one is at, another passes by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_budget.core import parking
from celery_budget.core.reservations import GivenUp, Refused
from celery_budget.errors import BudgetError
from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Store, continuations, parked, queues

__all__ = ["Looked", "run_once"]

logger = Logger(__name__)

#: How many budgets are looked at by one statement.
PAGE = 500
#: How much is admitted, or given up, of one budget in one pass.
LIMIT = 100
#: For how long what could not be decided is left alone.
PUT_OFF_US = 10_000_000
#: For how long nothing else is admitted to a budget; renewed at half of it. A sweep that is gone
#: keeps nobody out for longer.
AHEAD_US = 10_000_000


@dataclass(frozen=True)
class Looked:
    """What one pass did.

    :ivar admitted: how much was admitted.
    :ivar given_up: how much was given up.
    :ivar waits: whether anything waits still, or did when it was looked at.
    :ivar more: whether another pass should follow at once.
    """

    admitted: int = 0
    given_up: int = 0
    waits: bool = False
    more: bool = False


def run_once(
    store: Store, settings: Settings, gave_up: Callable[[GivenUp], object] = lambda given_up: None
) -> Looked:
    """Give up what waited longer than it may, then admit what fits, budget by budget.

    Each in a transaction of its own, so that what is admitted does not wait for the others. What
    cannot be decided (a budget that is gone, an id that is in use for something else) changes
    nothing and is tried again later, until its time is over.

    :param gave_up: called with each that was given up, in no transaction; what it raises is logged.
    """
    over = _give_up(store, settings, gave_up)
    admitted, waits, more = 0, False, over == LIMIT
    after = ""
    while True:
        page = store.read(queues.look, settings.root, after, PAGE)
        waits = waits or bool(page)
        for queue in page:
            count = _admit(store, settings, queue)
            admitted += count
            more = more or count == LIMIT
        if len(page) < PAGE:
            return Looked(admitted, over, waits, more)
        after = page[-1].budget


def _give_up(store: Store, settings: Settings, gave_up: Callable[[GivenUp], object]) -> int:
    over = 0
    for row in store.read(parked.over, settings.root, LIMIT):
        try:
            given_up = store.run(
                continuations.give_up, settings.root, row.parked_id, row.reservation_id
            )
        except Exception:
            logger.exception("parked.give_up_failed", task_id=row.task_id)
            store.run(parked.put_off, settings.root, row.parked_id, PUT_OFF_US)
            continue
        if given_up is None:
            continue
        over += 1
        logger.event(
            "request.given_up",
            task=given_up.task_name,
            task_id=given_up.task_id,
            amount=given_up.amount,
            name=given_up.budget,
        )
        try:
            gave_up(given_up)
        except Exception:
            logger.exception("parked.listener_failed", task_id=row.task_id)
    return over


def _admit(store: Store, settings: Settings, queue: queues.Queue) -> int:
    """Admit what fits of one queue, and have its first go ahead that has waited long enough."""
    aged_us = queue.now_us - settings.overtake_us
    fresh = queue.ahead_us is not None and queue.ahead_us > queue.now_us + AHEAD_US // 2
    fits = queue.smallest <= max(queue.room.new, queue.room.finishing)
    if not fits and not queue.past and (fresh or queue.oldest_us > aged_us):
        return 0
    waiting, room = store.read(queues.heads, settings.root, queue, aged_us, LIMIT)
    planned = parking.plan(waiting, room, aged_us)
    past = store.read(queues.past, settings.root, queue, LIMIT) if queue.past else []
    admitted = 0
    for parked_id in dict.fromkeys([*past, *planned.tries]):
        try:
            tried = store.run(
                continuations.try_parked,
                settings.root,
                parked_id,
                queue.budget,
                settings.lock_ms,
            )
        except Exception as error:
            if isinstance(error, BudgetError):
                # Told again and again: an error of ours says enough in one line.
                logger.event("parked.put_off", parked_id=parked_id, error=error)
            else:
                kind = type(error).__name__
                logger.exception("parked.failed", parked_id=parked_id, error_type=kind)
            store.run(parked.put_off, settings.root, parked_id, PUT_OFF_US)
            continue
        if tried is True:
            admitted += 1
            logger.event("request.unparked", parked_id=parked_id, name=queue.budget)
        if not isinstance(tried, Refused) and not tried:
            # Another sweep is at it.
            return admitted
    if planned.ahead is not None and not fresh:
        store.run(queues.go_ahead, settings.root, planned.ahead, AHEAD_US)
    return admitted
