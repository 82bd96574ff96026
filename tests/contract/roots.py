"""Whether a statement stays in one root: each of the ledger's tables in it is restricted to one.

A statement that names one root for each of its tables is sent to one node of a distributed ledger.
What is looked at is the statement as it is sent, parsed; that a condition is there, and that all
else is joined to it by root.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlglot
from sqlglot import exp

from celery_budget.store import schema

__all__ = ["Watch", "body_faults", "faults"]

TABLES = {table.name for table in schema.metadata.tables.values()}
ROOT = "root"
#: Functions that give another value each time, which Citus takes in nothing that it changes.
VOLATILE = {"rand", "uuid", "gen_random_uuid", "nextval", "clock_timestamp", "set_config"}
STABLE = {"budget_clock", "now"}
#: A table in one query: the query, and what the table is called there.
Place = tuple[int, str]


def faults(statement: str) -> list[str]:
    """Return what keeps a statement from being sent to one node; nothing where all is right."""
    text = re.sub(r"%\((\w+)\)s", r":\1", statement).replace("%%", "%")
    found: list[str] = []
    for tree in sqlglot.parse(text, dialect="postgres"):
        if tree is not None:
            found += [*_unrestricted(tree), *_volatile(tree)]
    return found


def _query_of(node: exp.Expression) -> exp.Expression:
    """Return the query that a node is in."""
    found = node.find_ancestor(exp.Select, exp.Update, exp.Delete, exp.Insert)
    assert found is not None
    return found


def _unrestricted(tree: exp.Expression) -> Iterator[str]:
    called = {cte.alias for cte in tree.find_all(exp.CTE)}
    tables = {
        (id(_query_of(table)), table.alias_or_name): table
        for table in tree.find_all(exp.Table)
        if table.name in TABLES
        and table.name not in called
        and not isinstance(table.parent, (exp.Schema, exp.Insert))
    }
    same: dict[Place, set[Place]] = {place: set() for place in tables}
    fixed: set[Place] = set()
    for query in tree.find_all(exp.Select, exp.Update, exp.Delete):
        for left, right in _equal(query):
            one, other = _place(left, tables), _place(right, tables)
            if one and other:
                same[one].add(other)
                same[other].add(one)
            elif one and _is_value(right):
                fixed.add(one)
            elif other and _is_value(left):
                fixed.add(other)
    while more := {near for place in fixed for near in same[place]} - fixed:
        fixed |= more
    for place in tables.keys() - fixed:
        yield f"{tables[place].name} is not restricted to a root"
    for insert in tree.find_all(exp.Insert):
        if not isinstance(insert.this, exp.Schema):
            continue
        names = [column.name for column in insert.this.expressions]
        if insert.this.this.name in TABLES and ROOT not in names:
            yield f"{insert.this.this.name} gets rows of no root"
        elif isinstance(insert.expression, exp.Select):
            given = insert.expression.selects[names.index(ROOT)].unalias()
            place = _place(given, tables)
            if not _is_value(given) and (place is None or place not in fixed):
                yield f"{insert.this.this.name} gets rows of {given.sql()}"


def _equal(query: exp.Expression) -> Iterator[tuple[exp.Expression, exp.Expression]]:
    """Yield both sides of all that a query asks to be equal, whatever else it asks."""
    asked: list[Any] = [query.args.get("where"), *(join.args.get("on") for join in _joins(query))]
    while asked:
        one = asked.pop()
        if isinstance(one, (exp.Where, exp.Paren)):
            asked.append(one.this)
        elif isinstance(one, exp.And):
            asked += [one.left, one.right]
        elif isinstance(one, exp.EQ):
            left, right = one.left, one.right
            if isinstance(left, exp.Tuple) and isinstance(right, exp.Tuple):
                yield from zip(left.expressions, right.expressions, strict=True)
            else:
                yield left, right


def _joins(query: exp.Expression) -> list[Any]:
    source = query.args.get("from_") or query.args.get("from")
    inside = source.this.args.get("joins") if source is not None else None
    using = query.args.get("using") or []
    return [
        *(query.args.get("joins") or []),
        *(inside or []),
        *(join for table in using for join in table.args.get("joins") or []),
    ]


def _place(node: exp.Expression, tables: dict[Place, exp.Table]) -> Place | None:
    """Return whose root a column is, the nearest that is called so; none of anything else."""
    while isinstance(node, (exp.Cast, exp.Paren)):
        node = node.this
    if not isinstance(node, exp.Column) or node.name != ROOT:
        return None
    query: exp.Expression | None = node
    while query is not None:
        query = query.find_ancestor(exp.Select, exp.Update, exp.Delete, exp.Insert)
        here = [place for place in tables if place[0] == id(query)]
        for place in here:
            if place[1] == node.table or (not node.table and len(here) == 1):
                return place
    return None


def _is_value(node: exp.Expression) -> bool:
    while isinstance(node, (exp.Cast, exp.Paren)):
        node = node.this
    variable = isinstance(node, exp.Column) and node.name.startswith("p_")
    return variable or isinstance(node, (exp.Placeholder, exp.Parameter, exp.Literal))


def _volatile(tree: exp.Expression) -> Iterator[str]:
    """Yield what Citus does not take in a change: volatile functions, and stable ones in places."""
    for change in tree.find_all(exp.Update, exp.Delete):
        for name, call in _calls(change):
            if _query_of(call) is not change and call.find_ancestor(exp.Select):
                continue
            if name in VOLATILE - {"clock_timestamp"}:
                yield f"{name}() is volatile"
            elif name in STABLE | {"clock_timestamp"}:
                if call.find_ancestor(exp.Returning):
                    yield f"{name}() in RETURNING"
                elif call.find_ancestor(exp.Case, exp.Coalesce):
                    yield f"{name}() in CASE or COALESCE"


def _calls(tree: exp.Expression) -> Iterator[tuple[str, exp.Expression]]:
    for call in tree.find_all(exp.Anonymous, exp.Func):
        name = call.name if isinstance(call, exp.Anonymous) else call.sql_name()
        yield name.lower(), call


#: A table of the ledger's in a stored function: how it is used, its name, and what it is called.
_USED = re.compile(
    r"\b(?P<how>FROM|JOIN|UPDATE|INTO|,)\s+(?P<table>budget_\w+)(?:\s+(?:AS\s+)?(?P<alias>(?!(?:"
    r"WHERE|SET|ON|VALUES|SELECT|LIMIT|ORDER|FOR|JOIN|LEFT|USING|GROUP|AND)\b)\w+))?",
    re.IGNORECASE,
)


#: What follows the table that rows go to: the root first, and whose.
_GIVEN = re.compile(r"\s*\(\s*root\b[^)]*\)\s*(?:VALUES\s*\(|SELECT\s+)\s*(p_root\b|\w+\.root\b)")


def body_faults(body: str) -> list[str]:
    """Return the tables in a stored function that no condition there restricts to its root.

    Its statements are looked at as text: PL/pgSQL is not parsed. A table is restricted by its own
    root, or joined by root to one that is.
    """
    found = []
    text = re.sub(r"--[^\n]*", "", body)
    for statement in text.split(";"):
        for used in _USED.finditer(statement):
            table, alias = used["table"], used["alias"] or used["table"]
            if table not in TABLES:
                continue
            if used["how"].upper() == "INTO":
                rows = statement[used.end() :]
                if _GIVEN.match(rows) is None:
                    found.append(f"{table} gets rows of another root: {statement.strip()[:200]}")
                continue
            own = rf"(?:\b{alias}\.|(?<![\w.]))root\s*=\s*(?:p_root|\w+\.root)\b"
            other = rf"\b\w+\.root\s*=\s*{alias}\.root\b"
            if not re.search(f"{own}|{other}", statement):
                found.append(f"{table} {alias}: {statement.strip()[:200]}")
    return found


_READS_OR_WRITES = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE)\b", re.IGNORECASE)
_PACKAGE, _TESTS = (
    f"{Path(place).resolve()}{os.sep}"
    for place in (Path(schema.__file__).parents[1], Path(__file__).parents[1])
)


def _is_tests() -> bool:
    """Tell whether the statement that is sent now is a test's own."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith((_PACKAGE, _TESTS)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TESTS)


class Watch:
    """Each statement that an engine sends for the package, looked at once.

    What a test sends itself stands for somebody else's work; what ends a savepoint has no tables.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._fresh: list[str] = []

    def note(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        """Listen to an engine's ``before_cursor_execute``."""
        if statement not in self._seen and _READS_OR_WRITES.match(statement) and not _is_tests():
            self._seen.add(statement)
            self._fresh.append(statement)

    def faults(self) -> list[tuple[str, list[str]]]:
        """Return the statements that were sent since, of which any is at fault, and why."""
        fresh, self._fresh = self._fresh, []
        return [(one, found) for one in fresh if (found := faults(one))]
