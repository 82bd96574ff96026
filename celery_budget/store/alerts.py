"""Alerts: what has come to a threshold, looked for in pages, and who tells it.

One looker at a time: it holds the row of what it looks at (:data:`alert_looks`), and others pass it
by. So several relays cost what one does, and an alert that is over is not raised anew by a look
that is older than its end. An alert is told behind a fence: the number of its tries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.alerts import is_over, is_reached, share_of
from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.budgets import MILLION, percent
from celery_budget.core.draws import limits_in_force
from celery_budget.core.identity import new_id
from celery_budget.store import levels
from celery_budget.store.budgets import thresholds_of
from celery_budget.store.insert import insert_each_new, insert_new
from celery_budget.store.schema import (
    IS_NEXT,
    alert_looks,
    alerts,
    balances,
    budgets,
    instant,
    now_us,
    outbox,
    parked,
    quarantine,
)

__all__ = [
    "BUDGET",
    "Found",
    "Looked",
    "Row",
    "begin_look",
    "end_look",
    "find_overdue",
    "find_parked",
    "fresh_in_quarantine",
    "in_hand",
    "look_at_budgets",
    "mark_told",
    "prune",
    "put_off",
    "settle_kind",
    "standing",
    "take_due",
]

Row = sa.Row[Any]

#: The kind of alert that a budget gives.
BUDGET = "budget"
#: How long alerts of a window are kept after its end.
KEPT_US = 3_600_000_000
#: A look that is so far ahead was made before the clock was set back; one that is less was made by
#: another looker just now.
SET_BACK_US = 60_000_000


@dataclass(frozen=True)
class Found:
    """What there is to be alerted of, as it was seen.

    :ivar threshold: that of the alert's row: parts per million of a budget's limit; else 0.
    :ivar said: what is told of it: ``threshold``, ``value``, ``message`` and ``details``.
    """

    kind: str
    subject: str
    threshold: int
    said: dict[str, Any]
    window_us: int = 0
    end_us: int = MAX_AMOUNT


@dataclass
class Looked:
    """What one look has changed.

    :ivar raised: how many alerts there are now that there were not.
    :ivar over: how many are no more.
    :ivar after: behind which name the next page begins; empty once all were looked at.
    """

    raised: int = 0
    over: int = 0
    after: str = field(default="")


class Key(NamedTuple):
    """The key of an alert's row, without its root."""

    kind: str
    subject: str
    window_us: int
    threshold: int


def begin_look(connection: Connection, root: str, what: str, every_us: int) -> str | None:
    """Begin a look that nobody has begun for so long; return behind which name, none if not due.

    It is due as well where the last look is still to come, since the clock was set back. Locks the
    row of ``what``; where another looker holds it, it is not due.
    """
    mine = sa.and_(alert_looks.c.root == root, alert_looks.c.what == what)
    if connection.execute(sa.select(alert_looks.c.what).where(mine)).first() is None:
        insert_new(connection, alert_looks, root=root, what=what, looked_us=0, after_name="")
    looked = alert_looks.c.looked_us
    row = connection.execute(
        sa.select(alert_looks.c.after_name)
        .where(mine, sa.or_(looked <= instant() - every_us, looked > instant() + SET_BACK_US))
        .with_for_update(skip_locked=True)
    ).first()
    if row is None:
        return None
    connection.execute(alert_looks.update().where(mine).values(looked_us=now_us()))
    return str(row.after_name)


def end_look(connection: Connection, root: str, what: str, ago_us: int = 0) -> None:
    """Note that a look at ``what`` counts as made so long ago. Locks its row."""
    connection.execute(
        alert_looks.update()
        .where(alert_looks.c.root == root, alert_looks.c.what == what)
        .values(looked_us=now_us() - ago_us)
    )


