"""A task's call under a budget: claim on entry, settle on exit.

The call is the only point after the work and before callbacks, chain, result and acknowledgement
that can still decide what becomes of the task.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import signals, states
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    TaskRevokedError,
)
from celery.utils.serialization import get_pickleable_exception
from kombu.exceptions import EncodeError
from kombu.utils.json import loads

from celery_budget import admission, settlement, telling, tracing, watching
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    AlreadyReserved,
    Closed,
    Missing,
    Outcome,
    Reserved,
    Running,
    StoredOutcome,
)
from celery_budget.errors import BudgetError, StoreError
from celery_budget.events import Logger
from celery_budget.integration import eager
from celery_budget.integration.chords import wait_for_body
from celery_budget.integration.context import (
    BOOT_ID,
    DIGEST,
    HEADER,
    Delivered,
    answer,
    attach,
    attempt_of,
    delivering,
    find_installed,
    installed_on,
    is_answered,
    is_refused,
    parse_header,
)
from celery_budget.integration.effects import called
from celery_budget.integration.outcomes import (
    is_needed,
    name_of,
    read_value,
    undisturbed,
    written_error,
    written_retry,
    written_value,
)
from celery_budget.integration.releases import retries_on_worker_lost
from celery_budget.integration.results import BackendResults
from celery_budget.integration.retries import TOLD, kept_as, refused
from celery_budget.integration.spooling import keep_unstarted, stopping
from celery_budget.integration.unclaimed import may_fail
from celery_budget.tracing import Span

if TYPE_CHECKING:
    import uuid

    from celery_budget.core.retries import Retries
    from celery_budget.integration.install import CeleryBudget

__all__ = ["execute", "guarded", "say_started"]

logger = Logger(__name__)


def execute(
    task: Any, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``task``'s ``body`` under its reservation, or do what its delivery calls for.

    :raises Ignore: for a delivery that may not run, and for an attempt that lost its claim while
        it ran, or whose end the ledger could not be told before the worker had to stop: no result,
        chord or chain is touched.
    """
    request = task.request
    if request.is_eager:
        return eager.run(task, body, args, kwargs)
    budget = installed_on(task.app)
    began = time.time_ns()
    attempt = _claim(budget, task, args, kwargs)
    attach(request, attempt)
    span = undisturbed(
        partial(
            tracing.of(budget.settings).span,
            "budget.run",
            "consumer",
            parent=vars(request),
            start_ns=began,
            expected=(Ignore, Reject, Retry),
        )
    )
    if not span.recording:
        return _run(task, body, args, kwargs, attempt)
    with _Run(span, attempt):
        of = (attempt.reservation_id, attempt.number, task.name, request.id)
        undisturbed(watching.run, span, *of)
        return _run(task, body, args, kwargs, attempt)


class _Run:
    """The span of an attempt's run, which no soft time limit leaves half told."""

    def __init__(self, span: Span, attempt: settlement.Attempt) -> None:
        self._span = span
        self._attempt = attempt

    def __enter__(self) -> None:
        undisturbed(self._span.__enter__)
        self._attempt.span = self._span
        self._attempt.trace = undisturbed(self._span.carrier)

    def __exit__(self, *error: Any) -> None:
        undisturbed(self._span.__exit__, *error)


def _run(
    task: Any,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    attempt: settlement.Attempt,
) -> Any:
    """Run a task's ``body`` as its attempt, or give its outcome again."""
    budget, request = installed_on(task.app), task.request
    if getattr(request, TOLD, None):
        # Its chord has been told that it failed.
        request.chord = None
    if attempt.replay is not None:
        attempt.called = attempt.settled = True
        undisturbed(partial(attempt.span.set, outcome="replayed"))
        return _replay(task, attempt, attempt.replay)
    attempt.stop_at_hold = task.budget_stops_at_hold(args, kwargs)
    retries = task.budget_retries(args, kwargs)
    try:
        say_started(request)
        value = called(attempt, body, args, kwargs)
        outcome = Outcome("returned", written_value(budget, task, request, value))
        closes = not is_needed(task, request)
    except Retry as exc:
        told = retries or attempt.deadline_us is not None
        error = written_retry(budget, task, exc.exc) if told else None
        _end(attempt, Outcome("retried", error, error=name_of(exc.exc)))
        if attempt.cancelled:
            # Celery would store RETRY, over what is told here.
            _tell(budget, task)
            raise Ignore("the request is cancelled") from exc
        raise
    except Ignore:
        _end(attempt, Outcome("replaced" if attempt.replaced else "ignored"), closes=True)
        raise
    except Reject as exc:
        again = budget.settings.again if exc.requeue else None
        _end(attempt, Outcome("rejected", again=again))
        if attempt.cancelled:
            _tell(budget, task)
        if attempt.settled:
            raise Reject(exc.reason, requeue=False) from exc
        # It comes again from the ledger, with back-off and counted; not from the broker.
        raise Ignore("the message is published again") from exc
    except Exception as exc:
        attempt.error = exc
        keep = kept_as(budget, attempt, retries, exc)
        written = written_error(budget, task, exc)
        _end(attempt, Outcome("raised", written, keep=keep, error=name_of(exc)))
        raise
    _end(attempt, outcome, closes)
    return value


