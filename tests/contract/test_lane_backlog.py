"""What a lane costs does not depend on how much waits in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine

from celery_budget.core.reservations import Reserved
from celery_budget.store import dispatching
from tests.contract.support import Ledger
from tests.contract.test_backlog import _nodes, analyze, ledger, read
from tests.contract.test_lanes import lane

__all__ = ["ledger"]

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

MANY = 30_000

_RESERVATIONS = sa.text(
    "INSERT INTO budget_reservations SELECT (jsonb_populate_record(r, jsonb_build_object("
    " 'reservation_id', gen_random_uuid(), 'request_id', 'n' || n, 'task_id', 'n' || n))).*"
    " FROM budget_reservations r, generate_series(1, :many) AS n"
    " WHERE r.root = :root AND r.task_id = 'first'"
)
_MESSAGES = sa.text(
    "INSERT INTO budget_outbox SELECT (jsonb_populate_record(o, jsonb_build_object("
    " 'outbox_id', gen_random_uuid(), 'reservation_id', r.reservation_id, 'task_id', r.task_id,"
    " 'tenant', 'tenant-' || mod(CAST(substr(r.task_id, 2) AS integer), 7)))).*"
    " FROM budget_outbox o, budget_reservations r"
    " WHERE o.root = :root AND o.task_id = 'first' AND r.root = :root AND r.task_id <> 'first'"
)


@contextmanager
def selects() -> Iterator[list[tuple[str, Any]]]:
    """The SELECTs on the outbox that are executed meanwhile."""
    said: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if "budget_outbox" in statement and statement.split(None, 1)[0] in ("SELECT", "WITH"):
            said.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def rows_read(ledger: Ledger, work: Callable[[], object]) -> int:
    """How many rows of the outbox the SELECTs of some work look at."""
    with selects() as said:
        work()
    total = 0
    with ledger.store.transaction() as connection:
        for statement, parameters in said:
            [explained] = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            total += read(list(_nodes(explained["Plan"])))
    return total


def test_a_dispatch_reads_what_it_may_choose_from_and_no_more(ledger: Ledger) -> None:
    lane(ledger, max_queued_jobs=10, max_waiting_jobs=2 * MANY, max_waiting_units=2 * MANY)
    ledger.reserve(1, task_id="first")
    with ledger.store.transaction() as connection:
        connection.execute(_RESERVATIONS, {"root": ledger.root, "many": MANY})
        connection.execute(_MESSAGES, {"root": ledger.root})
    analyze(ledger)
    with ledger.store.statement() as connection:
        connection.exec_driver_sql("VACUUM (ANALYZE) budget_reservations")
    released: list[int] = []

    def dispatch() -> None:
        released.append(ledger.store.run(dispatching.dispatch, ledger.root, "llm"))

    # Twice a thousand: to find them, and what there is to know of them.
    assert rows_read(ledger, dispatch) < 5000
    # Full: what was released is counted, and what waits is not looked at.
    assert rows_read(ledger, dispatch) < 100
    assert released == [10, 0]
    assert rows_read(ledger, lambda: dispatching_holds(ledger)) < 10
    # One admission counts all of them, the others read what it found.
    first, second = (ledger.request(1) for _ in range(2))
    assert ledger.admit(first) == Reserved(first.reservation_id)
    [tally] = ledger.rows("lane_tallies")
    assert (tally.jobs, tally.units) == (MANY + 1 - 10, MANY + 1 - 10)
    assert ledger.admit(second) == Reserved(second.reservation_id)
    assert ledger.rows("lane_tallies") == [tally]
    ledger.conserved = False


def dispatching_holds(ledger: Ledger) -> list[str]:
    return ledger.store.run_statement(dispatching.holding, ledger.root)
