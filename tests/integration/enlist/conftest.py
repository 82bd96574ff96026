"""Ledgers of both dialects, copied from one that was made once, and who is connected to them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget.core.budgets import Budget
from celery_budget.store import Store, declaring, migrate
from tests.integration.enlist.support import KINDS, VARIANTS, Async, Caller, Client, Sqlite, path
from tests.integration.support import Shop
from tests.services.postgres import PostgresServer

Make = Callable[..., Caller]


def parameter(dialect: str, *more: Any, name: str | None = None) -> Any:
    """A parameter that is marked where it needs a server."""
    marks = [pytest.mark.postgres] if dialect == "postgresql" else []
    return pytest.param((dialect, *more), id=name or dialect, marks=marks)


def prepare(url: str) -> None:
    """Make a ledger with the budgets ``tenant:a`` and ``tenant:b`` of 10 tokens, and a table."""
    store = Store(url)
    store.run(migrate.upgrade)
    with store.transaction() as connection:
        for name in ("tenant:a", "tenant:b"):
            terms = {"limit": 10, "unit": "tokens"}
            assert isinstance(declaring.set_budget(connection, "default", name, terms), Budget)
        connection.execute(sa.text("CREATE TABLE business (word TEXT)"))
    store.dispose()


@pytest.fixture(scope="package")
def templates(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """The URL of a prepared ledger of a dialect."""
    made: dict[str, str] = {}

    def template(dialect: str) -> str:
        if dialect not in made:
            if dialect == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp('template') / 'budget.db'}"
            else:
                url = request.getfixturevalue("postgres_server").create_database()
            prepare(url)
            made[dialect] = url
        return made[dialect]

    return template


@pytest.fixture
def make_url(
    request: pytest.FixtureRequest, templates: Callable[[str], str], tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """Make a ledger of a dialect of one's own; its URL."""
    databases: list[str] = []

    def make(dialect: str) -> str:
        if dialect == "sqlite":
            file = tmp_path / f"budget-{len(databases)}.db"
            shutil.copy(path(templates("sqlite")), file)
            databases.append("")
            return f"sqlite:///{file}"
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.create_database(template=sa.make_url(templates("postgresql")).database)
        databases.append(url)
        return url

    yield make
    for url in filter(None, databases):
        request.getfixturevalue("postgres_server").drop_database(url)


@pytest.fixture
def make_caller(make_url: Callable[[str], str], make_shop: Callable[..., Shop]) -> Iterator[Make]:
    """Make a shop, and a client of a kind that is connected to its ledger."""
    made: list[Caller] = []

    def make(dialect: str, kind: type[Client] | None = None, **conf: Any) -> Caller:
        shop = make_shop(init=False, budget_database_url=make_url(dialect), **conf)
        caller = Caller(shop, kind or KINDS[dialect][0])
        made.append(caller)
        return caller

    yield make
    for caller in made:
        caller.close()


def named(kinds: dict[str, list[type[Client]]], *but: type[Client]) -> list[Any]:
    """Parameters for kinds of connections, without those that are of some class."""
    return [
        parameter(dialect, kind, name=f"{dialect}-{kind.__name__}")
        for dialect, some in kinds.items()
        for kind in some
        if not issubclass(kind, but)
    ]


@pytest.fixture(params=named(KINDS))
def caller(request: pytest.FixtureRequest, make_caller: Make) -> Caller:
    """A shop, and a client of each kind."""
    return make_caller(*request.param)


@pytest.fixture(params=named(KINDS, Async))
def synchronous(request: pytest.FixtureRequest, make_caller: Make) -> Caller:
    """The same, of kinds on which nothing is awaited."""
    return make_caller(*request.param)


@pytest.fixture(params=named(KINDS, Async, Sqlite))
def seen(request: pytest.FixtureRequest, make_caller: Make) -> Caller:
    """The same, of kinds whose savepoints are seen as well."""
    return make_caller(*request.param)


@pytest.fixture(params=[*named(KINDS), *named(VARIANTS)])
def any_caller(request: pytest.FixtureRequest, make_caller: Make) -> Caller:
    """The same, and of each variant."""
    return make_caller(*request.param)


@pytest.fixture(params=[parameter("sqlite"), parameter("postgresql")])
def either(request: pytest.FixtureRequest, make_caller: Make) -> Caller:
    """A shop on either store, with a SQLAlchemy connection."""
    return make_caller(*request.param)


@pytest.fixture
def on_sqlite(make_caller: Make) -> Caller:
    """A shop on SQLite, with a SQLAlchemy connection."""
    return make_caller("sqlite")


@pytest.fixture
def on_postgresql(make_caller: Make) -> Caller:
    """A shop on PostgreSQL, with a SQLAlchemy connection."""
    return make_caller("postgresql")
