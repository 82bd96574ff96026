"""What an explanation costs does not depend on how much has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine

from celery_budget import reconcile
from tests.contract.support import RETURNED, Ledger
from tests.contract.test_backlog import _nodes, ledger

__all__ = ["ledger"]

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

MANY = 30_000
GROWING = ("budget_reservations", "budget_lines", "budget_journal", "budget_attempts")

_RESERVATIONS = sa.text(
    "INSERT INTO budget_reservations SELECT (jsonb_populate_record(r, jsonb_build_object("
    " 'reservation_id', gen_random_uuid(), 'request_id', 'n' || n, 'task_id', 'n' || n))).*"
    " FROM budget_reservations r, generate_series(1, :many) AS n"
    " WHERE r.root = :root AND r.task_id = 'first'"
)
_OTHERS = (
    "INSERT INTO {0} SELECT (jsonb_populate_record(o, jsonb_build_object("
    " 'reservation_id', r.reservation_id{1}))).*"
    " FROM {0} o, budget_reservations r, budget_reservations f"
    " WHERE o.root = :root AND f.root = :root AND f.task_id = 'first'"
    " AND o.reservation_id = f.reservation_id AND r.root = :root AND r.task_id LIKE 'n%'"
)
_NUMBERED = ", 'entry', o.entry + 2 * substr(r.task_id, 2)::bigint"


def fill(ledger: Ledger) -> None:
    """Have many requests that are settled, and a few that are open."""
    _, attempt = ledger.start(1, task_id="first")
    attempt.record(1)
    assert attempt.end(RETURNED)
    assert attempt.close()
    root: dict[str, Any] = {"root": ledger.root}
    with ledger.store.transaction() as connection:
        connection.execute(_RESERVATIONS, {**root, "many": MANY})
        for table in ("lines", "attempts"):
            connection.execute(sa.text(_OTHERS.format(f"budget_{table}", "")), root)
        connection.execute(sa.text(_OTHERS.format("budget_journal", _NUMBERED)), root)
        connection.execute(
            sa.text("UPDATE budget_balances SET entries = entries + 2 * :many WHERE root = :root"),
            {**root, "many": MANY},
        )
    for _ in range(5):
        ledger.reserve(3)
    ledger.start(10)
    with ledger.store.statement() as connection:
        for table in GROWING:
            connection.exec_driver_sql(f"VACUUM (ANALYZE) {table}")


@contextmanager
def selects() -> Iterator[list[tuple[str, Any]]]:
    """The SELECTs that are executed meanwhile."""
    said: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if statement.split(None, 1)[0] in ("SELECT", "WITH"):
            said.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def rows_read(ledger: Ledger, work: Callable[[], object], tables: Collection[str] = GROWING) -> int:
    """How many rows of what grows the SELECTs of some work look at."""
    with selects() as said:
        work()
    dropped = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
    total = 0
    with ledger.store.transaction() as connection:
        for statement, parameters in said:
            [explained] = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            for node in _nodes(explained["Plan"]):
                if node.get("Relation Name") in tables:
                    rows = node["Actual Rows"] + sum(node.get(name, 0) for name in dropped)
                    total += round(rows * node["Actual Loops"])
    assert said
    return total


def test_what_has_ended_is_not_read_for_a_budget_or_a_request(ledger: Ledger) -> None:
    fill(ledger)

    def budget() -> None:
        found = reconcile.explain_budget(ledger.store, ledger.settings, "b", 20)
        assert (sum(found.holding.values()), sum(found.held.values())) == (6, 25)

    def request() -> None:
        [found] = reconcile.explain(ledger.store, ledger.settings, "first")
        assert [one["what"] for one in found.changes] == ["reserve", "settle"]

    # Six requests, each with its line, seen twice.
    assert rows_read(ledger, budget) < 50
    assert rows_read(ledger, request) < 30
