"""The schema comes up from nothing, once, and goes again."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from celery_budget import parking, reconcile
from celery_budget.errors import SchemaError
from celery_budget.settings import Settings
from celery_budget.store import Store, budgets, migrate, schema
from tests.contract.support import Ledger


def names(connection: sa.Connection) -> set[str]:
    """Everything we have made: tables, indexes, functions."""
    inspector = sa.inspect(connection)
    tables = set(inspector.get_table_names())
    found = tables | {
        str(index["name"]) for table in tables for index in inspector.get_indexes(table)
    }
    if connection.dialect.name == "postgresql":
        found |= set(
            connection.execute(
                sa.text(
                    "SELECT proname FROM pg_proc"
                    " WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'budget%'"
                )
            ).scalars()
        )
    return found


def differences(connection: sa.Connection) -> list[object]:
    """What autogenerate would change."""
    context = MigrationContext.configure(
        connection, opts={"version_table": migrate.VERSION_TABLE, "compare_type": True}
    )
    return list(compare_metadata(context, schema.metadata))


def checks(connection: sa.Connection) -> set[tuple[str, str]]:
    """The check constraints, which autogenerate does not compare."""
    inspector = sa.inspect(connection)
    return {
        (table, str(check["name"]))
        for table in schema.metadata.tables
        for check in inspector.get_check_constraints(table)
    }


def downgrade(connection: sa.Connection) -> None:
    config = migrate._config()
    config.attributes["connection"] = connection
    command.downgrade(config, "base")


def test_an_upgrade_from_nothing_gives_the_tables_as_declared(empty: Store) -> None:
    assert empty.run(migrate.upgrade) == migrate._head()
    assert empty.run(differences) == []
    declared = {
        (table.name, str(constraint.name))
        for table in schema.metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, sa.CheckConstraint)
    }
    assert empty.run(checks) == declared
    empty.run(migrate.check)


def test_the_tables_serve_their_purpose(empty: Store) -> None:
    empty.run(migrate.upgrade)
    ledger = Ledger(empty, Settings("unused"))
    ledger.set("b", 10)
    ledger.reserve(10)
    assert reconcile.report(empty, ledger.settings).counts["admitted"] == 1


def test_an_upgrade_of_what_is_up_to_date_changes_nothing(empty: Store) -> None:
    empty.run(migrate.upgrade)
    Ledger(empty, Settings("unused")).set("b", 10)
    before = empty.run(names)
    assert empty.run(migrate.upgrade) == migrate._head()
    assert empty.run(names) == before
    assert len(empty.run(budgets.balances_of, "default")) == 1


def test_a_downgrade_takes_everything_away_and_an_upgrade_brings_it_back(empty: Store) -> None:
    empty.run(migrate.upgrade)
    before = empty.run(names)
    empty.run(downgrade)
    assert empty.run(names) <= {migrate.VERSION_TABLE}
    with pytest.raises(SchemaError):
        empty.run(migrate.check)
    empty.run(migrate.upgrade)
    assert empty.run(names) == before


def test_there_is_one_line_of_versions() -> None:
    assert len(ScriptDirectory.from_config(migrate._config()).get_heads()) == 1


def test_a_database_without_tables_is_told_with_what_to_run(empty: Store) -> None:
    with pytest.raises(SchemaError, match=r"missing.*'celery -A PROJ budget init'"):
        empty.run(migrate.check)
    assert empty.run(names) == set()


def test_a_database_of_another_version_is_told(empty: Store) -> None:
    empty.run(migrate.upgrade)
    with empty.transaction() as connection:
        connection.execute(sa.text(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '9999'"))  # noqa: S608
    with pytest.raises(SchemaError, match=rf"version 9999 .*needs {migrate._head()}"):
        empty.run(migrate.check)


def test_everything_on_a_database_without_tables_is_a_schema_error(empty: Store) -> None:
    ledger = Ledger(empty, Settings("unused"))
    request = ledger.request(1)
    stopped = threading.Event()
    stopped.set()
    calls = [
        lambda: ledger.set("b", 1),
        lambda: ledger.admit(request),
        # A worker waits until there are tables, or until it is told to stop.
        lambda: ledger.admit(request, continuation=True, stop=stopped),
        ledger.relay,
        ledger.recover,
        lambda: parking.run_once(empty, ledger.settings),
        lambda: reconcile.report(empty, ledger.settings),
    ]
    for call in calls:
        with pytest.raises(SchemaError, match="budget init"):
            call()


def test_upgrades_at_once_all_succeed(empty: Store) -> None:
    barrier = threading.Barrier(3)
    reached: list[object] = []

    def upgrade() -> None:
        store = Store(empty._engine.url.render_as_string(hide_password=False))
        barrier.wait()
        try:
            reached.append(store.run(migrate.upgrade))
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            reached.append(error)
        store.dispose()

    threads = [threading.Thread(target=upgrade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reached == [migrate._head()] * 3
    assert empty.run(differences) == []


def test_an_upgrade_that_fails_leaves_nothing(empty: Store) -> None:
    with empty.transaction() as connection:
        connection.execute(sa.text("CREATE TABLE budget_usage (id integer)"))
    with pytest.raises(Exception, match="budget_usage"):
        empty.run(migrate.upgrade)
    assert empty.run(names) == {"budget_usage"}


def test_the_tables_of_an_application_are_left_alone(empty: Store) -> None:
    with empty.transaction() as connection:
        connection.execute(sa.text("CREATE TABLE alembic_version (version_num varchar(32))"))
        connection.execute(sa.text("INSERT INTO alembic_version VALUES ('theirs')"))
    empty.run(migrate.upgrade)
    empty.run(downgrade)
    with empty.transaction() as connection:
        found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars()
        assert found.all() == ["theirs"]
