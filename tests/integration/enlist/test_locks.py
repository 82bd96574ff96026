"""Enlisted transactions beside others: what they hold, what they wait for, what a crash leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget.core.identity import new_id
from celery_budget.errors import BudgetExceeded, OutboxFull, StoreError
from celery_budget.store import schema, waiting
from celery_budget.store.schema import now_us
from tests.cluster import ROOT, eventually
from tests.contract.racers import WAIT_SECONDS, Beside, at_once, wait_for_waiting
from tests.integration.enlist.conftest import Make, parameter
from tests.integration.enlist.support import KINDS, Async, Caller, Psycopg, Session, Sqlite


def each_of(dialect: str) -> Any:
    return pytest.mark.parametrize("kind", KINDS[dialect], ids=lambda kind: kind.__name__)


@pytest.mark.postgres
def test_two_that_name_budgets_in_opposite_order(make_caller: Make) -> None:
    caller = make_caller("postgresql", Psycopg)
    clients = [caller.client, caller.another()]
    published = threading.Barrier(2)

    def run(number: int) -> None:
        def block(batch: Any) -> None:
            for tenant in ("ab", "ba")[number]:
                caller.draft.delay(tenant)
            # Both have published all, and neither has locked anything.
            published.wait(WAIT_SECONDS)

        clients[number].enlisted(block)
        clients[number].commit()

    for _ in range(5):
        at_once([lambda: run(0), lambda: run(1)])
    assert [caller.shop.amounts(f"tenant:{name}")[0] for name in "ab"] == [10, 10]
    assert caller.shop.budget.reconcile().ok


@pytest.mark.postgres
@each_of("postgresql")
def test_an_open_transaction_keeps_others_waiting_for_so_long(
    make_caller: Make, kind: type[Any]
) -> None:
    caller = make_caller("postgresql", kind, budget_lock_seconds=0.05)
    caller.client.enlisted(lambda batch: caller.draft.delay("a", 4))
    with pytest.raises(StoreError) as waited:
        caller.draft.delay("a", 1)
    assert waited.value.retryable
    other = caller.another(Psycopg)
    other.write("other")
    with pytest.raises(StoreError) as waited:
        other.enlisted(lambda batch: [caller.draft.delay("a", 1) for _ in range(2)])
    assert waited.value.retryable
    # Another budget waits for nobody.
    other.enlisted(lambda batch: caller.draft.delay("b", 2))
    other.commit()
    caller.client.commit()
    other.enlisted(lambda batch: caller.draft.delay("a", 1))
    other.commit()
    assert caller.committed() == (["other"], 5, 3)


@pytest.mark.postgres
def test_who_waits_goes_on_when_the_transaction_ends(make_caller: Make) -> None:
    caller = make_caller("postgresql", Psycopg, budget_lock_seconds=60)
    caller.client.enlisted(lambda batch: caller.draft.delay("a", 4))
    other = caller.another()

    def beside() -> None:
        other.enlisted(lambda batch: caller.draft.delay("a", 7))
        other.commit()

    waiting = Beside(beside)
    wait_for_waiting(caller.shop.budget.store)
    caller.client.rollback()
    waiting.result()
    assert caller.committed() == ([], 7, 1)


@pytest.mark.postgres
def test_a_refusal_counts_what_was_committed_meanwhile(make_caller: Make) -> None:
    caller = make_caller("postgresql", Psycopg, budget_lock_seconds=60)
    caller.client.enlisted(lambda batch: caller.draft.delay("a", 4))
    waiting = Beside(lambda: caller.draft.delay("a", 7))
    wait_for_waiting(caller.shop.budget.store)
    caller.client.commit()
    with pytest.raises(BudgetExceeded):
        waiting.result()
    assert caller.committed() == ([], 4, 1)


@pytest.mark.postgres
@pytest.mark.parametrize("count", [1, 2])
@each_of("postgresql")
def test_the_lock_time_out_is_the_callers_again(
    make_caller: Make, kind: type[Any], count: int
) -> None:
    caller = make_caller("postgresql", kind)
    client = caller.client

    def note_another() -> None:
        setting = "current_setting('lock_timeout')"
        client.execute(f"INSERT INTO business SELECT {setting} WHERE {setting} <> '1234ms'")

    client.execute("SET LOCAL lock_timeout = 1234")
    client.enlisted(lambda batch: [caller.draft.delay("a") for _ in range(count)])
    note_another()
    with pytest.raises(BudgetExceeded):
        client.enlisted(lambda batch: [caller.draft.delay("a", 11) for _ in range(count)])
    note_another()
    client.commit()
    assert caller.committed() == ([], count, count)


@pytest.mark.postgres
@pytest.mark.parametrize("kind", [Session, Async, Psycopg], ids=lambda kind: kind.__name__)
def test_what_has_to_be_made_waits_for_the_caller_itself_for_so_long(
    make_caller: Make, kind: type[Any]
) -> None:
    caller = make_caller("postgresql", kind, budget_lock_seconds=0.05)
    caller.shop.budget.set("tenant:*", limit=5, unit="tokens", parent="tenant:a")
    # As whoever makes budgets does, and nobody who publishes.
    caller.client.execute("LOCK TABLE budget_budgets IN EXCLUSIVE MODE")
    with pytest.raises(StoreError, match="the enlisted transaction may hold that itself") as waited:
        caller.client.enlisted(lambda batch: caller.draft.delay("new"))
    assert waited.value.retryable
    caller.client.write("order")
    caller.client.commit()
    assert caller.committed() == (["order"], 0, 0)


SCRIPT = """
import json, sys
from celery_budget.integration.context import installed_on
from tests.integration.enlist.support import KINDS, Caller
from tests.integration.support import Shop, make_app

