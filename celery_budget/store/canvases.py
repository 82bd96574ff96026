"""Canvases with a request id: what of them was admitted before."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store import advisory
from celery_budget.store.batch import MOST_KEYS
from celery_budget.store.schema import parked, reservations

__all__ = ["known", "lock", "undone"]

SAVEPOINT = "budget_undone"


def lock(connection: Connection, root: str, canvases: Collection[str]) -> None:
    """Until commit, keep others from getting here with any of the same canvases.

    Behind the locks of order keys and before all others, in one order. On SQLite there is one
    writer, and who has read what was changed since cannot be it.
    """
    advisory.lock(connection, root, advisory.CANVASES, canvases)


def known(connection: Connection, root: str, task_ids: Sequence[str]) -> set[str]:
    """Return those of some tasks that were admitted or parked, whatever became of them.

    The caller holds the locks of their canvases, so that nobody admits one of them meanwhile.
    """
    found: set[str] = set()
    for page in range(0, len(task_ids), MOST_KEYS):
        some = task_ids[page : page + MOST_KEYS]
        found.update(
            connection.execute(
                sa.union(
                    *(
                        sa.select(table.c.task_id).where(
                            table.c.root == root, table.c.task_id.in_(some)
                        )
                        for table in (reservations, parked)
                    )
                )
            ).scalars()
        )
    return found


@contextmanager
def undone(connection: Connection) -> Iterator[None]:
    """Undo what is done inside, and give back the locks that are taken there; an error as well."""
    connection.exec_driver_sql(f"SAVEPOINT {SAVEPOINT}")
    try:
        yield
    except BaseException:
        # Where the connection is gone, what is raised already says so.
        with suppress(Exception):
            _undo(connection)
        raise
    _undo(connection)


def _undo(connection: Connection) -> None:
    connection.exec_driver_sql(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
    connection.exec_driver_sql(f"RELEASE SAVEPOINT {SAVEPOINT}")
