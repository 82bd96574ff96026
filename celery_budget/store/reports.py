"""Reading the ledger for reports, reconciliation and explanations. Locks and changes nothing."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.reservations import USED
from celery_budget.store import journal as journals
from celery_budget.store.schema import (
    adjustments,
    attempts,
    balances,
    exact_sum,
    instant,
    journal,
    lines,
    now_us,
    outbox,
    parked,
    reservations,
    untold,
    usage,
)

__all__ = [
    "mismatched_balances",
    "mismatched_journals",
    "mismatched_lines",
    "mismatched_shares",
    "mismatched_usage",
    "open_work",
    "orphaned_lines",
    "overdue_us",
    "same_reservation",
    "total",
    "unreachable",
]

Rows = list[sa.Row[Any]]


def total(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the exact sum of amounts; 0 of none."""
    return sa.func.coalesce(exact_sum(column), 0)


def same_reservation(table: sa.Table) -> sa.ColumnElement[bool]:
    """Tell a reservation's rows in another table."""
    return sa.and_(
        table.c.root == reservations.c.root,
        table.c.reservation_id == reservations.c.reservation_id,
    )


def _some(connection: Connection, wrong: sa.Select[Any], limit: int) -> Rows:
    """Return the first of what is wrong, by reservation; each with how many there are: ``of``.

    PostgreSQL plans it as if all were wanted: for a few it may look one by one through a table.
    """
    found = wrong.cte("wrong").prefix_with("MATERIALIZED", dialect="postgresql")
    return list(
        connection.execute(
            sa.select(found, sa.func.count().over().label("of"))
            .order_by(found.c.reservation_id)
            .limit(limit)
        )
    )


def mismatched_balances(connection: Connection, root: str) -> Rows:
    """Return balances that are not the sum of their lines and adjustments, in one snapshot.

    Those of lines that have no balance come with amounts of none.
    """
    parts = sa.union_all(
        sa.select(
            lines.c.budget,
            lines.c.window_us,
            lines.c.stripe,
            total(lines.c.reserved).label("reserved"),
            total(lines.c.settled).label("spent"),
        )
        .where(lines.c.root == root)
        .group_by(lines.c.budget, lines.c.window_us, lines.c.stripe),
        sa.select(
            adjustments.c.budget,
            adjustments.c.window_us,
            adjustments.c.stripe,
            sa.literal(0),
            total(adjustments.c.amount),
        )
        .where(adjustments.c.root == root)
        .group_by(adjustments.c.budget, adjustments.c.window_us, adjustments.c.stripe),
    ).subquery()
    sums = (
        sa.select(
            parts.c.budget,
            parts.c.window_us,
            parts.c.stripe,
            total(parts.c.reserved).label("reserved"),
            total(parts.c.spent).label("spent"),
        )
        .group_by(parts.c.budget, parts.c.window_us, parts.c.stripe)
        .subquery()
    )
    mine = sa.select(balances).where(balances.c.root == root).subquery()
    held = sa.func.coalesce(sums.c.reserved, 0)
    spent = sa.func.coalesce(sums.c.spent, 0)
    differ = sa.or_(
        sa.func.coalesce(mine.c.reserved, 0) != held, sa.func.coalesce(mine.c.spent, 0) != spent
    )
    columns = [
        *(
            sa.func.coalesce(mine.c[name], sums.c[name]).label(name)
            for name in ("budget", "window_us", "stripe")
        ),
        mine.c.reserved,
        mine.c.spent,
        held.label("lines_reserved"),
        spent.label("lines_spent"),
    ]
    joined = mine.join(sums, _same_balance(mine.c, sums.c), full=True)
    return list(connection.execute(sa.select(*columns).select_from(joined).where(differ)))


def _same_balance(one: Any, other: Any) -> sa.ColumnElement[bool]:
    return sa.and_(
        one.budget == other.budget,
        one.window_us == other.window_us,
        one.stripe == other.stripe,
    )


