"""Budgets and templates: declared, changed, made from a template, closed, read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.budgets import (
    Balance,
    Budget,
    Limit,
    Share,
    check_name,
    check_own_name,
    is_template,
    with_terms,
)
from celery_budget.core.declarations import Change, compare
from celery_budget.core.draws import OPEN, limits_in_force
from celery_budget.errors import HoldsOpen, InvalidBudget, UnknownBudget
from celery_budget.store import levels, windows
from celery_budget.store.balances import binary
from celery_budget.store.schema import (
    adjustments,
    balances,
    budgets,
    grants,
    instant,
    lines,
    now_us,
    reservations,
)
from celery_budget.store.unready import Unready

__all__ = [
    "apply",
    "balance",
    "balances_of",
    "close",
    "declare",
    "declared",
    "draining",
    "find",
    "lock_budgets",
    "lock_root",
    "made_from",
    "make",
    "not_ready",
    "open_budgets",
    "ready",
    "reopen",
    "set_budget",
    "template_for",
    "templates_for",
]

#: How many budgets may be above one another.
MAX_DEPTH = 16


def find(connection: Connection, root: str, name: str) -> Budget | None:
    """Return a budget or template as declared; none where there is none. Locks nothing."""
    return declared(connection, root, [name]).get(name)


def declared(
    connection: Connection, root: str, names: Iterable[str] | None = None
) -> dict[str, Budget]:
    """Return budgets and templates as declared, by name; all of ``root`` unless ``names`` tells."""
    return {row.name: _budget(row) for row in rows_of(connection, root, names)}


def rows_of(
    connection: Connection, root: str, names: Iterable[str] | None = None
) -> list[sa.Row[Any]]:
    """Return the rows of budgets and templates, by name. Locks nothing."""
    statement = sa.select(budgets).where(budgets.c.root == root).order_by(budgets.c.name)
    if names is not None:
        statement = statement.where(budgets.c.name.in_(list(names)))
    return list(connection.execute(statement))


def _budget(row: sa.Row[Any]) -> Budget:
    limit: Limit = row.limit_amount if row.limit_share is None else Share(row.limit_share)
    return Budget(
        row.name,
        row.unit,
        limit,
        row.parent,
        windows.period_of(row),
        row.soft_stop,
        row.hard_stop,
        row.stripes,
    )


def open_budgets(connection: Connection, root: str, made: bool = False) -> list[Budget]:
    """Return the budgets and templates that take new requests, by name. Locks nothing.

    :param made: also those that templates made.
    """
    return [
        _budget(row)
        for row in rows_of(connection, root)
        if row.state == OPEN and (made or row.template is None)
    ]


def made_from(connection: Connection, root: str) -> dict[str, int]:
    """Return how many budgets were made from each template. Locks nothing."""
    rows = connection.execute(
        sa.select(budgets.c.template, sa.func.count())
        .where(budgets.c.root == root, budgets.c.template.is_not(None))
        .group_by(budgets.c.template)
    )
    return {template: int(count) for template, count in rows}


def lock_root(connection: Connection, root: str) -> None:
    """Let nobody else change the budgets of ``root`` until the transaction ends.

    The first lock of everything that may give a budget another parent: two such changes could make
    a circle that neither of them sees. Admissions do not wait for it.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT pg_advisory_xact_lock(1734502, hashtext(:root))"), {"root": root}
        )


