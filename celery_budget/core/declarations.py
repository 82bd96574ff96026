"""Budgets as code: the file ``budgets.toml``, and what would make a ledger what it says.

The file is a list of ``[[budget]]`` tables, read by :func:`parse` and written by :func:`written`.
:func:`compare` works out the changes in an order in which they can be made one by one.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from celery_budget.core.alerts import parse_thresholds
from celery_budget.core.budgets import (
    AUTO,
    DEFAULT,
    MILLION,
    Budget,
    Limit,
    Share,
    check_text,
    is_template,
    match,
    parts_per_million,
    thresholds_text,
)
from celery_budget.core.lane_files import parse_lanes
from celery_budget.core.lanes import Lane
from celery_budget.core.periods import Period
from celery_budget.errors import BudgetError, InvalidBudget

if sys.version_info >= (3, 11):
    import tomllib
else:
    # mypy takes this branch wherever it runs, and only Python 3.10 has the package.
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["Change", "compare", "parse", "parse_lanes_of", "written"]

#: The keys of a table: the types of their values, and what to give.
_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("name", "unit"), ((str,), "text in quotes")),
    "limit": ((int, str), 'an integer, a share of the parent\'s such as "10%", or "none"'),
    **dict.fromkeys(("parent", "root", "period", "timezone"), ((str,), "text in quotes")),
    "anchor_day": ((int,), "an integer"),
    **dict.fromkeys(("soft_stop", "hard_stop"), ((int, float), "a ratio such as 0.8")),
    "stripes": ((int, str), 'an integer, or "auto"'),
    "weight": ((int,), "an integer"),
    "alert_at": ((str, list), 'shares of the limit such as "80%,95%", or "none"'),
}
_UNLIMITED = "none"

_Value = str | int | Decimal


@dataclass(frozen=True)
class Change:
    """What is to be done with one budget; ``before`` and ``after`` are its declarations.

    :ivar kind: ``add`` (there is none before), ``change``, ``close`` (there is none after), or
        ``reopen``, where the terms may be others than before.
    """

    root: str
    name: str
    kind: Literal["add", "change", "close", "reopen"]
    before: Budget | None
    after: Budget | None

    @property
    def fields(self) -> tuple[tuple[str, str, str], ...]:
        """The terms that become others: key, text before and text after, in the file's words.

        No parent is an empty text. For a new budget: what the file has to state, with empty texts
        before it. Closing a budget leaves its terms as they are.
        """
        if self.after is None:
            return ()
        before = {} if self.before is None else _terms(self.before)
        after = _terms(self.after) if before else _stated(self.after)
        return tuple(
            (key, _plain(before.get(key, "")), _plain(value))
            for key, value in after.items()
            if value != before.get(key)
        )


@dataclass(frozen=True)
class _Table:
    """One ``[[budget]]`` with keys and types that are right, and its place for errors."""

    where: str
    name: str
    root: str
    terms: dict[str, Any]


def parse(text: str, root: str, source: str = "budgets.toml") -> dict[str, tuple[Budget, ...]]:
    """Return the budgets that a file declares, by root, in the order of the file.

    A unit that is left out is that of the parent in the file, or of the templates there that could
    make the parent. Stops are ratios; a soft stop that is left out is the hard stop.

    :param root: whose the tables are that name none.
    :param source: what the file is called in errors.
    :raises InvalidBudget: for what is no such file, for a table that declares no budget, and for
        tables that cannot stand beside each other.
    """
    by_root: dict[str, dict[str, _Table]] = {}
    for number, terms in enumerate(_load(text, source)[0], 1):
        table = _checked(terms, f"{source}, [[budget]] {number}", root)
        twin = by_root.setdefault(table.root, {}).setdefault(table.name, table)
        if twin is not table:
            raise InvalidBudget(
                f"{table.where}: {twin.where} has that name under the same root; take one of the "
                "two out"
            )
    return {name: _budgets(tables) for name, tables in by_root.items()}


def parse_lanes_of(
    text: str, root: str, source: str = "budgets.toml"
) -> dict[str, tuple[Lane, ...]]:
    """Return the lanes that a file declares, by root; see :func:`parse`.

    :raises InvalidBudget: for what is no such file, and for a table that declares no lane.
    """
    return parse_lanes(_load(text, source)[1], root, source)


def written(budgets: Mapping[str, Iterable[Budget]], root: str) -> str:
    """Return the file that :func:`parse` turns into these budgets: roots by name, parents first.

    What is left out comes back by default. Without a budget the text is empty, and no such file.

    :param budgets: by root.
    :param root: the one that needs no naming.
    :raises InvalidBudget: where parents lead in a circle.
    """
    tables = []
    for of_root, declared in sorted(budgets.items()):
        named = {budget.name: budget for budget in declared}
        other = {} if of_root == root else {"root": of_root}
        for name in _ordered({name: budget.parent for name, budget in named.items()}):
            terms: dict[str, _Value] = {"name": name, **_stated(named[name]), **other}
            pairs = "".join(f"{key} = {_toml(value)}\n" for key, value in terms.items())
            tables.append(f"[[budget]]\n{pairs}")
    return "\n".join(tables)


def compare(
    root: str,
    existing: Mapping[str, Budget],
    wanted: Sequence[Budget],
    closed: Collection[str] = (),
    prune: bool = False,
    pinned: Collection[str] = (),
) -> tuple[Change, ...]:
    """Return what makes the ``existing`` budgets of a root the ``wanted`` ones; nothing twice.

    Made in this order, no change meets a parent that is yet to come, nor leads parents in a circle
    on the way: parents before children, then what is closed, children before parents.

    :param existing: by name, closed ones included.
    :param closed: names of those that are closed; a wanted one of them is reopened.
    :param prune: whether what is not wanted is closed.
    :param pinned: names of those that stay, wanted or not: what templates made.
    :raises InvalidBudget: where the parents would lead in a circle.
    """
    target = {budget.name: budget for budget in wanted}
    order = list(_ordered({name: one.parent for name, one in {**existing, **target}.items()}))
    changes = []
    for name in filter(target.__contains__, order):
        before, after = existing.get(name), target[name]
        if name in closed:
            changes.append(Change(root, name, "reopen", before, after))
        elif before is None:
            changes.append(Change(root, name, "add", None, after))
        elif before != after:
            changes.append(Change(root, name, "change", before, after))
    kept = {*target, *closed, *pinned} if prune else set(order)
    closes = [name for name in reversed(order) if name not in kept]
    return (*changes, *(Change(root, name, "close", existing[name], None) for name in closes))


def _load(text: str, source: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the tables of a file: those of budgets, and what it says of lanes."""
    try:
        document: dict[str, Any] = tomllib.loads(text)
    # Numbers of thousands of digits and deep nesting meet limits of the interpreter instead.
    except (ValueError, RecursionError) as exc:
        raise InvalidBudget(f"{source} is no TOML, mend it there: {exc}") from exc
    for key in document:
        if key not in ("budget", "lane"):
            raise InvalidBudget(
                f"{source} has {key!r} at its top; there is nothing but tables that begin with "
                "[[budget]] or [lane.NAME], with their keys below"
                "; take it out"
            )
    tables = document.get("budget", [] if document.get("lane") else None)
    if not (isinstance(tables, list) and all(isinstance(one, dict) for one in tables)) or not (
        tables or "lane" in document
    ):
        raise InvalidBudget(f"{source} has no list of budgets; begin each with [[budget]]")
    return tables, document.get("lane", {})


