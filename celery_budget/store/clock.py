"""How statements read the clock where it is not the database's own.

Where a ledger is distributed: Citus takes no volatile function in what it changes. There the clock
is read by ``budget_clock``, once for a statement, which :mod:`celery_budget.store.distributed`
makes. And in tests of applications, whose ledgers are files of SQLite: a clock stands in for
SQLite's own on every connection to that file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine, make_url

from celery_budget.errors import ConfigurationError

__all__ = ["MAKE", "follow", "is_stable", "lend", "read_stable", "standing_in", "watch"]

#: Makes the function, outside of any root. Its text must not be what statements are rewritten by.
MAKE = (
    "CREATE OR REPLACE FUNCTION budget_clock() RETURNS timestamptz LANGUAGE plpgsql STABLE AS"
    " 'BEGIN RETURN clock_timestamp (); END'"
)
_EXECUTE = "before_cursor_execute"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: Clocks that stand in for SQLite's own, in microseconds since the epoch, by the ledger's file.
_stand_ins: dict[str, Callable[[], int]] = {}


def watch(engine: Engine) -> None:
    """Have the statements of a PostgreSQL engine read the clock as its ledger can.

    Whether that is distributed is found out once, with the first connection.
    """

    @event.listens_for(engine, "first_connect")
    def first_connect(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute("SELECT to_regproc('budget_clock') IS NOT NULL")
            [found] = cursor.fetchone()
        finally:
            cursor.close()
        connection.rollback()
        if found:
            read_stable(engine)


def read_stable(engine: Engine) -> None:
    """Have the statements of an engine read the clock by ``budget_clock``."""
    if not event.contains(engine, _EXECUTE, _stable):
        event.listen(engine, _EXECUTE, _stable, retval=True)


def is_stable(connection: Connection) -> bool:
    """Tell whether a connection reads the clock so: its ledger is distributed."""
    return event.contains(connection.engine, _EXECUTE, _stable)


def follow(engine: Engine, other: Engine) -> None:
    """Have the statements of an engine read the clock as those of another do."""
    if event.contains(other, _EXECUTE, _stable):
        read_stable(engine)


def _stable(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> tuple[str, Any]:
    return statement.replace("clock_timestamp()", "budget_clock()"), parameters


@contextmanager
def standing_in(url: str, now_us: Callable[[], int]) -> Iterator[None]:
    """Have all connections of this process to a ledger's file read another clock.

    Those that are opened in the block; milliseconds count, as of SQLite's own.

    :raises ConfigurationError: for a database of another kind.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        raise ConfigurationError(
            f"a clock stands in for SQLite's alone, and the ledger is in "
            f"{parsed.get_backend_name()}; leave the clock out"
        )
    file = str(parsed.database)
    _stand_ins[file] = now_us
    try:
        yield
    finally:
        del _stand_ins[file]


def lend(connection: Any, file: str) -> None:
    """Have a connection of SQLite's read the clock that stands in for its file's, if one does."""
    now_us = _stand_ins.get(file)
    if now_us is None:
        return

    def strftime(form: str, when: str) -> str:
        if when != "now":
            raise ValueError(f"a clock tells what time it is now, not {when!r}")
        now = _EPOCH + timedelta(microseconds=now_us())
        return {
            "%s": str((now - _EPOCH) // timedelta(seconds=1)),
            "%f": f"{now.second:02d}.{now.microsecond // 1000:03d}",
        }[form]

    # SQLite prefers a function that takes exactly so many arguments to its own.
    connection.create_function("strftime", 2, strftime)
