"""Deliveries that end before they claim: their requests end with them, and never come again.

A task that this worker does not know, a message that cannot be read, an error before the task's
call: Celery ends these without the call. The ledger is told first where Celery stores a result, so
that a copy's failure is not stored over what another delivery does. Recovery is behind them where
the ledger cannot be told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

from celery import bootsteps, signals, states
from celery._state import get_current_worker_task

from celery_budget import settlement
from celery_budget.events import Logger
from celery_budget.integration.asking import asking
from celery_budget.integration.context import (
    HEADER,
    answer,
    find_installed,
    is_answered,
    is_refused,
    parse_header,
)
from celery_budget.integration.outcomes import undisturbed
from celery_budget.integration.spooling import gives_back, stopping
from celery_budget.store import Stop

__all__ = ["ConsumerStep", "may_fail", "safe"]

logger = Logger(__name__)

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
            logger.exception("store.untold", matter="how a delivery ended")
            return None

    return call  # type: ignore[return-value]


@signals.task_rejected.connect
@safe
def _on_rejected(sender: Any, message: Any, **_: Any) -> None:
    """Of what is no task, or of a content type that is not accepted, Celery stores nothing."""
    _end(sender.app, message.headers, UNREADABLE, tell=True)


class ConsumerStep(bootsteps.Step):
    """Has the ledger told by the worker's consumer of what it cannot start."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        # There is no signal for messages that cannot be decoded, and the one for unknown tasks
        # comes when Celery has stored their failure.
        parent.on_decode_error = _then_tell(parent, parent.on_decode_error)
        parent.on_unknown_task = _tell_before(parent, parent.on_unknown_task)


def _then_tell(consumer: Any, on_decode_error: Callable[..., None]) -> Callable[..., None]:
    def call(message: Any, exc: Exception) -> None:
        on_decode_error(message, exc)
        safe(_end)(consumer.app, message.headers, UNREADABLE, tell=True)

    return call


def _tell_before(consumer: Any, on_unknown_task: Callable[..., None]) -> Callable[..., None]:
    def call(body: Any, message: Any, exc: Exception) -> None:
        if safe(_end)(consumer.app, message.headers, NOT_REGISTERED) is False:
            # Another delivery runs, or has ended it: its result is not to be touched.
            message.reject_log_error(logger, consumer.connection_errors)
            return
        on_unknown_task(body, message, exc)

    return call


def may_fail(request: Any) -> bool:
    """Tell whether Celery may store that what runs by ``request`` has failed.

    Where the ledger has not answered its claim, its request ends here, before. False where it is a
    copy of a message whose task runs elsewhere, waits for another attempt or has ended. A fault of
    the store is waited out; where the worker stops meanwhile the delivery is given back.
    """
    task = get_current_worker_task()
    if is_answered(request) or task is None or task.request is not request or request.is_eager:
        return not is_refused(request)
    return _end_request(task, request, REASONS[states.FAILURE], wait=True) is not False


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
    _end_request(task, request, REASONS.get(state, "failed"))


def _end_request(task: Any, request: Any, reason: str, *, wait: bool = False) -> bool | None:
    """As :func:`_end`, of what runs by ``request``; that has its answer then."""
    ended = safe(_end)(task.app, vars(request), reason, wait=stopping if wait else None)
    budget = find_installed(task.app)
    if wait and ended is None and budget is not None and parse_header(vars(request).get(HEADER)):
        # It is not known whether this is a copy: what is stored is the next delivery's to say.
        ended = None if not gives_back(budget, request) else False
    answer(request, refused=ended is False)
    return ended


def _end(
    app: Any, headers: Any, reason: str, *, tell: bool = False, wait: Stop | None = None
) -> bool | None:
    """End the request of a delivery with these headers; false where it is a copy's.

    None where it is none of this ledger's.
    """
    budget = find_installed(app)
    found = None if budget is None or not headers else parse_header(headers.get(HEADER))
    if budget is None or found is None:
        return None
    task_id, retries = str(headers.get("id")), int(headers.get("retries") or 0)
    key = (*found, task_id, retries, reason)
    end = partial(settlement.unclaimed, budget.store, *key, tell=tell, wait=wait)
    ended = undisturbed(end) if wait else undisturbed(asking.ask, end)
    name = headers.get("task")
    if ended:
        logger.event("request.unstarted", task=name, task_id=task_id, reason=reason)
    else:
        logger.event("delivery.foreign", task=name, task_id=task_id, reason=reason)
    return bool(ended)
