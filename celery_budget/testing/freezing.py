"""Budgets that refuse, or are pinned to a limit, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from celery_budget.core.budgets import Budget
from celery_budget.errors import UnknownBudget
from celery_budget.testing.ledgers import in_use

if TYPE_CHECKING:
    from celery_budget import CeleryBudget

__all__ = ["freeze_budget"]


@contextmanager
def freeze_budget(
    *names: str, limit: int | None = 0, ledger: CeleryBudget | None = None
) -> Iterator[None]:
    """Pin budgets to a limit in a block; by default to 0, so that they refuse everything.

    A refusal is a real one, from the ledger: the application sees the ``BudgetExceeded`` that it
    would see, and so does what comes between it and the caller. What is reserved and spent stays,
    as do grants: a limit of 0 blocks in spite of them, any other is raised by them. Work that
    runs goes on and is settled. Afterwards each has the limit that it had, or would have been made
    with.

    :param names: of budgets or templates; by default all there are. Of a template only budgets are
        pinned that it makes meanwhile.
    :param limit: in the budget's unit; none for unlimited.
    :param ledger: the one in use unless given.
    :raises UnknownBudget: where there is none of this name, or it is closed.
    """
    budget = in_use(ledger)
    declared = _declared(budget)
    missing = next((name for name in names if name not in declared), None)
    if missing is not None:
        raise UnknownBudget(missing)
    frozen = [declared[name] for name in names or declared]
    try:
        for one in frozen:
            budget.set(one.name, limit=limit)
        yield
    finally:
        for one in frozen:
            budget.set(one.name, limit=one.limit)
        made = [one.name for one in _declared(budget).values() if one.name not in declared]
        for name in made:
            for as_template in filter(None, (one.made_for(name) for one in frozen)):
                budget.set(name, limit=as_template.limit)


def _declared(budget: CeleryBudget) -> dict[str, Budget]:
    """Return what there is of budgets and templates, but for what is closed, by name."""
    found = budget.declared(everything=True).values()
    return {one.name: one for of_a_root in found for one in of_a_root}
