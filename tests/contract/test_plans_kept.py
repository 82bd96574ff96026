"""Plans that were made while a table was empty do not read all of it once it is long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.contract.support import RETURNED, Ledger
from tests.contract.test_backlog import LATER, fill, ledger

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
