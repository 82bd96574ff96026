"""Fixtures of the contract suite: a store for each dialect, a root for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection

from celery_budget import reconcile
from celery_budget.settings import Settings
from celery_budget.store import Store, migrate, windows
from tests.contract.racers import OneTry, racing_url
from tests.contract.roots import Watch
from tests.contract.support import Ledger

STORES = [
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.postgres),
    # With the counters of every budget over several rows.
    pytest.param("postgresql-striped", marks=pytest.mark.postgres),
]
#: Over so many, where a test does not say.
STRIPES = 4


#: What is counted is counted, and read, here; the others' tests do not know of stripes.
STRIPED = {
    f"test_{name}"
    for name in (
        *("batch", "budget_races", "deadlines", "grants", "hierarchy", "holdings", "model"),
        *("parking", "plans", "races", "reports", "reserve", "stops", "stripes", "tallies"),
        *("unenforced", "units", "usage", "windows"),
    )
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is run over stripes for nothing."""
    items[:] = [
        item
        for item in items
        if "postgresql-striped" not in item.nodeid
        or item.path.stem in STRIPED
        or item.path.parent.name != "contract"
    ]


@pytest.fixture(scope="session", params=STORES)
def store_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A migrated database for all tests of the session: each takes a root of its own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('store') / 'budget.db'}"
    else:
        url = request.getfixturevalue("postgres_server").create_database()
    store = Store(url)
    store.run(migrate.upgrade)
    store.dispose()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "postgresql-striped":
            patch.setattr(windows, "rows_for", spread(url))
        yield url


def spread(url: str) -> Callable[[Connection, int], int]:
    """Return what has the budgets of this database alone spread.

    The session's fixtures stay while tests of other folders run.
    """
    mine, rows_for = sa.make_url(url).database, windows.rows_for

    def rows(connection: Connection, stripes: int) -> int:
        if stripes == 1 and connection.engine.url.database == mine:
            return STRIPES
        return rows_for(connection, stripes)

    return rows


@pytest.fixture(scope="session")
def store(store_url: str, watch: Watch) -> Iterator[Store]:
    """The store of each dialect."""
    store = Store(store_url)
    if store.dialect == "postgresql":
        event.listen(store.engine, "before_cursor_execute", watch.note)
    yield store
    store.dispose()


@pytest.fixture(scope="session")
def watch() -> Watch:
    """What the session's store sends on PostgreSQL."""
    return Watch()


@pytest.fixture
def ledger(store: Store, store_url: str, watch: Watch) -> Iterator[Ledger]:
    """An empty ledger; whatever the test did to it, it adds up afterwards.

    And every request that is open is named, with what becomes of it. No statement left its root.
    """
    ledger = Ledger(store, Settings(database_url=store_url, root=f"root-{uuid4().hex[:12]}"))
    yield ledger
    if ledger.conserved:
        found = reconcile.reconcile(store, ledger.settings, limit=10_000)
        assert found.mismatches == ()
        named = {step.task_id for one in found.pending for step in one.steps}
        assert {row.task_id for row in ledger.rows("reservations", ended_us=None)} <= named
    assert watch.faults() == []


@pytest.fixture
def funded(ledger: Ledger) -> Ledger:
    """A ledger whose budget ``b`` has 100 tokens."""
    ledger.set("b", 100)
    return ledger


@pytest.fixture
def racing(funded: Ledger) -> Iterator[Ledger]:
    """A ledger on which a deadlock or a time-out is an error and not a second try."""
    whole = funded.store
    funded.store = racer = OneTry(racing_url(funded.settings.database_url))
    before = racer.deadlocks()
    try:
        yield funded
        assert racer.deadlocks() == before
    finally:
        # The next test waits until these sessions have ended.
        racer.dispose()
        funded.store = whole
