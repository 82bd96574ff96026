"""Statements that are prepared once a connection and sent by the driver itself.

SQLAlchemy's compiling, cursors and results, and psycopg's adapting of each value, take longer than
the server takes for a short statement. What a request does by one call of a stored function is
said here once, with the types of what it is given and returns: on a :class:`Direct` connection it
is sent as it is, in binary; on any other one SQLAlchemy executes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import PoolProxiedConnection

__all__ = [
    "BIGINT",
    "BIGINTS",
    "BOOLEAN",
    "BYTES",
    "INTEGER",
    "INTEGERS",
    "TEXT",
    "TEXTS",
    "UUIDS",
    "UUID_",
    "Direct",
    "Kind",
    "Statement",
    "is_direct",
]


class Kind(NamedTuple):
    """A type of PostgreSQL's, and how its values are written and read in the binary format.

    :ivar oid: its number, the same in every server.
    """

    oid: int
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]


_INT4 = Struct("!i")
_INT8 = Struct("!q")
_ARRAY = Struct("!iiIii")
_EMPTY = Struct("!iiI")
_NULL = _INT4.pack(-1)


def _text(value: str) -> bytes:
    return value.encode()


def _array(of: Kind) -> Callable[[Sequence[Any]], bytes]:
    """Return what writes an array of one dimension; none among its values is a NULL."""

    def dump(values: Sequence[Any]) -> bytes:
        if not values:
            return _EMPTY.pack(0, 0, of.oid)
        parts = [_ARRAY.pack(1, int(None in values), of.oid, len(values), 1)]
        for value in values:
            if value is None:
                parts.append(_NULL)
            else:
                raw = of.dump(value)
                parts += (_INT4.pack(len(raw)), raw)
        return b"".join(parts)

    return dump


def _elements(of: Kind) -> Callable[[bytes], list[Any]]:
    """Return what reads an array of one dimension."""

    def load(raw: bytes) -> list[Any]:
        dimensions, _, _ = _EMPTY.unpack_from(raw)
        values: list[Any] = []
        at = _ARRAY.size
        for _ in range(_ARRAY.unpack_from(raw)[3] if dimensions else 0):
            [length] = _INT4.unpack_from(raw, at)
            at += _INT4.size
            values.append(None if length < 0 else of.load(raw[at : at + length]))
            at += max(0, length)
        return values

    return load


def _many(oid: int, of: Kind) -> Kind:
    """Return the type of arrays of another one."""
    return Kind(oid, _array(of), _elements(of))


TEXT = Kind(25, _text, bytes.decode)
BIGINT = Kind(20, _INT8.pack, lambda raw: _INT8.unpack(raw)[0])
INTEGER = Kind(23, _INT4.pack, lambda raw: _INT4.unpack(raw)[0])
BOOLEAN = Kind(16, (b"\0", b"\1").__getitem__, b"\1".__eq__)
UUID_ = Kind(2950, lambda value: value.bytes, lambda raw: UUID(bytes=raw))
BYTES = Kind(17, bytes, bytes)
TEXTS = _many(1009, TEXT)
INTEGERS = _many(1007, INTEGER)
BIGINTS = _many(1016, BIGINT)
UUIDS = _many(2951, UUID_)


class Statement:
    """A statement and the types of its values and columns.

    :param text: with ``:name`` for each value.
    :param given: the values by name, with their types.
    :param found: the columns it returns, in their order, with their types.
    """

    def __init__(self, text: str, given: Mapping[str, Kind], found: Mapping[str, Kind]) -> None:
        self.text = text
        self.clause = sa.text(text)
        numbers = {name: number for number, name in enumerate(given, 1)}
        self.sql = re.sub(r"(?<!:):(\w+)", lambda m: f"${numbers[m[1]]}", text).encode()
        self.oids = [kind.oid for kind in given.values()]
        self.formats = [1] * len(given)
        self._dumps = [(name, kind.dump) for name, kind in given.items()]
        self._columns = {name: (n, kind.load) for n, (name, kind) in enumerate(found.items())}

    def one(self, connection: Connection, values: Mapping[str, Any]) -> Any:
        """Execute it, and return its one row."""
        [row] = self.all(connection, values)
        return row

    def all(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Any]:
        """Execute it, and return its rows, by whose attributes the columns are read."""
        if isinstance(connection, Direct):
            return connection.rows(self, values)
        return connection.execute(self.clause, values).all()

    def dumped(self, values: Mapping[str, Any]) -> list[bytes | None]:
        """Return the values as they are sent."""
        given = [(values[name], dump) for name, dump in self._dumps]
        return [None if value is None else dump(value) for value, dump in given]

    def loaded(self, result: Any) -> list[Row]:
        """Return the rows of a result."""
        return [Row(result, row, self._columns) for row in range(result.ntuples)]


class Row:
    """A row of a result, of which each column is read when it is asked for."""

    __slots__ = ("_columns", "_number", "_result")

    def __init__(
        self, result: Any, number: int, columns: Mapping[str, tuple[int, Callable[[bytes], Any]]]
    ) -> None:
        self._result = result
        self._number = number
        self._columns = columns

    def __getattr__(self, name: str) -> Any:
        try:
            column, load = self._columns[name]
        except KeyError:
            raise AttributeError(name) from None
        raw = self._result.get_value(self._number, column)
        return None if raw is None else load(raw)


class Direct(Connection):
    """A connection beneath SQLAlchemy's, from its pool: each statement is its own transaction.

    What is no :class:`Statement` SQLAlchemy executes as ever; what it needs for that is made when
    it is first needed.

    :param engine: one in autocommit.
    """

    _fairy: PoolProxiedConnection | Any

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dialect = engine.dialect
        try:
            self._fairy = engine.raw_connection()
        except engine.dialect.loaded_dbapi.Error as error:
            raise _wrapped(engine, None, error, lost=False) from error
        #: Whether the last that was done here has left no transaction behind.
        self._clean = True

    def __getattr__(self, name: str) -> Any:
        if "_fairy" not in vars(self) or "_allow_autobegin" in vars(self):
            raise AttributeError(name)
        super().__init__(self.engine, connection=self._fairy)
        return getattr(self, name)

    def close(self) -> None:
        """Give the connection back to its pool."""
        if "_allow_autobegin" in vars(self):
            super().close()
        elif self._clean:
            # As SQLAlchemy does once a transaction has ended: nothing is left to roll back.
            self._fairy._close_special(transaction_reset=True)
        else:
            self._fairy.close()

    def rows(self, statement: Statement, values: Mapping[str, Any]) -> Sequence[Any]:
        """Execute a statement, and return its rows.

        Prepared once it was executed so often that psycopg would, and never where that was told
        not to: behind a proxy that pools transactions a session's names mean nothing.

        :raises sqlalchemy.exc.DBAPIError: as SQLAlchemy raises it, and with what that does to the
            pool.
        """
        fairy, self._clean = self._fairy, False
        psycopg: Any = fairy.driver_connection
        if not _writes_utf8(fairy, psycopg):
            return self.execute(statement.clause, values).all()
        try:
            sent = statement.dumped(values)
        except StructError as error:
            beyond = self.dialect.loaded_dbapi.DataError(f"a number is out of range: {error}")
            raise _wrapped(self.engine, statement.text, beyond, lost=False) from error
        try:
            try:
                [result] = _results(fairy, psycopg, statement, sent)
            except sys.modules["psycopg"].errors.InvalidSqlStatementName:
                # psycopg drops all names of a session after a rollback, these as well. Nothing was
                # executed: it is sent once more, under a new one.
                fairy.info.pop(statement, None)
                [result] = _results(fairy, psycopg, statement, sent)
        except self.dialect.loaded_dbapi.Error as error:
            # By the server's word for a name it does not know, or a plan it cannot keep.
            fairy.info.pop(statement, None)
            lost = self.dialect.is_disconnect(error, psycopg, None)
            if lost:
                # As SQLAlchemy does: those beside it are gone as well.
                self.engine.pool._invalidate(fairy, error)
            raise _wrapped(self.engine, statement.text, error, lost=lost) from error
        self._clean = True
        return statement.loaded(result)


def is_direct(engine: Engine) -> bool:
    """Tell whether statements of an engine may go past SQLAlchemy.

    They do through psycopg, and unless somebody listens to what SQLAlchemy executes.
    """
    told = engine.dispatch
    return engine.driver == "psycopg" and not (
        told.before_cursor_execute or told.after_cursor_execute
    )


def _writes_utf8(fairy: PoolProxiedConnection, psycopg: Any) -> bool:
    known: bool | None = fairy.info.get("budget_utf8")
    if known is None:
        known = psycopg.info.encoding == "utf-8"
        fairy.info["budget_utf8"] = known
    return known


def _results(
    fairy: PoolProxiedConnection, psycopg: Any, statement: Statement, sent: list[bytes | None]
) -> list[Any]:
    """Send a statement, and return what came of it.

    :raises psycopg.Error: what the server, or the way to it, has raised.
    """
    pgconn, limit = psycopg.pgconn, psycopg.prepare_threshold
    # Its name in this session, or how often it was executed there without one.
    known: bytes | int = fairy.info.get(statement, 0)
    if limit is None or (isinstance(known, int) and known < limit):
        pgconn.send_query_params(statement.sql, sent, statement.oids, statement.formats, 1)
        if isinstance(known, int):
            fairy.info[statement] = known + 1
    else:
        if isinstance(known, int):
            names = fairy.info["budget_names"] = fairy.info.get("budget_names", 0) + 1
            known = b"_budget_%d" % names
            pgconn.send_prepare(known, statement.sql, statement.oids)
            _wait(psycopg)
            fairy.info[statement] = known
        pgconn.send_query_prepared(known, sent, statement.formats, 1)
    return _wait(psycopg)


#: PostgreSQL's word for a command that returned rows, and for one that returned none.
_WELL = (2, 1)


def _wait(psycopg: Any) -> list[Any]:
    """Wait as psycopg does: interrupted by Ctrl-C, and with its event loop where one was put."""
    driver = sys.modules["psycopg"]
    results: list[Any] = psycopg.wait(driver.generators.execute(psycopg.pgconn))
    for result in results:
        if result.status not in _WELL:
            raise driver.errors.error_from_result(result, encoding="utf-8")
    return results


def _wrapped(engine: Engine, text: str | None, error: Exception, *, lost: bool) -> Exception:
    dialect = engine.dialect
    return exc.DBAPIError.instance(
        text,
        None,
        error,
        dialect.loaded_dbapi.Error,
        connection_invalidated=lost,
        dialect=dialect,
    )
