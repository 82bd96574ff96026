"""Inserting a row unless it is there already, in either dialect."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

__all__ = ["AT_ONCE", "insert_new"]

#: For an INSERT of many rows that returns something: all of them in one statement, as far as a
#: statement takes that many values (some 1,400 requests), whatever SQLAlchemy's own page is.
AT_ONCE = {"insertmanyvalues_page_size": 100_000}


def insert_new(connection: Connection, table: sa.Table, **values: Any) -> bool:
    """Insert one row unless any of its unique keys is taken; tell whether it was inserted.

    Of two at once the second waits for the first to commit, then finds its key taken.
    """
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    # What comes back tells; the drivers' row counts do not agree after ON CONFLICT.
    inserted = connection.execute(
        insert(table).values(**values).on_conflict_do_nothing().returning(sa.literal(1))
    )
    return inserted.first() is not None