def lock_budgets(connection: Connection, root: str, names: Iterable[str]) -> list[sa.Row[Any]]:
    """Lock budgets and templates, then the balances that may still change, both in order.

    No window is made for them meanwhile, and no admission that draws on them is between its
    decision and its commit: one that got a balance first has committed, one that waits decides
    anew. Returns the rows of those that exist.
    """
    wanted = sorted(set(names))
    rows = connection.execute(
        sa.select(budgets)
        .where(budgets.c.root == root, budgets.c.name.in_(wanted))
        .order_by(sa.collate(budgets.c.name, binary(connection)))
        .with_for_update()
    ).all()
    if rows and connection.dialect.name == "postgresql":
        connection.execute(
            sa.select(balances.c.stripe)
            .where(
                balances.c.root == root,
                balances.c.budget.in_(wanted),
                # An admission into a window may still go on for a while after its end.
                sa.or_(balances.c.end_us > instant() - windows.LATE_US, balances.c.reserved > 0),
            )
            .order_by(
                sa.collate(balances.c.budget, binary(connection)),
                balances.c.window_us,
                balances.c.stripe,
            )
            .with_for_update()
        )
    return list(rows)


def declare(
    connection: Connection,
    root: str,
    budget: Budget,
    *,
    template: str | None = None,
    below: tuple[str, ...] = (),
) -> bool:
    """Create a budget or template, or give it new terms; what was reserved and spent stays.

    The caller holds :func:`lock_root` and, where it may exist, :func:`lock_budgets`: what is
    admitted afterwards goes by the new terms. Returns whether anything changed.

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
            {row.name: _budget(row) for row in rows},
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
        "stripes": budget.stripes,
    }


def _insert(connection: Connection, root: str, budget: Budget, template: str | None) -> None:
    connection.execute(
        budgets.insert().values(
            root=root,
            name=budget.name,
            **_columns(budget),
            state=OPEN,
            template=template,
            created_us=now_us(),
            updated_us=now_us(),
        )
    )
    if not is_template(budget.name):
        window = budget.period.window(windows.read_now(connection))
        windows.insert_window(connection, root, budget.name, window.start_us, window.end_us)


def _check_parent(
    connection: Connection, root: str, budget: Budget, below: tuple[str, ...]
) -> None:
    """Check what is above a budget; make those that are not there of their templates."""
    above, name, unit = budget.parent, budget.name, budget.unit
    levels_above = 0
    while above is not None:
        levels_above += 1
        if levels_above > MAX_DEPTH:
            raise InvalidBudget(f"budget {budget.name!r} has more than {MAX_DEPTH} above it")
        if above == budget.name:
            raise InvalidBudget(f"budget {budget.name!r} would be above itself, as {name!r} is")
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
            )
        above, name = row.parent, above
    if levels_above and levels_above + _levels_below(connection, root, budget.name) > MAX_DEPTH:
        raise InvalidBudget(
            f"budgets below {budget.name!r} would have more than {MAX_DEPTH} above them"
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
        sa.select(budgets).where(budgets.c.root == root, budgets.c.name.contains("*"))
    ).all()
    is_open = {row.name: row.state == OPEN for row in rows}
    templates = sorted(map(_budget, rows), key=_least_literal)
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

    The caller holds :func:`lock_root`.

    :param below: for whose sake it is made: templates can lead to one another without an end.
    """
    check_own_name(name)
    found = template_for(connection, root, name)
    if found is None:
        return False
    if name in below or len(below) > MAX_DEPTH:
        raise InvalidBudget(f"the templates of {below[0]!r} lead to no end of parents")
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
    known = levels.levels_of(connection, root, wanted)
    unseen = [name for name in wanted if name not in known]
    if unseen:
        lock_root(connection, root)
        for name in unseen:
            if find(connection, root, name) is None and not make(connection, root, name):
                raise UnknownBudget(name)
        known = levels.levels_of(connection, root, wanted)
    for name in sorted(known):
        # One that takes nothing new needs no window for it.
        if known[name].window_us is None and known[name].state == OPEN:
            windows.open_window(connection, root, name)


def not_ready(root: str, names: Sequence[str]) -> Unready:
    """Return what is raised where :func:`ready` has to be called before."""
    return Unready(f"budget {names[0]!r}", partial(ready, root=root, names=names))


