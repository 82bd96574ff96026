"""Plans that were made while a table was empty do not read all of it once it is long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from celery_budget.settings import Settings
from celery_budget.store import Store, migrate
from tests.contract.support import RETURNED, Ledger
from tests.contract.test_backlog import LATER, fill, ledger
from tests.services.postgres import PostgresServer

__all__ = ["ledger"]

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

#: A statement is prepared, and its plan kept for good, after so many times at the most.
OFTEN = 12


def work(ledger: Ledger) -> None:
    """Take requests all the way, as relay and workers do."""
    for _ in range(3):
        request = ledger.reserve(1)
        assert ledger.relay().published == 1
        attempt = ledger.run(request)
        attempt.record(1)
        assert attempt.end(RETURNED)
        assert attempt.close()


def read_whole(ledger: Ledger, call: Callable[[Ledger], None]) -> int:
    """How many rows of the outbox a call reads without an index."""
    before = _seen(ledger)
    call(ledger)
    ledger.store.dispose()
    return _seen(ledger) - before


def _seen(ledger: Ledger) -> int:
    """How many were read so until now, once every other session has told what it did."""
    alone = "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()"
    read = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'budget_outbox'"
    end = time.monotonic() + 10
    with ledger.store.apart() as connection:
        while not connection.exec_driver_sql(alone).scalar_one():
            assert time.monotonic() < end, "a session does not end"
        connection.exec_driver_sql("SELECT pg_stat_clear_snapshot()")
        return int(connection.exec_driver_sql(read).scalar_one())


def test_a_backlog_that_comes_at_once_is_not_read_whole(ledger: Ledger) -> None:
    with ledger.store.apart() as connection:
        connection.exec_driver_sql("ALTER TABLE budget_outbox SET (autovacuum_enabled = off)")
        connection.exec_driver_sql("VACUUM ANALYZE budget_outbox")
    ledger.store.dispose()

    def burst(ledger: Ledger) -> None:
        for _ in range(OFTEN):
            work(ledger)
        fill(ledger, due=LATER)
        work(ledger)

    assert read_whole(ledger, burst) < 10_000


#: How a request's rows are asked for.
ROWS = {
    "budget_reservations": "root = :root AND reservation_id = :id",
    "budget_lines": "root = :root AND reservation_id = :id",
    "budget_balances": "root = :root AND budget = 'b' AND window_us = 0 AND stripe = 0",
}


def test_rows_are_found_by_their_key_before_anybody_has_analyzed_the_tables(
    postgres_server: PostgresServer,
) -> None:
    url = postgres_server.create_database()
    store = Store(url)
    try:
        store.run(migrate.upgrade)
        with store.apart() as connection:
            for table in ROWS:
                connection.exec_driver_sql(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        ledger = Ledger(store, Settings(url))
        ledger.set("b", None)
        requests = [ledger.reserve(1) for _ in range(150)]
        of = {"root": ledger.root, "id": requests[0].reservation_id}
        for table, where in ROWS.items():
            # The plan that a session keeps.
            with store.transaction() as connection:
                connection.exec_driver_sql("SET LOCAL plan_cache_mode = force_generic_plan")
                asked = f"EXPLAIN SELECT * FROM {table} WHERE {where} FOR NO KEY UPDATE"  # noqa: S608 - constants
                plan = " ".join(row[0] for row in connection.execute(sa.text(asked), of))
            assert f"using pk_{table} " in plan
    finally:
        store.dispose()
        postgres_server.drop_database(url)
