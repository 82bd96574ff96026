"""What one budget costs does not depend on how many there are, nor on luck with statistics."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_budget import reconcile
from celery_budget.store import alerts, budgets, levels
from tests.contract.support import Ledger
from tests.contract.test_backlog import ledger
from tests.contract.test_explain_backlog import rows_read

__all__ = ["ledger"]

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

BUDGETS, HOLDS = 5000, 5000
TABLES = ("budget_budgets", "budget_balances")

_BUDGETS = """
    INSERT INTO budget_budgets SELECT (jsonb_populate_record(b, jsonb_build_object(
        'name', 'one:' || n))).*
      FROM budget_budgets b, generate_series(1, :many) AS n WHERE b.root = :root AND b.name = 'b'
"""
_BALANCES = """
    INSERT INTO budget_balances SELECT (jsonb_populate_record(b, jsonb_build_object(
        'budget', 'one:' || n))).*
      FROM budget_balances b, generate_series(1, :many) AS n
     WHERE b.root = :root AND b.budget = 'b'
"""
_HELD = """
    INSERT INTO budget_reservations SELECT (jsonb_populate_record(r, jsonb_build_object(
        'reservation_id', gen_random_uuid(), 'request_id', 'n' || n, 'task_id', 'n' || n))).*
      FROM budget_reservations r, generate_series(1, :many) AS n WHERE r.root = :root
"""
_LINES = """
    INSERT INTO budget_lines SELECT (jsonb_populate_record(l, jsonb_build_object(
        'reservation_id', r.reservation_id))).*
      FROM budget_lines l, budget_reservations r
     WHERE l.root = :root AND r.root = :root AND r.reservation_id <> l.reservation_id
"""


def run(ledger: Ledger, many: int, *statements: str) -> None:
    with ledger.store.transaction() as connection:
        for statement in statements:
            connection.execute(sa.text(statement), {"root": ledger.root, "many": many})


def analyze(ledger: Ledger) -> None:
    with ledger.store.statement() as connection:
        connection.exec_driver_sql(f"VACUUM ANALYZE {', '.join(TABLES)}")


def test_of_many_budgets_those_that_are_asked_for_are_read(ledger: Ledger) -> None:
    ledger.set("all", 10**9)
    ledger.set("b", 1_000_000, parent="all")
    ledger.reserve(1)
    run(ledger, BUDGETS, _BUDGETS, _BALANCES)
    analyze(ledger)

    def one() -> None:
        found = ledger.store.read(budgets.balance, ledger.root, "one:77")
        assert (found.budget, found.reserved) == ("one:77", 1)
        above = ledger.store.read(levels.levels_of, ledger.root, ["one:77", "one:78"])
        assert sorted(above) == ["all", "one:77", "one:78"]

    # Of each: itself, its balance, and how far its windows have come; seen twice, and all above.
    assert rows_read(ledger, one, TABLES) < 60

    def page() -> None:
        ledger.store.run(alerts.begin_look, ledger.root, alerts.BUDGET, 0)
        ledger.store.run(alerts.look_at_budgets, ledger.root, "", 100, (800_000,))

    assert rows_read(ledger, page, TABLES) < 1000


def test_many_holds_are_told_without_statistics(ledger: Ledger) -> None:
    """Each request's own lines are read once, however many the budget has."""
    ledger.reserve(1)
    with ledger.store.statement() as connection:
        for table in ("reservations", "lines"):
            connection.exec_driver_sql(f"ALTER TABLE budget_{table} SET (autovacuum_enabled = off)")
    run(ledger, HOLDS, _HELD, _LINES)
    held = HOLDS + 1

    def explain() -> None:
        found = reconcile.explain_budget(ledger.store, ledger.settings, "b", 20)
        assert found.holding == {"reserved": held}
        assert found.held == {"reserved": held}

    # Twice each, and the sums behind what is listed: once for the states, once for the largest.
    read = rows_read(ledger, explain, ("budget_lines",))
    assert read < 5 * held, read
