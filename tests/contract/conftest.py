"""Fixtures of the contract suite: a store for each dialect, a root for each test."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import event

from celery_budget import reconcile
from celery_budget.settings import Settings
from celery_budget.store import Store, migrate
from tests.contract.racers import OneTry, racing_url
from tests.contract.roots import Watch
from tests.contract.support import Ledger

STORES = [
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.postgres),
]


@pytest.fixture(scope="session", params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated database for all tests of the session: each takes a root of its own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('store') / 'budget.db'}"
    else:
        url = request.getfixturevalue("postgres_server").create_database()
    store = Store(url)
    store.run(migrate.upgrade)
    store.dispose()
    return url


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
    yield funded
    assert racer.deadlocks() == before
    racer.dispose()
    funded.store = whole
