"""What one budget is spent on and held by, what will free it, and what waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.core.backpressure import Outlook
from celery_budget.core.budgets import is_template
from celery_budget.core.reservations import USED, Line
from celery_budget.errors import InvalidBudget
from celery_budget.reconcile.following import Next, next_steps
from celery_budget.reconcile.standing import Standing, stand
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, holdings, lanes, outlook
from celery_budget.store.requests import error_of
from celery_budget.store.windows import read_now

__all__ = ["Asking", "BudgetStory", "HeldWindow", "Hold", "RefusedFor", "Waiting", "explain_budget"]


@dataclass(frozen=True)
class Hold:
    """What one request holds of a budget.

    :ivar held: how much, in all windows.
    :ivar since_us: when the request was admitted, in microseconds since the epoch.
    :ivar worker: who runs it; none where nobody does.
    :ivar next: what happens next with it, and when: with its end it holds nothing.
    """

    reservation_id: str
    task_id: str
    task_name: str
    owner: str
    state: str
    held: int
    since_us: int
    worker: str | None
    next: tuple[Next, ...]


@dataclass(frozen=True)
class HeldWindow:
    """A window that is open, or has ended and is held from still.

    :ivar end_us: none where it never ends.
    """

    start_us: int
    end_us: int | None
    reserved: int
    spent: int
    is_open: bool


@dataclass(frozen=True)
class Waiting:
    """A request that waits for a budget, parked.

    :ivar amount: how much more it needs.
    :ivar ahead: whether nothing else is admitted to the budget until it is.
    :ivar runs_on: whether it is the next attempt of one that has run.
    """

    parked_id: str
    task_id: str
    task_name: str
    owner: str
    reason: str
    amount: int
    since_us: int
    deadline_us: int
    ahead: bool
    runs_on: bool


@dataclass(frozen=True)
class RefusedFor:
    """What a budget has refused for one reason.

    :ivar count: how often, in the last 31 days.
    :ivar last_us: when that was last; with what was requested then, and by which task.
    """

    reason: str
    count: int
    last_us: int
    requested: int
    task_name: str


@dataclass(frozen=True)
class Asking:
    """What a new request of ``amount`` would meet now."""

    amount: int
    outlook: Outlook


@dataclass(frozen=True)
class BudgetStory:
    """What one budget is spent on and held by, what will free it, and what waits for it.

    :ivar standing: its terms and balance, all above it and its grants.
    :ivar rooms: of it and each budget above it, how much new work may reserve; none for unlimited.
    :ivar windows: the open one, and those that have ended and are held from.
    :ivar holding: how many requests hold any of it, by their state; ``held`` is how much they do.
    :ivar holds: the largest of these holds, the largest first.
    :ivar frees: what changes the room by itself, and when; what ends a hold is with that.
    :ivar parked: how many requests wait for it, the oldest since ``oldest_us``; ``waiting`` are the
        next ones.
    :ivar refusals: what it refused, by reason, the last first.
    :ivar asking: what a request would meet now, where that was asked.
    """

    standing: Standing
    rooms: dict[str, int | None]
    windows: tuple[HeldWindow, ...]
    holding: dict[str, int]
    held: dict[str, int]
    holds: tuple[Hold, ...]
    frees: tuple[Next, ...]
    parked: int
    oldest_us: int | None
    waiting: tuple[Waiting, ...]
    refusals: tuple[RefusedFor, ...]
    asking: Asking | None
    now_us: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        asking = self.asking
        return {
            **self.standing.as_dict(),
            "rooms": self.rooms,
            "windows": [asdict(one) for one in self.windows],
            "holding": self.holding,
            "held": self.held,
            "holds": [asdict(one) for one in self.holds],
            "frees": [one.as_dict() for one in self.frees],
            "parked": self.parked,
            "oldest_us": self.oldest_us,
            "waiting": [asdict(one) for one in self.waiting],
            "refusals": [asdict(one) for one in self.refusals],
            "asking": None
            if asking is None
            else {"amount": asking.amount, **asking.outlook.as_dict()},
            "now_us": self.now_us,
        }


def explain_budget(
    store: Store, settings: Settings, name: str, limit: int, amount: int | None = None
) -> BudgetStory:
    """Return what a budget is spent on and held by, all of it at one moment. Locks nothing.

    :param limit: how many holds, and how much of what waits, are listed; the counts are exact.
    :param amount: tell as well what a new request of so much would meet.
    :raises UnknownBudget: where there is no such budget.
    :raises InvalidBudget: for a template, which holds nothing.
    :raises InvalidAmount: for what is no amount.
    """
    if amount is not None:
        check_amount(amount, "the amount of a request")
    if is_template(name):
        raise InvalidBudget(
            f"{name!r} is a template: it holds nothing; name one of the budgets made from it"
        )
    return store.read(_explain, settings, name, limit, amount)


def _explain(
    connection: Connection, settings: Settings, name: str, limit: int, amount: int | None
) -> BudgetStory:
    root = settings.root
    standing, rooms = stand(connection, root, name)
    states = holdings.by_state(connection, root, name)
    waiting, parked, oldest_us = holdings.first_waiting(connection, root, name, limit)
    windows = tuple(
        HeldWindow(
            row.window_us,
            None if standing.budget.period.kind == "total" else row.end_us,
            row.reserved,
            row.spent,
            bool(row.is_open),
        )
        for row in holdings.windows(connection, root, name)
    )
    return BudgetStory(
        standing,
        rooms,
        windows,
        {row.state: row.requests for row in states},
        {row.state: int(row.held) for row in states},
        tuple(_holds(connection, settings, holdings.holders(connection, root, name, limit))),
        tuple(_frees(standing, windows)),
        parked,
        oldest_us,
        tuple(
            Waiting(
                str(row.parked_id),
                row.task_id,
                row.task_name,
                row.owner,
                row.reason,
                row.amount,
                row.created_us,
                row.deadline_us,
                bool(row.ahead),
                row.reservation_id is not None,
            )
            for row in waiting
        ),
        tuple(
            RefusedFor(row.reason, int(row.times), row.refused_us, row.requested, row.task_name)
            for row in holdings.refused(connection, root, name)
        ),
        None if amount is None else _asking(connection, settings, name, amount),
        read_now(connection),
    )


def _holds(connection: Connection, settings: Settings, rows: Iterable[Any]) -> Iterator[Hold]:
    rows = list(rows)
    root, ids = settings.root, [row.reservation_id for row in rows]
    follows = holdings.what_follows(connection, root, ids)
    of: dict[Any, dict[str, list[Any]]] = {one: {name: [] for name in follows} for one in ids}
    for name, some in follows.items():
        for row in some:
            of[row.reservation_id][name].append(row._mapping)
    held = {row.lane for row in follows["messages"] if row.state == "held"}
    standings = {
        one.lane.name: one
        for name in sorted(held)
        for one in lanes.standings(connection, root, name)
    }
    for row in rows:
        mine = of[row.reservation_id]
        runs = next((one for one in mine["attempts"] if one["ended_us"] is None), None)
        yield Hold(
            str(row.reservation_id),
            row.task_id,
            row.task_name,
            row.owner,
            row.state,
            row.held,
            row.created_us,
            None if runs is None else runs["worker"],
            next_steps(settings, row._mapping, **mine, lanes=standings),
        )


def _frees(standing: Standing, windows: Iterable[HeldWindow]) -> Iterator[Next]:
    """Yield what changes the room of a budget without anybody's doing."""
    for window in windows:
        if window.is_open and window.end_us is not None:
            what = f"the window ends: the {window.spent:,} spent in it count no longer"
            yield Next(what, window.end_us)
    for above in standing.above:
        if above.end_us is not None and standing.room_of == above.budget:
            yield Next(f"the window of budget {above.budget} above it ends", above.end_us)
    for grant in reversed(standing.grants):
        if grant.until_us is not None:
            yield Next(f"grant {grant.key} of {grant.amount:,} ends: less room", grant.until_us)


def _asking(connection: Connection, settings: Settings, name: str, amount: int) -> Asking:
    found = outlook.look(
        connection, settings.root, [Line(name, amount, USED)], False, settings.max_outbox
    )
    return Asking(amount, Outlook(True) if found is None else Outlook(False, error_of(found)))
