"""Inserting a row unless it is there already, in either dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

__all__ = ["AT_ONCE", "insert_each_new", "insert_new"]

#: For an INSERT of many rows that returns something: all of them in one statement, as far as a
#: statement takes that many values (some 1,400 requests), whatever SQLAlchemy's own page is.
AT_ONCE = {"insertmanyvalues_page_size": 100_000}


def insert_new(connection: Connection, table: sa.Table, **values: Any) -> bool:
    """Insert one row unless any of its unique keys is taken; tell whether it was inserted.

    Of two at once the second waits for the first to commit, then finds its key taken.
    """
    # What comes back tells; the drivers' row counts do not agree after ON CONFLICT.
    return bool(insert_each_new(connection, table, [values], sa.literal(1)))


def insert_each_new(
    connection: Connection,
    table: sa.Table,
    rows: Sequence[dict[str, Any]],
    returning: sa.ColumnElement[Any],
) -> set[Any]:
    """Insert those of ``rows`` whose keys are free, as :func:`insert_new`, in one statement.

    :return: what ``returning`` is of each that was inserted.
    """
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    inserted = connection.execute(
        insert(table).values(list(rows)).on_conflict_do_nothing().returning(returning)
    )
    return set(inserted.scalars())
