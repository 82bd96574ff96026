"""What is known beside Celery's own objects: an app's budget, a request's attempt, a header."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery
from celery._state import _task_stack
from celery.app.task import Context

from celery_budget.core.budgets import check_name
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Admitted
from celery_budget.errors import NotInstalled
from celery_budget.store import Stop

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget
    from celery_budget.settlement import Attempt

__all__ = [
    "BOOT_ID",
    "DIGEST",
    "HEADER",
    "Current",
    "Delivered",
    "answer",
    "attach",
    "attempt_of",
    "current",
    "current_attempt",
    "delivered_now",
    "delivering",
    "find_installed",
    "header",
    "install_on",
    "installed_on",
    "is_answered",
    "is_refused",
    "parse_header",
]

#: The one header a budgeted message carries: ``root/reservation id``.
HEADER = "budget_reservation"

#: What a worker adds to the headers of a message it has received: SHA-256 of its body, in hex.
DIGEST = "budget_digest"
# What a request does not know by itself Celery takes for a header of the message, which a retry
# sends again.
setattr(Context, DIGEST, None)

#: Identifies this process and the children it forks: the worker's main process and its pool.
BOOT_ID = new_id()

_ATTRIBUTE = "_budget_attempt"
_ANSWERED = "_budget_answered"
_INSTALLED = "_celery_budget"


def header(root: str, reservation_id: uuid.UUID) -> str:
    """Return the header's value for a reservation."""
    return f"{root}/{reservation_id}"


def parse_header(value: object) -> tuple[str, uuid.UUID] | None:
    """Return root and reservation id of a header; none for what is no such header."""
    if not isinstance(value, str):
        return None
    root, _, written = value.rpartition("/")
    try:
        return check_name(root), uuid.UUID(written)
    except ValueError:
        return None


def attach(request: Any, attempt: Attempt) -> None:
    """Tie an attempt to the request that runs it."""
    setattr(request, _ATTRIBUTE, attempt)


def attempt_of(request: Any) -> Attempt | None:
    """Return the attempt of a request; none where it runs under no budget."""
    attempt: Attempt | None = getattr(request, _ATTRIBUTE, None)
    return attempt


def answer(request: Any, *, refused: bool = False) -> None:
    """Note that the ledger knows what comes of a request: it has answered its claim, or its end.

    :param refused: it is a copy, of which nothing is to come.
    """
    setattr(request, _ANSWERED, "refused" if refused else "taken")


def is_answered(request: Any) -> bool:
    """Tell whether the ledger knows what comes of a request."""
    return getattr(request, _ANSWERED, None) is not None


def is_refused(request: Any) -> bool:
    """Tell whether a request is a copy, of which nothing is to come."""
    return bool(getattr(request, _ANSWERED, None) == "refused")


class Current(NamedTuple):
    """The task that runs, and the request and the attempt by which it does."""

    task: Any
    request: Any
    attempt: Attempt


def current_attempt(app: Celery | None = None) -> Attempt | None:
    """Return the attempt of the task that this thread runs; none where it runs none."""
    found = current(app)
    return None if found is None else found.attempt


def current(app: Celery | None = None) -> Current | None:
    """Return the task that this thread runs, with its attempt; none where it runs none.

    A task that another one calls is part of that one, unless it has an attempt of its own: one with
    a budget has where it is run in place, and none where it is called directly.
    """
    calls: Counter[int] = Counter()
    for task in reversed(_task_stack.stack or ()):
        # A task that has called itself has a request for each of its calls.
        calls[id(task)] += 1
        requests = task.request_stack.stack or ()
        nth = calls[id(task)]
        request = requests[-nth] if nth <= len(requests) else None
        attempt = attempt_of(request)
        if attempt is not None:
            return Current(task, request, attempt) if app is None or task.app is app else None
    return None


@dataclass
class Delivered:
    """A message that a worker has received without a reservation, on its way through the gate.

    :ivar stop: ends waiting for the ledger.
    """

    task_id: str
    park: bool
    stop: Stop | None = None
    admitted: Admitted | None = field(default=None)


_delivered: ContextVar[Delivered | None] = ContextVar("budget_delivered", default=None)


@contextmanager
def delivering(delivered: Delivered) -> Iterator[None]:
    """Have the gate admit the message of ``delivered`` as one that is not to be published."""
    token = _delivered.set(delivered)
    try:
        yield
    finally:
        _delivered.reset(token)


def delivered_now() -> Delivered | None:
    """Return the delivered message that is on its way through the gate; none otherwise."""
    return _delivered.get()


def install_on(app: Celery, budget: CeleryBudget) -> None:
    """Tie an application to its budget."""
    setattr(app, _INSTALLED, budget)


def find_installed(app: Celery) -> CeleryBudget | None:
    """Return the application's :class:`CeleryBudget`; none where it has none."""
    found: CeleryBudget | None = app.__dict__.get(_INSTALLED)
    return found


def installed_on(app: Celery) -> CeleryBudget:
    """Return the application's :class:`CeleryBudget`.

    :raises NotInstalled: where it has none.
    """
    found = find_installed(app)
    if found is None:
        raise NotInstalled(
            f"{app} has budgeted tasks and no CeleryBudget; add 'budget = CeleryBudget(app)' "
            "where the application is made, and see that this module is imported before its tasks "
            "are used"
        )
    return found
