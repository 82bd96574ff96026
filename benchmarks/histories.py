"""Long histories, made quickly: requests that have ended, as if they had been run.

Everything in them follows from a request's number, so that each table is written by itself. Ids are
as they are made (UUIDv7, one after another), request ids and task ids are at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from celery_budget.store import Store, tallies, windows
from tests.services.postgres import PostgresServer

__all__ = ["History", "fill", "filling", "tenant"]

#: Tallied at a time: more than by the sweep, which lets others at the rows in between.
BATCH = 5000
#: How many requests the sweep's own step tallies where not all are: of every key, and few.
ROLLED = 20_000
#: A server that forgets all of it in a crash, and writes no log of tables that it has just made.
QUICK = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "8GB",
    "maintenance_work_mem": "512MB",
    "autovacuum": "off",
    "max_parallel_maintenance_workers": "0",
}


@dataclass(frozen=True)
class History:
    """What has ended.

    :ivar requests: how many requests, over so many ``days`` up to two minutes ago.
    :ivar tenants: of how many budgets, in turns.
    :ivar above: a budget above all of them, that each request draws on as well; empty for none.
    :ivar whole: with usage records and the journal's entries.
    :ivar tallied: all are tallied by the sweep's own step; otherwise :data:`ROLLED` of them are,
        and the rest is said to be: there are as many tallies, and their sums are too low.
    """

    requests: int
    tenants: int = 100
    stages: int = 5
    days: int = 60
    above: str = ""
    whole: bool = True
    tallied: bool = False


def tenant(number: int) -> str:
    """Return the name of a tenant's budget."""
    return f"tenant:{number}"


@contextmanager
def filling(server: PostgresServer) -> Iterator[None]:
    """Have a server write quickly meanwhile; from then on it is as durable as it was."""
    durable = dict(server.settings)
    server.settings.update(QUICK)
    server.restart()
    try:
        yield
    finally:
        server.settings.clear()
        server.settings.update(durable)
        server.restart()


def fill(store: Store, root: str, history: History) -> None:
    """Write a history into a new ledger whose budgets have been set; vacuum and analyze it.

    Indexes are made after the rows, as they are in the schema. Balances tell what was spent; the
    journal adds up to it.
    """
    given = {"root": root, **asdict(history)}
    given["until_us"] = store.run(windows.read_now) - 120_000_000
    given["rolled"] = max(1, history.requests // (history.requests if history.tallied else ROLLED))
    written = [_RESERVATIONS, _ATTEMPTS, _LINES]
    if history.whole:
        written += [_USAGE, _JOURNAL]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(_write, store, one, given) for one in written]:
            done.result()
    if history.whole:
        with store.apart() as connection:
            connection.execute(sa.text(_BALANCES), given)
    with store.apart() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")
    while store.run(tallies.roll, root, BATCH, 0):
        pass
    with store.apart() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE budget_reservations, budget_tallies")


def _write(store: Store, statement: tuple[str, str], given: dict[str, object]) -> None:
    """Write one table in a transaction, which makes its indexes anew."""
    table, insert = statement
    with store.transaction() as connection:
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        indexes = connection.execute(sa.text(_INDEXES), {"table": table}).all()
        for index in indexes:
            connection.exec_driver_sql(index.drop)
        connection.exec_driver_sql(f"TRUNCATE {table}")
        connection.execute(sa.text(insert), given)
        _make(connection, [index.make for index in indexes])