def close(
    connection: Connection, root: str, name: str, drain: bool, only_draining: bool = False
) -> str:
    """Close a budget: it takes nothing new, for good. Returns the state it is in then.

    Locks as :func:`lock_budgets`: an admission that got a balance first is counted as open, one
    that comes later finds the budget closed.

    :param drain: where requests that draw on it have not ended, let them end first.
    :param only_draining: leave it alone where it was reopened meanwhile.
    :raises UnknownBudget: where there is none.
    :raises HoldsOpen: where some have not ended, and it is not to be drained.
    """
    rows = lock_budgets(connection, root, [check_name(name)])
    if not rows:
        raise UnknownBudget(name)
    if rows[0].state == "closed" or (only_draining and rows[0].state == OPEN):
        return str(rows[0].state)
    open_holds = connection.execute(
        sa.select(sa.func.count())
        .select_from(reservations)
        .join(
            lines,
            sa.and_(
                lines.c.root == reservations.c.root,
                lines.c.reservation_id == reservations.c.reservation_id,
            ),
        )
        .where(
            reservations.c.root == root,
            reservations.c.ended_us.is_(None),
            lines.c.budget == name,
        )
    ).scalar_one()
    if open_holds and not drain:
        raise HoldsOpen(name, "the closing", open_holds)
    state = "draining" if open_holds else "closed"
    if state != rows[0].state:
        _set_state(connection, root, name, state)
    return state


def _set_state(connection: Connection, root: str, name: str, state: str) -> None:
    connection.execute(
        budgets.update()
        .where(budgets.c.root == root, budgets.c.name == name)
        .values(state=state, updated_us=now_us())
    )


def draining(connection: Connection, root: str, limit: int) -> list[str]:
    """Return the names of budgets that are closed as soon as nothing draws on them any more."""
    return list(
        connection.execute(
            sa.select(budgets.c.name)
            .where(budgets.c.root == root, budgets.c.state == "draining")
            .order_by(budgets.c.updated_us)
            .limit(limit)
        ).scalars()
    )


def reopen(connection: Connection, root: str, name: str) -> bool:
    """Let a closed or draining budget take new requests again; false where it does already.

    :raises UnknownBudget: where there is none.
    """
    rows = lock_budgets(connection, root, [check_name(name)])
    if not rows:
        raise UnknownBudget(name)
    if rows[0].state == OPEN:
        return False
    _set_state(connection, root, name, OPEN)
    return True


def balances_of(connection: Connection, root: str) -> list[Balance]:
    """Return the balance of every budget of ``root``, by name. Locks nothing."""
    rows = connection.execute(levels.select_levels(root, {}).order_by(budgets.c.name)).all()
    known = {row.name: levels.level(row) for row in rows}
    now = windows.read_now(connection)
    return [
        _balance(row, limits_in_force(known, row.name)[row.name][0], now)
        for row in rows
        if not is_template(row.name)
    ]


def balance(connection: Connection, root: str, name: str) -> Balance:
    """Return the balance of budget ``name`` in the window that is open now. Locks nothing.

    :raises UnknownBudget: where there is none.
    """
    if is_template(check_name(name)):
        raise UnknownBudget(name)
    known = levels.levels_of(connection, root, [name])
    row = connection.execute(levels.select_levels(root, {}).where(budgets.c.name == name)).first()
    if row is None:
        raise UnknownBudget(name)
    now = 0 if row.window_us is not None else windows.read_now(connection)
    return _balance(row, limits_in_force(known, name)[name][0], now)


def _balance(row: sa.Row[Any], limit: int | None, now: int) -> Balance:
    start_us, end_us = row.window_us, row.end_us
    if start_us is None:
        # Nobody has drawn on this window yet.
        window = windows.window_now(row, now)
        start_us, end_us = window.start_us, window.end_us
    return Balance(
        row.name,
        row.unit,
        limit,
        row.reserved or 0,
        row.spent or 0,
        row.parent,
        row.period,
        start_us,
        None if row.period == "total" else end_us,
        row.state,
    )
