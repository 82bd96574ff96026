"""Inserting many rows at once, and a row unless it is there already, in either dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

__all__ = ["AT_ONCE", "Value", "insert_each_new", "insert_many", "insert_new"]

#: For an INSERT of many rows that returns something: all of them in one statement, as far as a
#: statement takes that many values (some 1,400 requests), whatever SQLAlchemy's own page is.
AT_ONCE = {"insertmanyvalues_page_size": 100_000}

#: Of a row that is inserted, the value by a name, as an expression.
Value = Callable[[str], sa.ColumnElement[Any]]


def insert_many(
    connection: Connection,
    table: sa.Table,
    rows: Sequence[Mapping[str, Any]],
    returning: Sequence[sa.ColumnElement[Any]],
    *,
    more: Mapping[str, Any] | None = None,
    made: Callable[[Value], Mapping[str, Any]] = lambda value: {},
    new: bool = False,
) -> Sequence[sa.Row[Any]]:
    """Insert ``rows``, which have the same names, in their order, and return what is asked for.

    By psycopg in one statement, however many they are: each column is one array, or one value where
    all rows have the same, which is written, sent and read in a fraction of the time that a value
    for each of them takes.

    :param more: the types of what the rows have beside the table's columns, for ``made``.
    :param made: returns further columns as expressions.
    :param new: leave out those of which a unique key is taken.
    """
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    types = {name: table.c[name].type for name in rows[0] if name in table.c} | dict(more or {})
    statement: Any
    if connection.dialect.driver == "psycopg":
        statement, sent = _of_arrays(insert(table), types, rows, made), None
    else:
        of_row = made(lambda name: sa.bindparam(name, type_=types[name]))
        statement, sent = insert(table).values(of_row), rows
    if new:
        statement = statement.on_conflict_do_nothing()
    statement = statement.returning(*returning)
    return connection.execute(statement, sent, execution_options=AT_ONCE).all()


def _of_arrays(
    insert: Any,
    types: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    made: Callable[[Value], Mapping[str, Any]],
) -> Any:
    same: dict[str, Any] = {}
    several: dict[str, list[Any]] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if values.count(values[0]) == len(values):
            same[name] = values[0]
        else:
            several[name] = values
    if not several:
        several[""] = [None] * len(rows)
    arrays = [_array(values, types.get(name, sa.Integer)) for name, values in several.items()]
    columns = [sa.column(name or "nothing", types.get(name, sa.Integer)) for name in several]
    row = sa.func.unnest(*arrays).table_valued(*columns, name="asked").render_derived()

    def value(name: str) -> sa.ColumnElement[Any]:
        if name in several:
            found: sa.ColumnElement[Any] = row.c[name]
            return found
        return sa.literal(same[name], types[name])

    of_row = made(value)
    names = [name for name in rows[0] if name in insert.table.c]
    query = sa.select(*(value(name) for name in names), *of_row.values()).select_from(row)
    return insert.from_select([*names, *of_row], query)


#: What separates texts that are sent as one: JSON and names have none of it.
_BETWEEN = "\x1f"


def _array(values: list[Any], kind: Any) -> sa.ColumnElement[Any]:
    """Return an array; of texts one text, as psycopg quotes each of them at length."""
    if all(type(value) is str for value in values):
        joined = _BETWEEN.join(values)
        if joined and joined.count(_BETWEEN) == len(values) - 1:
            return sa.func.string_to_array(joined, _BETWEEN, type_=postgresql.ARRAY(kind))
    return sa.literal(values, postgresql.ARRAY(kind))


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
