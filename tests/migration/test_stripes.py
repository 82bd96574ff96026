"""Back to the release before stripes: what several rows have counted is in one, and adds up."""

from __future__ import annotations

import pytest

from celery_budget import reconcile
from celery_budget.settings import Settings
from celery_budget.store import Store, migrate
from tests.contract.support import RETURNED, Ledger
from tests.migration.test_open_work import RELEASE, to


@pytest.mark.postgres
@pytest.mark.parametrize("empty", ["postgresql"], indirect=True)
def test_several_rows_become_one_again(empty: Store) -> None:
    empty.run(migrate.upgrade)
    ledger = Ledger(empty, Settings("unused"))
    ledger.set("b", 100, stripes=4)
    started = [ledger.start(5)[1] for _ in range(8)]
    started[0].record(3)
    started[0].end(RETURNED)
    assert len({row.stripe for row in ledger.rows("lines")}) > 1
    empty.run(to, RELEASE)
    empty._engine.dispose()
    empty.run(to, "head")
    empty._engine.dispose()
    assert [(row.stripe, row.reserved, row.spent) for row in ledger.rows("balances")] == [
        (0, 35, 3)
    ]
    assert reconcile.reconcile(empty, ledger.settings).mismatches == ()
    assert len(ledger.rows("budgets")) == 1
    started[1].record(5)
    started[1].end(RETURNED)
    assert ledger.balance() == (30, 8)
