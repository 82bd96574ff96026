"""Runs in place: ``apply()`` and ``task_always_eager`` reserve, claim and settle in their caller.

A request is reserved and claimed in one transaction before anything of it runs; what cannot be is
an error of the caller. It has no message: should this process die, its lease lapses and it is lost.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery import Task, states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from celery.result import EagerResult
from celery.utils.nodenames import gethostname

from celery_budget import settlement
from celery_budget.core.deadlines import Deadline
from celery_budget.core.identity import checked_id, new_id, task_id_of
from celery_budget.core.lanes import Lane
from celery_budget.core.parking import Parking
from celery_budget.core.reservations import (
    AlreadyReserved,
    Closed,
    Outcome,
    Refused,
    Released,
    ReserveRequest,
)
from celery_budget.core.retries import DEADLINE
from celery_budget.errors import AttemptLost, AttemptsSpent, PolicyError, RequestNotRun
from celery_budget.events import Logger
from celery_budget.integration import fallbacks
from celery_budget.integration.authority import may_draw
from celery_budget.integration.context import (
    BOOT_ID,
    attach,
    attempt_of,
    current_attempt,
    installed_on,
)
from celery_budget.integration.deadlines import UNTIL, deadline_of
from celery_budget.integration.effects import called
from celery_budget.integration.fallbacks import Way
from celery_budget.integration.leases import kept
from celery_budget.integration.outcomes import name_of
from celery_budget.settlement import Attempt, Delivery
from celery_budget.store.requests import error_of

if TYPE_CHECKING:
    from celery_budget.core.terms import Terms
    from celery_budget.integration.install import CeleryBudget

__all__ = ["apply", "replaced", "run", "with_task_id"]

logger = Logger(__name__)

#: What Celery's methods take by position after a call's arguments.
APPLY = tuple(inspect.signature(Task.apply).parameters)[3:]
APPLY_ASYNC = tuple(inspect.signature(Task.apply_async).parameters)[3:]

#: The option of a retry's signature that carries the run it follows.
FOLLOWS = "budget_follows"


@dataclass(eq=False)
class Run:
    """One attempt that runs in place.

    :ivar lane: of several that were tried, the one whose budgets it draws on.
    :ivar entered: whether the task's call has begun.
    :ivar over: whether the attempt has ended.
    :ivar otherwise: how it ends where its call does not tell.
    """

    attempt: Attempt
    task_id: str
    nesting: int
    lane: Lane | None = None
    entered: bool = False
    over: bool = False
    otherwise: str = "raised"

    def end(self, kind: str) -> None:
        """End the attempt, unless it has ended.

        :raises AttemptLost: where the ledger has given it up meanwhile.
        """
        if self.over:
            return
        self.attempt.finish_streams()
        ended = self.attempt.end(Outcome(kind, error=name_of(self.attempt.error)))
        self.attempt.called = self.over = True
        if not ended:
            raise AttemptLost(self.task_id)


#: What runs in place in this context, the innermost last.
_runs: ContextVar[tuple[Run, ...]] = ContextVar("budget_runs", default=())


def apply(
    task: Any,
    following: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rest: tuple[Any, ...],
    given: dict[str, Any],
) -> Any:
    """Do ``task.apply`` under a reservation; ``following`` is Celery's own.

    :return: Celery's result; for a request that was made before :func:`_repeated`.
    """
    options = {**dict(zip(APPLY, rest, strict=False)), **given}
    budget = installed_on(task.app)
    before: Run | None = options.pop(FOLLOWS, None)
    terms: Terms = task.budget_terms(args, kwargs)
    request = _request(budget, task, terms, options)
    if before is not None and not before.over:
        begun: Run | AlreadyReserved = _go_on(budget, before, request, terms)
    else:
        begun = _start(budget, request, terms)
    if isinstance(begun, AlreadyReserved):
        return _repeated(budget, task, begun.task_id, options)
    options["task_id"] = begun.task_id
    with kept(budget, begun.attempt, begun.task_id), _running(begun):
        return following(args, kwargs, **options)


def with_task_id(
    task: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rest: tuple[Any, ...],
    given: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of ``task.apply_async`` with the task id that its request id stands for.

    Celery would make one of its own before it runs the task in place.
    """
    position = dict(zip(APPLY_ASYNC, rest, strict=False))
    request_id = given["request_id"]
    if request_id is None or position.get("task_id") or given.get("task_id"):
        return given
    terms: Terms = task.budget_terms(tuple(args), kwargs)
    named = checked_id("request_id", request_id)
    return {**given, "task_id": task_id_of(terms.evaluation.budget, named)}