def _checked(terms: dict[str, Any], where: str, root: str) -> _Table:
    """Return a table whose keys and types are right."""
    name = terms.get("name")
    if isinstance(name, str):
        where = f"{where} ({name!r})"
    for key, value in terms.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}"
            raise InvalidBudget(f"{where}: there is no key {key!r}; {hint}; correct it")
        types, advice = _KEYS[key]
        if type(value) not in types:
            kind = type(value).__name__
            raise InvalidBudget(f"{where}: {key} is {value!r} ({kind}); give {advice}")
    if not isinstance(name, str):
        raise InvalidBudget(f"{where}: name is missing; add one, such as name = 'tenant:acme'")
    try:
        return _Table(where, name, check_text(terms.get("root", root), "a root"), terms)
    except BudgetError as exc:
        raise InvalidBudget(f"{where}: {exc}") from exc


def _budgets(tables: Mapping[str, _Table]) -> tuple[Budget, ...]:
    """Return the budgets of one root's tables, once they fit each other."""
    parents = {name: table.terms.get("parent") for name, table in tables.items()}
    units: dict[str, str | None] = {}
    for name, above in _ordered(parents, lambda name: tables[name].where).items():
        inherited = {units.get(one) for one in above}
        one_unit = inherited.pop() if len(inherited) == 1 else None
        units[name] = tables[name].terms.get("unit", one_unit)
    return tuple(_budget(table, units) for table in tables.values())


