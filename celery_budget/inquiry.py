"""Inquiry: tasks are asked what became of their lost attempts, or undo it, before anything follows.

What they do calls somebody else, may take its time and may fail: no transaction is open meanwhile.
Each attempt is taken by one process at a time; one that dies with it has it asked about again.
"""

from __future__ import annotations

from typing import Protocol

from celery_budget.core.backoff import backoff_seconds
from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Store, inquiries
from celery_budget.store.inquiries import Inquiry

__all__ = ["Tasks", "run_once"]

logger = Logger(__name__)

LIMIT = 20
#: How soon a task is asked once more, longer each time.
FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 300.0

#: For how long an attempt is whoever's who asks about it.
ASKING_US = 60_000_000

#: Why a reservation ends whose last attempt was lost.
LOOKED_UP = "looked up"
COMPENSATED = "compensated"
NOT_COMPENSATED = "not compensated"


class Tasks(Protocol):
    """What an inquiry needs of the tasks. Each may raise whatever the task's own function does."""

    def lookup(self, seen: Inquiry) -> bool | None:
        """Ask what an attempt has used and record that; false while nobody can tell.

        None where the task has no ``lookup``.
        """

    def compensate(self, seen: Inquiry) -> bool:
        """Have undone what an attempt may have done; false where the task has no ``compensate``."""


def run_once(store: Store, settings: Settings, tasks: Tasks) -> int:
    """Ask about every attempt that is due; return how many were concluded."""
    concluded = 0
    for seen in store.read(inquiries.due, settings.root, LIMIT):
        if not store.run(inquiries.take, settings.root, seen, ASKING_US):
            continue
        found = _ask(settings, tasks, seen)
        if found is None:
            wait = backoff_seconds(seen.tries + 1, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
            store.run(inquiries.ask_again, settings.root, seen, int(wait * 1_000_000))
            continue
        answered, reason = found
        state = store.run(
            inquiries.conclude,
            settings.root,
            seen,
            park_us=settings.park_us,
            answered=answered,
            reason=reason,
        )
        concluded += state is not None
        said = ", ".join(filter(None, (reason, state)))
        logger.event(
            "attempt.lost",
            attempt=seen.attempt,
            task=seen.task_name,
            task_id=seen.task_id,
            reservation_id=seen.reservation_id,
            reason=said,
        )
    return concluded


def _ask(settings: Settings, tasks: Tasks, seen: Inquiry) -> tuple[bool, str | None] | None:
    """Return whether an attempt's usage is known, and how; none where it is asked about again."""
    answer = None
    try:
        answer = tasks.lookup(seen)
        if answer:
            return True, LOOKED_UP
    except Exception:
        logger.exception(
            "attempt.lookup_failed",
            attempt=seen.attempt,
            task=seen.task_name,
            task_id=seen.task_id,
            reservation_id=seen.reservation_id,
        )
        answer = False
    if answer is False and seen.age_us < settings.lookup_us:
        return None
    try:
        return False, COMPENSATED if tasks.compensate(seen) else None
    except Exception:
        logger.exception(
            "attempt.compensate_failed",
            attempt=seen.attempt,
            task=seen.task_name,
            task_id=seen.task_id,
            reservation_id=seen.reservation_id,
        )
        return None if seen.age_us < 2 * settings.lookup_us else (False, NOT_COMPENSATED)


def _named(seen: Inquiry) -> str:
    return f"attempt {seen.attempt} of task {seen.task_name}[{seen.task_id}]"
