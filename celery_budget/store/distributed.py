"""The ledger over several PostgreSQL servers, by the Citus extension: a root's rows stay together.

Every table has the root first in its keys, and is distributed by it; all are in one group, so that
the rows of one root are on one node. A stored function that is given a root runs there as a whole,
and Citus refuses it what is elsewhere. A statement that names one root is sent to its node alone.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.errors import DistributionError
from celery_budget.store import clock
from celery_budget.store.migrate import VERSION_TABLE
from celery_budget.store.schema import budgets, metadata

__all__ = ["check_one_root", "distribute", "is_distributed", "missing"]

#: Functions that are given a root, by their first argument.
_ROOT = "p_root"
#: The other tables are where this one's rows are.
_FIRST = budgets.name

#: The ledger's own functions, their arguments' types, and whether the first argument is a root.
_FUNCTIONS = sa.text(
    "SELECT p.oid::regprocedure::text AS signature,"
    " coalesce(p.proargnames[1] = :root, false) AS of_root"
    " FROM pg_proc p JOIN pg_class t ON t.relnamespace = p.pronamespace"
    " WHERE t.oid = to_regclass(:first) AND starts_with(p.proname, 'budget_')"
    " AND p.prokind = 'f' ORDER BY 1"
)


def is_distributed(connection: Connection) -> bool:
    """Tell whether this ledger's tables are distributed. Locks nothing."""
    if connection.dialect.name != "postgresql":
        return False
    known = connection.execute(
        sa.text(
            "SELECT to_regclass('pg_dist_partition') IS NOT NULL AND to_regclass(:t) IS NOT NULL"
        ),
        {"t": _FIRST},
    ).scalar_one()
    return bool(known) and _is_placed(connection, _FIRST)


def distribute(connection: Connection) -> None:
    """Distribute tables by root, and functions by the root that they are given; again what is new.

    In the caller's transaction, after all tables are made: all or nothing. Rows that are there go
    to their nodes with it.

    :raises DistributionError: where the database is not a Citus coordinator with its workers.
    """
    _check(connection)
    if not _is_placed(connection, VERSION_TABLE):
        connection.execute(sa.text("SELECT create_reference_table(:t)"), {"t": VERSION_TABLE})
    names = [_FIRST, *sorted(table.name for table in metadata.tables.values())]
    for name in dict.fromkeys(names):
        if not _is_placed(connection, name):
            connection.execute(
                sa.text("SELECT create_distributed_table(:t, 'root', colocate_with => :w)"),
                {"t": name, "w": "none" if name == _FIRST else _FIRST},
            )
    connection.exec_driver_sql(clock.MAKE)
    clock.read_stable(connection.engine)
    functions = connection.execute(_FUNCTIONS, {"root": _ROOT, "first": _FIRST}).all()
    for function in functions:
        connection.execute(
            # Forced also inside of a transaction: locks of names would be had on two nodes else.
            sa.text(
                "SELECT create_distributed_function(CAST(:f AS regprocedure), :a,"
                " colocate_with => :w, force_delegation => true)"
                if function.of_root
                else "SELECT create_distributed_function(CAST(:f AS regprocedure))"
            ),
            {"f": function.signature, "a": _ROOT, "w": _FIRST}
            if function.of_root
            else {"f": function.signature},
        )


def missing(connection: Connection) -> tuple[str, ...]:
    """Return the tables of a distributed ledger that are not distributed. Locks nothing."""
    names = sorted(table.name for table in metadata.tables.values())
    return tuple(name for name in names if not _is_placed(connection, name))


def check_one_root(connection: Connection, roots: set[str]) -> None:
    """Check that a transaction stays in one root, where the ledger is distributed.

    :raises DistributionError: otherwise. Nothing was changed.
    """
    if len(roots) > 1 and is_distributed(connection):
        named = ", ".join(repr(root) for root in sorted(roots))
        raise DistributionError(
            f"this would change the roots {named} in one transaction, and they may be on different "
            "nodes of this distributed ledger; do it root by root"
        )


def _is_placed(connection: Connection, table: str) -> bool:
    return bool(
        connection.execute(
            sa.text(
                "SELECT EXISTS (SELECT 1 FROM pg_dist_partition"
                " WHERE logicalrelid = to_regclass(:t))"
            ),
            {"t": table},
        ).scalar_one()
    )


def _check(connection: Connection) -> None:
    """Check that there is something to distribute to.

    :raises DistributionError: otherwise, with what to do.
    """
    if connection.dialect.name != "postgresql":
        raise DistributionError(
            "a ledger in SQLite is one file; give budget_database_url of a PostgreSQL with Citus"
        )
    version = connection.execute(
        sa.text("SELECT extversion FROM pg_extension WHERE extname = 'citus'")
    ).scalar()
    if version is None:
        raise DistributionError(
            "the database has no Citus extension; install Citus 11 or later on all servers, add "
            "citus to shared_preload_libraries there, and in this database of each run 'CREATE "
            "EXTENSION citus'; then make this one the coordinator: 'SELECT "
            "citus_set_coordinator_host(HOST)', and 'SELECT citus_add_node(HOST, PORT)' for each "
            "worker"
        )
    if int(str(version).split(".", 1)[0]) < 11:
        raise DistributionError(f"Citus is {version} here; upgrade it to 11 or later")
    ready = connection.execute(
        sa.text(
            "SELECT EXISTS (SELECT 1 FROM pg_dist_node"
            " WHERE isactive AND shouldhaveshards AND noderole = 'primary')"
        )
    ).scalar_one()
    if not ready:
        raise DistributionError(
            "no node of this Citus cluster takes rows; add its workers: 'SELECT "
            "citus_add_node(HOST, PORT)'"
        )