def _budget(table: _Table, units: Mapping[str, str | None]) -> Budget:
    terms, unit, parent = table.terms, units[table.name], table.terms.get("parent")
    if unit is None:
        raise InvalidBudget(
            f"{table.where}: unit is missing; add one, such as unit = 'tokens' (it may be left out "
            "only where this file has the parent, with a unit)"
        )
    above = unit if parent is None else units.get(parent)
    if above not in (unit, None):
        raise InvalidBudget(
            f"{table.where}: it counts {unit!r} and its parent {parent!r} counts {above!r}; give "
            "both the same unit, or this one another parent"
        )
    try:
        hard_stop = parts_per_million(terms.get("hard_stop", 1), "hard_stop")
        soft_stop = terms.get("soft_stop")
        return Budget(
            name=table.name,
            unit=unit,
            limit=_limit(terms.get("limit", _UNLIMITED)),
            parent=parent,
            period=Period(
                terms.get("period", Period.kind),
                terms.get("timezone", Period.timezone),
                terms.get("anchor_day", Period.anchor_day),
            ),
            soft_stop=hard_stop if soft_stop is None else parts_per_million(soft_stop, "soft_stop"),
            hard_stop=hard_stop,
            stripes=_stripes(terms.get("stripes", AUTO)),
            weight=terms.get("weight", Budget.weight),
            alert_at=parse_thresholds(terms.get("alert_at", DEFAULT), "alert_at"),
        )
    except BudgetError as exc:
        raise InvalidBudget(f"{table.where}: {exc}") from exc


def _stripes(value: int | str) -> int | None:
    if value == AUTO:
        return None
    if isinstance(value, str):
        raise InvalidBudget(f"stripes is {value!r}; give {_KEYS['stripes'][1]}")
    return value


def _limit(value: int | str) -> Limit:
    if isinstance(value, int):
        return value
    if value == _UNLIMITED:
        return None
    if not value.endswith("%"):
        raise InvalidBudget(f"limit is {value!r}; give {_KEYS['limit'][1]}")
    return Share.parse(value, "limit")


def _terms(budget: Budget) -> dict[str, _Value]:
    """Return all terms of a budget in the words of the file."""
    limit = str(budget.limit) if isinstance(budget.limit, Share) else budget.limit
    return {
        "unit": budget.unit,
        "limit": _UNLIMITED if limit is None else limit,
        "parent": budget.parent or "",
        "period": budget.period.kind,
        "timezone": budget.period.timezone,
        "anchor_day": budget.period.anchor_day,
        "soft_stop": Decimal(budget.soft_stop) / MILLION,
        "hard_stop": Decimal(budget.hard_stop) / MILLION,
        "stripes": AUTO if budget.stripes is None else budget.stripes,
        "weight": budget.weight,
        "alert_at": thresholds_text(budget.alert_at),
    }


def _stated(budget: Budget) -> dict[str, _Value]:
    """Return the terms that a file has to state: the unit, and what is not so by default."""
    terms = _terms(budget)
    defaults = {**_terms(Budget("-", "-")), "unit": None, "soft_stop": terms["hard_stop"]}
    return {key: value for key, value in terms.items() if value != defaults[key]}


def _plain(value: _Value) -> str:
    if isinstance(value, int):
        return f"{value:_}"
    return value if isinstance(value, str) else f"{value.normalize():f}"


def _toml(value: _Value) -> str:
    # A JSON string is a TOML string but for U+007F, and names have no control characters.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _plain(value)


def _ordered(
    parents: Mapping[str, str | None], label: Callable[[str], str] = repr
) -> dict[str, set[str]]:
    """Return what has to be there before each budget: its parent, or what could make the parent.

    Parents come before children, those of one generation by code points.

    :param label: what a budget is called in errors.
    :raises InvalidBudget: where parents lead in a circle.
    """
    parent_of = {name: parents.keys() & {parent} for name, parent in parents.items()}
    templates = [name for name in parents if is_template(name)]
    above = {
        name: parent_of[name]
        or {one for one in templates if parent and one != name and match(one, parent)}
        for name, parent in parents.items()
    }
    try:
        order = _by_generation(parent_of)
    except CycleError as exc:
        circle = exc.args[1][::-1]
        raise InvalidBudget(
            f"{label(circle[0])}: its parents lead back to it "
            f"({' -> '.join(map(repr, circle))}); give one of them another"
        ) from exc
    # A circle that only templates close is none where the budget they could make exists already.
    with suppress(CycleError):
        order = _by_generation(above)
    return {name: above[name] for name in order}


def _by_generation(above: Mapping[str, set[str]]) -> list[str]:
    sorter = TopologicalSorter(above)
    sorter.prepare()
    order: list[str] = []
    while sorter.is_active():
        generation = sorted(sorter.get_ready())
        sorter.done(*generation)
        order += generation
    return order
