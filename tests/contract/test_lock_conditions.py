"""What stored functions lock they choose by its key, which never changes.

A row that was changed since the statement began is looked at again behind its lock. Where it is
not what was asked for any more it is left out, and stays locked: whoever then locks what comes
before it by the order has it the wrong way round.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from celery_budget.store import Store, schema

pytestmark = pytest.mark.postgres

#: What may be asked for beside the key, by function and table, and why that is well.
BESIDE = {
    ("budget_mark_published", "budget_outbox"): "nothing is locked after it but by the same keys",
    ("budget_backlog", "budget_backlog"): "nobody waits for that row",
    ("budget_wake", "budget_relays"): "the last that is locked; passed by where it is",
}

_LOCK = re.compile(r"\bFOR (?:NO KEY )?UPDATE(?: OF (\w+))?")
_TABLE = re.compile(r"\b(?:FROM|JOIN)\s+(budget_\w+)\s+(\w+)")
_QUERY = re.compile(r"\b(?:SELECT|PERFORM)\b")


def found_in(body: str) -> Iterator[tuple[str, set[str]]]:
    """Each table that a function locks rows of, and the columns that these are chosen by."""
    for statement in re.sub(r"--[^\n]*", "", body).split(";"):
        for lock in _LOCK.finditer(statement):
            query = statement[: lock.start()]
            tables = {alias: table for table, alias in _TABLE.findall(query)}
            alias = lock[1] or _TABLE.findall(query)[-1][1]
            # What it shows is no condition.
            chosen = query[re.search(rf"\b{tables[alias]}\s+{alias}\b", query).end() :]  # type: ignore[union-attr]
            chosen = chosen.partition("ORDER BY")[0] if lock[1] is None else chosen
            yield tables[alias], set(re.findall(rf"\b{alias}\.(\w+)", chosen))


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session")
def test_rows_are_locked_by_their_keys(store: Store) -> None:
    question = "SELECT proname, prosrc FROM pg_proc WHERE starts_with(proname, 'budget_')"
    with store.snapshot() as connection:
        bodies = {row.proname: row.prosrc for row in connection.execute(sa.text(question))}
    keys = {t.name: {c.name for c in t.primary_key} for t in schema.metadata.tables.values()}
    locks = [(name, *found) for name, body in bodies.items() for found in found_in(body)]
    assert {table for _, table, _ in locks} >= {
        "budget_balances",
        "budget_reservations",
        "budget_outbox",
        "budget_backlog",
    }
    beside = {(name, table) for name, table, chosen in locks if chosen - keys[table]}
    assert beside == set(BESIDE)
