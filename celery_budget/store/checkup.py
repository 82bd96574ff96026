"""What the ledger's database says of itself, for ``budget check``. Nothing is changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.store.alerts import find_overdue
from celery_budget.store.insert import insert_new
from celery_budget.store.schema import alert_looks, budgets

__all__ = [
    "Server",
    "Tables",
    "Undone",
    "is_writable",
    "mark",
    "read_server",
    "read_tables",
    "try_writing",
]

#: Of PostgreSQL's settings those that matter here.
SETTINGS = (
    "fsync",
    "full_page_writes",
    "max_connections",
    "server_version_num",
    "statement_timeout",
    "synchronous_commit",
    "transaction_timeout",
)


class Undone(Exception):
    """Ends a transaction that was only tried."""


@dataclass(frozen=True)
class Server:
    """What PostgreSQL is set to, as text, and the path of SQLite's file.

    :ivar standbys: how many standbys PostgreSQL has, and how many of them are synchronous; none
        where its user may not see that.
    """

    settings: dict[str, str]
    path: str | None
    standbys: tuple[int, int] | None = None


@dataclass(frozen=True)
class Tables:
    """What the tables say: see :class:`celery_budget.core.checkup.StoreSeen`."""

    zones: tuple[str, ...]
    overdue_us: int
    mark: str | None


def read_server(connection: Connection) -> Server:
    """Return how the server is set for this session. Locks nothing, and needs no table."""
    if connection.dialect.name == "postgresql":
        rows = connection.execute(
            sa.text("SELECT name, setting FROM pg_settings WHERE name = ANY(:names)"),
            {"names": list(SETTINGS)},
        )
        return Server({row.name: row.setting for row in rows}, None, _read_standbys(connection))
    for row in connection.execute(sa.text("PRAGMA database_list")):
        if row.name == "main":
            return Server({}, row.file or None)
    return Server({}, None)


def _read_standbys(connection: Connection) -> tuple[int, int] | None:
    """Count who follows the server, but for those who only take what they decode, or a backup.

    Of all of them a user sees that they are there; of others' sessions no more than that, without
    the role ``pg_read_all_stats``.
    """
    row = connection.execute(
        sa.text(
            "SELECT count(*) FILTER (WHERE state IN ('streaming', 'catchup')) AS standbys,"
            " count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) AS synchronous,"
            " count(*) FILTER (WHERE state IS NULL) AS unseen"
            " FROM pg_stat_replication WHERE pid NOT IN"
            " (SELECT active_pid FROM pg_replication_slots"
            "  WHERE slot_type = 'logical' AND active_pid IS NOT NULL)"
        )
    ).one()
    return None if row.unseen else (int(row.standbys), int(row.synchronous))


def read_tables(connection: Connection, root: str) -> Tables:
    """Return what the tables of a root say. Locks nothing."""
    zones = connection.execute(
        sa.select(budgets.c.timezone).where(budgets.c.root == root).distinct()
    ).scalars()
    overdue = find_overdue(connection, root)
    return Tables(
        tuple(sorted(zones)),
        0 if overdue is None else int(overdue.age_us),
        mark(connection, root),
    )


def mark(connection: Connection, root: str) -> str | None:
    """Return what tells this ledger from others: a digest of its first budget; none without."""
    first = connection.execute(
        sa.select(budgets.c.name, budgets.c.created_us)
        .where(budgets.c.root == root)
        .order_by(budgets.c.created_us, budgets.c.name)
        .limit(1)
    ).first()
    if first is None:
        return None
    return hashlib.sha256(f"{root} {first.created_us} {first.name}".encode()).hexdigest()[:16]


def is_writable(connection: Connection) -> bool:
    """Tell whether a transaction of this user's could write, on PostgreSQL; nothing is tried."""
    row = connection.execute(
        sa.text(
            "SELECT pg_is_in_recovery() AS follows,"
            " (SELECT reset_val FROM pg_settings WHERE name = 'default_transaction_read_only')"
            " AS read_only"
        )
    ).one()
    return not row.follows and row.read_only == "off"


def try_writing(connection: Connection, root: str) -> None:
    """Write a row, and take it back.

    :raises Undone: where it could be written, so that the transaction ends without it.
    """
    insert_new(connection, alert_looks, root=root, what="check", looked_us=0, after_name="")
    raise Undone
