"""The figures of a report: the tallies, what is not in them yet, and what is open. Locks nothing.

Exact at any moment, where all of it is read in one snapshot: whole days are read from the tallies,
what they lack (the last to have ended, and days of which only a part is asked for) from the
requests themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.tallies import AMOUNTS, DAY_US, Figures, Key
from celery_budget.store.refusals import IS_WAIVED, WAIVED
from celery_budget.store.schema import (
    IS_UNTALLIED,
    exact_sum,
    lines,
    parked,
    refusals,
    reservations,
    tallies,
)
from celery_budget.store.tallies import COUNTED, figures_of, key_of, streamed

__all__ = ["Asked", "amounts", "direct", "opened", "parked_count", "refused", "tallied", "waived"]


@dataclass(frozen=True)
class Asked:
    """Which requests are asked for: those that were admitted in a period.

    :ivar since_us: from then on, in microseconds since the epoch; none for all.
    :ivar until_us: and before then.
    :ivar budget: only those that draw on it.
    :ivar stage: only those of it.
    """

    since_us: int | None = None
    until_us: int | None = None
    budget: str | None = None
    stage: str | None = None

    @property
    def days(self) -> tuple[int | None, int | None]:
        """The whole days in it: the first, and the one after the last."""
        since, until = self.since_us, self.until_us
        first = None if since is None else -(-since // DAY_US)
        return first, None if until is None else until // DAY_US

    @property
    def is_whole(self) -> bool:
        """Whether any whole day is in it."""
        first, after = self.days
        return first is None or after is None or first < after

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The parts of it that are no whole days, from when until when."""
        since, until = self.since_us, self.until_us
        if since is not None and until is not None and not self.is_whole:
            return ((since, until),)
        first, after = self.days
        begins = () if since is None or first is None else ((since, first * DAY_US),)
        ends = () if until is None or after is None else ((after * DAY_US, until),)
        return tuple(edge for edge in (*begins, *ends) if edge[0] < edge[1])


def tallied(connection: Connection, root: str, asked: Asked, owners: bool) -> Iterator[Any]:
    """Return keys and figures of the tallies of whole days, one after another.

    :param owners: by owner where no budget is asked for; otherwise of all owners together.
    """
    if asked.is_whole:
        which = [tallies.c.budget == (asked.budget or "")]
        if asked.budget is None:
            which.append(tallies.c.owner != "" if owners else tallies.c.owner == "")
        found = connection.execute(
            sa.select(tallies).where(*_of_days(root, asked), *which),
            execution_options={"yield_per": 1000},
        )
        for row in found:
            yield key_of(row), figures_of(row)


def amounts(
    connection: Connection,
    root: str,
    asked: Asked,
    by: Sequence[str] = (),
    budgets: Sequence[str] | None = None,
) -> Iterator[tuple[tuple[Any, ...], str, str, Figures]]:
    """Return what was estimated and charged in whole days: group, budget, unit, and amounts.

    :param by: columns of the tallies that make a group.
    :param budgets: only of these.
    """
    if not asked.is_whole:
        return
    columns = [tallies.c[name] for name in by]
    keys = [*columns, tallies.c.budget, tallies.c.unit]
    which = tallies.c.budget != "" if asked.budget is None else tallies.c.budget == asked.budget
    some = () if budgets is None else (tallies.c.budget.in_(budgets),)
    found = connection.execute(
        sa.select(*keys, *(exact_sum(tallies.c[name]).label(name) for name in AMOUNTS))
        .where(*_of_days(root, asked), which, *some, tallies.c.requests > 0)
        .group_by(*keys),
        execution_options={"yield_per": 1000},
    )
    for row in found:
        group = tuple(row[: len(columns)])
        figures = {name: int(row._mapping[name]) for name in AMOUNTS}
        yield group, row.budget, row.unit, figures


def _of_days(root: str, asked: Asked) -> list[sa.ColumnElement[bool]]:
    first, after = asked.days
    which: list[sa.ColumnElement[bool]] = [tallies.c.root == root]
    if first is not None:
        which.append(tallies.c.day >= first)
    if after is not None:
        which.append(tallies.c.day < after)
    if asked.stage is not None:
        which.append(tallies.c.stage == asked.stage)
    return which


def direct(connection: Connection, root: str, asked: Asked) -> Iterator[tuple[Key, Figures]]:
    """Return keys and figures of what has ended and is not read from the tallies.

    By all keys that they add to, as the tallies would be.
    """
    ended = reservations.c.ended_us.is_not(None)
    those = sa.select(*COUNTED).where(*_which(root, asked))
    untallied = those.where(sa.text(IS_UNTALLIED))
    edges = (
        those.where(
            ended,
            reservations.c.tallied,
            reservations.c.created_us >= since,
            reservations.c.created_us < until,
        )
        for since, until in asked.edges
    )
    for some in (untallied, *edges):
        for found in streamed(connection, root, some):
            yield from found.items()


