"""What cannot be enlisted, and what cannot be done meanwhile: an error says so, at once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from django.db import transaction
from sqlalchemy import orm

from celery_budget.errors import EnlistError, PolicyError, SchemaError, StoreError
from celery_budget.store import enlisted
from tests.contract.racers import Beside
from tests.integration.enlist.conftest import Make, named, parameter
from tests.integration.enlist.support import (
    KINDS,
    VARIANTS,
    Async,
    AsyncPsycopg,
    AsyncSessions,
    BegunByHand,
    Caller,
    Django,
    Psycopg,
    PsycopgBlock,
    Session,
    Sqlalchemy,
    Sqlite,
    conninfo,
    path,
)
from tests.integration.support import Shop

SERVERS = {"postgresql": KINDS["postgresql"]}


def refuse(caller: Caller, given: Any, said: str, **options: Any) -> None:
    """Check that this cannot be enlisted, and why."""
    reached = []
    with (
        pytest.raises(EnlistError, match=said),
        caller.shop.budget.enlist(given, **options),
    ):
        reached.append(True)
    assert not reached


@pytest.mark.parametrize(
    "make",
    [
        lambda client: object(),
        lambda client: None,
        lambda client: client.engine,
        lambda client: "postgresql://",
        lambda client: client.given.connection,
    ],
)
def test_what_is_no_connection(on_sqlite: Caller, make: Callable[[Any], Any]) -> None:
    refuse(on_sqlite, make(on_sqlite.client), "cannot be enlisted; give a SQLAlchemy Session")


@pytest.mark.parametrize("option", ["immediate", "partial", "any_isolation"])
def test_options_are_true_or_false(on_sqlite: Caller, option: str) -> None:
    with pytest.raises(PolicyError, match=f"{option}= is 1"):
        on_sqlite.shop.budget.enlist(on_sqlite.client.given, **{option: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("ours", [parameter("sqlite"), parameter("postgresql")])
def test_a_connection_to_another_dialect(
    ours: tuple[str], make_caller: Make, make_url: Callable[[str], str], tmp_path: Any
) -> None:
    [dialect] = ours
    caller = make_caller(dialect)
    if dialect == "postgresql":
        with sqlite3.connect(tmp_path / "other.db") as other:
            refuse(caller, other, "is to sqlite and the ledger is in postgresql")
        other.close()
    else:
        mysql = sa.create_mock_engine("sqlite://", lambda *args: None)
        refuse(caller, mysql, "cannot be enlisted")


@pytest.mark.postgres
def test_a_server_connection_for_a_ledger_in_a_file(
    make_caller: Make, make_url: Callable[[str], str]
) -> None:
    caller = make_caller("sqlite")
    with psycopg.connect(conninfo(make_url("postgresql"))) as other:
        refuse(caller, other, "is to postgresql and the ledger is in sqlite")


@pytest.mark.parametrize("kind", KINDS["sqlite"], ids=lambda kind: kind.__name__)
def test_a_connection_to_another_file(make_caller: Make, kind: type[Any]) -> None:
    caller, other = make_caller("sqlite"), make_caller("sqlite", kind)
    with pytest.raises(EnlistError, match=r"is to the SQLite file .* and the ledger is in"):
        caller.enlisted_by(other.client)


def test_a_connection_to_no_file(on_sqlite: Caller) -> None:
    with sqlite3.connect(":memory:") as other:
        refuse(on_sqlite, other, "is to the SQLite file :memory:")
    other.close()


def test_the_same_file_by_another_name(on_sqlite: Caller, tmp_path: Any) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path(on_sqlite.shop.budget.settings.database_url))
    other = sqlite3.connect(link)
    with on_sqlite.shop.budget.enlist(other):
        on_sqlite.draft.delay("a")
    other.commit()
    other.close()
    assert on_sqlite.committed() == ([], 1, 1)


@pytest.mark.postgres
@pytest.mark.parametrize("kind", KINDS["postgresql"], ids=lambda kind: kind.__name__)
def test_a_connection_to_another_database(make_caller: Make, kind: type[Any]) -> None:
    caller, other = make_caller("postgresql"), make_caller("postgresql", kind)
    for _ in range(2):
        with pytest.raises(EnlistError, match="another database of the server than the ledger's"):
            caller.enlisted_by(other.client)
    other.client.enlisted(lambda batch: other.draft.delay("a"))
    other.client.commit()
    assert other.committed() == ([], 1, 1)


@pytest.mark.postgres
def test_a_connection_that_sees_other_tables(on_postgresql: Caller) -> None:
    client = on_postgresql.another(Psycopg)
    client.execute("SET search_path TO pg_catalog")
    refuse(on_postgresql, client.given, "search_path budget_reservations is not the ledger's")


@pytest.mark.postgres
def test_tables_that_were_made_anew(on_postgresql: Caller) -> None:
    on_postgresql.client.enlisted(lambda batch: on_postgresql.draft.delay("a"))
    on_postgresql.client.rollback()
    on_postgresql.shop.sql(sa.text("CREATE TABLE copy (LIKE budget_reservations INCLUDING ALL)"))
    on_postgresql.shop.sql(sa.text("ALTER TABLE budget_reservations RENAME TO gone"))
    on_postgresql.shop.sql(sa.text("ALTER TABLE copy RENAME TO budget_reservations"))
    for client in (on_postgresql.client, on_postgresql.another()):
        client.enlisted(lambda batch: on_postgresql.draft.delay("a"))
        client.rollback()


def test_a_ledger_without_tables(
    make_shop: Callable[..., Shop], tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    shop = make_shop(init=False, budget_database_url=f"sqlite:///{tmp_path / 'new.db'}")
    caller = Caller(shop, Sqlalchemy)
    with pytest.raises(SchemaError):
        caller.client.enlisted(lambda batch: caller.draft.delay("a"))
    caller.close()


@pytest.mark.postgres
def test_a_server_without_tables(make_shop: Callable[..., Shop], postgres_url: str) -> None:
    caller = Caller(make_shop(init=False, budget_database_url=postgres_url), Psycopg)
    with pytest.raises(SchemaError, match="the ledger's tables are missing"):
        caller.client.enlisted(lambda batch: caller.draft.delay("a"))
    caller.close()


@pytest.mark.postgres
def test_psycopg_in_autocommit(on_postgresql: Caller) -> None:
    client = on_postgresql.another(PsycopgBlock)
    client.rollback()
    connection = psycopg.connect(client.given.info.dsn, autocommit=True)
    refuse(on_postgresql, connection, "is in autocommit and no transaction is open")
    with connection.transaction(), on_postgresql.shop.budget.enlist(connection):
        on_postgresql.draft.delay("a")
    connection.close()
    assert on_postgresql.committed() == ([], 1, 1)


def test_sqlalchemy_in_autocommit(either: Caller) -> None:
    client = either.client
    assert isinstance(client, Sqlalchemy)
    with client.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        refuse(either, connection, "is in autocommit and no transaction is open")


def test_sqlite3_in_autocommit(on_sqlite: Caller) -> None:
    other = sqlite3.connect(path(on_sqlite.shop.budget.settings.database_url), isolation_level=None)
    refuse(on_sqlite, other, "is in autocommit and no transaction is open")
    other.close()


@pytest.mark.parametrize("given", [parameter("sqlite"), parameter("postgresql")])
def test_django_in_autocommit(given: tuple[str], make_caller: Make) -> None:
    caller = make_caller(given[0], Django)
    client = caller.client
    assert isinstance(client, Django)
    client.end()
    refuse(caller, client.given, r"'enlist' is in autocommit.* block inside transaction.atomic\(\)")
    client.begin()


@pytest.mark.postgres
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_stricter_isolation(on_postgresql: Caller, level: str) -> None:
    client = on_postgresql.another(Psycopg)
    client.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    refuse(on_postgresql, client.given, f"the transaction is {level}.*any_isolation=True")
    client.rollback()
    on_postgresql.draft.delay("a", 1)
    client.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    client.enlisted(lambda batch: on_postgresql.draft.delay("a", 2), any_isolation=True)
    client.commit()
    assert on_postgresql.committed() == ([], 3, 2)


@pytest.mark.postgres
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_race_in_a_stricter_isolation(on_postgresql: Caller, level: str, count: int) -> None:
    client = on_postgresql.another(Psycopg)
    client.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    client.write("order")
    on_postgresql.draft.delay("a", 1)
    with pytest.raises(StoreError) as refused:
        client.enlisted(
            lambda batch: [on_postgresql.draft.delay("a") for _ in range(count)],
            any_isolation=True,
        )
    assert refused.value.retryable
    client.commit()
    assert on_postgresql.committed() == (["order"], 1, 1)


@pytest.mark.postgres
def test_what_was_made_meanwhile_a_snapshot_does_not_see(on_postgresql: Caller) -> None:
    on_postgresql.shop.budget.set("tenant:*", limit=5, unit="tokens")
    client = on_postgresql.another(Psycopg)
    client.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    client.write("order")
    with pytest.raises(StoreError, match="was made since this REPEATABLE READ") as refused:
        client.enlisted(lambda batch: on_postgresql.draft.delay("new"), any_isolation=True)
    assert refused.value.retryable
    client.rollback()
    client.enlisted(lambda batch: on_postgresql.draft.delay("new"))


@pytest.mark.parametrize("given", named(KINDS, Session, AsyncSessions, Django))
def test_a_closed_connection(given: tuple[str, type[Any]], make_caller: Make) -> None:
    caller = make_caller(*given)
    client = caller.client
    if isinstance(client, Async):
        client.wait(client.given.close())
    elif isinstance(client, PsycopgBlock):
        client.given = psycopg.connect(conninfo(caller.shop.budget.settings.database_url))
        client.given.close()
    else:
        client.given.close()
    with pytest.raises(EnlistError, match="the connection is closed"):
        client.enlisted(lambda batch: caller.draft.delay("a"))


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        pytest.param(*one.values, inside, id=f"{one.id}-{inside}", marks=one.marks)
        for inside, some in ((False, named(SERVERS)), (True, named(SERVERS, Async)))
        for one in some
    ],
)
def test_a_failed_transaction(
    given: tuple[str, type[Any]], inside: bool, make_caller: Make
) -> None:
    caller = make_caller(*given)
    client = caller.client

    def fail(batch: Any = None) -> None:
        with pytest.raises(Exception, match="division by zero"):
            client.execute("SELECT 1 / 0")

    def block(batch: Any) -> None:
        caller.draft.delay("a")
        fail()

    if not inside:
        fail()
    with pytest.raises(EnlistError, match="takes no more statements; roll it back"):
        client.enlisted(block if inside else lambda batch: caller.draft.delay("a"))
    client.rollback()
    client.enlisted(lambda batch: caller.draft.delay("a"))
    client.commit()
    assert caller.committed() == ([], 1, 1)


@pytest.mark.parametrize("given", [parameter("sqlite"), parameter("postgresql")])
def test_a_django_block_that_has_to_be_rolled_back(given: tuple[str], make_caller: Make) -> None:
    caller = make_caller(given[0], Django)
    transaction.set_rollback(True, using=Django.alias)
    refuse(caller, caller.client.given, "takes no more statements; roll it back")
    transaction.set_rollback(False, using=Django.alias)


@pytest.mark.postgres
@pytest.mark.parametrize("inside", [False, True])
def test_a_read_only_transaction(on_postgresql: Caller, inside: bool) -> None:
    client = on_postgresql.another(Psycopg)

    def read_only() -> None:
        client.execute("SET TRANSACTION READ ONLY")

    def block(batch: Any) -> None:
        if inside:
            read_only()
        on_postgresql.draft.delay("a")

    if not inside:
        read_only()
    with pytest.raises(EnlistError, match="the transaction is read-only"):
        client.enlisted(block)


def test_a_read_only_file(on_sqlite: Caller) -> None:
    client = on_sqlite.another(Sqlite)
    client.execute("PRAGMA query_only = 1")
    with pytest.raises(EnlistError, match="the transaction is read-only"):
        client.enlisted(lambda batch: on_sqlite.draft.delay("a"))


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("given", [*named(KINDS, Async, Django, PsycopgBlock), *named(VARIANTS)])
def test_a_transaction_that_ends_inside_of_the_block(
    given: tuple[str, type[Any]], end: str, make_caller: Make
) -> None:
    caller = make_caller(*given)
    client = caller.client

    def block(batch: Any) -> None:
        client.write("order")
        caller.draft.delay("a")
        getattr(client.given if isinstance(client, Sqlite) else client, end)()

    if isinstance(client, (BegunByHand, Sqlite)):
        client.write("first")
    with pytest.raises(EnlistError, match=r"in which the block was opened has ended"):
        client.enlisted(block)
    client.commit()
    assert caller.committed()[1:] == (0, 0)


def test_a_savepoint_that_ends_inside_of_the_block(seen: Caller) -> None:
    caller, client = seen, seen.client
    savepoint = client.savepoint()
    savepoint.__enter__()

    def block(batch: Any) -> None:
        caller.draft.delay("a")
        savepoint.__exit__(None, None, None)

    with pytest.raises(EnlistError, match=r"in which the block was opened has ended"):
        client.enlisted(block)
    client.commit()
    assert caller.committed() == ([], 0, 0)


def test_another_connection_to_the_same_file(on_sqlite: Caller) -> None:
    other = on_sqlite.another(Sqlite)

    def block(batch: Any) -> None:
        refuse(on_sqlite, other.given, "another connection to the same SQLite file is enlisted")
        # The same one is one writer.
        on_sqlite.client.enlisted(lambda inner: on_sqlite.draft.delay("a", 1))
        on_sqlite.draft.delay("a", 2)

    on_sqlite.client.enlisted(block)
    refuse(on_sqlite, other.given, "another connection to the same SQLite file is enlisted")
    on_sqlite.client.commit()
    other.enlisted(lambda batch: on_sqlite.draft.delay("a", 4))
    other.commit()
    assert on_sqlite.committed() == ([], 7, 3)


@pytest.mark.parametrize("kind", KINDS["sqlite"], ids=lambda kind: kind.__name__)
def test_a_second_writer_to_the_same_file(make_caller: Make, kind: type[Any]) -> None:
    caller = make_caller("sqlite", kind)
    budget = caller.shop.budget

    def by_batch() -> None:
        with budget.batch():
            caller.draft.delay("a")

    writers = [
        lambda: budget.grant("tenant:a", 1),
        lambda: budget.set("tenant:a", limit=5),
        by_batch,
    ]

    def block(batch: Any) -> None:
        for write in writers:
            with pytest.raises(EnlistError, match="SQLite has one writer"):
                write()
        assert budget.balance("tenant:a").limit == 10
        caller.draft.delay("a")

    def ended(batch: Any = None) -> None:
        caller.client.enlisted(block)
        for write in (*writers, lambda: caller.draft.delay("a")):
            with pytest.raises(EnlistError, match="SQLite has one writer"):
                write()

    if isinstance(caller.client, Async):
        # Each of its verbs is a task, with a context of its own.
        caller.client.enlisted(block)
    else:
        ended()
    caller.client.commit()
    for write in writers:
        write()
    assert caller.committed() == ([], 2, 2)
    assert budget.balance("tenant:a").limit == 5 + 1


def test_another_context_waits_for_the_writer(make_caller: Make) -> None:
    caller = make_caller("sqlite", Session, budget_lock_seconds=0.05)
    caller.client.enlisted(lambda batch: caller.draft.delay("a", 1))
    with pytest.raises(StoreError) as busy:
        Beside(lambda: caller.draft.delay("a", 2)).result()
    assert busy.value.retryable
    with pytest.raises(StoreError):
        Beside(caller.shop.relay).result()
    caller.client.commit()
    Beside(lambda: caller.draft.delay("a", 2)).result()
    assert caller.committed() == ([], 3, 2)


def test_with_and_async_with(either: Caller) -> None:
    async def wrong() -> None:
        async with either.shop.budget.enlist(either.client.given):
            raise AssertionError

    with pytest.raises(EnlistError, match="is not asynchronous; use 'with'"):
        asyncio.run(wrong())
    for kind in (Async, AsyncSessions):
        given = either.another(kind).given
        refuse(either, given, "is asynchronous; use 'async with'")


@pytest.mark.postgres
def test_with_for_an_asynchronous_psycopg(on_postgresql: Caller) -> None:
    refuse(on_postgresql, on_postgresql.another(AsyncPsycopg).given, "use 'async with'")


def test_an_asynchronous_connection_that_was_not_started(either: Caller) -> None:
    client = either.another(Async)
    assert isinstance(client, Async)
    client.wait(client.given.close())
    client.given = client.engine.connect()
    with pytest.raises(EnlistError, match="the connection is closed"):
        client.enlisted(lambda batch: None)
    client.given = client.wait(client.amade())


def test_an_asynchronous_connection_without_greenlet(
    either: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = either.another(Async).given
    monkeypatch.setattr(enlisted, "find_spec", lambda name: None)
    with pytest.raises(EnlistError, match=r"install 'SQLAlchemy\[asyncio\]'"):
        either.shop.budget.enlist(given)


def test_a_session_without_a_bind(on_sqlite: Caller) -> None:
    refuse(on_sqlite, orm.Session(), "this cannot be enlisted: .*bind")


def test_a_block_is_opened_once(either: Caller) -> None:
    block = either.shop.budget.enlist(either.client.given)
    with block:
        pass
    with pytest.raises(PolicyError, match="a batch is one block"), block:
        pass
