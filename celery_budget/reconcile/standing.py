"""How single budgets stand: terms, balance, all above, grants, journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from celery_budget.core.budgets import Balance, Budget, check_name, is_template, most
from celery_budget.core.draws import OPEN, Level, chain, limits_in_force
from celery_budget.core.periods import FOREVER_US
from celery_budget.errors import UnknownBudget
from celery_budget.reconcile.terms import balance_as_dict, budget_as_dict
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, budgets, levels
from celery_budget.store import grants as stored_grants
from celery_budget.store import journal as stored_journal
from celery_budget.store.windows import read_now

__all__ = [
    "Entry",
    "Grant",
    "Standing",
    "Template",
    "grants",
    "journal",
    "stand",
    "standing",
    "templates",
]


@dataclass(frozen=True)
class Grant:
    """What raises a budget's limit by ``amount``.

    :ivar until_us: when it ends, in microseconds since the epoch; none where it never does.
    """

    key: str
    budget: str
    amount: int
    until_us: int | None
    reason: str | None
    who: str
    created_us: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """One change of a balance.

    :ivar window_us: when the window began whose balance it is; 0 where it always was.
    :ivar entry: its number; each balance counts its own, without a gap.
    :ivar what: what was done: ``reserve``, ``settle``, ``adjust`` and the like; a ``checkpoint``
        stands for all entries before it.
    :ivar reserved: by how much ``reserved`` changed; ``reserved_after`` is what it was then.
    """

    budget: str
    window_us: int
    entry: int
    at_us: int
    what: str
    who: str
    reservation_id: str | None
    reserved: int
    spent: int
    reserved_after: int
    spent_after: int
    reason: str | None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Standing:
    """One budget with all that decides what it admits.

    :ivar budget: as it is declared; the limit in force is the balance's.
    :ivar template: the template it was made from.
    :ivar blocked: whether its own limit is 0, which no grant helps.
    :ivar grants: those in force, the last to end first.
    :ivar above: the balances of its parent, of that one's parent and so on.
    :ivar room: what new work may reserve now, by this budget and all above; none for unlimited.
    :ivar room_of: the budget that leaves no more.
    """

    budget: Budget
    balance: Balance
    template: str | None
    blocked: bool
    grants: tuple[Grant, ...]
    above: tuple[Balance, ...]
    room: int | None
    room_of: str | None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON: a balance, and more beside it."""
        return {
            **balance_as_dict(self.balance),
            "declared": budget_as_dict(self.budget),
            "template": self.template,
            "grants": [grant.as_dict() for grant in self.grants],
            "above": [balance_as_dict(balance) for balance in self.above],
            "room": self.room,
            "room_of": self.room_of,
        }


@dataclass(frozen=True)
class Template:
    """A template: what budgets yet unseen are made from.

    :ivar state: ``open``, or ``closed`` where it makes none any more.
    :ivar made: how many budgets were made from it.
    """

    budget: Budget
    state: str
    made: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "budget": self.budget.name,
            "unit": self.budget.unit,
            "state": self.state,
            "declared": budget_as_dict(self.budget),
            "made": self.made,
        }


def standing(store: Store, settings: Settings, name: str) -> Standing | Template:
    """Return how a budget or a template stands, all of it at one moment.

    :raises UnknownBudget: where there is none.
    """
    return store.read(_standing, settings.root, name)


def _standing(connection: Connection, root: str, name: str) -> Standing | Template:
    row = next(iter(budgets.rows_of(connection, root, [check_name(name)])), None)
    if row is None:
        raise UnknownBudget(name)
    budget = budgets.budget_of(row)
    if is_template(name):
        return Template(budget, row.state, budgets.made_from(connection, root).get(name, 0))
    return _standing_of(connection, root, row, budget)[0]


def stand(connection: Connection, root: str, name: str) -> tuple[Standing, dict[str, int | None]]:
    """Return how a budget stands, and what it and each budget above it leave to new work.

    :raises UnknownBudget: where there is none.
    """
    row = next(iter(budgets.rows_of(connection, root, [check_name(name)])), None)
    if row is None:
        raise UnknownBudget(name)
    return _standing_of(connection, root, row, budgets.budget_of(row))


def _standing_of(
    connection: Connection, root: str, row: Any, budget: Budget
) -> tuple[Standing, dict[str, int | None]]:
    name = budget.name
    known = levels.levels_of(connection, root, [name])
    rooms = list(_rooms(known, name))
    way = [budgets.balance(connection, root, level.budget) for level in chain(known, name)]
    room, room_of = min(rooms, key=lambda one: one[0], default=(None, None))
    standing = Standing(
        budget,
        way[0],
        row.template,
        limits_in_force(known, name)[name][1],
        tuple(_grants(connection, root, name, False)),
        tuple(way[1:]),
        room,
        room_of,
    )
    left = {of: room for room, of in rooms}
    return standing, {level.budget: left.get(level.budget) for level in chain(known, name)}


def _rooms(known: Mapping[str, Level], name: str) -> Iterator[tuple[int, str]]:
    """Yield what new work may reserve of each budget on the way up that leaves not everything."""
    limits = limits_in_force(known, name)
    for level in chain(known, name):
        limit, blocked = limits[level.budget]
        if level.state != OPEN or blocked:
            yield 0, level.budget
        elif limit is not None:
            yield (
                max(0, most(limit, level.soft_stop) - level.reserved - level.spent),
                level.budget,
            )


def templates(store: Store, settings: Settings) -> list[Template]:
    """Return all templates, by name."""
    return store.read(_templates, settings.root)


def _templates(connection: Connection, root: str) -> list[Template]:
    rows = [row for row in budgets.rows_of(connection, root) if is_template(row.name)]
    if not rows:
        return []
    made = budgets.made_from(connection, root)
    return [Template(budgets.budget_of(row), row.state, made.get(row.name, 0)) for row in rows]


def grants(store: Store, settings: Settings, name: str, ended: bool = False) -> list[Grant]:
    """Return the grants of a budget that are in force, the last to end first.

    :param ended: those as well that are over.
    :raises UnknownBudget: where there is no such budget.
    """
    return store.read(_known_grants, settings.root, name, ended)


def _known_grants(connection: Connection, root: str, name: str, ended: bool) -> list[Grant]:
    _check_known(connection, root, name)
    return _grants(connection, root, name, ended)


def _grants(connection: Connection, root: str, name: str, ended: bool) -> list[Grant]:
    now = read_now(connection)
    return [
        Grant(
            row.key,
            row.budget,
            row.amount,
            None if row.until_us == FOREVER_US else row.until_us,
            row.reason,
            row.who,
            row.created_us,
        )
        for row in stored_grants.grants_of(connection, root, name)
        if ended or row.until_us > now
    ]


def journal(store: Store, settings: Settings, name: str, limit: int) -> list[Entry]:
    """Return the last ``limit`` changes of a budget's balances, the newest first.

    :raises UnknownBudget: where there is no such budget.
    """
    return store.read(_journal, settings.root, name, limit)


def _journal(connection: Connection, root: str, name: str, limit: int) -> list[Entry]:
    _check_known(connection, root, name)
    return [
        Entry(
            row.budget,
            row.window_us,
            row.entry,
            row.at_us,
            row.what,
            row.who,
            None if row.reservation_id is None else str(row.reservation_id),
            row.reserved,
            row.spent,
            row.reserved_after,
            row.spent_after,
            row.reason,
        )
        for row in stored_journal.entries(connection, root, name, limit)
    ]


def _check_known(connection: Connection, root: str, name: str) -> None:
    if budgets.find(connection, root, check_name(name)) is None:
        raise UnknownBudget(name)
