"""What one call asks of which budgets, and what reports know it by."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from celery_budget.core.amounts import MAX_AMOUNT, check_amount
from celery_budget.core.authority import Authorize
from celery_budget.core.deadlines import Deadline
from celery_budget.core.identity import Fingerprint, fingerprint
from celery_budget.core.parking import Parking
from celery_budget.core.policies import Evaluation, joined
from celery_budget.core.reservations import Line
from celery_budget.errors import PolicyError

__all__ = ["Terms", "summed"]


@dataclass(frozen=True)
class Terms:
    """A call's evaluation, and what reports know it by.

    :ivar fingerprint: of the task and its bound arguments.
    :ivar deadline: when it is to be over, unless the call says so.
    :ivar ask_shadows: asks the shadows of its estimator; what each would have promised, by name and
        version. Asked where the call is admitted, and not for each look at its terms.
    :ivar parking: what becomes of it where it does not fit.
    :ivar fallback: the lanes that it is tried in, in this order.
    :ivar enforced: whether it is refused, or waits, where it does not fit.
    :ivar authorize: the rule that is asked whether its caller may draw on its budgets.
    """

    stage: str
    estimator: str
    version: str
    evaluation: Evaluation
    fingerprint: Fingerprint
    deadline: Deadline | None = None
    ask_shadows: Callable[[], Mapping[str, int]] = field(default=dict, compare=False, repr=False)

    def shadows(self) -> str | None:
        """Return what its shadows would have promised, as JSON; none without any."""
        asked = self.ask_shadows()
        return json.dumps(asked, sort_keys=True) if asked else None

    parking: Parking = field(default_factory=Parking)
    fallback: tuple[str, ...] = ()
    enforced: bool = True
    authorize: Authorize | None = None

    def parking_of(self, call: Parking) -> Parking:
        """Return what becomes of a call that does not fit, by what the call says itself.

        :raises PolicyError: where that means nothing for such a task.
        """
        parking = self.parking.given_by(call)
        parking.check(self.fallback)
        return parking


def summed(task_name: str, calls: Sequence[Terms], arguments: Mapping[str, object]) -> Terms:
    """Return the terms of a call of ``task_name`` that makes all of ``calls``, at least one.

    They draw on all the budgets that any of them names, in the order in which those are named
    first; the owner is that of the first call. Stage, estimator, version, tenant, deadline,
    parking, lanes and whether it is enforced are those of the first call as well.

    :param arguments: what the fingerprint is of, beside the task's name; ``task`` is whose calls
        they are.
    :raises InvalidAmount: where a sum is too large.
    :raises PolicyError: where one of the calls draws on a budget twice, as it would by itself.
    """
    called = f"{task_name} over {arguments['task']}"
    amounts: dict[tuple[str, str], int] = {}
    for call in calls:
        names = [line.budget for line in call.evaluation.lines]
        for name in names:
            if names.count(name) > 1:
                raise PolicyError(
                    f"one item of {called} draws on budget {name!r} twice; name it once"
                )
        for line in call.evaluation.lines:
            key = line.budget, line.charge
            total = amounts.get(key, 0) + line.amount
            amounts[key] = check_amount(total, f"the summed estimate for {called}")
    lines = tuple(Line(budget, amount, charge) for (budget, charge), amount in amounts.items())
    return replace(
        calls[0],
        evaluation=Evaluation(
            lines,
            arguments,
            joined(call.evaluation.prices for call in calls),
            calls[0].evaluation.tenant,
        ),
        fingerprint=fingerprint(task_name, arguments),
        ask_shadows=lambda: _summed_shadows(calls),
    )


def _summed_shadows(calls: Sequence[Terms]) -> Mapping[str, int]:
    """Return the sums of what all calls would have been promised; without what one was not."""
    sums: Counter[str] = Counter()
    answers = [call.ask_shadows() for call in calls]
    for answer in answers:
        sums.update(answer)
    return {
        key: amount
        for key, amount in sums.items()
        if amount <= MAX_AMOUNT and all(key in answer for answer in answers)
    }
