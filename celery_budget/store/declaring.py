"""Budgets and templates declared and changed, and budgets made of their templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.budgets import (
    Budget,
    Share,
    check_name,
    check_own_name,
    is_template,
    with_terms,
)
from celery_budget.core.declarations import Change, compare
from celery_budget.core.draws import OPEN
from celery_budget.errors import InvalidBudget, UnknownBudget
from celery_budget.store import levels, parked, windows
from celery_budget.store.budgets import (
    budget_of,
    close,
    find,
    lock_budgets,
    lock_root,
    reopen,
    rows_of,
)
from celery_budget.store.levels import MAX_DEPTH
from celery_budget.store.schema import (
    IS_TEMPLATE,
    adjustments,
    budgets,
    grants,
    lines,
    now_us,
)
from celery_budget.store.unready import Unready

__all__ = [
    "apply",
    "declare",
    "make",
    "not_ready",
    "ready",
    "set_budget",
    "template_for",
    "templates_for",
]


def declare(
    connection: Connection,
    root: str,
    budget: Budget,
    *,
    template: str | None = None,
    below: tuple[str, ...] = (),
) -> bool:
    """Create a budget or template, or give it new terms; what was reserved and spent stays.

    The caller holds the root's lock and, where it may exist, the budget's
    (:func:`~celery_budget.store.budgets.lock_budgets`): what is admitted afterwards goes by the new
    terms. Returns whether anything changed.

    :param template: the template it is made from.
    :param below: for whose sake it is made.
    :raises InvalidBudget: for a parent that does not exist, counts something else or is below it;
        for more levels than there may be; for another unit once it was drawn on or has budgets
        below it.
    """
    before = find(connection, root, budget.name)
    if before == budget:
        return False
    _check_parent(connection, root, budget, below)
    if before is None:
        _insert(connection, root, budget, template)
        return True
    if before.unit != budget.unit:
        _check_unit_free(connection, root, before, budget.unit)
    connection.execute(
        budgets.update()
        .where(budgets.c.root == root, budgets.c.name == budget.name)
        .values(**_columns(budget), updated_us=now_us())
    )
    if before.parent != budget.parent:
        parked.look_anew(connection, root)
    if before.stripes != budget.stripes and not is_template(budget.name):
        windows.spread(connection, root, budget.name, budget.stripes or 1)
    if before.period != budget.period and not is_template(budget.name):
        windows.retime(connection, root, budget.name, budget.period)
    return True


def set_budget(
    connection: Connection, root: str, name: str, terms: Mapping[str, Any], reopened: bool = False
) -> Budget:
    """Create a budget or template, or change the ``terms`` that are given; return it as it is then.

    See :func:`celery_budget.core.budgets.with_terms`. A new budget counts what its parent does
    unless told otherwise. Locks the root, then as :func:`declare`.

    :param reopened: let a closed or draining budget take requests again.
    :raises InvalidName, InvalidAmount, InvalidPeriod, InvalidBudget: nothing was changed.
    """
    check_name(name)
    lock_root(connection, root)
    before, given = find(connection, root, name), dict(terms)
    if before is None and given.get("unit") is None and given.get("parent") is not None:
        parent = given["parent"]
        if find(connection, root, parent) is None and not is_template(check_name(parent)):
            make(connection, root, parent)
        above = find(connection, root, parent)
        given["unit"] = None if above is None else above.unit
        if above is None:
            raise _no_parent(parent, name)
    budget = with_terms(before, name, given)
    lock_budgets(connection, root, [name])
    declare(connection, root, budget)
    if reopened:
        reopen(connection, root, name)
    return budget


def _no_parent(parent: str, name: str) -> InvalidBudget:
    return InvalidBudget(f"the parent {parent!r} of {name!r} does not exist; create it first")


def apply(
    connection: Connection,
    wanted: Mapping[str, Sequence[Budget]],
    prune: bool = False,
    only_compare: bool = False,
) -> tuple[Change, ...]:
    """Make the budgets of each root as they are ``wanted``; return what that changes.

    All or nothing, in the caller's transaction. Locks the roots, then the budgets' rows, both in
    order. What is wanted is open afterwards, closed as it may have been.

    :param prune: close what is not wanted and was not made of a template.
    :param only_compare: change nothing.
    :raises HoldsOpen: where a budget is to be closed that requests still draw on.
    :raises InvalidBudget: as :func:`declare`.
    """
    changes: list[Change] = []
    for root in sorted(wanted):
        lock_root(connection, root)
        rows = rows_of(connection, root, None if prune else [one.name for one in wanted[root]])
        mine = compare(
            root,
            {row.name: budget_of(row) for row in rows},
            wanted[root],
            closed=[row.name for row in rows if row.state != OPEN],
            prune=prune,
            pinned=[row.name for row in rows if row.template is not None],
        )
        changes += mine
        if only_compare:
            continue
        lock_budgets(connection, root, [one.name for one in mine])
        for change in mine:
            if change.after is not None:
                declare(connection, root, change.after)
            if change.kind == "reopen":
                reopen(connection, root, change.name)
            elif change.kind == "close":
                close(connection, root, change.name, False)
    return tuple(changes)


def _columns(budget: Budget) -> dict[str, Any]:
    is_share = isinstance(budget.limit, Share)
    return {
        "unit": budget.unit,
        "limit_amount": None if is_share else budget.limit,
        "limit_share": budget.limit.parts if isinstance(budget.limit, Share) else None,
        "parent": budget.parent,
        "period": budget.period.kind,
        "timezone": budget.period.timezone,
        "anchor_day": budget.period.anchor_day,
        "soft_stop": budget.soft_stop,
        "hard_stop": budget.hard_stop,
        "stripes": budget.stripes or 0,
        "weight": budget.weight,
        "alert_at": None if budget.alert_at is None else ",".join(map(str, budget.alert_at)),
    }


def _insert(connection: Connection, root: str, budget: Budget, template: str | None) -> None:
    connection.execute(
        budgets.insert().values(
            root=root,
            name=budget.name,
            **_columns(budget),
            state=OPEN,
            template=template,
            spread=windows.rows_for(connection, budget.stripes or 1),
            created_us=now_us(),
            updated_us=now_us(),
        )
    )
    if not is_template(budget.name):
        window = budget.period.window(windows.read_now(connection))
        rows = windows.rows_for(connection, budget.stripes or 1)
        windows.insert_window(connection, root, budget.name, window.start_us, window.end_us, rows)


def _check_parent(
    connection: Connection, root: str, budget: Budget, below: tuple[str, ...]
) -> None:
    """Check what is above a budget; make those that are not there of their templates."""
    above, name, unit = budget.parent, budget.name, budget.unit
    levels_above = 0
    while above is not None:
        levels_above += 1
        if levels_above > MAX_DEPTH:
            raise InvalidBudget(
                f"budget {budget.name!r} has more than {MAX_DEPTH} above it"
                "; give it a parent further up"
            )
        if above == budget.name:
            raise InvalidBudget(
                f"budget {budget.name!r} would be above itself, as {name!r} is"
                "; give it another parent"
            )
        row = _unit_and_parent(connection, root, above)
        if row is None and not is_template(above):
            make(connection, root, above, (*below, budget.name))
            row = _unit_and_parent(connection, root, above)
        if row is None:
            raise _no_parent(above, name)
        if row.unit != unit:
            raise InvalidBudget(
                f"budget {name!r} counts {unit} and its parent {above!r} {row.unit}; what is drawn "
                "from the one is drawn from the other"
                "; give it a parent that counts the same"
            )
        above, name = row.parent, above
    if levels_above and levels_above + _levels_below(connection, root, budget.name) > MAX_DEPTH:
        raise InvalidBudget(
            f"budgets below {budget.name!r} would have more than {MAX_DEPTH} above them"
            "; give them a parent further up"
        )


def _unit_and_parent(connection: Connection, root: str, name: str) -> Any:
    return connection.execute(
        sa.select(budgets.c.unit, budgets.c.parent).where(
            budgets.c.root == root, budgets.c.name == name
        )
    ).first()


def _levels_below(connection: Connection, root: str, name: str) -> int:
    """Return how far the budgets reach that are below one, which may not exist yet."""
    child = budgets.alias("child")
    down = (
        sa.select(budgets.c.name, sa.literal(1).label("depth"))
        .where(budgets.c.root == root, budgets.c.parent == name)
        .cte("down", recursive=True)
    )
    down = down.union_all(
        sa.select(child.c.name, down.c.depth + 1).where(
            child.c.root == root, child.c.parent == down.c.name
        )
    )
    deepest = sa.select(sa.func.coalesce(sa.func.max(down.c.depth), 0))
    return int(connection.execute(deepest).scalar_one())


def _check_unit_free(connection: Connection, root: str, before: Budget, unit: str) -> None:
    def is_in(table: sa.Table) -> bool:
        mine = sa.and_(table.c.root == root, table.c.budget == before.name)
        return connection.execute(sa.select(table.c.root).where(mine).limit(1)).first() is not None

    counted = any(map(is_in, (lines, adjustments, grants)))
    below = connection.execute(
        sa.select(budgets.c.name)
        .where(budgets.c.root == root, budgets.c.parent == before.name)
        .limit(1)
    ).scalar()
    if counted or below is not None:
        why = "was drawn on" if below is None else f"is the parent of {below!r}"
        raise InvalidBudget(
            f"budget {before.name!r} counts {before.unit} and {why}; its unit cannot become {unit}"
            "; make another budget for that"
        )


def template_for(connection: Connection, root: str, name: str) -> tuple[str, Budget] | None:
    """Return the template that stands for ``name``, and the budget it makes; none without one."""
    return templates_for(connection, root, [name]).get(name)


def templates_for(
    connection: Connection, root: str, names: Iterable[str]
) -> dict[str, tuple[str, Budget]]:
    """Return for each name that a template stands for that template, and the budget it makes.

    Of several it is the one with the most literal characters, then the first by name. Where that
    one is closed there is none: its names do not fall to a wider one.
    """
    rows = connection.execute(
        sa.select(budgets).where(budgets.c.root == root, sa.text(IS_TEMPLATE))
    ).all()
    is_open = {row.name: row.state == OPEN for row in rows}
    templates = sorted(map(budget_of, rows), key=_least_literal)
    found = {}
    for name in names:
        made = ((one.name, one.made_for(name)) for one in templates)
        first = next(((template, budget) for template, budget in made if budget is not None), None)
        if first is not None and is_open[first[0]]:
            found[name] = first
    return found


def _least_literal(template: Budget) -> tuple[int, str]:
    return template.name.count("*") - len(template.name), template.name


def make(connection: Connection, root: str, name: str, below: tuple[str, ...] = ()) -> bool:
    """Make the budget ``name`` from its template, and those above it; false without a template.

    The caller holds :func:`~celery_budget.store.budgets.lock_root`.

    :param below: for whose sake it is made: templates can lead to one another without an end.
    """
    check_own_name(name)
    found = template_for(connection, root, name)
    if found is None:
        return False
    if name in below or len(below) > MAX_DEPTH:
        raise InvalidBudget(
            f"the templates of {below[0]!r} lead to no end of parents"
            "; let one of them have no parent"
        )
    template, budget = found
    above = budget.parent
    if (
        above is not None
        and find(connection, root, above) is None
        and not make(connection, root, above, (*below, name))
    ):
        raise UnknownBudget(above)
    declare(connection, root, budget, template=template, below=below)
    return True


def ready(connection: Connection, root: str, names: Iterable[str]) -> None:
    """Make what requests on ``names`` need before they can be admitted.

    Budgets that are not there are made of their templates, and the windows of all on the way up
    are opened. In a transaction of its own; locks the root where budgets are made, then budgets'
    rows in order.

    :raises UnknownBudget: for one that does not exist and has no template.
    """
    wanted = sorted(set(names))
    seen = levels.levels_of(connection, root, wanted)
    unseen = [name for name in wanted if name not in seen]
    if unseen:
        lock_root(connection, root)
        for name in unseen:
            if find(connection, root, name) is None and not make(connection, root, name):
                raise UnknownBudget(name)
        seen = levels.levels_of(connection, root, wanted)
    for name in sorted(seen):
        # One that takes nothing new needs no window for it. One that is spread may lack a row.
        if (seen[name].window_us is None or seen[name].spread) and seen[name].state == OPEN:
            windows.open_window(connection, root, name)


def not_ready(root: str, names: Sequence[str]) -> Unready:
    """Return what is raised where :func:`ready` has to be called before."""
    return Unready(f"budget {names[0]!r}", partial(ready, root=root, names=names))
