"""Balances whose rows are gone, of budgets that are spread: made anew from what is left."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import reconcile
from celery_budget.core.reservations import Reserved
from celery_budget.store import repairs
from celery_budget.store.balances import Key
from celery_budget.store.schema import balances, budgets
from tests.contract.racers import Beside, wait_for_waiting
from tests.contract.support import Ledger
from tests.contract.test_stripes import STRIPES, admit_all, at, on_postgresql, striped

__all__ = ["striped"]

pytestmark = pytest.mark.postgres


def lose(ledger: Ledger, **which: Any) -> None:
    """Delete rows of ``b``, as nobody does."""
    mine = (balances.c.root == ledger.root, balances.c.budget == "b")
    with ledger.store.transaction() as connection:
        connection.execute(
            balances.delete().where(*mine, *(balances.c[n] == v for n, v in which.items()))
        )


@on_postgresql
@pytest.mark.parametrize("which", [{"stripe": 0}, {"stripe": 2}, {}], ids=str)
def test_whichever_rows_are_gone_they_are_rebuilt(striped: Ledger, which: dict[str, int]) -> None:
    for stripe in [*range(STRIPES)] * 2:
        striped.admit(at(stripe, striped, 5))
    lose(striped, **which)
    assert reconcile.repair(striped.store, striped.settings)
    assert reconcile.reconcile(striped.store, striped.settings).mismatches == ()
    assert striped.balance() == (40, 0)
    for stripe in range(STRIPES):
        assert isinstance(striped.admit(at(stripe, striped, 5)), Reserved)
    assert admit_all(striped, 5) == 8


@on_postgresql
def test_a_row_that_is_no_more_drawn_on_is_rebuilt(striped: Ledger) -> None:
    for stripe in range(STRIPES):
        striped.admit(at(stripe, striped, 5))
    striped.set("b", 100, stripes=1)
    lose(striped, stripe=3)
    assert reconcile.repair(striped.store, striped.settings)
    assert reconcile.reconcile(striped.store, striped.settings).mismatches == ()
    assert admit_all(striped, 5) == 16


@on_postgresql
def test_a_row_in_which_nothing_was_counted_is_made_by_who_misses_it(striped: Ledger) -> None:
    first = at(1, striped, 5)
    striped.admit(first)
    lose(striped, stripe=2)
    assert isinstance(striped.admit(at(2, striped, 5)), Reserved)
    assert admit_all(striped, 5) == 18
    assert len(striped.rows("balances", budget="b")) == STRIPES


@on_postgresql
def test_a_rebuilding_waits_for_who_changes_the_budget_and_that_one_not_for_it(
    striped: Ledger,
) -> None:
    """The budget's row comes before its balances, also where it is looked at for a lost one."""
    for stripe in range(STRIPES):
        striped.admit(at(stripe, striped, 5))
    lose(striped, stripe=3)
    mine = (budgets.c.root == striped.root, budgets.c.name == "b")
    with striped.store.transaction() as connection:
        connection.execute(sa.select(budgets).where(*mine).with_for_update())
        key = Key("b", striped.windows()[0][0], 3)
        rebuilt = Beside(
            lambda: striped.store.run(repairs.rebuild, striped.root, key, "a row was lost")
        )
        wait_for_waiting(striped.store)
        free = connection.execute(
            sa.select(balances.c.stripe)
            .where(balances.c.root == striped.root, balances.c.budget == "b")
            .with_for_update(skip_locked=True)
        )
        assert len(free.all()) == STRIPES - 1
    assert rebuilt.result()
    assert striped.balance() == (20, 0)
