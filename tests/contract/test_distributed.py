"""A ledger whose tables are distributed by root: what Citus asks of it, and that it works so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_budget import CeleryBudget, DistributionError, budgeted, reconcile
from celery_budget.integration.checkup import collect
from celery_budget.store import Store, distributed, migrate, schema
from tests.contract.roots import body_faults, faults
from tests.contract.support import RETRIED, RETURNED, Ledger
from tests.integration.support import make_app
from tests.services import citus

pytestmark = pytest.mark.postgres

#: On the stand-in, and on a real cluster where there is one.
CLUSTERS = ["stand-in", *(["citus"] if os.environ.get(citus.VARIABLE) else [])]


@pytest.fixture(params=CLUSTERS)
def cluster_url(request: pytest.FixtureRequest) -> str:
    """A database that can be distributed and is not yet, unless it is a real cluster's."""
    if request.param == "citus":
        return os.environ[citus.VARIABLE]
    url = str(request.getfixturevalue("postgres_url"))
    citus.stand_in(url)
    return url


@pytest.fixture
def installed(cluster_url: str) -> Iterator[CeleryBudget]:
    """An application whose ledger is distributed."""
    app = make_app(
        budget=False, budget_database_url=cluster_url, budget_root=f"root-{uuid4().hex[:12]}"
    )
    made = CeleryBudget(app)
    made.init(distributed=True)
    yield made
    made.store.dispose()


def test_all_tables_are_in_one_group_by_root(installed: CeleryBudget) -> None:
    question = "SELECT logicalrelid::text, partmethod, colocationid FROM pg_dist_partition"
    with installed.store.snapshot() as connection:
        rows = connection.execute(sa.text(question)).all()
    placed = {name: method for name, method, _ in rows if name.startswith("budget_")}
    assert placed.pop(migrate.VERSION_TABLE) == "n"
    assert placed == dict.fromkeys((table.name for table in schema.metadata.tables.values()), "h")
    assert len({group for name, method, group in rows if placed.get(name) == "h"}) == 1
    assert installed.store.read(distributed.is_distributed)


@pytest.mark.skipif("citus" in CLUSTERS, reason="asks what the stand-in has noted")
def test_functions_that_are_given_a_root_run_where_it_is(installed: CeleryBudget) -> None:
    with installed.store.snapshot() as connection:
        noted = connection.execute(
            sa.text(
                "SELECT p.proname, f.argument, f.colocated_with::text, f.forced"
                " FROM distributed_functions f JOIN pg_proc p ON p.oid = f.signature"
            )
        ).all()
    functions = {name: tuple(how) for name, *how in noted}
    assert functions.pop("budget_clock") == (None, None, False)
    assert {"budget_reserve", "budget_move", "budget_lock", "budget_claim"} <= set(functions)
    assert set(functions.values()) == {("p_root", "budget_budgets", True)}


def test_a_distributed_ledger_does_all_that_another_does(installed: CeleryBudget) -> None:
    store = Store(installed.settings.database_url)
    ledger = Ledger(store, installed.settings)
    statements: list[str] = []
    ledger.set("b", 100)
    sa.event.listen(
        store.engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *_: statements.append(statement),
    )
    try:
        request = ledger.reserve(60)
        assert ledger.balance() == (60, 0)
        assert ledger.relay().published == 1
        attempt = ledger.run(request)
        again, _ = ledger.retry(request, attempt)
        assert attempt.end(RETRIED)
        assert ledger.relay().published == 1
        attempt = ledger.run(again)
        assert attempt.end(RETURNED)
        attempt.close()
        lapsed, _ = ledger.start(5)
        ledger.lapse(lapsed)
        ledger.recover()
        ledger.sweep()
        ledger.upkeep()
        assert ledger.balance() == (5, 60)
        found = reconcile.reconcile(store, ledger.settings)
        assert found.mismatches == ()
        assert reconcile.report(store, ledger.settings).counts["settled"] == 1
        assert any("budget_clock()" in one for one in statements)
        assert not any("clock_timestamp()" in one for one in statements)
    finally:
        store.dispose()