def mismatched_journals(connection: Connection, root: str) -> Rows:
    """Return balances that their journal does not lead to.

    ``missing`` where an entry is not there, ``changed`` where one does not follow from the one
    before; those of entries that have no balance come with amounts of none.
    """
    told = journals.told(journal.c.root == root).subquery("told")
    mine = sa.select(balances).where(balances.c.root == root).subquery("mine")

    def number(column: Any) -> sa.ColumnElement[Any]:
        return sa.func.coalesce(column, 0)

    missing = sa.or_(
        number(told.c.missing) > 0,
        sa.and_(mine.c.entries.is_not(None), number(told.c.entries) != mine.c.entries),
    )
    changed = number(told.c.changed) > 0
    joined = mine.join(told, _same_balance(mine.c, told.c), full=True)
    return list(
        connection.execute(
            sa.select(
                *(
                    sa.func.coalesce(mine.c[name], told.c[name]).label(name)
                    for name in ("budget", "window_us", "stripe")
                ),
                mine.c.reserved,
                mine.c.spent,
                number(told.c.reserved).label("journal_reserved"),
                number(told.c.spent).label("journal_spent"),
                missing.label("missing"),
                changed.label("changed"),
            )
            .select_from(joined)
            .where(
                sa.or_(
                    mine.c.entries.is_(None),
                    missing,
                    changed,
                    mine.c.reserved != number(told.c.reserved),
                    mine.c.spent != number(told.c.spent),
                )
            )
        )
    )


def mismatched_shares(connection: Connection, root: str) -> Rows:
    """Return windows with several rows whose shares are not within the bound they were made by.

    While they are the shares add up to no more than it, and no row is above its share.
    """
    used = exact_sum(balances.c.reserved + balances.c.spent)
    above = balances.c.reserved + balances.c.spent > balances.c.share
    return list(
        connection.execute(
            sa.select(
                balances.c.budget,
                balances.c.window_us,
                sa.func.min(balances.c.basis).label("basis"),
                exact_sum(balances.c.share).label("shares"),
                used.label("used"),
            )
            .where(balances.c.root == root, balances.c.share.is_not(None))
            .group_by(balances.c.budget, balances.c.window_us)
            .having(
                sa.or_(
                    sa.func.min(balances.c.basis) != sa.func.max(balances.c.basis),
                    sa.and_(
                        sa.func.min(balances.c.basis) >= 0,
                        sa.or_(
                            exact_sum(balances.c.share) > sa.func.min(balances.c.basis),
                            sa.func.max(sa.case((above, 1), else_=0)) > 0,
                        ),
                    ),
                )
            )
            .order_by(balances.c.budget, balances.c.window_us)
        )
    )


def mismatched_lines(connection: Connection, root: str, limit: int) -> Rows:
    """Return lines that do not agree with the state of their reservation.

    An ended one holds nothing and has charged at least what was used; an open one has charged
    nothing and holds at least what was used. What is charged at the start is charged as it is used.
    """
    ended = reservations.c.ended_us.is_not(None)
    by_use = lines.c.charge == USED
    wrong = sa.or_(
        sa.and_(ended, sa.or_(lines.c.reserved != 0, lines.c.settled < lines.c.used)),
        sa.and_(~ended, by_use, sa.or_(lines.c.settled != 0, lines.c.reserved < lines.c.used)),
        sa.and_(~by_use, lines.c.settled != lines.c.used),
    )
    return _some(
        connection,
        sa.select(
            reservations.c.reservation_id,
            reservations.c.task_id,
            reservations.c.state,
            lines.c.budget,
            lines.c.reserved,
            lines.c.used,
            lines.c.settled,
        )
        .join(lines, same_reservation(lines))
        .where(reservations.c.root == root, wrong),
        limit,
    )


def orphaned_lines(connection: Connection, root: str, limit: int) -> Rows:
    """Return lines whose reservation is not there: nothing gives back what they hold."""
    return _some(
        connection,
        sa.select(lines.c.reservation_id, lines.c.budget, lines.c.reserved, lines.c.settled).where(
            lines.c.root == root,
            ~sa.exists(sa.text("1")).where(reservations.c.root == root, same_reservation(lines)),
        ),
        limit,
    )


