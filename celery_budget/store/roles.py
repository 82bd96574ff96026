"""Least-privilege roles of PostgreSQL: what each kind of process may do with the ledger's tables.

The functions of the ledger run with the rights of who calls them, so a role's grants are what its
process can do, whatever it says: a caller that is taken over can spoil the counters it has to
write, and cannot change a limit, make a budget or rewrite the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.budgets import check_name
from celery_budget.errors import ConfigurationError
from celery_budget.store.migrate import VERSION_TABLE
from celery_budget.store.schema import metadata

__all__ = ["PREFIX", "ROLES", "script"]

PREFIX = "budget_"

S, I, U, D = "SELECT", "INSERT", "UPDATE", "DELETE"  # noqa: E741 - as they are said
ALL = (S, I, U, D)
#: To lock a row is to be allowed to change some column of it: one that decides nothing.
LOCK = "UPDATE (updated_us)"

#: What is in a message, what a task has returned, what it was called with. Reporters read none of
#: it, but that an attempt has an outcome, which is erased when it is closed.
PAYLOADS: Mapping[str, frozenset[str]] = {
    "budget_attempts": frozenset({"payload"}),
    "budget_effects": frozenset({"value"}),
    "budget_outbox": frozenset({"body", "envelope"}),
    "budget_parked": frozenset({"body", "envelope"}),
    "budget_quarantine": frozenset({"body", "envelope"}),
    "budget_reuse": frozenset({"payload"}),
}

_Grants = Mapping[str, Sequence[str]]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


#: What every process reads.
_KNOWN: _Grants = {VERSION_TABLE: [S]}

#: Publishes: what web processes, scripts and beat do, cancelling and asking for results included.
_CALLER: _Grants = {
    "budget_attempts": [S],
    "budget_backlog": [S, I, U],
    "budget_balances": [S, I, U],
    "budget_budgets": [S, LOCK],
    "budget_grants": [S],
    "budget_journal": [S, I],
    "budget_lane_queues": [S],
    "budget_lane_tallies": [S],
    "budget_lanes": [S],
    "budget_lines": [S, I, U],
    "budget_outbox": ALL,
    "budget_parked": ALL,
    "budget_quarantine": [S],
    "budget_refusals": [S, I, U],
    "budget_relays": [S, "UPDATE (sleeping)"],
    "budget_reservations": ALL,
    "budget_reuse": ALL,
    "budget_share_returns": [S, I],
    "budget_untold": ALL,
    "budget_usage": [S],
}
#: Runs tasks, and publishes what they do; beside what callers may. Also what runs in place.
_WORKER: _Grants = {
    "budget_attempts": [I, U],
    "budget_effects": ALL,
    "budget_extensions": [S, I],
    "budget_quarantine": [I, U, D],
    "budget_tallies": [S, I, U],
    "budget_usage": [I, U],
}
#: Publishes what was admitted, sweeps and tells alerts; beside what workers may.
_RELAY: _Grants = {
    "budget_adjustments": [S],
    "budget_alert_looks": ALL,
    "budget_alerts": ALL,
    "budget_balances": [D],
    "budget_budgets": ["UPDATE (updated_us, state, stripes, spread)"],
    "budget_lane_tallies": [I, U, D],
    "budget_lanes": ["UPDATE (ticked_us, after_tenant, awake, checked_us, asleep_reason)"],
    "budget_refusals": [D],
    "budget_relays": [I, U, D],
    "budget_share_returns": ALL,
    "budget_shares": ALL,
    "budget_sweeps": ALL,
    "budget_tallies": [D],
}


def _all(grants: Sequence[str]) -> _Grants:
    return dict.fromkeys(metadata.tables, grants)


def _readable(name: str) -> str:
    """Return the privilege to read a table's columns but for payloads."""
    hidden = PAYLOADS.get(name, frozenset()) if name != "budget_attempts" else frozenset()
    columns = [column.name for column in metadata.tables[name].columns]
    if not hidden:
        return S
    return f"SELECT ({', '.join(_quoted(one) for one in columns if one not in hidden)})"


#: The roles, each with the one that it can do all of, what it may do with tables, and whether it
#: calls functions.
ROLES: Mapping[str, tuple[str | None, _Grants, bool]] = {
    "caller": (None, _CALLER, True),
    "worker": ("caller", _WORKER, True),
    "relay": ("worker", _RELAY, True),
    "reporter": (None, {name: [_readable(name)] for name in metadata.tables}, True),
    "admin": (None, _all(ALL), True),
}


def script(connection: Connection, prefix: str = PREFIX, *, templates: bool = False) -> list[str]:
    """Return statements that make the roles and give them what they need, and nothing else.

    Of the tables and functions as they are now, in their schema; again they change nothing, and
    after an upgrade they give what is new. Everybody else is left without the functions. Changes
    nothing itself; locks nothing.

    :param prefix: what the names of the roles begin with.
    :param templates: whether callers, workers and relays make budgets of templates.
    :raises ConfigurationError: where the ledger is not in PostgreSQL.
    """
    check_name(prefix)
    if connection.dialect.name != "postgresql":
        raise ConfigurationError(
            "roles are for a ledger in PostgreSQL; one in SQLite is a file: see to who may read "
            "and write that, and its folder"
        )
    schema = connection.execute(_SCHEMA, {"known": VERSION_TABLE}).scalar_one()
    functions = list(connection.execute(_FUNCTIONS, {"schema": schema}).scalars())
    inside = _quoted(schema)
    said: list[str] = []
    said.append(f"REVOKE ALL ON FUNCTION {', '.join(functions)} FROM PUBLIC")
    for name, (all_of, grants, calls) in ROLES.items():
        role = _quoted(prefix + name)
        said.append(_MAKE.format(literal=_literal(prefix + name), role=role))
        tables = ", ".join(f"{inside}.{_quoted(one)}" for one in (*metadata.tables, VERSION_TABLE))
        said.append(f"REVOKE ALL ON TABLE {tables} FROM {role}")
        said.append(f"GRANT USAGE ON SCHEMA {inside} TO {role}")
        if all_of is not None:
            said.append(f"GRANT {_quoted(prefix + all_of)} TO {role}")
        for table, privileges in {**grants, **_KNOWN}.items():
            given = list(privileges)
            if templates and name == "caller" and table == "budget_budgets":
                given.append(I)
            said.append(f"GRANT {', '.join(given)} ON TABLE {inside}.{_quoted(table)} TO {role}")
        if calls:
            said.append(f"GRANT EXECUTE ON FUNCTION {', '.join(functions)} TO {role}")
    return said


#: Where the tables are that a connection finds by their names alone.
_SCHEMA = sa.text(
    "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE c.oid = to_regclass(:known)"
)
#: Written with their schema and the types of what they take.
_FUNCTIONS = sa.text(
    "SELECT quote_ident(n.nspname) || '.' || quote_ident(p.proname) || '('"
    " || pg_get_function_identity_arguments(p.oid) || ')'"
    " FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
    " WHERE n.nspname = :schema AND p.proname LIKE 'budget\\_%' AND p.prokind = 'f' ORDER BY 1"
)
#: Roles are the whole server's: another ledger there may have made them.
_MAKE = (
    "DO $$ BEGIN IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = {literal}) THEN"
    " CREATE ROLE {role} NOLOGIN; END IF; END $$"
)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