def look_at_budgets(
    connection: Connection, root: str, after: str, limit: int, by_default: tuple[int, ...]
) -> Looked | None:
    """Look at the next ``limit`` budgets by name; raise what is reached, end what is over.

    None where another looker has gone on from ``after``, or holds the row. Locks that row, then the
    alerts that it changes. It reads ``limit`` rows of budgets and of their open windows, whatever
    the number of budgets, windows or requests; of those that are near a threshold, or have given
    an alert, also what is above them.

    :param after: the name behind which the page begins.
    :param by_default: the thresholds of budgets that have none of their own.
    """
    mine = sa.and_(alert_looks.c.root == root, alert_looks.c.what == BUDGET)
    held = connection.execute(
        sa.select(alert_looks.c.what)
        .where(mine, alert_looks.c.after_name == after)
        .with_for_update(skip_locked=True)
    ).first()
    if held is None:
        return None
    names = list(
        connection.execute(
            sa.select(budgets.c.name)
            .where(budgets.c.root == root, budgets.c.name > after)
            .order_by(budgets.c.name)
            .limit(limit)
        ).scalars()
    )
    looked = Looked(after=names[-1] if len(names) == limit else "")
    if names:
        near = _near(connection, root, after, names[-1], by_default)
        if near:
            _look_at(connection, root, near, by_default, looked)
    connection.execute(alert_looks.update().where(mine).values(after_name=looked.after))
    return looked


def _near(
    connection: Connection, root: str, after: str, last: str, by_default: tuple[int, ...]
) -> list[str]:
    """Return the budgets of a page that may have come to a threshold, or have given an alert.

    What is left to decide exactly: limits that are shares, grants, which raise a limit, thresholds
    of their own.
    """
    now = instant()
    window = (
        sa.select(sa.func.max(balances.c.window_us))
        .where(
            balances.c.root == root,
            balances.c.budget == budgets.c.name,
            balances.c.window_us <= now,
        )
        .correlate(budgets)
        .scalar_subquery()
    )
    counted = sa.cast(balances.c.reserved, sa.Double) + sa.cast(balances.c.spent, sa.Double)
    used = sa.case((balances.c.share.is_(None), counted), else_=_of_all_rows())
    # A double is wrong by less than that.
    lowest = min(by_default, default=0) / MILLION * 0.999
    reaches = used >= lowest * sa.cast(budgets.c.limit_amount, sa.Double)
    by_the_setting = sa.and_(budgets.c.alert_at.is_(None), reaches) if by_default else sa.false()
    near = (
        sa.select(budgets.c.name)
        .join(
            balances,
            sa.and_(
                balances.c.root == root,
                balances.c.budget == budgets.c.name,
                # Said of both: otherwise the balances of all budgets are read for each page.
                balances.c.budget > after,
                balances.c.budget <= last,
                balances.c.window_us == window,
                balances.c.stripe == 0,
            ),
        )
        .where(
            budgets.c.root == root,
            budgets.c.name > after,
            budgets.c.name <= last,
            used > 0,
            sa.or_(budgets.c.limit_share.is_not(None), budgets.c.alert_at != "", by_the_setting),
        )
    )
    given = sa.select(alerts.c.subject).where(
        alerts.c.root == root,
        alerts.c.kind == BUDGET,
        alerts.c.subject > after,
        alerts.c.subject <= last,
    )
    return sorted({name for one in (near, given) for name in connection.execute(one).scalars()})


def _of_all_rows() -> sa.ColumnElement[Any]:
    """Return what is used of a window that has several rows."""
    row = balances.alias("row")
    used = sa.cast(row.c.reserved, sa.Double) + sa.cast(row.c.spent, sa.Double)
    return (
        sa.select(sa.func.sum(used))
        .where(
            row.c.root == balances.c.root,
            row.c.budget == balances.c.budget,
            row.c.window_us == balances.c.window_us,
        )
        .correlate(balances)
        .scalar_subquery()
    )


