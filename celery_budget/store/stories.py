"""Reading the life of one request: everything that the ledger has of it. Locks and changes nothing.

What is read grows with the request, not with the ledger, but for an id that is none of a task or a
reservation: that is looked for among all requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.tallies import DAY_US
from celery_budget.store.claims import predecessor
from celery_budget.store.journal import CHECKPOINT, of_balance
from celery_budget.store.refusals import IS_WAIVED
from celery_budget.store.schema import (
    attempts,
    effects,
    extensions,
    journal,
    lines,
    outbox,
    parked,
    quarantine,
    refusals,
    reservations,
    reuse,
    untold,
    usage,
)

__all__ = [
    "CHILDREN",
    "LISTED",
    "children",
    "find_messages",
    "find_parked",
    "find_refusals",
    "find_reservations",
    "folded",
    "kin",
    "messages_left",
    "refused_before",
    "replayable",
    "reused",
    "steps_after",
    "story",
    "untold_of",
]

Rows = list[sa.Row[Any]]

#: How much of what followed from a request is listed.
CHILDREN = 20
#: How many rows of a kind are listed of one request, the last ones: there may be any number.
LISTED = 1000
#: How many refusals of other tries are listed.
REFUSALS = 3

#: What tells nothing to people, belongs to the store alone, or to the application: payloads.
_INTERNAL = (
    "body",
    "envelope",
    "payload",
    "root",
    "stripe",
    "claim_id",
    "boot_id",
    "taken_by",
    "request",
    "value",
)


def _columns(table: sa.Table) -> list[sa.Column[Any]]:
    return [column for column in table.c if column.name not in _INTERNAL]


def _as_uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def find_reservations(connection: Connection, root: str, some_id: str) -> Rows:
    """Return the reservations that an id means, oldest first.

    Those of the task with this id, the reservation, or what has this id in the outbox, in
    quarantine or among what is parked; only where there is none, those with this request id.
    """
    with_id = _as_uuid(some_id)
    known = [reservations.c.task_id == some_id]
    if with_id is not None:
        known.append(reservations.c.reservation_id == with_id)
        for table, key in (
            (outbox, outbox.c.outbox_id),
            (quarantine, quarantine.c.quarantine_id),
            (parked, parked.c.parked_id),
        ):
            of_it = sa.select(table.c.reservation_id).where(table.c.root == root, key == with_id)
            known.append(reservations.c.reservation_id == of_it.scalar_subquery())

    def which(*conditions: sa.ColumnElement[bool]) -> Rows:
        # Apart from each other, so that each goes by its index.
        keys = [
            sa.select(reservations.c.reservation_id).where(reservations.c.root == root, one)
            for one in conditions
        ]
        return list(
            connection.execute(
                sa.select(reservations)
                .where(
                    reservations.c.root == root,
                    reservations.c.reservation_id.in_(sa.union(*keys)),
                )
                .order_by(reservations.c.created_us, reservations.c.nesting)
            )
        )

    return which(*known) or which(reservations.c.request_id == some_id)


def find_parked(connection: Connection, root: str, some_id: str) -> Rows:
    """Return the parked work of this task id, request id or id among what is parked."""
    known = [parked.c.task_id == some_id, parked.c.request_id == some_id]
    with_id = _as_uuid(some_id)
    if with_id is not None:
        known.append(parked.c.parked_id == with_id)
    return list(
        connection.execute(
            sa.select(
                *(one for one in parked.c if one.name not in _INTERNAL or one.name == "request")
            )
            .where(parked.c.root == root, sa.or_(*known))
            .order_by(parked.c.created_us)
        )
    )


def find_messages(connection: Connection, root: str, some_id: str) -> Rows:
    """Return messages of the outbox that draw on no budget, by their id or that of their task.

    Reads the outbox, which holds what is not done with.
    """
    known = [outbox.c.task_id == some_id]
    with_id = _as_uuid(some_id)
    if with_id is not None:
        known.append(outbox.c.outbox_id == with_id)
    return list(
        connection.execute(
            sa.select(*_columns(outbox))
            .where(outbox.c.root == root, outbox.c.reservation_id.is_(None), sa.or_(*known))
            .order_by(outbox.c.created_us)
        )
    )


def find_refusals(connection: Connection, root: str, some_id: str) -> Rows:
    """Return the refusal of the try with this reservation id, where the sample has kept it."""
    with_id = _as_uuid(some_id)
    if with_id is None:
        return []
    return list(
        connection.execute(
            sa.select(*_columns(refusals)).where(
                refusals.c.root == root, refusals.c.refusal_id == with_id
            )
        )
    )


def story(
    connection: Connection, root: str, reservation_id: Any
) -> tuple[dict[str, Rows], dict[str, int]]:
    """Return what belongs to one reservation, by what it is, and how much of it is left out.

    Of each kind the last :data:`LISTED`, in their order; counted is only what has more.
    """
    left_out: dict[str, int] = {}

    def rows(name: str, table: sa.Table, *order: str) -> Rows:
        # The message that one waits for by its order key.
        more: list[Any] = [predecessor(root).label("follows")] if table is outbox else []
        if table is attempts:
            more = [replayable()]
        mine = sa.and_(table.c.root == root, table.c.reservation_id == reservation_id)
        found = list(
            connection.execute(
                sa.select(*_columns(table), *more)
                .where(mine)
                .order_by(*(table.c[column].desc() for column in order))
                .limit(LISTED + 1)
            )
        )
        if len(found) > LISTED:
            counted = sa.select(sa.func.count()).select_from(table).where(mine)
            left_out[name] = int(connection.execute(counted).scalar_one()) - LISTED
        return found[:LISTED][::-1]

    parts = {
        "lines": rows("lines", lines, "line"),
        "messages": rows("messages", outbox, "retries"),
        "attempts": rows("attempts", attempts, "attempt"),
        "usage": rows("usage", usage, "recorded_us", "key"),
        "effects": rows("effects", effects, "created_us", "key"),
        "changes": rows("changes", journal, "at_us", "budget", "window_us", "entry"),
        "extensions": rows("extensions", extensions, "extended_us", "key"),
    }
    return parts, left_out


def replayable() -> Any:
    """Select whether an attempt's outcome is kept, and can be given again."""
    return attempts.c.payload.is_not(None).label("replayable")


