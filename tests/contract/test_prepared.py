"""Statements that go past SQLAlchemy: what they return, how they fail, when they are prepared."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from celery_budget.errors import StoreError
from celery_budget.store import Store
from celery_budget.store.prepared import (
    BIGINT,
    BIGINTS,
    BOOLEAN,
    BYTES,
    INTEGER,
    TEXT,
    TEXTS,
    UUID_,
    UUIDS,
    Direct,
    Statement,
)

pytestmark = pytest.mark.postgres

ONE = uuid.UUID(int=1)

#: Says each value back, arrays as text.
ECHO = Statement(
    "SELECT CAST(:text AS text) AS text, CAST(:big AS bigint) AS big, CAST(:small AS int) AS small,"
    " CAST(:yes AS boolean) AS yes, CAST(:id AS uuid) AS id, CAST(:raw AS bytea) AS raw,"
    " CAST(CAST(:texts AS text[]) AS text) AS texts,"
    " CAST(CAST(:bigs AS bigint[]) AS text) AS bigs,"
    " CAST(CAST(:ids AS uuid[]) AS text) AS ids",
    given={
        "text": TEXT,
        "big": BIGINT,
        "small": INTEGER,
        "yes": BOOLEAN,
        "id": UUID_,
        "raw": BYTES,
        "texts": TEXTS,
        "bigs": BIGINTS,
        "ids": UUIDS,
    },
    found={
        "text": TEXT,
        "big": BIGINT,
        "small": INTEGER,
        "yes": BOOLEAN,
        "id": UUID_,
        "raw": BYTES,
        "texts": TEXT,
        "bigs": TEXT,
        "ids": TEXT,
    },
)
SAID: dict[str, Any] = {
    "text": "ä ' \\ 中",
    "big": -(2**63),
    "small": -1,
    "yes": True,
    "id": ONE,
    "raw": b"\0\xff",
    "texts": ["a,b", None, ""],
    "bigs": [0, None, 2**63 - 1],
    "ids": [ONE],
}
DIVIDE = Statement("SELECT 1 / :by AS it", {"by": BIGINT}, {"it": BIGINT})
SERIES = Statement("SELECT g AS it FROM generate_series(1, :to) g", {"to": BIGINT}, {"it": BIGINT})
SESSION = Statement("SELECT pg_backend_pid() AS it, :n", {"n": BIGINT}, {"it": INTEGER})


@pytest.fixture
def store(postgres_server: Any) -> Iterator[Store]:
    store = Store(postgres_server.url)
    yield store
    store.dispose()


def names(store: Store) -> int:
    """How many statements the one session has prepared of ours."""
    count = sa.text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE '\\_budget%'")
    return int(store.run_statement(lambda connection: connection.execute(count).scalar_one()))


@pytest.mark.parametrize("values", [SAID, dict.fromkeys(SAID), {**SAID, "texts": [], "yes": False}])
def test_values_come_back_as_through_sqlalchemy(store: Store, values: dict[str, Any]) -> None:
    with store.statement() as direct, store.transaction() as other:
        assert isinstance(direct, Direct)
        expected = ECHO.one(other, values)._asdict()
        for _ in range(7):
            row = ECHO.one(direct, values)
            assert {name: getattr(row, name) for name in expected} == expected
            assert not hasattr(row, "other")


def test_several_rows_are_returned_in_order(store: Store) -> None:
    with store.statement() as direct:
        assert [row.it for row in SERIES.all(direct, {"to": 3})] == [1, 2, 3]
        assert SERIES.all(direct, {"to": 0}) == []


@pytest.mark.parametrize(("given", "after"), [("", 5), ("?prepare_threshold=1", 1)])
def test_a_statement_is_prepared_once_a_session(
    postgres_server: Any, given: str, after: int
) -> None:
    store = Store(f"{postgres_server.url}{given}", pool_size=1)
    for _ in range(after):
        assert names(store) == 0
        store.run_statement(DIVIDE.one, {"by": 1})
    for _ in range(3):
        store.run_statement(DIVIDE.one, {"by": 1})
        assert names(store) == 1
    store.dispose()


def test_what_fails_fails_as_ours_and_the_connection_stays(store: Store) -> None:
    session = store.run_statement(SESSION.one, {"n": 1}).it
    for _ in range(7):
        with pytest.raises(StoreError, match="division by zero") as caught:
            store.run_statement(DIVIDE.one, {"by": 0})
        assert not caught.value.retryable
        assert store.run_statement(DIVIDE.one, {"by": 1}).it == 1
    assert store.run_statement(SESSION.one, {"n": 1}).it == session


@pytest.mark.parametrize(("kind", "value"), [(BIGINT, 2**63), (TEXT, "a\0b"), (TEXT, "\ud800")])
def test_what_no_database_takes_is_ours_and_final(store: Store, kind: Any, value: Any) -> None:
    statement = Statement("SELECT :it AS it", {"it": kind}, {"it": kind})
    with pytest.raises(StoreError) as caught:
        store.run_statement(statement.one, {"it": value})
    assert not caught.value.retryable


@pytest.mark.parametrize("reset", ["DEALLOCATE ALL", "DISCARD ALL"])
def test_names_the_server_has_forgotten_are_made_anew(postgres_server: Any, reset: str) -> None:
    """As where a proxy resets the sessions that it lends to one after another."""
    store = Store(f"{postgres_server.url}?prepare_threshold=1", pool_size=1)

    def ask() -> int:
        # Once: what fails is not tried again.
        with store.statement() as connection:
            return int(SESSION.one(connection, {"n": 1}).it)

    session = ask()
    for _ in range(3):
        assert [ask(), ask(), ask()] == [session] * 3
        # Past psycopg, which would forget its own names with it.
        with store.statement() as connection:
            connection.connection.driver_connection.pgconn.exec_(reset.encode())
    store.dispose()


def test_who_only_reads_leaves_what_is_prepared(postgres_server: Any) -> None:
    store = Store(f"{postgres_server.url}?prepare_threshold=0", pool_size=1)
    store.run_statement(SESSION.one, {"n": 1})
    store.read(lambda connection: connection.execute(ONE).scalar_one())
    assert names(store) == 1
    store.dispose()


def test_what_psycopg_has_prepared_itself_is_prepared_again(postgres_server: Any) -> None:
    """By another connection: where nothing is rolled back it keeps its names for good."""
    store = Store(f"{postgres_server.url}?prepare_threshold=0", pool_size=1)
    for run in (store.run_statement, store.run):
        for _ in range(2):
            assert run(lambda connection: connection.execute(ONE).scalar_one()) == 1
            with store.statement() as connection:
                connection.connection.driver_connection.pgconn.exec_(b"DISCARD ALL")
    store.dispose()


ONE = sa.text("SELECT 1")


def test_connections_that_were_cut_are_left_by_all(store: Store) -> None:
    """One of them finds it out; the others would cost a caller a try each."""
    cut = sa.text("SELECT pg_terminate_backend(:pid)")
    with store.statement() as one, store.statement() as two, store.statement() as three:
        pids = [SESSION.one(each, {"n": 1}).it for each in (one, two, three)]
    with store.transaction() as killer:
        mine = killer.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        for pid in {*pids} - {mine}:
            killer.execute(cut, {"pid": pid})
    tries = []

    def ask(connection: sa.Connection) -> int:
        tries.append(connection)
        return int(SESSION.one(connection, {"n": 1}).it)

    for _ in range(3):
        assert store.run_statement(ask) not in {*pids} - {mine}
    assert len(tries) <= 4


def test_who_listens_to_sqlalchemy_hears_of_every_statement(store: Store) -> None:
    heard: list[str] = []

    def note(*told: Any) -> None:
        heard.append(told[2])

    event.listen(store.engine, "before_cursor_execute", note)
    store.run_statement(DIVIDE.one, {"by": 1})
    event.remove(store.engine, "before_cursor_execute", note)
    assert any("1 / " in one for one in heard)


def test_sqlalchemys_own_go_by_the_same_session_in_autocommit(store: Store) -> None:
    with store.statement() as direct:
        session = SESSION.one(direct, {"n": 1}).it
        assert direct.execute(sa.text("SELECT pg_backend_pid()")).scalar_one() == session
        assert direct.connection.driver_connection.info.transaction_status.name == "IDLE"
