"""The schema that migrations lead to is the one that is declared, down to each default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget.store import Store, migrate, schema

VERSIONS = Path(migrate.__file__).with_name("migrations") / "versions"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """A database that was migrated, and one whose tables were made as they are declared."""
    if request.param == "sqlite":
        urls = [f"sqlite:///{tmp_path / name}.db" for name in ("migrated", "declared")]
    else:
        server = request.getfixturevalue("postgres_server")
        urls = [server.create_database() for _ in range(2)]
    migrated, declared = stores = Store(urls[0]), Store(urls[1])
    migrated.run(migrate.upgrade)
    declared.run(schema.metadata.create_all)
    yield stores
    for store, url in zip(stores, urls, strict=True):
        store.dispose()
        if request.param == "postgresql":
            server.drop_database(url)


def described(connection: sa.Connection) -> dict[str, Any]:
    """Everything the database says of each of our tables."""
    postgresql = connection.dialect.name == "postgresql"
    return {
        table: _postgresql(connection, table) if postgresql else _sqlite(connection, table)
        for table in schema.metadata.tables
    }


_COLUMNS = """
    SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
           a.attgenerated, c.collname, pg_get_expr(d.adbin, d.adrelid)
      FROM pg_attribute a
      LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
      LEFT JOIN pg_collation c ON c.oid = a.attcollation
     WHERE a.attrelid = CAST(:name AS regclass) AND a.attnum > 0 AND NOT a.attisdropped
     ORDER BY a.attnum"""
_CONSTRAINTS = """
    SELECT conname, contype, convalidated, pg_get_constraintdef(oid)
      FROM pg_constraint WHERE conrelid = CAST(:name AS regclass) AND contype <> 'n'
     ORDER BY conname"""
_INDEXES = """
    SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename = :name
     ORDER BY indexname"""


def _postgresql(connection: sa.Connection, table: str) -> dict[str, Any]:
    def rows(statement: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in connection.execute(sa.text(statement), {"name": table})]

    return {
        "columns": rows(_COLUMNS),
        "constraints": rows(_CONSTRAINTS),
        "indexes": rows(_INDEXES),
    }


def _sqlite(connection: sa.Connection, table: str) -> dict[str, Any]:
    def rows(pragma: str, name: str = table) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in connection.exec_driver_sql(f"PRAGMA {pragma}('{name}')")]

    written = connection.execute(
        sa.text("SELECT name, sql FROM sqlite_master WHERE tbl_name = :name AND type = 'index'"),
        {"name": table},
    )
    checks = sa.inspect(connection).get_check_constraints(table)
    return {
        # Without the number of the column; the values of defaults are quoted in several ways.
        "columns": [
            (*row[1:4], None if row[4] is None else row[4].strip("'()"), row[5])
            for row in rows("table_info")
        ],
        "indexes": sorted(
            (name, " ".join((sql or "").split()), tuple(rows("index_xinfo", name)))
            for name, sql in written
        ),
        "checks": sorted((str(one["name"]), one["sqltext"]) for one in checks),
        "foreign": rows("foreign_key_list"),
    }


def test_migrated_and_declared_are_the_same(both: tuple[Store, Store]) -> None:
    migrated, declared = (store.run(described) for store in both)
    for table in schema.metadata.tables:
        for what, found in migrated[table].items():
            assert found == declared[table][what], f"{what} of {table}"


def test_the_descriptions_tell_what_matters(both: tuple[Store, Store]) -> None:
    """What this comparison rests on: each of these changes shows."""
    declared = both[1]
    changes = [
        "ALTER TABLE budget_outbox ADD COLUMN more INTEGER",
        "DROP INDEX ix_budget_outbox_due",
        "DROP INDEX ux_budget_outbox_child",
        "CREATE UNIQUE INDEX ux_budget_outbox_child ON budget_outbox (root, parent_id, task_id)",
        "ALTER TABLE budget_lines RENAME COLUMN extended TO stretched",
    ]
    for change in changes:
        before = declared.run(described)
        with declared.transaction() as connection:
            connection.exec_driver_sql(change)
        assert declared.run(described) != before, change


def since(file: Path) -> int:
    """Return the number of the revision that a stored function's file is of."""
    return int(file.stem.rpartition("_")[2])


@pytest.mark.postgres
def test_the_functions_are_those_of_the_files(postgres_url: str) -> None:
    store = Store(postgres_url)
    store.run(migrate.upgrade)
    with store.transaction() as connection:
        rows = connection.execute(
            sa.text(
                "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
            )
        ).all()
    store.dispose()
    # Of a function that was made anew the last file counts.
    assert {row.proname: row.prosrc for row in rows} == dict(
        found
        for file in sorted(VERSIONS.glob("*_*.sql"), key=since)
        if since(file) > 1
        for found in re.findall(
            r"CREATE FUNCTION (\w+).*?\$\$(.*?)\$\$", file.read_text("utf-8"), re.DOTALL
        )
    )


@pytest.mark.postgres
def test_tables_of_which_rows_come_and_go_are_cleared_early(postgres_url: str) -> None:
    store = Store(postgres_url)
    store.run(migrate.upgrade)
    with store.transaction() as connection:
        rows = connection.execute(
            sa.text("SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL")
        ).all()
    store.dispose()
    of = {row.relname: dict(one.split("=") for one in row.reloptions) for row in rows}
    churn = {f"budget_{name}" for name in ("outbox", "balances", "attempts", "reservations")}
    assert churn <= set(of)
    for table in churn:
        assert float(of[table]["autovacuum_vacuum_scale_factor"]) <= 0.02
        assert int(of[table]["fillfactor"]) < 100
