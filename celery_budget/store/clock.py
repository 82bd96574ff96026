"""How statements read the clock where a ledger is distributed.

Citus takes no volatile function in what it changes. There the clock is read by ``budget_clock``,
once for a statement, which :mod:`celery_budget.store.distributed` makes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

__all__ = ["MAKE", "follow", "read_stable", "watch"]

#: Makes the function, outside of any root. Its text must not be what statements are rewritten by.
MAKE = (
    "CREATE OR REPLACE FUNCTION budget_clock() RETURNS timestamptz LANGUAGE plpgsql STABLE AS"
    " 'BEGIN RETURN clock_timestamp (); END'"
)
_EXECUTE = "before_cursor_execute"


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


def follow(engine: Engine, other: Engine) -> None:
    """Have the statements of an engine read the clock as those of another do."""
    if event.contains(other, _EXECUTE, _stable):
        read_stable(engine)


def _stable(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> tuple[str, Any]:
    return statement.replace("clock_timestamp()", "budget_clock()"), parameters
