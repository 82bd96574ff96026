"""A server that does not answer, though its machine does: nobody waits for ever."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import sqlalchemy as sa

from celery_budget.errors import StoreError
from celery_budget.store import Store, engine
from tests.cluster import WAIT
from tests.services.postgres import PostgresServer

pytestmark = [pytest.mark.fault, pytest.mark.postgres]


def answer(connection: sa.Connection, together: Barrier | None = None) -> int:
    if together is not None:
        together.wait(WAIT)
    return int(connection.execute(sa.text("SELECT 42")).scalar_one())


def test_it_is_given_up_within_a_bound(
    own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "TRIES", 2)
    store = Store(own_postgres.create_database() + "?connect_timeout=2", answer_seconds=0.5)
    ways = (store.run, store.run_statement, store.read)
    with ThreadPoolExecutor(len(ways)) as threads:
        # Each has its connection before the server stands still.
        together = Barrier(len(ways))
        assert list(threads.map(lambda way: way(answer, together), ways)) == [42] * 3
        with own_postgres.stopped():
            begun = time.monotonic()
            asked = [threads.submit(way, answer) for way in ways]
            for one in asked:
                with pytest.raises(StoreError) as caught:
                    one.result()
                assert caught.value.retryable
            # A try that hears nothing asks, and the next one does not connect.
            assert time.monotonic() - begun < WAIT / 4
    assert [way(answer) for way in ways] == [42] * 3
    store.dispose()


def test_one_that_is_at_work_is_waited_for(postgres_url: str) -> None:
    store = Store(postgres_url, answer_seconds=0.3)

    def work(connection: sa.Connection) -> int:
        connection.execute(sa.text("SELECT pg_sleep(1)"))
        return answer(connection)

    pid = sa.text("SELECT pg_backend_pid()")
    with store.transaction() as connection:
        before = connection.execute(pid).scalar_one()
    assert store.run(work) == 42
    with store.transaction() as connection:
        assert connection.execute(pid).scalar_one() == before
    store.dispose()
