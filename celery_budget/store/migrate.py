"""The schema's version: bring it up to date, or tell that it is not."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from celery_budget.errors import SchemaError

__all__ = ["VERSION_TABLE", "check", "head", "upgrade"]

#: Alembic's own table; not its default name, so that it can share a database with an application.
VERSION_TABLE = "budget_alembic_version"
_VERSION = sa.text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608 - a constant


def upgrade(connection: Connection) -> str:
    """Apply every migration that is missing and return the version reached.

    In the caller's transaction: all or nothing. Two at once wait for each other on SQLite; on
    PostgreSQL an advisory lock sees to it.

    :raises SchemaError: where a later release has made them.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7016996765293437281)")
    config = _config()
    if sa.inspect(connection).has_table(VERSION_TABLE):
        found = connection.execute(_VERSION).scalar()
        if found is not None and found > _head():
            raise _differs(found)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return _head()


def check(connection: Connection) -> None:
    """Check that the schema is of the version this package needs.

    :raises SchemaError: otherwise; also (from :class:`Store`) where there is none at all.
    """
    # Not through Alembic's context: it would log at every start of every process.
    found = connection.execute(_VERSION).scalar()
    if found != _head():
        raise _differs(found)


def _differs(found: str | None) -> SchemaError:
    later = found is not None and found > _head()
    return SchemaError(
        f"the ledger's schema is at version {found or 'none'} and this release needs {_head()}; "
        + ("install the release that made it" if later else "run 'celery -A PROJ budget init'")
    )


def head() -> str:
    """Return the version that this release needs."""
    return _head()


def _config() -> Config:
    config = Config()
    config.set_main_option(
        "script_location", str(Path(__file__).parent / "migrations").replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    return config


def _head() -> str:
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if head is None:
        raise SchemaError("this installation of celery_budget lacks its migrations; reinstall it")
    return head