WHOLE = "the ledger is distributed by root, with all of its tables"


def rule(installed: CeleryBudget) -> tuple[str, str]:
    """What ``budget check`` says of it: the level, and what was seen."""
    seen = collect(installed, 0.05).store
    assert (seen.error, seen.schema_error) == ("", "")
    [found] = [one for one in installed.checkup(0.05).findings if one.id == "distributed"]
    return found.level, found.seen


@pytest.mark.skipif("citus" in CLUSTERS, reason="takes a table out of the stand-in's catalogue")
def test_what_was_distributed_stays_so_and_gets_what_is_new(installed: CeleryBudget) -> None:
    assert rule(installed) == ("ok", WHOLE)
    with installed.store.transaction() as connection:
        connection.execute(
            sa.text("DELETE FROM pg_dist_partition WHERE logicalrelid = 'budget_lanes'::regclass")
        )
    assert rule(installed) == ("error", "not distributed: budget_lanes")
    assert installed.init() == migrate.head()
    assert rule(installed) == ("ok", WHOLE)


def test_a_file_of_several_roots_is_refused_as_a_whole(installed: CeleryBudget) -> None:
    budget = '[[budget]]\nname = "a"\nlimit = 1\nunit = "tokens"\nroot = "{}"\n'
    text = "".join(map(budget.format, ("one", "two")))
    with pytest.raises(
        DistributionError, match="would change the roots 'one', 'two' in one transaction"
    ):
        installed.apply(text)
    assert installed.declared(["one", "two"]) == {"one": [], "two": []}


def _draft() -> None: ...


def enlist_both(made: CeleryBudget) -> tuple[int, ...]:
    """Publish under two roots in one transaction, and once more under the second; what each holds.

    What is refused there leaves the transaction as it was.
    """
    roots = [made.settings.root, f"root-{uuid4().hex[:12]}"]
    url = made.settings.database_url
    apps = [make_app(budget=False, budget_database_url=url, budget_root=root) for root in roots]
    budgets = [CeleryBudget(app) for app in apps]
    engine = sa.create_engine(url)
    try:
        tasks = [
            budgeted(budget="b", estimate=10)(app.task(name="shop.draft", shared=False)(_draft))
            for app in apps
        ]
        for budget in budgets:
            budget.set("b", limit=100, unit="tokens")
        with engine.begin() as connection:
            for number in (0, 1, 0):
                with suppress(DistributionError), budgets[number].enlist(connection):
                    tasks[number].delay()
        with engine.begin() as connection, budgets[1].enlist(connection):
            tasks[1].delay()
        return tuple(budget.balance("b").reserved for budget in budgets)
    finally:
        engine.dispose()
        for budget in budgets:
            budget.store.dispose()


def test_a_transaction_that_is_enlisted_stays_in_one_root(installed: CeleryBudget) -> None:
    assert enlist_both(installed) == (20, 10)


def test_one_that_is_not_distributed_takes_several_roots(postgres_url: str) -> None:
    made = CeleryBudget(make_app(budget=False, budget_database_url=postgres_url))
    made.init()
    assert enlist_both(made) == (20, 20)
    made.store.dispose()


