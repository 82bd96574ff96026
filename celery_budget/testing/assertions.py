"""What became of a test's ledger, asserted in a line each.

Each takes the name of a budget and tells, where it fails, what there is instead. They look at the
whole ledger, which a test begins with empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from celery_budget.store import whole
from celery_budget.testing.ledgers import in_use

if TYPE_CHECKING:
    from celery_budget import CeleryBudget

__all__ = [
    "Parked",
    "Refusal",
    "Request",
    "assert_held",
    "assert_parked",
    "assert_refused",
    "assert_reserved",
    "assert_settled",
]

#: In which a request's reservation has not ended.
_LIVE = ("planned", "reserved", "published", "running", "waiting")


@dataclass(frozen=True)
class Request:
    """A request that was admitted, as one of the budgets has it that it draws on.

    :ivar task: the task's name.
    :ivar task_id: its id.
    :ivar request_id: the one given, or the task's id.
    :ivar budget: the budget.
    :ivar unit: what that counts.
    :ivar estimate: what was reserved for its last attempt, when that was admitted.
    :ivar held: what is held for it now.
    :ivar settled: what it was charged in the end.
    :ivar state: ``reserved``, ``running``, ``settled``, ``released`` and so on.
    :ivar outcome: how its last attempt ended, ``returned`` or ``raised`` for one; none where none
        has.
    """

    task: str
    task_id: str
    request_id: str
    budget: str
    unit: str
    estimate: int
    held: int
    settled: int
    state: str
    outcome: str | None

    def __str__(self) -> str:
        said = self.state if self.outcome is None else f"{self.state}, {self.outcome}"
        return (
            f"{self.task} on {self.budget!r}: reserved {self.estimate}, holds {self.held}, "
            f"settled {self.settled} {self.unit} ({said})"
        )


@dataclass(frozen=True)
class Refusal:
    """Refusals of one task's requests by a budget.

    :ivar budget: the budget that was short.
    :ivar task: the task's name.
    :ivar reason: why: ``exhausted``, ``held``, ``blocked`` and so on.
    :ivar requested: what the last one asked for.
    :ivar times: how many there were.
    """

    budget: str
    task: str
    reason: str
    requested: int
    times: int

    def __str__(self) -> str:
        return (
            f"{self.task} on {self.budget!r}: {self.times} refused ({self.reason}), the last one "
            f"asked for {self.requested}"
        )


@dataclass(frozen=True)
class Parked:
    """A request that waits for budget, and holds nothing.

    :ivar task: the task's name.
    :ivar task_id: its id.
    :ivar request_id: the one given, or the task's id.
    :ivar budget: the budget that is short.
    :ivar reason: why.
    :ivar needs: how much it needs of that.
    """

    task: str
    task_id: str
    request_id: str
    budget: str
    reason: str
    needs: int

    def __str__(self) -> str:
        return f"{self.task} waits for {self.needs} of {self.budget!r} ({self.reason})"


Seen = TypeVar("Seen", Request, Refusal, Parked)


def assert_reserved(
    budget: str | None = None,
    amount: int | None = None,
    *,
    task: Any = None,
    count: int | None = None,
    ledger: CeleryBudget | None = None,
) -> list[Request]:
    """Assert that requests were admitted, whatever became of them since; return them.

    :param budget: that draw on it, those on its children included; on any unless given.
    :param amount: what was reserved for them in all, when they were admitted.
    :param task: only those of this task, or task's name.
    :param count: how many; at least one unless given. 0 asserts that there were none.
    :raises AssertionError: where it is not so.
    """
    __tracebackhide__ = True
    found = _requests(ledger)
    which = _which(found, budget, task)
    estimates = None if amount is None else sum(one.estimate for one in which)
    _check("reserved", budget, task, which, found, count, amount, estimates)
    return which


def assert_held(
    budget: str, amount: int, *, task: Any = None, ledger: CeleryBudget | None = None
) -> list[Request]:
    """Assert how much of a budget is held now, by requests that have not ended; return them.

    :param task: only by those of this task.
    :raises AssertionError: where it is not so.
    """
    __tracebackhide__ = True
    found = _requests(ledger)
    which = [one for one in _which(found, budget, task) if one.state in _LIVE]
    held = sum(one.held for one in which)
    _check("that hold", budget, task, which, found, len(which), amount, held)
    return which


def assert_settled(
    budget: str | None = None,
    amount: int | None = None,
    *,
    task: Any = None,
    count: int | None = None,
    outcome: str | None = None,
    ledger: CeleryBudget | None = None,
) -> list[Request]:
    """Assert that requests have run and were settled; return them.

    :param budget: on which; on any unless given.
    :param amount: what they were charged in all.
    :param task: only those of this task.
    :param count: how many; at least one unless given.
    :param outcome: only those that ended so: ``returned``, ``raised`` and so on.
    :raises AssertionError: where it is not so.
    """
    __tracebackhide__ = True
    found = _requests(ledger)
    which = [
        one
        for one in _which(found, budget, task)
        if one.state in ("settled", "lost") and outcome in (None, one.outcome)
    ]
    charged = None if amount is None else sum(one.settled for one in which)
    what = "settled" if outcome is None else f"settled as {outcome}"
    _check(what, budget, task, which, found, count, amount, charged)
    return which


def assert_refused(
    budget: str | None = None,
    *,
    task: Any = None,
    count: int | None = None,
    reason: str | None = None,
    ledger: CeleryBudget | None = None,
) -> list[Refusal]:
    """Assert that requests were refused, whoever has caught the ``BudgetExceeded``; return why.

    :param budget: which was short, the one that the error names; any unless given.
    :param task: only those of this task.
    :param count: how many refusals; at least one unless given. 0 asserts that there were none.
    :param reason: only those for this reason.
    :raises AssertionError: where it is not so.
    """
    __tracebackhide__ = True
    in_ledger = in_use(ledger)
    rows = in_ledger.store.read(whole.refused_requests, in_ledger.settings.root)
    found = [
        Refusal(row.budget, row.task_name, row.reason, int(row.requested), int(row.times))
        for row in rows
    ]
    which = [one for one in _which(found, budget, task) if reason in (None, one.reason)]
    what = "refused" if reason is None else f"refused as {reason}"
    _check(what, budget, task, which, found, count, times=sum(one.times for one in which))
    return which


def assert_parked(
    budget: str | None = None,
    *,
    task: Any = None,
    count: int | None = None,
    ledger: CeleryBudget | None = None,
) -> list[Parked]:
    """Assert that requests wait for budget; return them.

    :param budget: which is short; any unless given.
    :param task: only those of this task.
    :param count: how many; at least one unless given. 0 asserts that none does.
    :raises AssertionError: where it is not so.
    """
    __tracebackhide__ = True
    in_ledger = in_use(ledger)
    rows = in_ledger.store.read(whole.parked_requests, in_ledger.settings.root)
    found = [
        Parked(row.task_name, row.task_id, row.request_id, row.budget, row.reason, int(row.amount))
        for row in rows
    ]
    which = _which(found, budget, task)
    _check("parked", budget, task, which, found, count)
    return which


def _requests(ledger: CeleryBudget | None) -> list[Request]:
    in_ledger = in_use(ledger)
    rows = in_ledger.store.read(whole.requests_by_line, in_ledger.settings.root)
    return [
        Request(
            row.task_name,
            row.task_id,
            row.request_id,
            row.budget,
            row.unit,
            int(row.estimate),
            int(row.reserved),
            int(row.settled),
            row.state,
            row.outcome,
        )
        for row in rows
    ]


def _which(found: Iterable[Seen], budget: str | None, task: Any) -> list[Seen]:
    name = getattr(task, "name", task)
    return [one for one in found if budget in (None, one.budget) and name in (None, one.task)]


def _check(
    what: str,
    budget: str | None,
    task: Any,
    which: Sequence[object],
    found: Sequence[object],
    count: int | None,
    amount: int | None = None,
    really: int | None = None,
    times: int | None = None,
) -> None:
    """Compare numbers.

    :param which: what is meant.
    :param found: all there is, for the message.
    :raises AssertionError: where one is another.
    """
    __tracebackhide__ = True
    if amount is not None and budget is None:
        raise TypeError("an amount is one of a budget's unit; name the budget as well")
    there = len(which) if times is None else times
    amount_fits = amount is None or amount == really
    if amount_fits and (there == count if count is not None else there > 0 or amount == 0):
        return
    meant = what
    meant += "" if budget is None else f" on {budget!r}"
    meant += "" if task is None else f" by {getattr(task, 'name', task)}"
    wanted, said = "at least one" if count is None else str(count), str(there)
    if amount is not None:
        wanted, said = f"{wanted} with {amount} in all", f"{said} with {really} in all"
    listed = "".join(f"\n  {one}" for one in found) or "\n  nothing"
    raise AssertionError(
        f"requests {meant}: expected {wanted}, found {said}; in the ledger there is:{listed}"
    )