def folded(connection: Connection, root: str, reservation_id: Any) -> set[tuple[str, int]]:
    """Return of which balances (budget, window) entries of a request may have been folded away."""
    found = set()
    row = connection.execute(
        sa.select(reservations.c.created_us).where(
            reservations.c.root == root, reservations.c.reservation_id == reservation_id
        )
    ).one()
    drawn = sa.select(lines.c.budget, lines.c.window_us, lines.c.stripe).where(
        lines.c.root == root, lines.c.reservation_id == reservation_id
    )
    for line in connection.execute(drawn.distinct()):
        first = connection.execute(
            sa.select(journal.c.what, journal.c.at_us)
            .where(of_balance(root, line.budget, line.window_us, line.stripe))
            .order_by(journal.c.entry)
            .limit(1)
        ).first()
        if first is not None and first.what == CHECKPOINT and first.at_us >= row.created_us:
            found.add((line.budget, line.window_us))
    return found


_KIN: tuple[Any, ...] = (
    reservations.c.reservation_id,
    reservations.c.task_id,
    reservations.c.task_name,
    reservations.c.state,
)


def kin(connection: Connection, root: str, reservation_id: Any) -> sa.Row[Any] | None:
    """Return what another request's reservation is, in a few words; none where it is gone."""
    found: sa.Row[Any] | None = connection.execute(
        sa.select(*_KIN).where(
            reservations.c.root == root, reservations.c.reservation_id == reservation_id
        )
    ).first()
    return found


def children(connection: Connection, root: str, reservation_id: Any) -> tuple[Rows, int]:
    """Return the first requests that attempts of one have made, and how many there are in all."""
    mine = sa.and_(reservations.c.root == root, reservations.c.parent_id == reservation_id)
    count: int = connection.execute(
        sa.select(sa.func.count()).select_from(reservations).where(mine)
    ).scalar_one()
    found = connection.execute(
        sa.select(*_KIN)
        .where(mine)
        .order_by(reservations.c.created_us, reservations.c.reservation_id)
        .limit(CHILDREN)
    )
    return list(found), count


def messages_left(connection: Connection, root: str, reservation_id: Any) -> Rows:
    """Return the first messages without a budget that followed a request and are known still."""
    return list(
        connection.execute(
            sa.select(*_columns(outbox))
            .where(
                outbox.c.root == root,
                outbox.c.parent_id == reservation_id,
                outbox.c.reservation_id.is_(None),
            )
            .order_by(outbox.c.created_us)
            .limit(CHILDREN)
        )
    )


def steps_after(connection: Connection, root: str, plan_id: Any, step: int) -> Rows:
    """Return the steps of a plan that come after one and have not begun."""
    return list(
        connection.execute(
            sa.select(*_KIN, reservations.c.step)
            .where(
                reservations.c.root == root,
                reservations.c.plan_id == plan_id,
                reservations.c.state == "planned",
                reservations.c.step > step,
            )
            .order_by(reservations.c.step)
        )
    )


def untold_of(connection: Connection, root: str, task_id: str) -> Rows:
    """Return the results of a task that have still to be stored."""
    return list(
        connection.execute(
            sa.select(*_columns(untold))
            .where(untold.c.root == root, untold.c.task_id == task_id)
            .order_by(untold.c.created_us)
        )
    )


def reused(connection: Connection, root: str, task_id: str) -> Rows:
    """Return the identities whose calls join the run of a task now, and until when it is kept."""
    return list(
        connection.execute(
            sa.select(reuse.c.owner, reuse.c.key, reuse.c.request_id, reuse.c.until_us)
            .where(reuse.c.root == root, reuse.c.task_id == task_id)
            .order_by(reuse.c.key)
        )
    )


def refused_before(
    connection: Connection, root: str, task_name: str, budgets: Iterable[str], until_us: int
) -> Rows:
    """Return the last refusals of a task by these budgets that the sample has kept.

    A bounded number of rows is read for each budget and stage. Whose they were is not known.

    :param until_us: only those before, of the same day and of that before it.
    """
    day = until_us // DAY_US
    where = [
        refusals.c.root == root,
        refusals.c.day.in_((day - 1, day)),
        refusals.c.budget.in_(sorted(set(budgets))),
        refusals.c.task_name == task_name,
        refusals.c.refused_us <= until_us,
        ~IS_WAIVED,
    ]
    return list(
        connection.execute(
            sa.select(
                *(
                    one
                    for one in _columns(refusals)
                    if one.name not in ("count", "slot", "day", "amount")
                )
            )
            .where(*where)
            .order_by(refusals.c.refused_us.desc(), refusals.c.budget, refusals.c.reason)
            .limit(REFUSALS)
        )
    )