def _end(attempt: settlement.Attempt, outcome: Outcome, closes: bool = False) -> None:
    """End an attempt by how its task's call has ended.

    :param closes: whether nothing of it is ever to be given again.
    :raises Ignore: where nothing may follow from it here.
    """
    undisturbed(attempt.finish_streams)
    attempt.called = True
    undisturbed(partial(attempt.span.set, outcome=outcome.kind))
    if attempt.cut_short and outcome.kind in ("raised", "rejected"):
        # Not for a reason of its own.
        undisturbed(attempt.leave)
        logger.event("attempt.left", attempt=attempt.number, reservation_id=attempt.reservation_id)
        raise Ignore("the worker stops")
    ended = undisturbed(attempt.end, outcome, closes)
    if attempt.spooled:
        logger.event(
            "attempt.spooled",
            attempt=attempt.number,
            reservation_id=attempt.reservation_id,
            outcome=outcome.kind,
        )
        raise Ignore("the worker stops, and the outcome is in its spool")
    if not ended:
        logger.event(
            "attempt.claim_lost", attempt=attempt.number, reservation_id=attempt.reservation_id
        )
        raise Ignore("the attempt lost its claim")


def _tell(budget: CeleryBudget, task: Any) -> None:
    """Store the result of a cancelled request now; where that fails the sweep does."""
    _tell_result(budget, str(task.request.id))
    _tell_chord(task)


def _tell_result(budget: CeleryBudget, task_id: str) -> None:
    ended = BackendResults(budget.app).ended
    telling.tell_task(budget.store, budget.settings.root, ended, task_id)


def _tell_chord(task: Any, why: str = "cancelled") -> None:
    """Tell the chord of a task that does not run, if it is in one, as Celery of one it revokes."""
    request = task.request
    if request.chord:
        error = TaskRevokedError(why)
        task.backend.on_chord_part_return(request, states.REVOKED, error)


