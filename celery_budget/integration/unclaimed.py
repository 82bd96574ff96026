"""Deliveries that end before they claim: their requests end with them, and never come again.

A task that this worker does not know, a message that cannot be read, an error before the task's
call: Celery ends these without the call, and the ledger hears of them by its signals. Recovery is
behind them where the ledger cannot be told.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from celery import bootsteps, signals, states

from celery_budget import settlement
from celery_budget.integration.context import HEADER, find_installed, is_answered, parse_header

__all__ = ["UnreadableStep", "safe"]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

#: Why requests end whose task never made its call, by the state in which Celery left it.
REASONS = {
    # It ran past the ledger, as a task that has no budget in this worker.
    states.SUCCESS: "not_claimed",
    states.FAILURE: "failed",
    states.IGNORED: "ignored",
    states.REJECTED: "rejected",
    # No message followed it.
    states.RETRY: "retried",
}
NOT_REGISTERED = "not_registered"
UNREADABLE = "unreadable"


def safe(function: F) -> F:
    """Keep what fails here from Celery, which would leak a prefetch slot; recovery finds it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            logger.exception("the ledger could not be told; recovery will find it")
            return None

    return call  # type: ignore[return-value]


@signals.task_unknown.connect
@safe
def _on_unknown(sender: Any, message: Any, **_: Any) -> None:
    """Celery has stored ``NotRegistered``."""
    _end(sender.app, message.headers, NOT_REGISTERED)


@signals.task_rejected.connect
@safe
def _on_rejected(sender: Any, message: Any, **_: Any) -> None:
    """Of what is no task, or of a content type that is not accepted, Celery stores nothing."""
    _end(sender.app, message.headers, UNREADABLE, tell=True)


class UnreadableStep(bootsteps.Step):
    """Tells the ledger of messages that cannot be decoded, for which there is no signal."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        following = parent.on_decode_error

        def on_decode_error(message: Any, exc: Exception) -> None:
            following(message, exc)
            safe(_end)(parent.app, message.headers, UNREADABLE, tell=True)

        parent.on_decode_error = on_decode_error


@signals.task_postrun.connect
@safe
def _on_postrun(task: Any, state: str | None, retval: Any, **_: Any) -> None:
    """End what came to its end without an answer of the ledger to its claim."""
    request = task.request
    if request.is_eager or is_answered(request):
        return
    if state is None:
        # What Celery could not even begin to run; what ends the process is no failure of the task.
        error = sys.exc_info()[1]
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return
        state = states.FAILURE
    if state == states.REJECTED and retval.requeue:
        # The broker has it, and delivers it again.
        return
    _end(task.app, vars(request), REASONS.get(state, "failed"))


def _end(app: Any, headers: Any, reason: str, *, tell: bool = False) -> None:
    """End the request of a delivery with these headers, if it is one of this ledger's."""
    budget = find_installed(app)
    found = None if budget is None or not headers else parse_header(headers.get(HEADER))
    if budget is None or found is None:
        return
    task_id, retries = str(headers.get("id")), int(headers.get("retries") or 0)
    if settlement.unclaimed(budget.store, *found, task_id, retries, reason, tell=tell):
        logger.error(
            "task %s[%s] ended before it was started: %s", headers.get("task"), task_id, reason
        )
