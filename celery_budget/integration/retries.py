"""Where trying ends: retries that are turned away, and what is kept of a request that failed."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery.utils.serialization import raise_with_context
from celery.utils.time import maybe_make_aware
from kombu.utils.json import loads

from celery_budget.core.retries import DEADLINE, FAILED, TERMINAL_ERROR, Keep, Retries
from celery_budget.errors import AttemptsSpent
from celery_budget.events import Logger
from celery_budget.integration.context import attempt_of
from celery_budget.integration.outcomes import traced

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget
    from celery_budget.settlement import Attempt

__all__ = ["TOLD", "check_retry", "kept_as", "refused"]

logger = Logger(__name__)

#: The header of a message that runs again after its failure was told to its chord.
TOLD = "budget_told"


def check_retry(task: Any, exc: Any, eta: Any, countdown: Any) -> None:
    """Raise what a task would be retried for, where its policy, or deadline, lets none follow.

    As Celery does beyond ``max_retries``: ``exc``, else the error that is being handled, else
    ``task.MaxRetriesExceededError``.
    """
    request = task.request
    attempt = attempt_of(request)
    if attempt is None:
        return
    retries: Retries = task.budget_retries(request.args or (), request.kwargs or {})
    handled = sys.exc_info()[1]
    if retries.is_terminal(exc, handled):
        attempt.spent = TERMINAL_ERROR
    else:
        starts = time.monotonic() + _wait_seconds(task, eta, countdown)
        elapsed = starts - attempt.begun
        attempt.spent = retries.spent(attempt.number, int(elapsed * 1_000_000))
        if attempt.until is not None and starts >= attempt.until:
            attempt.spent = attempt.spent or DEADLINE
    if attempt.spent is None:
        return
    logger.event(
        "request.spent",
        task=task.name,
        task_id=request.id,
        attempt=attempt.number,
        reason=attempt.spent,
    )
    if exc:
        raise_with_context(exc)
    if handled is not None:
        raise handled
    raise task.MaxRetriesExceededError(
        f"{task.name}[{request.id}] is not retried after attempt {attempt.number}: {attempt.spent}"
    )


def _wait_seconds(task: Any, eta: Any, countdown: Any) -> float:
    """Return in how many seconds a retry would start, at the earliest."""
    if isinstance(eta, datetime):
        aware = maybe_make_aware(eta, task.app.timezone)
        return max(0.0, float(aware.timestamp()) - time.time())
    wait = task.default_retry_delay if countdown is None and not eta else countdown
    return float(wait or 0)


def kept_as(
    budget: CeleryBudget, attempt: Attempt, retries: Retries, error: Exception
) -> Keep | None:
    """Return as what a request is kept that fails with ``error``; none where it is not to be."""
    if not retries:
        return None
    reason = attempt.spent or (TERMINAL_ERROR if retries.is_terminal(error) else FAILED)
    return Keep(reason, traced(error), budget.settings.max_quarantine)


def refused(task: Any, reason: str, attempts: int, last: str | None) -> Exception:
    """Return what a task failed with that is not run again: its last error, if that is known."""
    logger.event(
        "request.spent", task=task.name, task_id=task.request.id, attempt=attempts, reason=reason
    )
    error = None if last is None else task.backend.exception_to_python(loads(last))
    if isinstance(error, Exception):
        return error
    return AttemptsSpent(str(task.request.id), attempts, reason)