def _claim(
    budget: CeleryBudget, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> settlement.Attempt:
    """Claim the attempt this delivery stands for.

    :raises Ignore: where another delivery runs or has ended it, or the request is parked.
    :raises Reject: where it came without a reservation and those are to be rejected; to be
        delivered again, where the worker stops while it waits for the ledger.
    """
    try:
        return _try_claim(budget, task, args, kwargs)
    except StoreError as error:
        if not stopping.is_set():
            raise
        logger.event("delivery.given_back", task_id=task.request.id)
        if task.acks_late:
            raise Reject("the worker stops", requeue=True) from error
        keep_unstarted(budget, task.request)
        raise Ignore("the worker stops") from error


def _try_claim(
    budget: CeleryBudget, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> settlement.Attempt:
    found = parse_header(getattr(task.request, HEADER, None))
    retries = task.budget_retries(args, kwargs)
    if found is not None:
        claimed = _claim_reserved(
            budget, task, *found, retries, getattr(task.request, DIGEST, None)
        )
        if not isinstance(claimed, Missing):
            return _only_attempt(budget, task, claimed, *found)
    reservation_id = _admit_delivered(budget, task, args, kwargs)
    root = budget.settings.root
    claimed = _claim_reserved(budget, task, root, reservation_id, retries)
    return _only_attempt(budget, task, claimed, root, reservation_id)


def _claim_reserved(
    budget: CeleryBudget,
    task: Any,
    root: str,
    reservation_id: uuid.UUID,
    retries: Retries,
    digest: str | None = None,
) -> settlement.Attempt | Running | Closed | Missing:
    request = task.request
    losses = task.budget_losses(request.args or (), request.kwargs or {})
    delivery = settlement.Delivery(
        root,
        reservation_id,
        str(request.id),
        int(request.replaced_task_nesting or 0),
        int(request.retries or 0),
        f"{request.hostname}/{os.getpid()}",
        BOOT_ID,
        bool(task.acks_late),
        os.getpid(),
        bool(task.acks_late or retries_on_worker_lost(task)) and losses.may_rerun,
        losses.inquires,
        # As the message says it: a worker may know a task by several names.
        None if digest is None else str(getattr(request, "task", None) or task.name),
        digest,
    )
    claimed: Any = undisturbed(
        settlement.claim,
        budget.store,
        budget.settings,
        delivery,
        new_id(),
        stopping,
        retries,
        budget.spool,
        budget.closings,
    )
    if (
        digest is not None
        and isinstance(claimed, Missing)
        and undisturbed(settlement.is_altered, budget.store, delivery, stopping)
    ):
        answer(request, refused=True)
        logger.event("delivery.altered", task=task.name, task_id=request.id)
        raise Ignore("the message is not the one that was admitted")
    return claimed  # type: ignore[no-any-return]


def _only_attempt(
    budget: CeleryBudget,
    task: Any,
    claimed: settlement.Attempt | Running | Closed | Missing,
    root: str,
    reservation_id: uuid.UUID,
) -> settlement.Attempt:
    """Return the attempt that was claimed.

    :raises Ignore: where there is none. The chord of one that was cancelled, or came after its
        deadline, is told here: nobody else has its message.
    """
    answer(task.request)
    if isinstance(claimed, settlement.Attempt):
        return claimed
    why = "is running elsewhere" if isinstance(claimed, Running) else "has ended"
    waits = task.request.chord and not getattr(task.request, TOLD, None)
    if (
        waits
        and isinstance(claimed, Closed)
        and undisturbed(settlement.leaves_chord, budget.store, root, reservation_id, stopping)
    ):
        _tell_chord(task, "cancelled, or past its deadline")
    logger.event("delivery.idle", task=task.name, task_id=task.request.id, reason=why)
    raise Ignore(f"the request {why}")


def _admit_delivered(
    budget: CeleryBudget, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> uuid.UUID:
    """Reserve for a message that came without a reservation; return the reservation's id.

    The message is made again from the request, as Celery does for a retry, so that it can be
    published anew should this worker go away.
    """
    request = task.request
    if budget.settings.unreserved == "reject" and task.budget_enforced(args, kwargs):
        _count_rejected(budget, task, args, kwargs)
        raise Reject(
            f"task {task.name}[{request.id}] came without a reservation and budget_unreserved "
            "is 'reject'",
            requeue=False,
        )
    # One that is acknowledged is nowhere else, and waits.
    delivered = Delivered(str(request.id), park=True, stop=stopping if task.acks_late else None)
    with delivering(delivered):
        again = task.signature_from_request(request, args, kwargs, retries=request.retries)
        try:
            again.apply_async(add_to_parent=False)
        except StoreError:
            raise
        except BudgetError as error:
            _leave_foreign(budget, task, error)
            raise
    admitted = delivered.admitted
    if isinstance(admitted, (Reserved, AlreadyReserved)):
        return admitted.reservation_id
    logger.event("delivery.unreserved", task=task.name, task_id=request.id)
    raise Ignore("the request waits for budget")


def _leave_foreign(budget: CeleryBudget, task: Any, error: BudgetError) -> None:
    """Do nothing for a message that is refused, and has the id of a task that the ledger knows.

    :raises Ignore: for such a one: its failure would be stored over that task's result.
    """
    request = task.request
    if not settlement.owners_of(budget.store, budget.settings.root, str(request.id), stopping):
        return
    answer(request, refused=True)
    logger.event(
        "delivery.foreign", task=task.name, task_id=request.id, reason=type(error).__name__
    )
    raise Ignore("the task's id is another request's") from error


def _count_rejected(
    budget: CeleryBudget, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    terms = task.budget_terms(args, kwargs)
    admission.count_refusal(
        budget.store,
        budget.settings,
        terms.evaluation.budget,
        terms.stage,
        task.name,
        terms.evaluation.estimate,
        stopping,
    )


def _replay(task: Any, attempt: settlement.Attempt, stored: StoredOutcome) -> Any:
    """Give a stored outcome again, so that chain, chord and result go on."""
    if stored.payload is None:
        raise Ignore("the outcome was not kept")
    if stored.kind == "returned":
        return read_value(stored.payload)
    value = loads(stored.payload)
    if stored.kind == "refused":
        attempt.error = refused(task, *value)
        raise attempt.error
    attempt.error = task.backend.exception_to_python(value)
    raise attempt.error


def guarded(backend: Any) -> Any:
    """Return ``backend``, guarded where this process runs tasks."""
    return AttemptBackend(backend) if _process.runs_tasks else backend


class _Process:
    """Whether this process runs tasks."""

    runs_tasks = False


_process = _Process()


@signals.task_prerun.connect
def _on_prerun(task: Any, **_: Any) -> None:
    if not task.request.is_eager:
        _process.runs_tasks = True


#: Where a request keeps what stores that its task has started.
_START = "_budget_start"


def say_started(request: Any) -> None:
    """Store that a task has started, where that is tracked; it goes on where that fails."""
    start = vars(request).pop(_START, None)
    if start is None:
        return
    try:
        start()
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        logger.exception("result.start_unstored", task_id=request.id)


def _stands_for(stored: BaseException, error: BaseException | None) -> bool:
    """Tell whether Celery stores ``stored`` for ``error``: another where that cannot be pickled."""
    if error is None or stored is error:
        return stored is error
    instead = get_pickleable_exception(error)
    return type(stored) is type(instead) and stored.args == instead.args


class AttemptBackend:
    """The result backend, as Celery sees it while it stores what became of an attempt.

    Where storing a result fails, Celery stores that failure as the task's. The attempt has ended,
    with an outcome of its own: it stays open, and is given again when its lease is over.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: Any = None,
        request: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Store a result; that a task has started when it has claimed.

        Celery stores it before: a copy's would be stored over how the task has ended, for good.
        """
        store = partial(
            self._backend.store_result, task_id, result, state, traceback, request, **kwargs
        )
        if state != states.STARTED or request is None or is_answered(request):
            return store()
        setattr(request, _START, store)
        return result

    def mark_as_failure(
        self, task_id: str, exc: BaseException, *args: Any, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store a failure if it is the task's own, or says that its outcome cannot be written.

        :raises Ignore: for any other, and for that of a copy which has not claimed.
        """
        attempt = attempt_of(request)
        if request is not None and not may_fail(request):
            raise Ignore("the request is another delivery's")
        if (
            attempt is not None
            and attempt.called
            and not attempt.in_place
            and not _stands_for(exc, attempt.error)
            and not isinstance(exc, EncodeError)
        ):
            logger.event("outcome.unstored", task_id=task_id, exc_info=exc)
            raise Ignore("the outcome is given again")
        self._wait_for_body(attempt, request)
        return self._backend.mark_as_failure(task_id, exc, *args, request=request, **kwargs)

    def mark_as_done(
        self, task_id: str, result: Any, request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Store what a task has returned; a replay waits for its chord, see :mod:`.chords`."""
        self._wait_for_body(attempt_of(request), request)
        return self._backend.mark_as_done(task_id, result, request, *args, **kwargs)

    def _wait_for_body(self, attempt: settlement.Attempt | None, request: Any) -> None:
        if attempt is not None and attempt.replay is not None:
            wait_for_body(self._backend, request)

    def mark_as_retry(
        self, task_id: str, exc: BaseException, *args: Any, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store that a task is retried, and again that it was cancelled where it was meanwhile.

        Nothing of a copy's: the result is another delivery's.
        """
        if request is not None and is_refused(request):
            return None
        stored = self._backend.mark_as_retry(task_id, exc, *args, request=request, **kwargs)
        attempt, budget = attempt_of(request), find_installed(self._backend.app)
        if attempt is not None and budget is not None and not attempt.in_place:
            try:
                if undisturbed(attempt.cancelled_since, task_id):
                    _tell_result(budget, task_id)
            except StoreError:
                if not attempt.cut_short:
                    raise
                logger.event("result.cancel_unknown", task_id=task_id)
        return stored
