"""Every statement names its root: of tables that are partitioned by it only that part is touched.

The tables are made anew, each in parts by the hash of the root, and filled with other roots' rows,
so that plans are made as they are where there is much to search. After each statement the server
is asked which parts its own session has searched or changed so far; what its functions do counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from celery_budget import admission, reconcile, settlement
from celery_budget.core.budgets import Budget
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    START,
    Again,
    AlreadyExtended,
    AlreadyReserved,
    Extended,
    Line,
    Missing,
    Outcome,
    Parked,
    Refused,
    Released,
    Reserved,
    Running,
)
from celery_budget.core.usage import Used
from celery_budget.errors import HoldsOpen, RequestConflict, UnknownBudget
from celery_budget.relay import BrokerDown, Rejected, Unpublishable
from celery_budget.settings import Settings
from celery_budget.store import (
    Store,
    budgets,
    declaring,
    grants,
    migrate,
    outbox,
    quarantine,
    schema,
)
from tests.contract.support import BOOT, RAISED, RETRIED, RETURNED, Ledger, admit_many, message_of

pytestmark = pytest.mark.postgres

VERSIONS = Path(migrate.__file__).with_name("migrations") / "versions"
PARTS = 8
ROOT = "mine"

_TOUCHED = sa.text(
    "SELECT relname, seq_scan + coalesce(idx_scan, 0) + n_tup_ins + n_tup_upd + n_tup_del AS times"
    " FROM {view} WHERE relname LIKE 'budget%' AND relname ~ '_p[0-9]+$'"
)


def functions() -> list[str]:
    """The files of the functions that the migrations lead to: the last of each."""
    latest: dict[str, int] = {}
    for path in VERSIONS.glob("*.sql"):
        name, _, number = path.stem.rpartition("_")
        latest[name] = max(latest.get(name, 0), int(number))
    # What the first release had was named anew, or is gone.
    return [f"{name}_{number}.sql" for name, number in sorted(latest.items()) if number > 1]


def create(connection: sa.Connection) -> None:
    """Make the schema with every table partitioned by the hash of the root."""
    parted = sa.MetaData()
    for table in schema.metadata.tables.values():
        copy = table.to_metadata(parted)
        # A copy does not know which of them are another dialect's.
        others = {
            str(one.sqltext)
            for one in table.constraints
            if isinstance(one, sa.CheckConstraint)
            and one._ddl_if
            and one._ddl_if.dialect == "sqlite"
        }
        copy.constraints -= {
            one
            for one in copy.constraints
            if isinstance(one, sa.CheckConstraint) and str(one.sqltext) in others
        }
        copy.dialect_options["postgresql"]["partition_by"] = "HASH (root)"
    parted.create_all(connection)
    for name in parted.tables:
        for part in range(PARTS):
            connection.exec_driver_sql(
                f"CREATE TABLE {name}_p{part} PARTITION OF {name}"
                f" FOR VALUES WITH (MODULUS {PARTS}, REMAINDER {part})"
            )
    for name in functions():
        connection.exec_driver_sql((VERSIONS / name).read_text("utf-8"))
    connection.exec_driver_sql(
        f"CREATE TABLE {migrate.VERSION_TABLE} AS SELECT '{migrate._head()}' AS version_num"
    )


def touched(connection: Any, view: str) -> dict[str, int]:
    """How often each part was searched or changed, by name."""
    rows = connection.execute(str(_TOUCHED).format(view=view))
    return {name: times for name, times in rows.fetchall() if times}


class Watch:
    """Notes which parts other than that of :data:`ROOT` each statement touches."""

    def __init__(self, store: Store) -> None:
        self._engine = store._engine
        self.strays: dict[str, set[str]] = {}
        self.statements: set[str] = set()
        with self._engine.connect() as connection:
            self._mine = connection.execute(
                sa.text(
                    "SELECT n FROM generate_series(0, :parts - 1) n WHERE"
                    " satisfies_hash_partition('budget_budgets'::regclass, :parts, n,"
                    " CAST(:root AS varchar))"
                ),
                {"parts": PARTS, "root": ROOT},
            ).scalar_one()

    def others(self, found: dict[str, int]) -> dict[str, int]:
        return {
            name: times for name, times in found.items() if not name.endswith(f"_p{self._mine}")
        }

    @contextmanager
    def listen(self) -> Iterator[None]:
        event.listen(self._engine, "after_cursor_execute", self._after)
        try:
            yield
        finally:
            event.remove(self._engine, "after_cursor_execute", self._after)

    def _after(self, connection: sa.Connection, cursor: Any, statement: str, *more: Any) -> None:
        self.statements.add(statement)
        raw: Any = connection.connection.dbapi_connection
        with raw.cursor() as own:
            now = self.others(touched(own, "pg_stat_xact_user_tables"))
        before = connection.info.get("touched", {})
        connection.info["touched"] = now
        # What is less than before was handed on to the server's statistics meanwhile.
        strays = {name for name, times in now.items() if times != before.get(name, 0)}
        if strays:
            self.strays.setdefault(statement, set()).update(strays)


@pytest.fixture(scope="module")
def parted_url(postgres_server: Any) -> Iterator[str]:
    """A database with partitioned tables in which forty other roots have their work."""
    url = postgres_server.create_database()
    store = Store(url)
    store.run(create)
    for number in range(40):
        others = Ledger(store, Settings(url, root=f"other-{number}"))
        others.set("org", None)
        others.set("b", None, parent="org")
        requests = [others.request(5) for _ in range(40)]
        asked = [(request, message_of(request)) for request in requests]
        admit_many(store, others.settings, asked)
        others.grant("k", 5)
        others.adjust("k", 5)
        for request in requests[:6]:
            attempt = others.run(request)
            attempt.record(3)
            attempt.end(RETURNED)
    with store._autocommit.connect() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")
    store.dispose()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(params=["auto", "force_generic_plan", "force_custom_plan"])
def ledger(parted_url: str, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    store = Store(parted_url)

    @event.listens_for(store._engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.execute(f"SET plan_cache_mode = {request.param}")
        connection.commit()

    ledger = Ledger(store, Settings(parted_url, root=ROOT, max_publishes=2, max_deliveries=3))
    yield ledger
    assert reconcile.reconcile(store, ledger.settings).mismatches == ()
    with store.transaction() as connection:
        for table in schema.metadata.tables.values():
            connection.execute(table.delete().where(table.c.root == ROOT))
    store.dispose()


def declare(ledger: Ledger) -> None:
    ledger.set("org", 100_000)
    ledger.set("b", 1000, parent="org")
    ledger.set("cost", 10_000, unit="usd")
    ledger.set("rate", 100, unit="requests", period="minute")
    ledger.set("tenant:*", 1000, parent="org", period="day")
    ledger.set("small", 100)


def reserve(ledger: Ledger) -> None:
    lines = (Line("b", 10), Line("cost", 5), Line("rate", 1, START))
    request = ledger.reserve(10, lines=lines)
    assert ledger.admit(replace(request, reservation_id=new_id())) == AlreadyReserved(
        request.reservation_id, request.task_id
    )
    with pytest.raises(RequestConflict):
        ledger.admit(replace(request, reservation_id=new_id(), fingerprint="1:other"))
    assert isinstance(ledger.admit(ledger.request(1001)), Refused)
    with pytest.raises(UnknownBudget):
        ledger.admit(ledger.request(1, budget="unknown"))
    ledger.reserve(3, budget="tenant:one")
    ledger.admit(ledger.request(3), delivered=True)
    assert ledger.store.run(declaring.make, ROOT, "tenant:two")
    ledger.put("balances", {"window_us": 0, "end_us": 1}, budget="tenant:two")
    ledger.reserve(4, budget="tenant:two")
    ledger.set("gone", 10)
    ledger.close("gone")
    ledger.admit(ledger.request(1, budget="gone"))
    ledger.reopen("gone")


def reserve_many(ledger: Ledger) -> None:
    known = ledger.reserve(1)
    requests = [
        ledger.request(1, ("cost", 1)),
        replace(known, reservation_id=new_id()),
        ledger.request(1001),
        ledger.request(1, budget="unknown"),
        ledger.request(1, budget="tenant:many"),
    ]
    for best_effort in (False, True):
        asked = [(request, message_of(request)) for request in requests]
        admit_many(ledger.store, ledger.settings, asked, best_effort=best_effort)


def relay(ledger: Ledger) -> None:
    message = message_of(ledger.request())
    assert admission.enqueue(ledger.store, ledger.settings, message)
    request, attempt = ledger.start(1)
    child = message_of(ledger.request())
    admission.enqueue(ledger.store, ledger.settings, child, request.reservation_id)
    assert ledger.relay().published > 0
    attempt.end(RETURNED)
    attempt.close()
    expired = ledger.reserve(1, expires_us=1)
    lost = message_of(ledger.request(), expires_us=1)
    admission.enqueue(ledger.store, ledger.settings, lost)
    assert ledger.relay().released == 2
    assert ledger.state(expired) == "released"

    def down(message: Any) -> None:
        raise BrokerDown("down")

    def refuse(message: Any) -> None:
        raise Unpublishable("oversize", "no")

    def reject(message: Any) -> None:
        raise Rejected("full")

    bad = ledger.reserve(1, order_key="k")
    ledger.reserve(1, order_key="k")
    for fail in (down, reject, refuse):
        ledger.broker.on_publish = fail
        ledger.make_due(bad)
        ledger.relay()
    ledger.broker.on_publish = lambda message: None
    assert ledger.state(bad) == "released"
    key = (ledger.root, bad.task_id)
    again = (quarantine.requeue, *key, lambda message, reservation_id: message)
    assert ledger.store.read(quarantine.listed, ledger.root, 1)
    ledger.store.run(*again, lock_ms=5000, bound=None)
    assert not ledger.store.run(quarantine.discard, *key)
    ledger.relay()


def run(ledger: Ledger) -> None:
    lines = (Line("b", 10), Line("cost", 5), Line("rate", 1, START))
    request = ledger.reserve(10, lines=lines)
    attempt = ledger.run(request)
    assert ledger.deliver(request) == Running()
    assert ledger.deliver(ledger.request()) == Missing()
    assert settlement.renew(ledger.store, ledger.settings, [request.task_id], BOOT, []) == 1
    assert attempt.record(4, key="one")
    assert not attempt.record(4, key="one")
    assert attempt.record(2, unit="usd")
    assert attempt.write(Used({"tokens": 0}, True, {"tokens"}), "incomplete")[0]
    assert attempt.write(Used({"tokens": 3}, True), "incomplete")[0]
    assert attempt.remaining() == 3
    assert attempt.record(40)
    assert attempt.extend(5, key="more") == Extended(5)
    assert attempt.extend(5, key="more") == AlreadyExtended()
    assert isinstance(attempt.extend(5000, key="much"), Refused)
    assert attempt.end(RETURNED)
    assert attempt.record(1, key="late")
    assert attempt.close()
    assert ledger.deliver(request) is not None
    reconcile.explain(ledger.store, ledger.settings, request.task_id)


def retry(ledger: Ledger) -> None:
    request, attempt = ledger.start(10)
    attempt.record(3)
    following, written = ledger.retry(replace(request, prices="of today"), attempt)
    assert written == Reserved(request.reservation_id)
    assert attempt.end(RETRIED)
    again = ledger.run(following)
    assert again.end(Outcome("rejected", again=Again(5, 0, 10**9)))
    ledger.run(following).end(RAISED)

    request, attempt = ledger.start(60, budget="small")
    attempt.record(50)
    following = replace(request, retries=1)
    parked = admission.retry(
        ledger.store,
        ledger.settings,
        following,
        message_of(following),
        attempt.number,
        attempt.claim_id,
    )
    assert isinstance(parked, Parked)
    assert attempt.end(RETRIED)
    assert ledger.sweep().admitted == 0
    ledger.set("small", 200)
    assert ledger.sweep().admitted == 1
    assert ledger.run(following).end(RETURNED)


def park(ledger: Ledger) -> None:
    for request in (ledger.request(5, budget="small"), ledger.request(5000, budget="small")):
        ledger.admit(request, continuation=True)
    assert ledger.sweep().admitted == 0
    ledger.put("parked", {"deadline_us": 1})
    assert len(ledger.sweep().over) == 1
    waits = ledger.request(5000, budget="small")
    assert isinstance(ledger.admit(waits, continuation=True), Parked)
    cancelled = settlement.cancel(ledger.store, ledger.settings, waits.task_id)
    assert cancelled == Released(waits.task_id, "released")


def end_early(ledger: Ledger) -> None:
    request = ledger.reserve(1)
    cancel = settlement.cancel(ledger.store, ledger.settings, request.task_id)
    assert cancel == Released(request.task_id, "released")
    other = ledger.reserve(1)
    assert settlement.revoke(ledger.store, ROOT, other.reservation_id, "revoked")
    settlement.cancel(ledger.store, ledger.settings, "unknown")
    admission.count_refusal(ledger.store, ledger.settings, "b", "draft", "shop.draft", 1)


def recover(ledger: Ledger) -> None:
    def lost(task_id: str, may_rerun: bool) -> bool:
        return settlement.worker_lost(ledger.store, ledger.settings, task_id, BOOT, may_rerun)

    again, _ = ledger.start(1)
    ledger.lapse(again)
    early, _ = ledger.start(1, late_ack=False)
    ledger.lapse(early)
    ready, _ = ledger.start(1)
    ledger.results.stored[ready.task_id] = "returned"
    ledger.lapse(ready)
    replayed, attempt = ledger.start(1)
    attempt.end(RETURNED)
    ledger.lapse(replayed)
    silent, over = ledger.reserve(1), ledger.reserve(1)
    ledger.relay()
    for request in (silent, over):
        ledger.make_due(request)
    ledger.put("outbox", {"publishes": 9}, reservation_id=over.reservation_id)
    done = ledger.recover()
    assert (done.rerun, done.lost, done.finished, done.replayed) == (1, 1, 1, 1)
    assert done.republished >= 1
    assert done.undelivered >= 1
    assert ledger.run(again).end(RETURNED)
    for may_rerun in (True, False):
        request, _ = ledger.start(1)
        lost(request.task_id, may_rerun)
        request, attempt = ledger.start(1)
        attempt.end(RETURNED)
        lost(request.task_id, may_rerun)
        lost(ledger.reserve(1).task_id, may_rerun)


def keep_up(ledger: Ledger) -> None:
    ledger.set("soon", 10, period="hour")
    ledger.reserve(1, budget="soon")
    soon = ledger.now() + 5_000_000
    ledger.put("balances", {"end_us": soon}, budget="soon")
    assert ledger.upkeep().made >= 1
    ledger.set("empty", 10, period="hour")
    ledger.put("balances", {"window_us": 0, "end_us": 1}, budget="empty")
    ledger.set("drained", 10)
    request = ledger.reserve(1, budget="drained")
    assert ledger.close("drained", drain=True) == "draining"
    settlement.revoke(ledger.store, ROOT, request.reservation_id, "revoked")
    done = ledger.upkeep()
    assert done.closed == ("drained",)


def govern(ledger: Ledger) -> None:
    assert ledger.grant("k", 10)
    assert not ledger.grant("k", 10)
    assert ledger.adjust("k", 10)
    ledger.store.read(grants.grants_of, ROOT, "b")
    ledger.set("b", 2000)
    ledger.set("c", 10, parent="org")
    ledger.set("c", 10, parent="b")
    request = ledger.reserve(1, budget="c")
    with pytest.raises(HoldsOpen):
        ledger.close("c")
    settlement.revoke(ledger.store, ROOT, request.reservation_id, "revoked")
    ledger.store.run(
        declaring.apply, {ROOT: [Budget("b", "tokens", 1500, "org"), Budget("d", "tokens", 5)]}
    )
    ledger.set("c", 10, period="day")
    ledger.balance("b")
    ledger.store.read(budgets.balances_of, ROOT)


def prove(ledger: Ledger) -> None:
    assert reconcile.reconcile(ledger.store, ledger.settings).ok
    reconcile.report(ledger.store, ledger.settings)
    ledger.put("balances", {"reserved": 77}, budget="small")
    assert len(reconcile.repair(ledger.store, ledger.settings)) == 1
    assert reconcile.fold(ledger.store, ledger.settings, -1_000_000) > 0


STEPS = (
    declare,
    reserve,
    reserve_many,
    relay,
    run,
    retry,
    park,
    end_early,
    recover,
    keep_up,
    govern,
    prove,
)


def test_only_the_roots_own_part_is_touched(ledger: Ledger) -> None:
    watch = Watch(ledger.store)
    with ledger.store.statement() as connection:
        before = watch.others(_all(connection))
    with watch.listen():
        for step in STEPS:
            step(ledger)
            assert watch.strays == {}, step.__name__
    assert len(watch.statements) > 100
    # The server's own count, of all sessions, agrees.
    with ledger.store.statement() as connection:
        after = _all(connection)
    assert watch.others(after) == before
    mine = {name.rsplit("_p", 1)[0] for name in after if name not in watch.others(after)}
    assert mine == set(schema.metadata.tables)


def _all(connection: sa.Connection) -> dict[str, int]:
    connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
    return touched(connection.connection.dbapi_connection, "pg_stat_user_tables")


def _forgets(connection: sa.Connection) -> None:
    connection.execute(sa.select(schema.outbox.c.task_id).where(schema.outbox.c.state == "due"))


def _joins(connection: sa.Connection) -> None:
    of, lines = schema.reservations, schema.lines
    same = lines.c.reservation_id == of.c.reservation_id
    connection.execute(sa.select(lines.c.line).join(of, same).where(of.c.root == ROOT)).all()


def _changes(connection: sa.Connection) -> None:
    connection.execute(schema.parked.update().values(checked_us=0))


@pytest.mark.parametrize("rootless", [_forgets, _joins, _changes])
def test_a_statement_that_forgets_its_root_is_found(
    ledger: Ledger, rootless: Callable[[sa.Connection], None]
) -> None:
    ledger.set("b", 100)
    ledger.reserve(1)
    watch = Watch(ledger.store)
    with watch.listen():
        ledger.reserve(1)
        ledger.store.run(outbox.prune, ROOT, 10)
        assert watch.strays == {}
        ledger.store.run(rootless)
    [(statement, parts)] = watch.strays.items()
    assert statement.startswith(("SELECT", "UPDATE"))
    assert len(parts) >= PARTS - 1
