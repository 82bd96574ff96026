"""Asks the application's rules before anything is written: ``authorize=`` and ``budget_authorize``.

A running task acts for the request that was admitted: what draws on the budgets of that alone, its
retries and what follows included, is not asked about again, unless somebody says who is calling.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery_budget.core.authority import Authorize, Draw, ask, current_caller
from celery_budget.core.reservations import Line
from celery_budget.integration.fallbacks import named
from celery_budget.store import Stop
from celery_budget.store.reservations import named_by

if TYPE_CHECKING:
    from celery_budget.core.terms import Terms
    from celery_budget.integration.context import Current
    from celery_budget.integration.install import CeleryBudget

__all__ = ["may_draw", "may_turn"]


def may_draw(
    budget: CeleryBudget,
    task_name: str,
    terms: Terms,
    lines: Sequence[Line],
    kind: str,
    running: uuid.UUID | None = None,
    stop: Stop | None = None,
) -> None:
    """Ask whether a call may draw on the budgets of ``lines``. Nothing is read without a rule.

    :param running: the reservation that it follows from, or by which runs what publishes it.
    :param stop: ends waiting for the ledger, which is read for that.
    :raises NotAuthorized: where it may not.
    :raises ConfigurationError: where what ``budget_authorize`` names is not there.
    """
    rules = _rules(budget, terms.authorize)
    if rules:
        budgets = {line.budget: line.amount for line in lines}
        arguments = terms.evaluation.arguments
        _ask(budget, rules, task_name, budgets, arguments, kind, running, stop)


def may_turn(budget: CeleryBudget, found: Current, lane: str, estimate: int | None) -> None:
    """Ask whether a running task may draw on the budgets of a lane as well.

    :raises NotAuthorized: where it may not.
    :raises UnknownLane: where there is none.
    """
    args, kwargs = tuple(found.request.args or ()), dict(found.request.kwargs or {})
    rules = _rules(budget, found.task.budget_authorize(args, kwargs))
    if not rules:
        return
    running, stop = found.attempt.reservation_id, found.attempt.stop
    [lane_found] = named(budget, [lane], True, stop)
    if estimate is None:
        before = _named_by(budget, running, stop)
        estimate = next(iter(before.values()), 0)
    budgets = {line.budget: line.amount for line in lane_found.lines(estimate)}
    arguments = found.task.budget_arguments(args, kwargs)
    _ask(budget, rules, found.task.name, budgets, arguments, "turn", running, stop)


def _rules(budget: CeleryBudget, own: Authorize | None) -> list[Authorize]:
    return [rule for rule in (budget.authorize, own) if rule is not None]


def _ask(
    budget: CeleryBudget,
    rules: Sequence[Authorize],
    task_name: str,
    budgets: Mapping[str, int],
    arguments: Mapping[str, Any],
    kind: str,
    running: uuid.UUID | None,
    stop: Stop | None,
) -> None:
    drawn = () if running is None else tuple(_named_by(budget, running, stop))
    caller = current_caller()
    if caller is None and budgets.keys() <= set(drawn):
        return
    ask(rules, Draw(task_name, budgets, caller, kind, drawn, arguments))


def _named_by(budget: CeleryBudget, running: uuid.UUID, stop: Stop | None) -> Mapping[str, int]:
    return budget.store.wait_out_reading(stop, named_by, budget.settings.root, running)