def mismatched_usage(connection: Connection, root: str, limit: int) -> Rows:
    """Return lines whose recorded total is not the sum of the usage records that count there."""
    sums = (
        sa.select(usage.c.reservation_id, usage.c.unit, total(usage.c.amount).label("amount"))
        .where(usage.c.root == root)
        .group_by(usage.c.reservation_id, usage.c.unit)
        .subquery()
    )
    amount = sa.func.coalesce(sums.c.amount, 0)
    return _some(
        connection,
        sa.select(
            reservations.c.reservation_id,
            reservations.c.task_id,
            lines.c.budget,
            lines.c.used,
            (amount - lines.c.earlier).label("recorded"),
        )
        .join(lines, same_reservation(lines))
        .outerjoin(
            sums,
            sa.and_(
                sums.c.reservation_id == reservations.c.reservation_id,
                sums.c.unit == lines.c.unit,
            ),
        )
        .where(
            reservations.c.root == root,
            lines.c.charge == USED,
            lines.c.used + lines.c.earlier != amount,
        ),
        limit,
    )


def unreachable(connection: Connection, root: str, limit: int) -> Rows:
    """Return open requests that nothing would ever bring to an end.

    One that runs has an open attempt; a planned step has one before it that has not come to its
    end; any other has a message in the outbox that waits for no attempt, or is parked.
    """

    def has(table: sa.Table, *where: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        return sa.exists(sa.text("1")).where(same_reservation(table), table.c.root == root, *where)

    has_message, is_parked = has(outbox, outbox.c.state != "blocked"), has(parked)
    is_attempted = has(attempts, attempts.c.lease_until_us.is_not(None))
    running, planned = reservations.c.state == "running", reservations.c.state == "planned"
    before = reservations.alias("before")
    open_attempt = sa.exists(sa.text("1")).where(
        attempts.c.root == before.c.root,
        attempts.c.reservation_id == before.c.reservation_id,
        attempts.c.lease_until_us.is_not(None),
    )
    follows = sa.exists(sa.text("1")).where(
        before.c.root == root,
        before.c.plan_id == reservations.c.plan_id,
        before.c.step < reservations.c.step,
        sa.or_(before.c.ended_us.is_(None), open_attempt),
    )
    return _some(
        connection,
        sa.select(
            reservations.c.reservation_id,
            reservations.c.task_id,
            reservations.c.state,
            reservations.c.owner,
        ).where(
            reservations.c.root == root,
            reservations.c.ended_us.is_(None),
            sa.or_(
                sa.and_(running, ~is_attempted),
                sa.and_(~running, ~planned, ~has_message, ~is_parked),
                sa.and_(planned, ~follows),
            ),
        ),
        limit,
    )


def open_work(connection: Connection, root: str) -> dict[str, int]:
    """Return how many requests have not ended, by state, and what else has still to be done."""
    states = connection.execute(
        sa.select(reservations.c.state, sa.func.count(), sa.func.count(reservations.c.cancelled_us))
        .where(reservations.c.root == root, reservations.c.ended_us.is_(None))
        .group_by(reservations.c.state)
    ).all()
    found = {state: int(count) for state, count, _ in states}
    found["cancelling"] = sum(int(cancelled) for _, _, cancelled in states)
    unclosed = connection.execute(
        sa.select(sa.func.count())
        .select_from(attempts)
        .where(
            attempts.c.root == root,
            attempts.c.lease_until_us.is_not(None),
            attempts.c.ended_us.is_not(None),
        )
    ).scalar_one()
    unpublished = {"due": 0, "held": 0}
    for state, count in connection.execute(
        sa.select(outbox.c.state, sa.func.count())
        .where(outbox.c.root == root, outbox.c.state.in_(unpublished))
        .group_by(outbox.c.state)
    ):
        unpublished[state] = int(count)
    waiting = connection.execute(
        sa.select(sa.func.count()).select_from(parked).where(parked.c.root == root)
    ).scalar_one()
    results = connection.execute(
        sa.select(sa.func.count()).select_from(untold).where(untold.c.root == root)
    ).scalar_one()
    return {**found, "unclosed": unclosed, **unpublished, "parked": waiting, "untold": results}


def overdue_us(connection: Connection, root: str) -> int:
    """Return for how long the oldest due message has been waiting for a relay; 0 where none is."""
    oldest = connection.execute(
        sa.select(sa.func.max(now_us() - outbox.c.due_us)).where(
            outbox.c.root == root, outbox.c.state == "due", outbox.c.due_us <= instant()
        )
    ).scalar()
    return int(oldest or 0)