def _make(connection: sa.Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.exec_driver_sql(statement)


#: How the indexes of a table are dropped, and made.
_INDEXES = """
    SELECT CASE WHEN c.oid IS NULL THEN 'DROP INDEX ' || i.indexrelid::regclass
                ELSE format('ALTER TABLE %s DROP CONSTRAINT %I', i.indrelid::regclass, c.conname)
           END AS drop,
           CASE WHEN c.oid IS NULL THEN pg_get_indexdef(i.indexrelid)
                ELSE format('ALTER TABLE %s ADD CONSTRAINT %I %s', i.indrelid::regclass, c.conname,
                            pg_get_constraintdef(c.oid))
           END AS make
      FROM pg_index i
      LEFT JOIN pg_constraint c ON c.conindid = i.indexrelid
     WHERE i.indrelid = CAST(:table AS regclass)
     ORDER BY i.indexrelid
"""

#: Each request: its number, when it was admitted, its id, and a number at random below 256. What is
#: used more than once is evaluated once (OFFSET 0).
_EACH = """
      FROM generate_series(1, :requests) AS n,
           LATERAL (SELECT md5(CAST(n AS text)) AS hash,
                           CAST(:until_us AS bigint) - (CAST(:requests AS bigint) - n)
                             * (CAST(:days AS bigint) * 86400000000 / :requests) AS at_us
                    OFFSET 0) AS h,
           LATERAL (SELECT CAST(lpad(to_hex(at_us / 1000), 12, '0') || '7' || substr(hash, 1, 3)
                                || '8' || substr(hash, 4, 15) AS uuid) AS id,
                           CAST(CAST('x' || substr(hash, 19, 2) AS bit(8)) AS integer) AS dice,
                           'tenant:' || n % :tenants AS owner
                    OFFSET 0) AS i,
           LATERAL (SELECT CASE WHEN dice < 5 THEN 'released' WHEN dice < 10 THEN 'lost'
                                ELSE 'settled' END AS state,
                           CAST(1000 * exp(dice / 40.0) AS bigint) AS waited,
                           CAST(20000 * exp((255 - dice) / 50.0) AS bigint) AS lasted,
                           CASE WHEN dice < 5 THEN 0 ELSE 500 + dice * 4 END AS used) AS s
"""

_RESERVATIONS = (
    "budget_reservations",
    f"""
    INSERT INTO budget_reservations (
        root, reservation_id, owner, request_id, nesting, task_id, task_name, stage, fingerprint,
        opaque, estimator, estimator_version, state, retries, attempts, deliveries, unreserved,
        unmetered, over, created_us, ended_us, tallied)
    SELECT :root, id, owner, CAST(CAST(md5('r' || n) AS uuid) AS text), 0,
           CAST(CAST(md5('r' || n) AS uuid) AS text), 'shop.task' || n % :stages,
           'stage' || n % :stages, '1:' || hash || hash, false, 'words', '1', state,
           0, CAST(dice >= 5 AS integer), CAST(dice >= 5 AS integer), false, n % 20 = 2,
           n % 10 = 3, at_us, at_us + waited + lasted,
           CAST(CAST('x' || substr(hash, 21, 6) AS bit(24)) AS integer) % :rolled <> 0
      {_EACH}
    """,
)
_LINES = (
    "budget_lines",
    f"""
    INSERT INTO budget_lines (
        root, reservation_id, line, budget, window_us, stripe, charge, unit, estimate, reserved,
        used, settled)
    SELECT :root, id, l.line, CASE l.line WHEN 0 THEN owner ELSE :above END, 0, 0,
           'used', 'tokens', 1000, 0, used, used
      {_EACH}, generate_series(0, CASE CAST(:above AS text) WHEN '' THEN 0 ELSE 1 END) AS l (line)
    """,
)
_ATTEMPTS = (
    "budget_attempts",
    f"""
    INSERT INTO budget_attempts (
        root, reservation_id, attempt, claim_id, retries, worker, boot_id, late_ack, started_us,
        ended_us, outcome, replays, pid, rerun, queue, publishes, published_us)
    SELECT :root, id, 1, CAST(md5('c' || n) AS uuid), 0, 'celery@worker-' || n % 7,
           CAST(md5('b' || n % 7) AS uuid), true, at_us + waited, at_us + waited + lasted,
           CASE WHEN state = 'lost' THEN 'uncertain' WHEN dice % 9 = 0 THEN 'raised'
                ELSE 'returned' END, 0, 1000 + n % 7, true, 'celery', 1, at_us + waited / 2
      {_EACH}
     WHERE state <> 'released'
    """,
)
_USAGE = (
    "budget_usage",
    f"""
    INSERT INTO budget_usage (
        root, reservation_id, key, unit, attempt, amount, late, recorded_us)
    SELECT :root, id, 'chatcmpl-' || hash, 'tokens', 1, used, false, at_us + waited + lasted / 2
      {_EACH}
     WHERE state <> 'released' AND n % 20 <> 2
    """,
)
#: Of each tenant one request after another.
_JOURNAL = (
    "budget_journal",
    f"""
    INSERT INTO budget_journal (
        root, budget, window_us, stripe, entry, at_us, what, who, reservation_id, reserved, spent,
        reserved_after, spent_after)
    SELECT :root, owner, 0, 0, (n - 1) / :tenants * 2 + m.entry,
           CASE m.entry WHEN 1 THEN at_us ELSE at_us + waited + lasted END,
           CASE m.entry WHEN 1 THEN 'reserve' ELSE 'settle' END, 'web@host', id,
           CASE m.entry WHEN 1 THEN 1000 ELSE -1000 END, CASE m.entry WHEN 1 THEN 0 ELSE used END,
           CASE m.entry WHEN 1 THEN 1000 ELSE 0 END, (n - 1) / :tenants * 1000
      {_EACH}, generate_series(1, 2) AS m (entry)
    """,
)
#: What the last entries of the journal say.
_BALANCES = """
    UPDATE budget_balances b SET entries = j.entry, spent = j.spent_after
      FROM generate_series(0, :tenants - 1) AS t,
           LATERAL (SELECT entry, spent_after FROM budget_journal
                     WHERE root = :root AND budget = 'tenant:' || t AND window_us = 0 AND stripe = 0
                     ORDER BY entry DESC LIMIT 1) AS j
     WHERE b.root = :root AND b.budget = 'tenant:' || t
"""
