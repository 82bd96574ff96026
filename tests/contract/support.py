"""A ledger with short verbs, for tests that say what happens and not how it is called."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import sqlalchemy as sa

from celery_budget import admission, parking, recovery, relay, settlement, telling, upkeep
from celery_budget.core.budgets import Balance, Limit
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.periods import FOREVER_US
from celery_budget.core.reservations import (
    Admitted,
    Line,
    Outcome,
    Reserved,
    ReserveRequest,
    Tried,
)
from celery_budget.core.retries import Retries
from celery_budget.relay import Answer, BrokerDown, Rejected, Unpublishable
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt, Delivery
from celery_budget.store import Store, budgets, declaring, grants, schema, untold, windows
from celery_budget.store.in_place import NotStarted
from celery_budget.suspicion import Suspicion

BOOT = uuid.UUID(int=7)

#: What can be said of a message where a request is made.
MESSAGE = ("due_us", "expires_us", "rank", "order_key", "broker", "queue", "envelope")

RETURNED = Outcome("returned", payload='"done"')
RAISED = Outcome("raised", payload='"boom"')
RETRIED = Outcome("retried")


@dataclass
class Results:
    """A result backend: what is stored, and what recovery or the relay stored, in order."""

    stored: dict[str, str] = field(default_factory=dict)
    told: list[tuple[str, str]] = field(default_factory=list)
    counts_chord_members: bool = False

    def ready(self, task_id: str) -> str | None:
        return self.stored.get(task_id)

    def ended(self, task_id: str, reason: str) -> None:
        self.told.append((task_id, reason))


@dataclass
class Broker:
    """A publisher that remembers; ``on_publish`` may raise or look at the ledger first.

    :ivar at_once: how many messages it takes at a time.
    :ivar windows: the tasks whose messages it was given together.
    """

    published: list[str] = field(default_factory=list)
    windows: list[list[str]] = field(default_factory=list)
    at_once: int = 1
    resets: int = 0
    on_publish: Callable[[WireMessage], None] = lambda message: None

    def window(self, broker: str) -> int:
        return self.at_once

    def publish_all(self, messages: Sequence[WireMessage]) -> list[Answer]:
        """Publish one after the other; a broker that is down gets nothing more."""
        self.windows.append([message.task_id for message in messages])
        answers: list[Answer] = []
        for number, message in enumerate(messages):
            try:
                self.on_publish(message)
            except (Rejected, Unpublishable) as error:
                answers.append(error)
            except BrokerDown as down:
                unsent = [BrokerDown(down.error)] * (len(messages) - number - 1)
                return [*answers, down, *unsent]
            else:
                self.published.append(message.task_id)
                answers.append(None)
        return answers

    def reset(self) -> None:
        self.resets += 1


@dataclass
class Queues:
    """Queues that are empty, but for those that are said to hold something, or nobody knows.

    :ivar said: by broker and envelope whether a queue is empty.
    :ivar asked: what was asked for, in order.
    """

    said: dict[tuple[str, str], bool | None] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def is_empty(self, broker: str, envelope: str) -> bool | None:
        self.asked.append((broker, envelope))
        return self.said.get((broker, envelope), True)


@dataclass(frozen=True)
class Swept:
    """What became of parked work: how much was admitted, and who was told that it was given up."""

    admitted: int
    over: tuple[str, ...]


class Counted(NamedTuple):
    """What is reserved and spent of a budget in a window."""

    budget: str
    window_us: int
    reserved: int
    spent: int


@dataclass
class Ledger:
    """A migrated store under a root of its own.

    :ivar conserved: whether the ledger has to add up when the test is over.
    """

    store: Store
    settings: Settings
    conserved: bool = True
    results: Results = field(default_factory=Results)
    broker: Broker = field(default_factory=Broker)
    queues: Queues = field(default_factory=Queues)

    @property
    def reading(self) -> Store:
        """As of an application without a replica."""
        return self.store

    @property
    def root(self) -> str:
        return self.settings.root

    def set(
        self,
        name: str = "b",
        limit: Limit = 100,
        unit: str | None = "tokens",
        **terms: Any,
    ) -> None:
        given = {"limit": limit, **({} if unit is None else {"unit": unit}), **terms}
        self.store.run(declaring.set_budget, self.root, name, given)

    def request(
        self, amount: int = 10, *more: tuple[str, int], budget: str = "b", **changes: Any
    ) -> ReserveRequest:
        """A request of ``amount`` from ``budget``, and of ``more`` (budget, amount)."""
        task_id = changes.pop("task_id", None) or str(uuid.uuid4())
        values: dict[str, Any] = {
            "reservation_id": new_id(),
            "root": self.root,
            "owner": budget,
            "request_id": task_id,
            "task_id": task_id,
            "task_name": "shop.draft",
            "stage": "draft",
            "fingerprint": "1:same",
            "estimator": "constant",
            "estimator_version": "1",
            "lines": (Line(budget, amount), *(Line(*line) for line in more)),
        }
        return ReserveRequest(**{**values, **changes})

    def admit(self, request: ReserveRequest, **changes: Any) -> Admitted:
        flags = {n: changes.pop(n) for n in ("continuation", "delivered", "stop") if n in changes}
        return admission.admit(
            self.store, self.settings, request, message_of(request, **changes), **flags
        )

    def reserve(self, amount: int = 10, *more: tuple[str, int], **changes: Any) -> ReserveRequest:
        """Admit a new request; it must fit."""
        message = {name: changes.pop(name) for name in MESSAGE if name in changes}
        request = self.request(amount, *more, **changes)
        assert self.admit(request, **message) == Reserved(request.reservation_id)
        return request

    def deliver(
        self, request: ReserveRequest, limits: Retries | None = None, **changes: Any
    ) -> Any:
        """What a worker hears that gets the message of ``request``."""
        delivery = Delivery(
            self.root,
            request.reservation_id,
            request.task_id,
            request.nesting,
            request.retries,
            "worker@host",
            BOOT,
            late_ack=True,
        )
        closings = changes.pop("closings", None)
        delivery = replace(delivery, **changes)
        return settlement.claim(
            self.store, self.settings, delivery, new_id(), retries=limits, closings=closings
        )

    def run(self, request: ReserveRequest, **changes: Any) -> Attempt:
        """Claim the attempt of ``request``; it must be free."""
        attempt = self.deliver(request, **changes)
        assert isinstance(attempt, Attempt)
        assert attempt.replay is None
        return attempt

    def start(self, amount: int = 10, **changes: Any) -> tuple[ReserveRequest, Attempt]:
        """Admit a new request and claim it."""
        late_ack = changes.pop("late_ack", True)
        request = self.reserve(amount, **changes)
        return request, self.run(request, late_ack=late_ack)

    def start_in_place(
        self, request: ReserveRequest, claim_id: uuid.UUID | None = None
    ) -> Attempt | NotStarted:
        """Admit a request that has no message, and claim it."""
        key = request.root, request.reservation_id, request.task_id
        delivery = Delivery(
            *key, request.nesting, request.retries, "caller@host", BOOT, late_ack=False
        )
        return settlement.start(self.store, self.settings, request, delivery, claim_id or new_id())

    def retry(
        self, request: ReserveRequest, attempt: Attempt, amount: int | None = None
    ) -> tuple[ReserveRequest, Any]:
        """Write the retry of ``attempt``; its request, and what came of it."""
        lines = request.lines if amount is None else (Line("b", amount),)
        following = replace(request, retries=request.retries + 1, lines=lines)
        written = admission.retry(
            self.store,
            self.settings,
            following,
            message_of(following),
            attempt.number,
            attempt.claim_id,
        )
        return following, written

    def relay(self) -> relay.Relayed:
        return relay.run_once(self.store, self.settings, self.broker, self.results.ended)

    def suspicion(self) -> Suspicion:
        """The suspicion of a sweep that has just begun."""
        return Suspicion(self.store, self.settings, self.queues)

    def recover(self, suspicion: Suspicion | None = None) -> recovery.Recovered:
        """One pass of recovery; by a sweep that begins with it, unless its suspicion is given."""
        return recovery.run_once(
            self.store, self.settings, self.results, suspicion or self.suspicion()
        )

    def tell_all(self) -> recovery.Recovered:
        """One pass of recovery, with the time come for all that is untold."""
        if self.rows("untold"):
            self.put("untold", {"due_us": 1})
        return self.recover()

    def sweep(self) -> Swept:
        over: list[str] = []
        admitted = parking.run_once(self.store, self.settings).admitted
        for one in self.store.read(untold.due, self.root, 100):
            telling.tell(self.store, self.root, lambda task_id, reason: over.append(task_id), one)
        return Swept(admitted, tuple(over))

    def balance(self, name: str = "b") -> tuple[int, int]:
        """What is reserved and what is spent of a budget."""
        found = self.store.run(budgets.balance, self.root, name)
        return found.reserved, found.spent

    def balances(self, *names: str) -> list[tuple[int, int]]:
        """What is reserved and what is spent of each of several budgets."""
        return [self.balance(name) for name in names]

    def standing(self, name: str = "b") -> Balance:
        """The whole balance of a budget."""
        return self.store.run(budgets.balance, self.root, name)

    def close(self, name: str = "b", drain: bool = False) -> str:
        return self.store.run(budgets.close, self.root, name, drain)

    def reopen(self, name: str = "b") -> bool:
        return self.store.run(budgets.reopen, self.root, name)

    def grant(
        self,
        key: str,
        amount: int,
        name: str = "b",
        until_us: int | None = None,
        reason: str | None = None,
    ) -> bool:
        return self.store.run(grants.grant, self.root, key, name, amount, until_us, reason)

    def adjust(self, key: str, amount: int, name: str = "b", reason: str = "invoice") -> bool:
        return self.store.run(grants.adjust, self.root, key, name, amount, reason)

    def upkeep(self) -> upkeep.Upkept:
        """One pass of the sweep's steps for budgets."""
        return upkeep.Upkeep(self.store, self.settings).run_once()

    def now(self) -> int:
        """The database's clock."""
        return self.store.run(windows.read_now)

    def windows(self, name: str = "b") -> list[tuple[int, int]]:
        """When each window of a budget begins and ends, in order."""
        rows = self.rows("balances", budget=name, stripe=0)
        return [(row.window_us, row.end_us) for row in rows]

    def counted(self, **where: Any) -> list[Counted]:
        """What every window has counted, in order of their keys, whatever rows it has."""
        sums: dict[tuple[str, int], Counted] = {}
        for row in self.rows("balances", **where):
            key = row.budget, row.window_us
            before = sums.get(key, Counted(*key, 0, 0))
            sums[key] = Counted(*key, before.reserved + row.reserved, before.spent + row.spent)
        return list(sums.values())

    def age(self, name: str = "b", by_us: int = 3_600_000_000) -> None:
        """Let all windows of a budget have been that much earlier, with what belongs to them."""
        for start_us, end_us in self.windows(name):
            where = {"budget": name, "window_us": start_us}
            if end_us != FOREVER_US:
                self.put("balances", {"end_us": end_us - by_us}, **where)
            for table in ("lines", "journal", "adjustments", "balances"):
                if self.rows(table, **where):
                    self.put(table, {"window_us": start_us - by_us}, **where)

    def refused(self) -> int:
        """How many refusals were counted."""
        return sum(row.count for row in self.rows("refusals"))

    def row(self, request: ReserveRequest) -> Any:
        """The reservation's row."""
        return self.rows("reservations", reservation_id=request.reservation_id)[0]

    def state(self, request: ReserveRequest) -> str:
        return str(self.row(request).state)

    def line(self, request: ReserveRequest) -> tuple[int, int, int]:
        """What the first line holds, used and charged."""
        row = self.rows("lines", reservation_id=request.reservation_id, line=0)[0]
        return row.reserved, row.used, row.settled

    def message(self, request: ReserveRequest) -> Any:
        """The one outbox row of a reservation, or none."""
        rows = self.rows("outbox", reservation_id=request.reservation_id)
        assert len(rows) <= 1
        return rows[0] if rows else None

    def rows(self, table: str, **where: Any) -> list[Any]:
        """The rows of one table under this root, in order of its key."""
        return self.store.run(_rows, getattr(schema, table), {"root": self.root, **where})

    def put(self, table: str, values: dict[str, Any], **where: Any) -> None:
        """Change rows behind the ledger's back, to let time pass or to break something."""
        self.store.run(_put, getattr(schema, table), values, {"root": self.root, **where})

    def lapse(self, request: ReserveRequest) -> None:
        """Let the leases of a request's open attempts be over, for the second time seen."""
        open_ones = schema.attempts.c.lease_until_us.is_not(None)
        self.store.run(
            _put,
            schema.attempts,
            {"lease_until_us": 1, "suspected_us": 1},
            {"root": self.root, "reservation_id": request.reservation_id},
            open_ones,
        )

    def make_due(self, request: ReserveRequest) -> None:
        """Let the time of a request's message come."""
        self.put("outbox", {"due_us": 1}, reservation_id=request.reservation_id)

    def dump(self) -> dict[str, list[Any]]:
        """Every row of every table under this root; without what anybody may renew."""
        return {
            name.removeprefix("budget_"): [
                tuple(row) for row in self.store.run(_rows, table, {"root": self.root})
            ]
            for name, table in schema.metadata.tables.items()
            if table not in (schema.backlog, schema.sweeps)
        }