conf = json.loads(sys.argv[1])
app = make_app(**conf["app"])
kind = KINDS[conf["dialect"]][conf["kind"]]
caller = Caller(Shop(app, installed_on(app)), kind)
caller.client.write("order")
caller.client.enlisted(lambda batch: [caller.draft.delay("a", 3) for _ in range(conf["count"])])
print("ended", flush=True)
sys.stdin.read()
"""


@pytest.mark.fault
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "where",
    [
        parameter(dialect, number, name=f"{dialect}-{kind.__name__}")
        for dialect, kinds in KINDS.items()
        for number, kind in enumerate(kinds)
        if kind.__name__ in ("Session", "AsyncSessions", "Psycopg", "Sqlite", "Django")
    ],
)
def test_who_is_killed_before_the_commit_leaves_nothing(
    make_caller: Make, where: tuple[str, int], count: int
) -> None:
    dialect, number = where
    caller = make_caller(dialect, budget_lock_seconds=WAIT_SECONDS)
    url = caller.shop.budget.settings.database_url
    conf = {"app": {"budget_database_url": url}, "dialect": dialect, "kind": number, "count": count}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(conf)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"ended\n"
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    # All of the budget is free once the server has noticed, which who asks for it waits for.
    caller.draft.delay("a", 10)
    assert caller.committed() == ([], 10, 1)
    assert caller.shop.budget.reconcile().ok


@pytest.mark.postgres
def test_commits_are_lost_with_the_connection(make_caller: Make) -> None:
    caller = make_caller("postgresql", Psycopg)
    client = caller.client
    client.write("order")

    def block(batch: Any) -> None:
        caller.draft.delay("a", 3)
        pid = client.given.info.backend_pid
        caller.shop.sql(sa.text(f"SELECT pg_terminate_backend({pid})"))
        eventually(lambda: not sessions(caller, pid))

    with pytest.raises(StoreError) as lost:
        client.enlisted(block)
    assert lost.value.retryable
    assert caller.committed() == ([], 0, 0)


def sessions(caller: Caller, pid: int) -> int:
    with caller.shop.budget.store.snapshot() as connection:
        counted = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
        return int(connection.execute(counted, {"pid": pid}).scalar_one())


def test_what_was_read_before_on_sqlite_cannot_wait(make_caller: Make) -> None:
    caller = make_caller("sqlite", Sqlite)
    client = caller.client
    client.execute("BEGIN")
    client.given.execute("SELECT * FROM business").fetchall()
    Beside(lambda: caller.draft.delay("a", 1)).result()
    with pytest.raises(StoreError) as stale:
        client.enlisted(lambda batch: caller.draft.delay("a", 2))
    assert stale.value.retryable
    client.rollback()
    client.enlisted(lambda batch: caller.draft.delay("a", 2))
    client.commit()
    assert caller.committed() == ([], 3, 2)


def test_refusals_are_counted_with_the_transaction(either: Caller) -> None:
    def counted() -> int:
        return sum(row.count for row in either.shop.rows(schema.refusals))

    for end, more in (("rollback", 0), ("commit", 1)):
        before = counted()
        with pytest.raises(BudgetExceeded):
            either.client.enlisted(lambda batch: either.draft.delay("a", 11))
        getattr(either.client, end)()
        assert counted() == before + more


def beside(caller: Caller, table: sa.Table) -> tuple[int, int]:
    """How many rows of a table there are, and how many of them nobody holds."""
    with caller.shop.budget.store.transaction() as connection:
        rows = connection.execute(sa.select(table)).all()
        free = connection.execute(sa.select(table).with_for_update(skip_locked=True)).all()
    return len(rows), len(free)


@pytest.mark.postgres
@pytest.mark.parametrize("count", [1, 2])
def test_what_all_share_is_not_held_by_a_transaction_that_may_be_long(
    make_caller: Make, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A relay that sleeps is told by others, counts are made anew by others."""
    monkeypatch.setattr(waiting, "MOST_COUNTED", 0)
    caller = make_caller("postgresql", Psycopg)
    shop = caller.shop
    queue = shop.app.conf.task_default_queue
    shop.budget.lanes.set("lane", queues=[queue], max_waiting_jobs=1000)
    shop.budget.set("tenant:a", limit=None)
    caller.draft.delay("a")
    relay = {"root": "default", "relay_id": new_id(), "host": "h", "pid": 1, "started_us": 1}
    shop.sql(schema.relays.insert().values(**relay, seen_us=now_us(), sleeping=True))
    for table in (schema.backlog, schema.lane_tallies):
        shop.sql(table.update().values(counted_us=1))
    with shop.budget.store.transaction() as connection:
        # More than are counted each time.
        connection.execute(sa.text(_HELD), {"many": 600, "queue": queue})
    caller.client.enlisted(lambda batch: [caller.draft.delay("a") for _ in range(count)])
    shared = (schema.relays, schema.backlog, schema.lane_tallies)
    assert [beside(caller, table) for table in shared] == [(1, 1)] * 3
    caller.client.commit()
    assert [row.counted_us for row in shop.rows(schema.lane_tallies)] == [1]


