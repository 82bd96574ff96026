"""Telling: the results of tasks that will not run (again), stored once the ledger has said so.

A result backend takes no part in the ledger's transactions and may hang: none is open while it is
asked. What could not be told stays noted, and recovery tells it later.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from celery_budget.errors import StoreError
from celery_budget.events import Logger
from celery_budget.store import Store, untold
from celery_budget.store.untold import Untold

__all__ = ["Ended", "tell", "tell_task"]

logger = Logger(__name__)

#: Of how many requests with one task id the ends are told at a time.
LIMIT = 10


class Ended(Protocol):
    """Stores in the result backend that a task will not run (again), and why."""

    def __call__(self, task_id: str, reason: str) -> None: ...


def tell(store: Store, root: str, ended: Ended, seen: Untold) -> bool:
    """Store one result; false where there was nothing to tell.

    That is where another process tells it, see :func:`untold.take`, and where the result is another
    request's by now, see :func:`untold.is_anothers`. One that is admitted while this is stored is
    not published until it is, for as long as :func:`untold.told_until` says.

    A process that dies in between has it told once more, with the same words.

    :raises Exception: as ``ended`` does; it is told later then.
    """
    if not store.run(untold.take, root, seen):
        return False
    if store.run(untold.is_anothers, root, seen):
        return False
    try:
        ended(seen.task_id, seen.reason)
    except Exception:
        with suppress(StoreError):
            store.run(untold.failed, root, seen)
        raise
    store.run(untold.forget, root, seen.untold_id)
    return True


def tell_task(store: Store, root: str, ended: Ended, task_id: str) -> bool:
    """Store the result of a task that has just ended, if there is one to tell.

    False where that failed: it is logged, and left to recovery.
    """
    try:
        for seen in store.read(untold.due, root, LIMIT, task_id):
            tell(store, root, ended, seen)
    except Exception:
        logger.exception("result.untold", task_id=task_id)
        return False
    return True