def _look_at(
    connection: Connection,
    root: str,
    names: Sequence[str],
    by_default: tuple[int, ...],
    looked: Looked,
) -> None:
    rows = {row.name: row for row in levels.rows_above(connection, root, names)}
    known = {name: levels.level(row) for name, row in rows.items()}
    given: dict[str, list[Row]] = {}
    for alert in connection.execute(
        sa.select(alerts).where(
            alerts.c.root == root, alerts.c.kind == BUDGET, alerts.c.subject.in_(names)
        )
    ):
        given.setdefault(alert.subject, []).append(alert)
    found, over = [], []
    for name in names:
        row = rows.get(name)
        if row is None or row.window_us is None:
            continue
        own = thresholds_of(row.alert_at)
        wanted = by_default if own is None else own
        if row.state == "closed":
            wanted = ()
        used = int(row.reserved or 0) + int(row.spent or 0)
        if not used and name not in given:
            continue
        limit = limits_in_force(known, name)[name][0]
        before = {one.threshold: one for one in given.get(name, ()) if _of(one, row)}
        for threshold in wanted:
            if limit is None or threshold in before or not is_reached(used, limit, threshold):
                continue
            found.append(_of_budget(row, used, limit, threshold))
        for threshold, one in before.items():
            gone = threshold not in wanted or is_over(used, limit, threshold)
            if gone and one.state != "due":
                over.append(Key(BUDGET, name, one.window_us, threshold))
    looked.raised = _raise(connection, root, found)
    looked.over = _end(connection, root, over)


def _of(alert: Row, budget: Row) -> bool:
    """Tell whether an alert is of the window that is open."""
    return bool(alert.window_us == budget.window_us)


def _of_budget(row: Row, used: int, limit: int, threshold: int) -> Found:
    share = share_of(used, limit)
    held, spent = int(row.reserved or 0), int(row.spent or 0)
    return Found(
        BUDGET,
        row.name,
        threshold,
        {
            "threshold": threshold / MILLION,
            "value": share,
            "message": f"budget {row.name!r} has come to {percent(threshold)} of its limit: "
            f"{spent:,} spent and {held:,} held of {limit:,} {row.unit}",
            "details": {"unit": row.unit, "limit": limit, "reserved": held, "spent": spent},
        },
        row.window_us,
        row.end_us,
    )


def settle_kind(
    connection: Connection, root: str, kind: str, found: Sequence[Found], keep: Iterable[str] = ()
) -> Looked:
    """Make the alerts of a kind without windows those that were ``found``; the others are over.

    What has still to be told stays until it is. Locks the rows that it changes.

    :param keep: subjects that are not over, though they are not to be raised.
    """
    rows = connection.execute(
        sa.select(alerts).where(
            alerts.c.root == root, alerts.c.kind == kind, alerts.c.state != "due"
        )
    ).all()
    here = {one.subject for one in found} | set(keep)
    over = [Key(kind, row.subject, 0, row.threshold) for row in rows if row.subject not in here]
    return Looked(_raise(connection, root, found), _end(connection, root, over))


def _raise(connection: Connection, root: str, found: Sequence[Found]) -> int:
    """Insert what was found, unless it is there; of two at once the first counts."""
    if not found:
        return 0
    now = int(connection.execute(sa.select(now_us())).scalar_one())
    return len(
        insert_each_new(
            connection,
            alerts,
            [
                {
                    "root": root,
                    "kind": one.kind,
                    "subject": one.subject,
                    "window_us": one.window_us,
                    "threshold": one.threshold,
                    "alert_id": new_id(),
                    "state": "due",
                    "tries": 0,
                    "due_us": now,
                    "since_us": now,
                    "end_us": one.end_us,
                    "said": json.dumps(one.said),
                }
                for one in found
            ],
            alerts.c.alert_id,
        )
    )


def _end(connection: Connection, root: str, over: Sequence[Key]) -> int:
    """Delete alerts that are over."""
    gone = 0
    for key in sorted(over):
        gone += connection.execute(
            alerts.delete().where(_is(root, key), alerts.c.state != "due")
        ).rowcount
    return gone


def _is(root: str, key: Key) -> sa.ColumnElement[bool]:
    return sa.and_(
        alerts.c.root == root,
        alerts.c.kind == key.kind,
        alerts.c.subject == key.subject,
        alerts.c.window_us == key.window_us,
        alerts.c.threshold == key.threshold,
    )


def take_due(connection: Connection, root: str, hold_us: int) -> Row | None:
    """Take the next alert that has to be told, for so long; none without any.

    Passes by what another process takes just now. Who has it knows it by its ``tries``; after that
    time another one takes it.
    """
    row = connection.execute(
        sa.select(alerts)
        .where(alerts.c.root == root, sa.text("state = 'due'"), alerts.c.due_us <= instant())
        .order_by(alerts.c.due_us, alerts.c.subject, alerts.c.threshold)
        .limit(1)
        .with_for_update(skip_locked=True)
    ).first()
    if row is None:
        return None
    return connection.execute(
        alerts.update()
        .where(_is(root, _key(row)))
        .values(tries=alerts.c.tries + 1, due_us=now_us() + hold_us)
        .returning(alerts)
    ).first()


