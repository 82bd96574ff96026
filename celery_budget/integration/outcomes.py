"""What became of a task's call: told to the ledger undisturbed, and written as that keeps it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from celery import Task
from celery.backends.base import DisabledBackend
from celery.exceptions import SoftTimeLimitExceeded
from kombu import serialization
from kombu.exceptions import EncodeError
from kombu.utils.encoding import safe_repr
from kombu.utils.json import dumps, loads

from celery_budget.core.retries import TRACEBACK
from celery_budget.events import Logger

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = [
    "is_needed",
    "name_of",
    "read_value",
    "text_of",
    "traced",
    "undisturbed",
    "written_error",
    "written_retry",
    "written_value",
]

logger = Logger(__name__)

T = TypeVar("T")

#: How much of the name of an error's class is kept with its attempt.
MOST_NAME = 255
#: How much of an error's text is kept in quarantine.
MOST_TEXT = 2000
#: How much of its traceback, from the end.
MOST_TRACEBACK = 8000


def undisturbed(function: Callable[..., T], *args: Any) -> T:
    """Call ``function``, again should the task's soft time limit strike meanwhile (it does once).

    The limit is for the task's work. While the ledger is waited for there is none, and what has
    been done is to be settled. Both claim and end find what an interrupted call has committed.
    """
    try:
        return function(*args)
    except SoftTimeLimitExceeded:
        return function(*args)


def is_needed(task: Any, request: Any) -> bool:
    """Tell whether anybody needs what a task returns, so that a replay would have to give it."""
    follows = request.callbacks or request.chain or request.chord
    return bool(follows) or _is_stored(task, request) or task.budget_reuses()


def _is_stored(task: Any, request: Any) -> bool:
    """Tell whether Celery stores what a task returns."""
    if task.ignore_result or request.ignore_result is True:
        return False
    return not isinstance(Task.backend.fget(task), DisabledBackend)


def written_value(budget: CeleryBudget, task: Any, request: Any, value: Any) -> str | None:
    """Return a return value as kept for a replay; none where nobody would need it.

    :raises EncodeError: where Celery could not store the result either.
    """
    if not is_needed(task, request):
        return None
    serializer = budget.app.conf.result_serializer
    try:
        content_type, content_encoding, body = serialization.dumps(value, serializer=serializer)
    except EncodeError:
        if _is_stored(task, request):
            raise
        return None
    return _capped(budget, task, dumps([content_type, content_encoding, body]))


def read_value(written: str) -> Any:
    """Return a return value that :func:`written_value` has written."""
    content_type, content_encoding, body = loads(written)
    return serialization.loads(body, content_type, content_encoding, accept={content_type})


def written_error(budget: CeleryBudget, task: Any, error: Exception) -> str | None:
    """Return an exception as kept for a replay; none where it cannot be written as JSON."""
    try:
        written = dumps(task.backend.prepare_exception(error, serializer="json"))
    except Exception:
        logger.exception("outcome.unkept", task=task.name, task_id=task.request.id)
        return None
    return _capped(budget, task, written)


def text_of(error: object) -> str:
    """Return an error as it is shown to whoever looks: without what a database cannot hold."""
    written = str(safe_repr(error)).encode("utf-8", "replace").decode("utf-8")
    return written.replace("\x00", "\ufffd")[:MOST_TEXT]


def name_of(error: object) -> str | None:
    """Return the name of an error's class, of a length that the ledger keeps; none of no error."""
    if not isinstance(error, BaseException):
        return None
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    written = f"{module}{kind.__qualname__}".encode("utf-8", "replace").decode("utf-8")
    return written.replace("\x00", "\ufffd")[:MOST_NAME]


def traced(error: BaseException) -> str:
    """Return an error as :func:`text_of`, and its traceback after it: of a long one the end."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    if not frames:
        return text_of(error)
    written = frames[-MOST_TRACEBACK:].encode("utf-8", "replace").decode("utf-8")
    return text_of(error) + TRACEBACK + written.replace("\x00", "\ufffd")


def written_retry(budget: CeleryBudget, task: Any, error: object) -> str | None:
    """Return the error by which a task is retried, as kept for where no attempt follows."""
    if not isinstance(error, Exception):
        return None
    return str(dumps([traced(error), written_error(budget, task, error)]))


def _capped(budget: CeleryBudget, task: Any, written: str) -> str | None:
    if len(written) <= budget.settings.outcome_bytes:
        return written
    logger.event(
        "outcome.oversize",
        task=task.name,
        task_id=task.request.id,
        bytes=len(written),
        bound=budget.settings.outcome_bytes,
    )
    return None