def message_of(request: ReserveRequest, **changes: Any) -> WireMessage:
    """The message of a request."""
    plain = WireMessage(request.task_id, request.task_name, b"body", "{}", "celery")
    return replace(plain, **changes)


def id_of(is_wanted: Callable[[int], bool]) -> uuid.UUID:
    """Return an id with such a last byte: those of one moment may differ in that alone."""
    return next(one for one in iter(new_id, None) if is_wanted(one.bytes[-1]))


def admit_many(
    store: Store,
    settings: Settings,
    asked: Sequence[tuple[ReserveRequest, WireMessage]],
    *,
    best_effort: bool = False,
) -> list[Tried]:
    """Admit several requests: all or none; with ``best_effort`` each that fits, in their order."""
    publications = [
        admission.Publication(request, message, number if best_effort else 0)
        for number, (request, message) in enumerate(asked)
    ]
    tried = admission.admit_many(store, settings, publications, partial=best_effort)
    return cast("list[Tried]", tried)


def _conditions(table: sa.Table, where: dict[str, Any]) -> list[Any]:
    return [table.c[name] == value for name, value in where.items()]


def _rows(connection: sa.Connection, table: sa.Table, where: dict[str, Any]) -> list[Any]:
    select = sa.select(table).where(*_conditions(table, where)).order_by(*table.primary_key)
    return list(connection.execute(select))


def _put(
    connection: sa.Connection,
    table: sa.Table,
    values: dict[str, Any],
    where: dict[str, Any],
    *more: Any,
) -> None:
    changed = connection.execute(
        table.update()
        .where(*_conditions(table, where), *more)
        .values(**values)
        .returning(table.c.root)
    )
    assert changed.all()
