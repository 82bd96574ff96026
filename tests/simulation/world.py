"""What is outside the ledger, and what must hold of the ledger whatever the clients do."""

from __future__ import annotations

import random
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from celery_budget import reconcile
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Line, ReserveRequest
from celery_budget.settings import Settings
from celery_budget.store import Store, reports, schema

__all__ = ["World"]

MILLION = 1_000_000
#: What the journal calls a reservation's end.
ENDS = ("settle", "release", "lose")
#: What the journal calls it where an amount must have fitted.
FITTED = ("reserve", "raise", "extend")

#: Why a request ends whose result is for relay or sweep to store.
TOLD = ("expired", "undelivered", "unpublishable", "park_expired")

#: What requests ask for: budgets, the charge rule of each, and the units that can be recorded.
SHAPES: tuple[tuple[tuple[tuple[str, str], ...], tuple[str, ...]], ...] = (
    ((("user:a", "used"),), ("tokens",)),
    ((("user:b", "used"), ("calls", "start")), ("tokens",)),
    ((("user:a", "used"), ("usd", "used")), ("tokens", "usd")),
    ((("t:1", "used"),), ("tokens",)),
    ((("t:2", "used"), ("user:b", "used")), ("tokens",)),
    ((("calls", "start"), ("usd", "used")), ("usd",)),
)