def run(task: Any, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a task's ``body`` under the attempt that :func:`apply` has claimed for it.

    A retry does not end the attempt: what follows it does, together with its own claim.

    :raises AttemptLost: where the ledger has given the attempt up while it ran.
    """
    this = _entered(task)
    attach(task.request, this.attempt)
    this.attempt.stop_at_hold = task.budget_stops_at_hold(args, kwargs)
    try:
        value = called(this.attempt, body, args, kwargs)
    except Retry as retry:
        _leave_to(this, retry)
        raise
    except Ignore:
        this.end("ignored")
        raise
    except Reject:
        this.end("rejected")
        raise
    except Exception as error:
        this.attempt.error = error
        this.end("raised")
        raise
    if isinstance(value, Retry):
        # task.retry(throw=False)
        _leave_to(this, value)
    else:
        this.end("returned")
    return value


def replaced(request: Any) -> None:
    """End the attempt of a request whose task puts another in its place; that runs in it."""
    attempt = attempt_of(request)
    for this in reversed(_runs.get()):
        if this.attempt is attempt:
            this.attempt.replaced = True
            this.end("replaced")


def _leave_to(this: Run, retry: Retry) -> None:
    """Leave the end of an attempt to its retry, which Celery applies, or else to its own apply."""
    this.attempt.finish_streams()
    this.otherwise = "retried"
    this.attempt.called = True
    if retry.sig is not None:
        retry.sig.options[FOLLOWS] = this


def _entered(task: Any) -> Run:
    for this in reversed(_runs.get()):
        if this.task_id == task.request.id and not this.entered:
            this.entered = True
            return this
    raise PolicyError(
        f"task {task.name}[{task.request.id}] runs eagerly, and not by BudgetedTask.apply, which "
        "would have reserved it; have the apply of its class call the next one"
    )


@contextmanager
def _running(this: Run) -> Iterator[None]:
    """Make a run known to its task's call, and see to it that its attempt has ended afterwards.

    It has not where its call was not reached, or was left by what is no ``Exception``.
    """
    token = _runs.set((*_runs.get(), this))
    try:
        yield
    finally:
        _runs.reset(token)
        try:
            this.end(this.otherwise)
        except AttemptLost:
            logger.event(
                "attempt.claim_lost",
                attempt=this.attempt.number,
                reservation_id=this.attempt.reservation_id,
            )


def _request(
    budget: CeleryBudget, task: Any, terms: Terms, options: dict[str, Any]
) -> ReserveRequest:
    """Return the request for a call; takes what is for us out of its options."""
    request_id = options.pop("request_id", None)
    finishing = options.pop("finishing", False)
    asked = Deadline.given(options.pop("deadline", None), task.name) or terms.deadline
    deadline = deadline_of(asked, _continued(budget), options.pop(UNTIL, None))
    if type(finishing) is not bool:
        raise PolicyError(f"finishing= of {task.name} is {finishing!r}; give True or False")
    # Nobody could wait in place: it is refused there. What was said has to mean something.
    terms.parking_of(Parking(options.pop("on_refused", None), options.pop("park_for", None)))
    owner = terms.evaluation.budget
    task_id = checked_id("a task id", options.get("task_id") or _id_of(owner, request_id))
    if request_id is not None and task_id != _id_of(owner, request_id):
        raise PolicyError(
            f"request id {request_id!r} stands for task {_id_of(owner, request_id)}, and the "
            f"task's id is {task_id!r}; give one of the two"
        )
    return ReserveRequest(
        reservation_id=new_id(),
        root=budget.settings.root,
        owner=owner,
        request_id=task_id if request_id is None else request_id,
        task_id=task_id,
        task_name=task.name,
        stage=terms.stage,
        fingerprint=terms.fingerprint.digest,
        estimator=terms.estimator,
        estimator_version=terms.version,
        lines=terms.evaluation.lines,
        prices=terms.evaluation.prices,
        shadows=terms.shadows(),
        opaque=terms.fingerprint.opaque,
        nesting=_nesting(task_id, options),
        retries=int(options.get("retries") or 0),
        finishing=finishing or _continued(budget) is not None,
        deadline_us=deadline.at_us,
        within_us=deadline.within_us,
        enforced=terms.enforced,
    )


def _id_of(owner: str, request_id: object) -> str:
    if request_id is None:
        return str(uuid4())
    return task_id_of(owner, checked_id("request_id", request_id))


def _nesting(task_id: str, options: dict[str, Any]) -> int:
    """Return how often the task replaced itself; Celery does not count that for runs in place."""
    replaced_runs = [one.nesting + 1 for one in _runs.get() if one.task_id == task_id]
    return max([*replaced_runs, int(options.get("replaced_task_nesting") or 0)])


def _continued(budget: CeleryBudget) -> Attempt | None:
    """Return the attempt whose work is done and that what begins now follows: a callback, a step.

    None where it follows none.
    """
    attempt = current_attempt(budget.app)
    return attempt if attempt is not None and attempt.called else None


def _start(budget: CeleryBudget, request: ReserveRequest, terms: Terms) -> Run | AlreadyReserved:
    """Begin the first attempt, under the budgets of the first of its lanes that takes it."""
    lanes, around = terms.fallback, current_attempt(budget.app)
    kind = "new" if _continued(budget) is None else "continuation"
    running = None if around is None else around.reservation_id
    ways = fallbacks.ways(budget, request, lanes, None) if lanes else [Way(request, {})]
    for way in ways:
        may_draw(budget, request.task_name, terms, way.request.lines, kind, running)
        started = settlement.start(
            budget.store,
            budget.settings,
            way.request,
            _delivery(request),
            new_id(),
            last=way.last,
        )
        if isinstance(started, Attempt):
            return Run(started, request.task_id, request.nesting, way.lane)
        if isinstance(started, AlreadyReserved):
            return started
        if isinstance(started, Closed):
            raise RequestNotRun(request.task_id, DEADLINE)
        if way.last or not isinstance(started, Refused):
            raise error_of(started)
    raise AssertionError("one of the ways is the last")


def _go_on(budget: CeleryBudget, before: Run, request: ReserveRequest, terms: Terms) -> Run:
    """Put the next attempt in the place of the one that asked for a retry."""
    request = replace(request, reservation_id=before.attempt.reservation_id, nesting=before.nesting)
    if before.lane is not None:
        request = fallbacks.through(request, before.lane)
    running = before.attempt.reservation_id
    may_draw(budget, request.task_name, terms, request.lines, "retry", running)
    going = settlement.go_on(
        budget.store, budget.settings, request, before.attempt, _delivery(request), new_id()
    )
    before.over = True
    if isinstance(going, Refused):
        raise going.error()
    if isinstance(going, Released):
        raise TaskRevokedError("cancelled")
    if isinstance(going, Closed) and going.state == DEADLINE:
        raise AttemptsSpent(before.task_id, before.attempt.number, DEADLINE)
    if isinstance(going, Closed):
        raise AttemptLost(before.task_id)
    return Run(going, before.task_id, before.nesting, before.lane)


def _delivery(request: ReserveRequest) -> Delivery:
    return Delivery(
        request.root,
        request.reservation_id,
        request.task_id,
        request.nesting,
        request.retries,
        f"{gethostname()}/{os.getpid()}",
        BOOT_ID,
        late_ack=False,
        pid=os.getpid(),
    )


def _repeated(budget: CeleryBudget, task: Any, task_id: str, options: dict[str, Any]) -> Any:
    """Return the result of a request that was made before.

    Where results are stored, of runs in place too, or a message runs it: Celery's own, which asks
    the backend. Otherwise one that tells how the ledger knows that it ended, without its value.
    """
    seen = settlement.standing(budget.store, budget.settings, task_id)
    stores = task.store_eager_result and not options.get("ignore_result", task.ignore_result)
    if stores or seen is None or not seen.in_place:
        return task.AsyncResult(task_id)
    value: Any = None
    state = _STATES.get(str(seen.outcome), states.SUCCESS)
    if seen.state == "running":
        state = states.STARTED
    elif seen.state == "lost":
        state, value = states.FAILURE, AttemptLost(task_id)
    elif state == states.FAILURE:
        value = RequestNotRun(task_id, "it has run before, and failed")
    return EagerResult(task_id, value, state, name=task.name)


#: The states that Celery's results have after the outcomes that are no success.
_STATES = {
    "raised": states.FAILURE,
    "ignored": states.IGNORED,
    "rejected": states.REJECTED,
    "retried": states.RETRY,
}