def _which(root: str, asked: Asked) -> list[sa.ColumnElement[bool]]:
    """Return which reservations are asked for."""
    which: list[sa.ColumnElement[bool]] = [reservations.c.root == root]
    if asked.since_us is not None:
        which.append(reservations.c.created_us >= asked.since_us)
    if asked.until_us is not None:
        which.append(reservations.c.created_us < asked.until_us)
    if asked.stage is not None:
        which.append(reservations.c.stage == asked.stage)
    if asked.budget is not None:
        # Of the request's own lines and no EXISTS, for which PostgreSQL may read every line that
        # the budget ever had.
        drawn = sa.func.max(sa.case((lines.c.budget == asked.budget, 1), else_=0))
        of_request = sa.select(drawn).where(
            lines.c.root == root, lines.c.reservation_id == reservations.c.reservation_id
        )
        which.append(of_request.scalar_subquery() == 1)
    return which


def opened(connection: Connection, root: str, asked: Asked) -> Iterator[tuple[Key, Figures]]:
    """Return keys and figures of requests that have not ended, by state and flags."""
    day = (reservations.c.created_us // DAY_US).label("day")
    known = [
        reservations.c[name]
        for name in ("owner", "stage", "task_name", "estimator", "estimator_version", "lane")
    ]
    flags = [reservations.c[name] for name in ("over", "unmetered", "unreserved")]
    keys = [day, *known, reservations.c.state, *flags]
    # All attempts before the last one failed, and were followed.
    earlier = sa.case((reservations.c.attempts > 1, reservations.c.attempts - 1), else_=0)
    found = connection.execute(
        sa.select(*keys, sa.func.count().label("number"), sa.func.sum(earlier).label("earlier"))
        .where(*_which(root, asked), reservations.c.ended_us.is_(None))
        .group_by(*keys)
    )
    for row in found:
        number = int(row.number)
        figures = {row.state: number, "failed.transient": int(row.earlier)}
        figures.update({flag.name: number for flag in flags if row._mapping[flag.name]})
        key = Key(
            asked.budget or "",
            "",
            row.owner,
            row.day,
            row.stage,
            row.task_name,
            row.estimator,
            row.estimator_version,
            row.lane or "",
        )
        yield key, {name: value for name, value in figures.items() if value}


def refused(
    connection: Connection, root: str, asked: Asked
) -> Iterator[tuple[int, str, str, str, int]]:
    """Return how often budgets refused: day, budget, stage, reason and number.

    Of days of which any part is asked for.
    """
    for row in _refused(connection, root, asked, ~IS_WAIVED):
        yield row.day, row.budget, row.stage, row.reason, int(row.number)


def waived(
    connection: Connection, root: str, asked: Asked
) -> Iterator[tuple[int, str, str, str, int, int]]:
    """Return how often budgets would have refused: day, budget, stage, reason, number and amount.

    Of days of which any part is asked for.
    """
    for row in _refused(connection, root, asked, IS_WAIVED):
        reason = row.reason.removeprefix(WAIVED)
        yield row.day, row.budget, row.stage, reason, int(row.number), int(row.amount)


def _refused(
    connection: Connection, root: str, asked: Asked, which_kind: sa.ColumnElement[bool]
) -> sa.Result[Any]:
    since, until = asked.since_us, asked.until_us
    which = [refusals.c.root == root, which_kind]
    if since is not None:
        which.append(refusals.c.day >= since // DAY_US)
    if until is not None:
        which.append(refusals.c.day <= (until - 1) // DAY_US)
    if asked.budget is not None:
        which.append(refusals.c.budget == asked.budget)
    if asked.stage is not None:
        which.append(refusals.c.stage == asked.stage)
    keys = [refusals.c[name] for name in ("day", "budget", "stage", "reason")]
    sums = exact_sum(refusals.c.count), exact_sum(refusals.c.amount)
    return connection.execute(
        sa.select(*keys, sums[0].label("number"), sums[1].label("amount"))
        .where(*which)
        .group_by(*keys)
        .order_by(*keys),
        execution_options={"yield_per": 1000},
    )


def parked_count(connection: Connection, root: str, asked: Asked) -> int:
    """Return how many requests are parked now, for a budget or of a stage where that is asked."""
    which = [parked.c.root == root]
    if asked.budget is not None:
        which.append(parked.c.budget == asked.budget)
    if asked.stage is not None:
        stage: sa.ColumnElement[Any]
        if connection.dialect.name == "postgresql":
            stage = sa.cast(parked.c.request, sa.JSON).op("->>")("stage")
        else:
            stage = sa.func.json_extract(parked.c.request, "$.stage")
        which.append(stage == asked.stage)
    counted = sa.select(sa.func.count()).select_from(parked).where(*which)
    return int(connection.execute(counted).scalar_one())