@dataclass
class World:
    """Broker, result backend, and what the clients have heard.

    :ivar queue: messages that the broker has.
    :ivar stored: results by task.
    :ivar heard: by reservation whether its caller heard that it was admitted.
    :ivar batches: ids that were to be admitted all or none.
    :ivar runs: who runs an attempt: its fence.
    :ivar settled: whose outcome settled a reservation.
    :ivar recorded: usage whose recording was confirmed.
    :ivar is_due: whether a message was due at the last commit; ``is_running``: an attempt open.
    :ivar states: what the admin knows of a budget's state.
    """

    store: Store
    settings: Settings
    problems: list[str]
    queue: list[WireMessage] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)
    heard: dict[uuid.UUID, bool] = field(default_factory=dict)
    batches: list[list[uuid.UUID]] = field(default_factory=list)
    requests: dict[uuid.UUID, ReserveRequest] = field(default_factory=dict)
    runs: dict[tuple[uuid.UUID, int], uuid.UUID] = field(default_factory=dict)
    settled: dict[uuid.UUID, uuid.UUID] = field(default_factory=dict)
    recorded: dict[tuple[uuid.UUID, str, str], int] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    counts_chord_members: bool = False
    is_due: bool = False
    is_running: bool = False
    _checked: set[Any] = field(default_factory=set)

    @property
    def root(self) -> str:
        return self.settings.root

    # What the result backend is asked.

    def ready(self, task_id: str) -> str | None:
        return self.stored.get(task_id)

    def ended(self, task_id: str, reason: str) -> None:
        self.stored.setdefault(task_id, "raised")

    # What the queues are asked: each copy that may be published is.

    def is_empty(self, broker: str, envelope: str) -> bool:
        return True

    def request(self, chance: random.Random, new_id: uuid.UUID, shared: bool) -> ReserveRequest:
        """A new request, or with ``shared`` one whose id others use as well."""
        name = f"r{chance.randrange(4)}" if shared else str(new_id)
        shape, _ = SHAPES[sum(map(ord, name)) % len(SHAPES)]
        lines = tuple(Line(budget, 1 + len(budget) % 5 * 2, charge) for budget, charge in shape)
        request = ReserveRequest(
            reservation_id=new_id,
            root=self.root,
            owner=lines[0].budget,
            request_id=name,
            task_id=f"task-{name}",
            task_name="shop.draft",
            stage="draft",
            fingerprint="other" if shared and chance.random() < 0.1 else "same",
            estimator="constant",
            estimator_version="1",
            lines=lines,
            finishing=chance.random() < 0.3,
        )
        self.requests[new_id] = request
        return request

    def rows(self, table: sa.Table, *where: sa.ColumnElement[bool]) -> list[Any]:
        mine = sa.select(table).where(table.c.root == self.root, *where)
        select = mine.order_by(*table.primary_key)
        return self.store.read(lambda connection: list(connection.execute(select)))

    # What must hold.

    def at_commit(self) -> None:
        """Each balance is the sum of its lines, and what had to fit did fit."""
        self.is_due = any(row.state == "due" for row in self.rows(schema.outbox))
        self.is_running = any(row.ended_us is None for row in self.rows(schema.attempts))
        for row in self.store.read(reports.mismatched_balances, self.root):
            self.problems.append(f"not the sum of its lines: {row._mapping}")
        for row in self.store.read(reports.mismatched_shares, self.root):
            self.problems.append(f"shares above their bound: {row._mapping}")
        fitted = [
            row
            for row in self.rows(schema.journal, schema.journal.c.what.in_(FITTED))
            if row.reserved > 0 and _key(row) not in self._checked
        ]
        self._checked |= {_key(row) for row in fitted}
        if not fitted:
            return
        budgets = {row.name: row for row in self.rows(schema.budgets)}
        granted: Counter[str] = Counter()
        for grant in self.rows(schema.grants):
            granted[grant.budget] += grant.amount
        for row in fitted:
            most = _most(budgets, granted, row.budget)
            if most is not None and self._stood(row) > most:
                self.problems.append(f"{row.what} of {row.budget} above {most}: {row._mapping}")
            if row.what == "reserve" and budgets[row.budget].state != "open":
                self.problems.append(f"{row.budget} is {budgets[row.budget].state}: {row._mapping}")

    def _stood(self, row: Any) -> int:
        """Return what a window was after an entry of its journal: of several rows what it is now.

        This is asked after each commit.
        """
        mine = (
            schema.balances.c.budget == row.budget,
            schema.balances.c.window_us == row.window_us,
        )
        stands = self.rows(schema.balances, *mine)
        if len(stands) == 1:
            return int(row.reserved_after + row.spent_after)
        return sum(one.reserved + one.spent for one in stands)

    def at_publish(self, message: WireMessage) -> None:
        """A message is published only after its reservation has committed."""
        reservation_id = uuid.UUID(message.envelope)
        known = {row.reservation_id for row in self.rows(schema.reservations)}
        if reservation_id not in known:
            self.problems.append(f"{message.task_id} was published and is not in the ledger")

    def at_settled(self, reservation_id: uuid.UUID, claim_id: uuid.UUID) -> None:
        """An attempt has heard that it settled its reservation; no other one may."""
        if self.settled.setdefault(reservation_id, claim_id) != claim_id:
            self.problems.append(f"{reservation_id} was settled by two attempts")

    def at_end(self) -> None:
        """Nothing is open, each request has ended once, each record counts once."""
        found = reconcile.reconcile(self.store, self.settings)
        self.problems += found.mismatches
        self.problems += [f"{n} {what} left" for what, n in found.open_work.items() if n]
        rows = {row.reservation_id: row for row in self.rows(schema.reservations)}
        self.problems += [
            f"attempt {row.attempt} of {row.reservation_id} was never closed"
            for row in self.rows(schema.attempts)
            if row.lease_until_us is not None or row.ended_us is None
        ]
        self.problems += [
            f"{row.task_id} is {row.state}, {row.reason}, and nobody was told"
            for row in rows.values()
            if (row.state == "lost" or row.reason in TOLD) and row.task_id not in self.stored
        ]
        ends: dict[uuid.UUID, set[str]] = defaultdict(set)
        for entry in self.rows(schema.journal):
            if entry.what in ENDS:
                ends[entry.reservation_id].add(entry.what)
        self.problems += [f"{one} ended as {how}" for one, how in ends.items() if len(how) > 1]
        for reservation_id, admitted in self.heard.items():
            row = rows.get(reservation_id)
            if admitted and row is None:
                self.problems.append(f"{reservation_id} was told to be admitted and is not there")
            if not admitted and row is not None and row.state != "released":
                self.problems.append(f"{reservation_id} was refused and is {row.state}")
        for batch in self.batches:
            there = [one for one in batch if one in rows]
            if there and there != batch:
                self.problems.append(f"of the batch {batch} only {there} were admitted")
        usage = {(row.reservation_id, row.key, row.unit): row for row in self.rows(schema.usage)}
        for key, amount in self.recorded.items():
            if key not in usage or usage[key].amount != amount:
                self.problems.append(f"the record {key} of {amount} is {usage.get(key)}")
        states = {row.name: row.state for row in self.rows(schema.budgets)}
        for name, state in self.states.items():
            if (states[name] == "open") != (state == "open"):
                self.problems.append(f"{name} was left {state} and is {states[name]}")


def _most(budgets: dict[str, Any], granted: Counter[str], name: str) -> int | None:
    """Up to what work of any kind may fill a budget; none for any amount."""
    limit = _limit(budgets, granted, name)
    if limit is None:
        return None
    own = limit - granted[name]
    return 0 if own == 0 else limit * budgets[name].hard_stop // MILLION


def _limit(budgets: dict[str, Any], granted: Counter[str], name: str) -> int | None:
    row = budgets[name]
    own = row.limit_amount
    if row.limit_share is not None:
        above = _limit(budgets, granted, row.parent)
        own = None if above is None else above * row.limit_share // MILLION
    return None if own is None else int(own) + granted[name]


def _key(entry: Any) -> tuple[Any, ...]:
    return entry.budget, entry.window_us, entry.stripe, entry.entry
