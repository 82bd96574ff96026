"""Locks of names that are in no row yet, on PostgreSQL; SQLite has one writer anyway.

By stored functions, which a distributed ledger runs on the node of the root that they are given.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

__all__ = ["CANVASES", "ORDER_KEYS", "QUEUES", "TALLIES", "lock", "try_lock"]

#: What is named: a character between root and name, so that no two kinds share a lock. That of
#: order keys stands in the stored function that admits as well.
ORDER_KEYS, CANVASES, QUEUES, TALLIES = 1, 2, 3, 4


def lock(connection: Connection, root: str, kind: int, names: Collection[str]) -> None:
    """Until commit, keep others from locking any of the same names of a kind; in one order."""
    if names and connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT budget_lock(:root, :kind, CAST(:names AS text[]))"),
            {"root": root, "kind": kind, "names": sorted(names)},
        )


def try_lock(connection: Connection, root: str, kind: int, name: str) -> bool:
    """Lock a name of a kind until commit; false, and without a wait, where somebody else has it."""
    if connection.dialect.name != "postgresql":
        return True
    return bool(
        connection.execute(
            sa.text("SELECT budget_try_lock(:root, :kind, :name)"),
            {"root": root, "kind": kind, "name": name},
        ).scalar()
    )