_HELD = (
    "INSERT INTO budget_outbox (root, outbox_id, task_id, task_name, retries, state, due_us,"
    " publishes, failures, created_us, queue, body, envelope, rank, broker, lane, tenant, weight)"
    " SELECT 'default', gen_random_uuid(), 'held-' || n, 'shop.notify', 0, 'held', 1, 0, 0, n,"
    " :queue, 'body', '{}', 5, '', 'lane', 'a', 0 FROM generate_series(1, :many) AS n"
)


@pytest.mark.postgres
@pytest.mark.parametrize("count", [1, 2])
def test_a_refusal_that_a_caller_lives_with_keeps_no_other_waiting(
    make_caller: Make, count: int
) -> None:
    caller = make_caller("postgresql", Psycopg, budget_lock_seconds=0.05)

    def ask() -> None:
        with pytest.raises(BudgetExceeded):
            caller.draft.delay("a", 11)

    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            caller.client.enlisted(lambda batch: [caller.draft.delay("a", 11)] * count)
    # Of sixteen rows that count them each is met.
    for _ in range(100):
        ask()
    caller.client.write("order")
    caller.client.commit()
    assert sum(row._mapping["count"] for row in caller.shop.rows(schema.refusals)) == 102


@pytest.mark.postgres
def test_many_messages_are_counted_for_a_caller_in_a_transaction_of_its_own(
    make_caller: Make,
) -> None:
    caller = make_caller("postgresql", Psycopg, budget_max_outbox=20_000)
    shop = caller.shop
    caller.draft.delay("a")
    with shop.budget.store.transaction() as connection:
        connection.execute(sa.text(_HELD), {"many": 15_000, "queue": "q"})
    shop.sql(schema.backlog.update().values(counted_us=1))
    caller.client.enlisted(lambda batch: caller.draft.delay("a"))
    [row] = shop.rows(schema.backlog)
    assert row.messages == 15_001
    assert beside(caller, schema.backlog) == (1, 1)
    caller.client.rollback()
    with shop.budget.store.transaction() as connection:
        connection.execute(sa.text(_HELD), {"many": 6_000, "queue": "q"})
    shop.sql(schema.backlog.update().values(counted_us=1))
    for isolation in ("READ COMMITTED", "REPEATABLE READ"):
        caller.client.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        with pytest.raises(OutboxFull):
            caller.client.enlisted(lambda batch: caller.draft.delay("a"), any_isolation=True)
        caller.client.rollback()