def test_without_citus_it_is_said_what_to_install(postgres_url: str, sqlite_url: str) -> None:
    none = "the database has no Citus extension; install Citus 11 or later"
    for url, said in ((postgres_url, none), (sqlite_url, "SQLite is one file")):
        store = Store(url)
        store.run(migrate.upgrade)
        with pytest.raises(DistributionError, match=said):
            store.run(distributed.distribute)
        assert not store.read(distributed.is_distributed)
        store.dispose()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("CREATE UNIQUE INDEX ON budget_outbox (outbox_id)", "does not have the distribution"),
        (
            "ALTER TABLE budget_lines ADD FOREIGN KEY (root, budget) REFERENCES budget_budgets",
            "cannot create foreign key",
        ),
        ("CREATE TABLE budget_child () INHERITS (budget_lines)", "inheritance"),
        ("UPDATE pg_dist_node SET shouldhaveshards = false", "no node of this Citus"),
        (
            "UPDATE pg_extension SET extversion = '10.2-5' WHERE extname = 'citus'",
            "Citus is 10.2-5 here; upgrade it",
        ),
    ],
    ids=["unique", "foreign", "inherits", "nodes", "version"],
)
def test_the_stand_in_refuses_what_citus_does(postgres_url: str, change: str, said: str) -> None:
    citus.stand_in(postgres_url)
    store = Store(postgres_url)
    store.run(migrate.upgrade)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("SET allow_system_table_mods = on")
        for one in change.split(";"):
            connection.exec_driver_sql(one)
        connection.exec_driver_sql("RESET allow_system_table_mods")
    with pytest.raises(Exception, match=said):
        store.run(distributed.distribute)
    assert not store.read(distributed.is_distributed)
    store.dispose()


def test_every_statement_of_stored_functions_stays_in_the_root_it_is_given(
    installed: CeleryBudget,
) -> None:
    question = (
        "SELECT proname, prosrc FROM pg_proc WHERE starts_with(proname, 'budget_')"
        " AND prosrc LIKE '%budget\\_%'"
    )
    with installed.store.snapshot() as connection:
        bodies = {row.proname: row.prosrc for row in connection.execute(sa.text(question))}
    assert {"budget_reserve", "budget_move", "budget_decide", "budget_claim"} <= set(bodies)
    found = {name: wrong for name, body in bodies.items() if (wrong := body_faults(body))}
    assert found == {}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("SELECT 1 FROM budget_outbox WHERE state = 'due'", "budget_outbox is not restricted"),
        (
            "SELECT 1 FROM budget_outbox o JOIN budget_lines l ON l.used = 1 WHERE o.root = %(r)s",
            "budget_lines is not restricted",
        ),
        ("SELECT 1 FROM budget_outbox WHERE root = %(r)s OR state = 'due'", "is not restricted"),
        ("UPDATE budget_lines SET used = 1 WHERE budget = %(b)s", "budget_lines is not restricted"),
        ("INSERT INTO budget_lanes (name) VALUES (%(n)s)", "budget_lanes gets rows of no root"),
        (
            "INSERT INTO budget_lanes (root) SELECT name FROM budget_budgets WHERE root = %(r)s",
            "gets rows of name",
        ),
        (
            "UPDATE budget_lanes SET name = 'n' WHERE root = %(r)s RETURNING clock_timestamp()",
            "in RETURNING",
        ),
        (
            "UPDATE budget_lanes SET checked_us = coalesce(1, budget_clock()) WHERE root = %(r)s",
            "in CASE or COALESCE",
        ),
        ("DELETE FROM budget_lanes WHERE root = %(r)s AND random() < 1", "rand() is volatile"),
        ("UPDATE budget_lanes SET ageing = nextval('s') WHERE root = %(r)s", "nextval() is"),
    ],
)
def test_a_statement_that_leaves_its_root_would_be_found(statement: str, said: str) -> None:
    [found] = faults(statement)
    assert said in found


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1 FROM budget_outbox o, budget_lines l WHERE o.root = %(r)s AND l.root = o.root",
        """SELECT 1 FROM budget_outbox o WHERE o.root = %(r)s
           AND EXISTS (SELECT 1 FROM budget_lines l WHERE l.root = o.root)""",
        """WITH d AS (SELECT root FROM budget_outbox WHERE root = %(r)s FOR UPDATE SKIP LOCKED)
           UPDATE budget_outbox o SET state = 'x' FROM d WHERE o.root = %(r)s""",
        "INSERT INTO budget_lanes (root, name) VALUES (%(r)s, 'n') ON CONFLICT DO NOTHING",
    ],
)
def test_one_that_stays_in_its_root_is_let_through(statement: str) -> None:
    assert faults(statement) == []
