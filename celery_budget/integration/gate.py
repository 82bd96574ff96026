"""The gate: every publication passes it, and a budgeted one is admitted instead of sent.

It stands in for ``app.amqp.send_task_message``, the one function through which Celery publishes
task messages of any origin. A signal would not do: Celery logs what a receiver raises and goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import celery.app.amqp
from celery._state import get_current_worker_task

from celery_budget import admission
from celery_budget.core.budgets import check_text
from celery_budget.core.identity import fingerprint, new_id, task_id_of
from celery_budget.core.messages import WireMessage
from celery_budget.core.policies import BudgetPolicy
from celery_budget.core.reservations import (
    Admitted,
    AlreadyReserved,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
)
from celery_budget.errors import (
    BudgetError,
    InvalidName,
    PolicyError,
    StoreError,
    UnsupportedPublication,
)
from celery_budget.integration.capture import Record, RecordingProducer, fix_link_ids, written
from celery_budget.integration.context import HEADER, current_attempt, delivered_now, header
from celery_budget.integration.results import BackendResults
from celery_budget.integration.task import policy_of, signature_of
from celery_budget.settlement import Attempt

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["Gate", "with_request_id"]

logger = logging.getLogger(__name__)

#: Celery's own tasks that run another task's body inside their message.
INLINE_TASKS = ("celery.map", "celery.starmap", "celery.chunks")


class Gate:
    """``send_task_message`` of an application with budgets.

    :param send: Celery's own.
    """

    def __init__(self, budget: CeleryBudget, send: Callable[..., Any]) -> None:
        self._budget = budget
        self._send = send

    def __call__(self, producer: Any, name: str, message: Any, **options: Any) -> Any:
        app = self._budget.app
        attempt = current_attempt(app)
        origin = _origin(message, attempt)
        try:
            _check_inline(app, name, message)
            policy = policy_of(app, name)
            if policy is None:
                # Of a canvas it reaches every task; Celery would make a message property of it.
                options.pop("finishing", None)
                if attempt is not None and origin == "continuation":
                    return self._follow_unbudgeted(attempt, producer, name, message, options)
                return self._send(producer, name, message, **options)
            publication = self._publication(policy, name, message, attempt, origin, options)
            return self._admit(publication, producer, name, message, options)
        except StoreError:
            raise
        except BudgetError as error:
            if origin != "continuation":
                raise
            # Raising would turn the task that has just finished into a failure; it is the one
            # that cannot follow which failed.
            BackendResults(app).failed(_task_id(message), error)
            return None

    def _publication(
        self,
        policy: BudgetPolicy,
        name: str,
        message: Any,
        attempt: Attempt | None,
        origin: str,
        options: dict[str, Any],
    ) -> _Publication:
        """Work out the request: whose budget, how much, and what it is to the running task.

        Takes what is meant for it out of ``options``, which become the message's properties.
        """
        request_id, finishing = options.pop("request_id", None), options.pop("finishing", False)
        if type(finishing) is not bool:
            raise PolicyError(f"finishing= of {name} is {finishing!r}; give True or False")
        if not isinstance(message.body, tuple):
            raise UnsupportedPublication(
                f"task {name} has a budget and cannot be sent with task_protocol 1; use 2"
            )
        app, settings = self._budget.app, self._budget.settings
        task = app.tasks[name]
        args, kwargs, _ = message.body
        headers = message.headers
        evaluation = policy.evaluate(name, signature_of(task), tuple(args), kwargs)
        print_ = fingerprint(name, evaluation.arguments)
        task_id = _task_id(message)
        _checked_id("a task id", task_id)
        if request_id is None:
            request_id = task_id
        else:
            request_id = _checked_id("request_id", request_id)
            _check_stands_for(request_id, evaluation.budget, task_id)
        request = ReserveRequest(
            reservation_id=new_id(),
            root=settings.root,
            owner=evaluation.budget,
            request_id=request_id,
            task_id=task_id,
            task_name=name,
            stage=policy.stage or name,
            fingerprint=print_.digest,
            estimator=policy.estimator,
            estimator_version=policy.version,
            lines=evaluation.lines,
            opaque=print_.opaque,
            nesting=int(headers.get("replaced_task_nesting") or 0),
            parent=attempt.reservation_id if attempt and origin == "continuation" else None,
            retries=int(headers.get("retries") or 0),
            finishing=finishing or origin != "new",
        )
        delivered = delivered_now()
        if delivered is not None and delivered.task_id == task_id:
            origin = "delivered"
            request = replace(request, unreserved=True)
        elif origin == "retry" and attempt is not None:
            request = replace(request, reservation_id=attempt.reservation_id)
        return _Publication(request, origin, attempt)

    def _admit(
        self,
        publication: _Publication,
        producer: Any,
        name: str,
        message: Any,
        options: dict[str, Any],
    ) -> Any:
        """Have Celery's sender make the message, and admit it at the moment it would go out.

        What the sender does afterwards (``after_task_publish``) happens for admitted requests
        only; the ``task-sent`` event it may publish goes through the outbox as well.
        """
        request = publication.request
        args, kwargs, embed = message.body
        message = message._replace(body=(args, kwargs, fix_link_ids(embed, request.reservation_id)))
        options["headers"] = {
            **(options.get("headers") or {}),
            HEADER: header(request.root, request.reservation_id),
        }
        queue = _queue_name(options)
        admitted: list[Admitted | None] = []

        def sink(record: Record) -> None:
            wire = written(self._budget.app, record, queue)
            if not admitted:
                admitted.append(self._decide(publication, wire))
            elif isinstance(admitted[0], Reserved):
                self._enqueue_event(wire)

        return self._send(RecordingProducer(producer, sink), name, message, **options)

    def _decide(self, publication: _Publication, wire: WireMessage) -> Admitted | None:
        store, settings = self._budget.store, self._budget.settings
        request = publication.request
        if publication.origin == "retry" and publication.attempt is not None:
            attempt = publication.attempt
            return admission.retry(
                store, settings, request, wire, attempt.number, attempt.claim_id, attempt.stop
            )
        delivered = delivered_now() if publication.origin == "delivered" else None
        result = admission.admit(
            store,
            settings,
            request,
            wire,
            continuation=delivered.park if delivered else publication.origin == "continuation",
            delivered=delivered is not None,
        )
        if delivered is not None:
            delivered.admitted = result
        elif isinstance(result, Refused):
            raise result.error()
        elif isinstance(result, AlreadyReserved):
            logger.info("task %s[%s] was admitted before", request.task_name, request.task_id)
        elif isinstance(result, Parked):
            logger.info("task %s[%s] waits for budget", request.task_name, request.task_id)
        return result

    def _enqueue_event(self, wire: WireMessage) -> None:
        """Have an event published by the relay; the request it tells of is admitted already."""
        try:
            admission.enqueue(self._budget.store, self._budget.settings, wire)
        except StoreError:
            logger.warning("the task-sent event could not be stored", exc_info=True)

    def _follow_unbudgeted(
        self,
        attempt: Attempt,
        producer: Any,
        name: str,
        message: Any,
        options: dict[str, Any],
    ) -> Any:
        """Send what follows a budgeted attempt through the outbox, where a replay finds it."""
        queue = _queue_name(options)
        first = True

        def sink(record: Record) -> None:
            nonlocal first
            wire = written(self._budget.app, record, queue)
            parent = attempt.reservation_id if first else None
            first = False
            admission.enqueue(self._budget.store, self._budget.settings, wire, parent, attempt.stop)

        return self._send(RecordingProducer(producer, sink), name, message, **options)


@dataclass(frozen=True)
class _Publication:
    """A budgeted message and what it is to the task that publishes it.

    :ivar origin: ``new``; ``retry`` of the running attempt; ``continuation`` of work that was
        admitted (a chain's next step, a callback, a chord's body, a replacement), which is parked
        where it does not fit; ``delivered`` to a worker without a reservation.
    """

    request: ReserveRequest
    origin: str
    attempt: Attempt | None


def _origin(message: Any, attempt: Attempt | None) -> str:
    task = get_current_worker_task()
    if attempt is not None and task is not None:
        if attempt.called:
            return "continuation"
        headers = message.headers
        # Of a chain that takes the task's place only the last step gets the task's id.
        nesting = int(headers.get("replaced_task_nesting") or 0)
        if nesting > int(task.request.replaced_task_nesting or 0):
            attempt.replaced = True
            return "continuation"
        retries = int(headers.get("retries") or 0)
        if _task_id(message) == task.request.id and retries > int(task.request.retries or 0):
            return "retry"
    # Set while Celery publishes what follows a task that has finished, budgeted or not.
    follows = getattr(celery.app.amqp, "_callback_publish_retry", None)
    return "continuation" if follows is not None and follows.get() else "new"


def _task_id(message: Any) -> str:
    """Return the id of the task a message starts; protocol 1 has it in the body."""
    return str(message.headers["id"] if message.headers else message.body["id"])


def _check_inline(app: Any, name: str, message: Any) -> None:
    """Refuse what would run a budgeted task's body without a reservation.

    :raises UnsupportedPublication: for map, starmap and chunks of a budgeted task.
    """
    if name not in INLINE_TASKS or not isinstance(message.body, tuple):
        return
    args, kwargs, _ = message.body
    inner = kwargs.get("task", args[0] if args else None)
    inner_name = inner.get("task") if isinstance(inner, dict) else getattr(inner, "name", None)
    if inner_name and policy_of(app, inner_name) is not None:
        raise UnsupportedPublication(
            f"{name.removeprefix('celery.')} of {inner_name} would run it without a reservation; "
            f"use a group of {inner_name} signatures"
        )


def _queue_name(options: dict[str, Any]) -> str:
    queue = options.get("queue")
    return str(getattr(queue, "name", queue) or options.get("routing_key") or "")


def _checked_id(what: str, value: object) -> str:
    """Return an id if the ledger can hold it: text without control characters."""
    try:
        return check_text(value, what)
    except InvalidName as exc:
        raise PolicyError(str(exc)) from exc


def _check_stands_for(request_id: str, owner: str, task_id: str) -> None:
    expected = task_id_of(owner, request_id)
    if task_id != expected:
        raise PolicyError(
            f"request id {request_id!r} stands for task {expected}, and the task's id is "
            f"{task_id!r}; give one of the two, and none to the steps of a canvas, whose ids "
            "Celery makes"
        )


def with_request_id(budget: CeleryBudget, send_task: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``app.send_task`` so that ``request_id=`` fixes the task id.

    The id must be known before Celery makes its own, since the result it returns is built from
    that; everything else is Celery's. What is wrong with the request is for the gate to say: it
    knows whether the publication follows a task that must not fail for it.
    """

    def send(name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        request_id = options.get("request_id")
        if request_id is not None and options.get("task_id") is None:
            policy = policy_of(budget.app, name)
            if policy is not None:
                with suppress(BudgetError):
                    signature = signature_of(budget.app.tasks[name])
                    evaluation = policy.evaluate(name, signature, tuple(args or ()), kwargs or {})
                    options["task_id"] = task_id_of(
                        evaluation.budget, _checked_id("request_id", request_id)
                    )
        return send_task(name, args, kwargs, *rest, **options)

    return send
