"""What publications ask of which budgets: those of one call, and of a chain's steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery
from celery.canvas import Signature
from celery.exceptions import QueueNotFound

from celery_budget.core.amounts import check_amount
from celery_budget.core.deadlines import Deadline, earliest
from celery_budget.core.identity import new_id
from celery_budget.core.policies import BudgetLine, BudgetPolicy
from celery_budget.core.reservations import Line, ReserveRequest
from celery_budget.core.terms import Terms
from celery_budget.errors import PolicyError
from celery_budget.integration.context import header
from celery_budget.integration.inline import gated_task

__all__ = ["CANVAS", "PLANNED", "Terms", "lines_of_call", "plan", "terms_of"]

#: The option of a task of a canvas with a request id: the canvas' id, and what it is made of.
CANVAS = "budget_canvas"

#: The option of a chain's later step that names the reservation it was planned with.
PLANNED = "budget_planned"

#: Chooses the lane of a step that may go by several.
LaneOf = Callable[[ReserveRequest, tuple[str, ...]], tuple[ReserveRequest, Mapping[str, Any]]]


def terms_of(
    app: Celery,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    unknown: type | None = None,
) -> Terms | None:
    """Return what a call of the task ``name`` asks for; none where it has no budget.

    :param unknown: the type of what stands for arguments that are not known yet.
    :raises PolicyError, EstimateError, InvalidAmount, InvalidName: where it cannot be worked out.
    """
    task = gated_task(app, name)
    return None if task is None else task.budget_terms(tuple(args), kwargs, unknown)


def lines_of_call(
    app: Celery,
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    lines: Mapping[str, int] | Sequence[BudgetLine] | None = None,
) -> tuple[tuple[Line, ...], tuple[str, ...], str | None, bool | None]:
    """Return what a call draws on, or what explicit lines do; nothing for a task without a budget.

    With it the lanes that the call is tried in, the queue that it goes to without those, and
    whether it is enforced; none of both for explicit lines.

    :raises PolicyError: for what is neither a task nor lines, and for a canvas.
    """
    if (task is None) == (lines is None):
        raise PolicyError("give a task (or its name, or its signature) or lines=, one of the two")
    if lines is not None:
        given = (
            [
                BudgetLine(budget, check_amount(amount, f"lines= for {budget!r}"))
                for budget, amount in lines.items()
            ]
            if isinstance(lines, Mapping)
            else list(lines)
        )
        policy = BudgetPolicy(given)
        return policy.evaluate("a look", inspect.Signature(), (), {}).lines, (), None, None
    options: Mapping[str, Any] = {}
    if isinstance(task, Signature):
        if task.get("subtask_type") not in (None, "xmap", "xstarmap"):
            raise PolicyError(
                f"{task!r} is no single task; look at its tasks one by one, or publish it: a "
                "canvas is admitted whole or not at all"
            )
        args, kwargs, options = task._merge(tuple(args), dict(kwargs))
        task = task.task
    name = getattr(task, "name", task)
    if not isinstance(name, str):
        raise PolicyError(f"{task!r} is no task; give a task, its name or its signature")
    terms = terms_of(app, name, tuple(args), kwargs)
    if terms is None:
        return (), (), None, None
    if terms.fallback:
        return terms.evaluation.lines, terms.fallback, None, terms.enforced
    queue = _queue_of(app, name, tuple(args), kwargs, options)
    return terms.evaluation.lines, (), queue, terms.enforced


def _queue_of(
    app: Celery,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> str:
    """Return the queue that a call's message goes to, by its routing key, as the outbox names it.

    :raises PolicyError: where Celery cannot route it.
    """
    task = app.tasks.get(name)
    own = {} if task is None else task._get_exec_options()
    given = {key: value for key, value in {**own, **options}.items() if value is not None}
    try:
        route = app.amqp.router.route(given, name, args, kwargs)
    except QueueNotFound as error:
        raise PolicyError(
            f"a call of {name} goes nowhere: {error}; add it there, or name another queue"
        ) from error
    queue = route.get("queue") or app.amqp.default_queue
    exchange, key = route.get("exchange"), route.get("routing_key")
    kind = route.get("exchange_type") or getattr(queue.exchange, "type", "direct")
    # As Celery does: a direct exchange is left out where not both of them are given.
    if kind == "direct" and not (exchange and key):
        return str(queue.name)
    if exchange is None:
        key = key or queue.routing_key or app.conf.task_default_routing_key
    return str(key or queue.name)


class _Unknown:
    """Stands for what the step before returns, which nobody knows when the chain is reserved."""

    def __repr__(self) -> str:
        return "<what the step before returns>"


def plan(
    app: Celery,
    head: ReserveRequest,
    embed: dict[str, Any],
    lane: LaneOf,
    allow: Callable[[ReserveRequest, Terms], object],
) -> tuple[list[ReserveRequest], dict[str, Any]]:
    """Return the later steps of a chain as requests, and ``embed`` with steps that name theirs.

    :param head: the request of the chain's first step.
    :param embed: what its message carries; the steps that follow, the last one first.
    :param lane: returns a step's request as it is in the lane that is chosen for it, with options
        by which its publication finds that.
    :param allow: raises where a step may not draw on its budgets.
    :raises PolicyError: where a step has no budget, is no single task, or asks for what depends on
        what the step before returns.
    """
    requests: list[ReserveRequest] = []
    steps = list(reversed(embed.get("chain") or []))
    for number, step in enumerate(steps, 1):
        asked, terms = _step(app, head, step, number)
        request, chosen = lane(asked, terms.fallback)
        allow(request, terms)
        requests.append(request)
        planned = header(head.root, request.reservation_id)
        options = {**step["options"], **chosen, PLANNED: planned}
        # A dictionary is all that a worker needs of a signature.
        steps[number - 1] = {**step, "options": options}
    return requests, {**embed, "chain": list(reversed(steps)) or None}


def _step(
    app: Celery, head: ReserveRequest, step: Any, number: int
) -> tuple[ReserveRequest, Terms]:
    """Return a step's request, and its terms."""
    name, options = step["task"], step["options"]
    if step.get("subtask_type") not in (None, "xmap", "xstarmap"):
        raise PolicyError(
            f"step {number + 1} of the chain is a {step['subtask_type']}; a chain that is reserved "
            "whole has single tasks only: leave reserve='chain' out to admit it step by step"
        )
    args = tuple(step["args"]) if step.get("immutable") else (_Unknown(), *step["args"])
    terms = terms_of(app, name, args, step["kwargs"], unknown=_Unknown)
    if terms is None:
        raise PolicyError(
            f"step {number + 1} of the chain, {name}, has no budget, and what follows it could not "
            "be given back where it fails: leave reserve='chain' out to admit it step by step"
        )
    own = Deadline.given(options.get("deadline"), name) or terms.deadline or Deadline()
    # All steps are admitted at once: by one clock, and none of them beyond the first.
    deadline = Deadline(
        earliest(own.within_us, head.within_us), earliest(own.at_us, head.deadline_us)
    )
    request = ReserveRequest(
        reservation_id=new_id(),
        root=head.root,
        owner=terms.evaluation.budget,
        request_id=options["task_id"],
        task_id=options["task_id"],
        task_name=name,
        stage=terms.stage,
        fingerprint=terms.fingerprint.digest,
        estimator=terms.estimator,
        estimator_version=terms.version,
        lines=terms.evaluation.lines,
        prices=terms.evaluation.prices,
        tenant=terms.evaluation.tenant,
        shadows=terms.shadows(),
        opaque=terms.fingerprint.opaque,
        finishing=head.finishing,
        deadline_us=deadline.at_us,
        within_us=deadline.within_us,
        plan=head.reservation_id,
        step=number,
        enforced=terms.enforced,
    )
    return request, terms