def _key(row: Row) -> Key:
    return Key(row.kind, row.subject, row.window_us, row.threshold)


def _taken(root: str, row: Row) -> sa.ColumnElement[bool]:
    """Tell the alert that was taken from one that somebody has taken since."""
    return sa.and_(
        _is(root, _key(row)),
        alerts.c.alert_id == row.alert_id,
        alerts.c.tries == row.tries,
        alerts.c.state == "due",
    )


def mark_told(connection: Connection, root: str, row: Row) -> bool:
    """Note that an alert was told; false where another process has taken it meanwhile."""
    told = connection.execute(
        alerts.update().where(_taken(root, row)).values(state="told", told_us=now_us())
    )
    return bool(told.rowcount)


def put_off(connection: Connection, root: str, row: Row, wait_us: int | None) -> bool:
    """Tell an alert again after so long, or no more; false where another has taken it meanwhile."""
    values: dict[str, Any] = {"state": "failed"}
    if wait_us is not None:
        values = {"due_us": now_us() + wait_us}
    return bool(
        connection.execute(alerts.update().where(_taken(root, row)).values(values)).rowcount
    )


def standing(connection: Connection, root: str) -> list[Row]:
    """Return the alerts that are not over, the newest first. Locks nothing."""
    return list(
        connection.execute(
            sa.select(alerts)
            .where(alerts.c.root == root, alerts.c.end_us > instant())
            .order_by(alerts.c.since_us.desc(), alerts.c.kind, alerts.c.subject, alerts.c.threshold)
        )
    )


def prune(connection: Connection, root: str, limit: int) -> int:
    """Delete alerts of windows that ended an hour ago, at most ``limit``."""
    keys = connection.execute(
        sa.select(alerts.c.kind, alerts.c.subject, alerts.c.window_us, alerts.c.threshold)
        .where(alerts.c.root == root, alerts.c.end_us <= instant() - KEPT_US)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    for row in keys:
        connection.execute(alerts.delete().where(_is(root, Key(*row))))
    return len(keys)


def find_parked(connection: Connection, root: str) -> Row | None:
    """Return what has been parked longest: task, budget and for how long. Locks nothing."""
    return connection.execute(
        sa.select(
            parked.c.task_id,
            parked.c.task_name,
            parked.c.budget,
            (instant() - parked.c.created_us).label("age_us"),
        )
        .where(parked.c.root == root)
        .order_by(parked.c.created_us)
        .limit(1)
    ).first()


def find_overdue(connection: Connection, root: str) -> Row | None:
    """Return the message that is overdue longest and by how much. Locks nothing.

    What a relay has in hand is due later for that time, and is not found.
    """
    return connection.execute(
        sa.select(
            outbox.c.task_id,
            outbox.c.task_name,
            outbox.c.last_error,
            (instant() - outbox.c.due_us).label("age_us"),
        )
        .where(outbox.c.root == root, sa.text(IS_NEXT), outbox.c.due_us <= instant())
        .order_by(outbox.c.due_us)
        .limit(1)
    ).first()


def in_hand(connection: Connection, root: str) -> bool:
    """Tell whether a relay has any message in hand just now. Locks nothing."""
    found = sa.select(outbox.c.task_id).where(
        outbox.c.root == root,
        sa.text(IS_NEXT),
        outbox.c.due_us > instant(),
        outbox.c.taken_by.is_not(None),
    )
    return connection.execute(found.limit(1)).first() is not None


def fresh_in_quarantine(connection: Connection, root: str, within_us: int) -> tuple[int, int]:
    """Return how much is in quarantine, and how much of it came within so long. Locks nothing."""
    fresh = sa.case((quarantine.c.quarantined_us > instant() - within_us, 1), else_=0)
    row = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(fresh), 0)).where(
            quarantine.c.root == root
        )
    ).one()
    return int(row[0]), int(row[1])
