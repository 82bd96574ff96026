"""The clients: what callers, workers, a relay, a sweep and an admin do, each by its own chance."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from celery_budget import admission, parking, recovery, relay, settlement
from celery_budget.core.budgets import Share
from celery_budget.core.identity import new_id
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    AlreadyReserved,
    Conflict,
    Outcome,
    Refused,
    Reserved,
    ReserveRequest,
    Skipped,
)
from celery_budget.errors import BudgetError, HoldsOpen, InvalidAmount, InvalidBudget
from celery_budget.settlement import Attempt, Delivery
from celery_budget.store import Store, budgets, declaring, grants, journal, schema
from celery_budget.suspicion import Suspicion
from celery_budget.upkeep import Upkeep
from tests.contract.support import admit_many
from tests.simulation.scheduler import Client, SteppedStore
from tests.simulation.world import SHAPES, World

__all__ = ["ROLES", "drain", "found"]

Role = Callable[[Client, World, Store], None]
PAST = 1
#: How often one looks for something to do before the turn is over.
PATIENCE = 20


def found(world: World) -> None:
    """Create the budgets: a tree in tokens, calls charged at the start, money by the month."""
    declared: dict[str, dict[str, Any]] = {
        "org": {"unit": "tokens", "limit": 90},
        "team": {"parent": "org", "limit": 60, "soft_stop": 800_000},
        "user:a": {"parent": "team", "limit": 40},
        "user:b": {"parent": "team", "limit": Share(500_000)},
        "t:*": {"parent": "org", "limit": 15},
        "calls": {"unit": "requests", "limit": 12, "period": "month"},
        "usd": {"unit": "usd", "limit": None, "period": "month"},
    }
    for name, terms in declared.items():
        world.store.run(declaring.set_budget, world.root, name, terms)
    # Admissions count the outbox every two seconds, which no seed orders: nobody ever has to.
    counted = schema.backlog.insert().values(root=world.root, messages=0, counted_us=2**62)
    world.store.run(lambda connection: connection.execute(counted))


def playing(role: Role, turns: int, world: World) -> Callable[[Client], None]:
    """The life of a client of this role: a store of its own, and some turns."""

    def play(client: Client) -> None:
        store = SteppedStore(world.store, client)
        for _ in range(turns):
            try:
                role(client, world, store)
            except BudgetError as error:
                # What was tried too often, or cannot be; another turn follows.
                client.stop(type(error).__name__)

    return play


def message_of(request: ReserveRequest) -> WireMessage:
    return WireMessage(
        request.task_id, request.task_name, b"", str(request.reservation_id), "celery"
    )


def caller(client: Client, world: World, store: Store) -> None:
    """Reserve one or several, the same id as others now and then; or take one back."""
    chance = client.chance
    what = chance.choice(("one", "one", "waits", "all", "some", "goes on", "cancel"))
    if what == "cancel":
        if world.heard:
            one = chance.choice(list(world.heard))
            settlement.revoke(store, world.root, one, "cancelled")
        return
    count = chance.randint(1, 3) if what in ("all", "some") else 1
    asked = [world.request(chance, new_id(), chance.random() < 0.5) for _ in range(count)]
    if what == "waits":
        asked = [dataclasses.replace(request, parks=True) for request in asked]
    messages = [(request, message_of(request)) for request in asked]
    if what in ("all", "some"):
        heard: Sequence[Any] = admit_many(
            store, world.settings, messages, best_effort=what == "some"
        )
        new = [one.reservation_id for one, out in zip(asked, heard, strict=True) if new_of(out)]
        if what == "all":
            world.batches.append(new)
    else:
        [(request, message)] = messages
        heard = [
            admission.admit(store, world.settings, request, message, continuation=what == "goes on")
        ]
    for request, outcome in zip(asked, heard, strict=True):
        if isinstance(outcome, (Reserved, AlreadyReserved)):
            world.heard[outcome.reservation_id] = True
        elif isinstance(outcome, (Refused, Skipped, Conflict)):
            world.heard.setdefault(request.reservation_id, False)


def wait_for(client: Client, what: Callable[[], bool]) -> bool:
    """Whether it comes while others take some steps."""
    for _ in range(PATIENCE):
        if what():
            return True
        client.stop("nothing to do")
    return False


def new_of(outcome: Any) -> bool:
    return isinstance(outcome, (Reserved, Skipped))


def worker(client: Client, world: World, store: Store) -> None:
    """Take a message that the broker has, run it in some way, and acknowledge it in the end."""
    chance = client.chance
    if not wait_for(client, lambda: bool(world.queue)):
        return
    message = chance.choice(world.queue)
    late_ack = chance.random() < 0.7
    if not late_ack:
        world.queue.remove(message)
    work(client, world, store, message, late_ack)
    if late_ack and message in world.queue:
        world.queue.remove(message)


def work(client: Client, world: World, store: Store, message: WireMessage, late_ack: bool) -> None:
    chance = client.chance
    reservation_id = uuid.UUID(message.envelope)
    request = world.requests[reservation_id]
    retries = len(message.body)
    delivery = Delivery(
        world.root,
        reservation_id,
        request.task_id,
        request.nesting,
        retries,
        client.name,
        uuid.UUID(int=client.number + 1),
        late_ack,
    )
    attempt = settlement.claim(store, world.settings, delivery, new_id())
    if not isinstance(attempt, Attempt):
        return
    if attempt.replay is None:
        key = (reservation_id, attempt.number)
        if world.runs.setdefault(key, attempt.claim_id) != attempt.claim_id:
            world.problems.append(f"attempt {key} is run by two workers")
        use(client, world, attempt, request)
        retried = retries < 2 and chance.random() < 0.25
        if retried:
            following = dataclasses.replace(request, retries=retries + 1)
            admission.retry(
                store,
                world.settings,
                following,
                dataclasses.replace(message, body=b"+" * (retries + 1)),
                attempt.number,
                attempt.claim_id,
            )
        end_it(client, world, attempt, retried)
        if chance.random() < 0.2:
            use(client, world, attempt, request)
    if attempt.settled or attempt.replay is not None:
        world.stored.setdefault(request.task_id, "returned")
        attempt.close()


def end_it(client: Client, world: World, attempt: Attempt, retried: bool) -> None:
    kind = "retried" if retried else client.chance.choice(("returned", "raised", "rejected"))
    outcome = Outcome(
        kind,
        payload='"done"' if kind in ("returned", "raised") else None,
        again=world.settings.again if kind == "rejected" else None,
    )
    attempt.end(outcome)
    if attempt.settled:
        world.at_settled(attempt.reservation_id, attempt.claim_id)


def use(client: Client, world: World, attempt: Attempt, request: ReserveRequest) -> None:
    """Record usage under keys that other attempts use as well, and ask for more now and then."""
    chance = client.chance
    shape = tuple((line.budget, line.charge) for line in request.lines)
    units = next(units for lines, units in SHAPES if lines == shape)
    for _ in range(chance.randrange(3)):
        key, unit = f"k{chance.randrange(4)}", chance.choice(units)
        amount = len(key) + len(unit)
        attempt.record(amount, key, unit)
        world.recorded[attempt.reservation_id, f"key:{key}", unit] = amount
    if chance.random() < 0.2:
        attempt.extend(3, "more", units[0])


@dataclasses.dataclass
class Publisher:
    """The broker as the relay sees it."""

    client: Client
    world: World

    def window(self, broker: str) -> int:
        # As a broker does that has answered quickly so far, or that has not.
        return self.client.chance.choice([1, 3])

    def publish_all(self, messages: Sequence[WireMessage]) -> list[None]:
        for message in messages:
            self.client.stop("publish")
            self.world.at_publish(message)
            self.world.queue.append(message)
        return [None] * len(messages)

    def reset(self) -> None:
        raise AssertionError("this broker is never down")


def relayer(client: Client, world: World, store: Store) -> None:
    wait_for(client, lambda: world.is_due)
    relay.run_once(store, world.settings, Publisher(client, world), world.ended)


def sweeper(client: Client, world: World, store: Store) -> None:
    """Let a lease lapse, or the time of a published message be over; then all that a sweep does."""
    chance = client.chance
    # Each time in the past is another one, so that what is sorted by it has one order.
    wait_for(client, lambda: world.is_running)
    if chance.random() < 0.7:
        alive = [row for row in world.rows(schema.attempts) if row.lease_until_us is not None]
        if alive:
            one = chance.choice([row for row in alive if row.ended_us is None] or alive)
            store.run(
                put, schema.attempts, {"lease_until_us": client.granted, "suspected_us": PAST}, one
            )
    else:
        published = [row for row in world.rows(schema.outbox) if row.state == "published"]
        if published:
            store.run(put, schema.outbox, {"due_us": client.granted}, chance.choice(published))
    recovery.run_once(store, world.settings, world, Suspicion(store, world.settings, world))
    parking.run_once(store, world.settings)
    if chance.random() < 0.4:
        Upkeep(store, world.settings).run_once()
    if chance.random() < 0.3:
        for row in store.read(journal.foldable, world.root, -1_000_000, 2):
            store.run(journal.fold, world.root, row.budget, row.window_us, row.stripe, -1_000_000)


def put(connection: sa.Connection, table: sa.Table, values: dict[str, Any], row: Any) -> None:
    """Change one row if it is as it was seen; time passes for it."""
    key = [table.c[column.name] == getattr(row, column.name) for column in table.primary_key]
    same = [table.c[name] == getattr(row, name) for name in values]
    connection.execute(table.update().where(*key, *same).values(**values))


def admin(client: Client, world: World, store: Store) -> None:
    """Change limits, parents, stops and periods; grant, adjust, close and reopen."""
    chance = client.chance
    name = chance.choice(("org", "team", "user:a", "user:b", "calls", "t:1"))
    what = chance.choice(
        ("limit", "limit", "parent", "grant", "adjust", "close", "reopen", "reopen", "period")
    )
    try:
        if what == "limit":
            terms: dict[str, Any] = {"limit": chance.choice((None, 0, 20, 35, 60))}
            store.run(declaring.set_budget, world.root, name, terms)
        elif what == "parent":
            terms = {"parent": chance.choice(("org", "team"))}
            store.run(declaring.set_budget, world.root, chance.choice(("user:a", "user:b")), terms)
        elif what == "period":
            terms = {"period": chance.choice(("month", "total", "day"))}
            store.run(declaring.set_budget, world.root, "calls", terms)
        elif what == "grant":
            store.run(grants.grant, world.root, f"g{client.granted}", name, 5, None, None)
        elif what == "adjust":
            amount = chance.choice((-3, 2))
            store.run(grants.adjust, world.root, f"a{client.granted}", name, amount, "invoice")
        else:
            # Until it is known what came of it, it is not known.
            world.states.pop(name, None)
            if what == "close":
                state = store.run(budgets.close, world.root, name, True)
                world.states[name] = state
            else:
                store.run(budgets.reopen, world.root, name)
                world.states[name] = "open"
    except (HoldsOpen, InvalidAmount, InvalidBudget):
        client.stop("refused")


#: Who takes part, and how many turns each has.
ROLES: tuple[tuple[str, Role, int], ...] = (
    ("caller", caller, 10),
    ("other caller", caller, 10),
    ("third caller", caller, 10),
    ("worker", worker, 4),
    ("other worker", worker, 4),
    ("third worker", worker, 4),
    ("relay", relayer, 5),
    ("sweep", sweeper, 3),
    ("other sweep", sweeper, 3),
    ("admin", admin, 10),
)


def drain(world: World) -> None:
    """Bring everything to an end with nobody in the way: leases lapse, all is delivered once."""
    store = world.store
    for turn in range(40):
        for row in world.rows(schema.attempts):
            if row.lease_until_us is not None:
                store.run(put, schema.attempts, {"lease_until_us": PAST, "suspected_us": PAST}, row)
        for row in world.rows(schema.outbox):
            if row.due_us != PAST:
                store.run(put, schema.outbox, {"due_us": PAST}, row)
        for row in world.rows(schema.untold):
            store.run(put, schema.untold, {"due_us": PAST}, row)
        for row in world.rows(schema.parked):
            if turn > 20:
                store.run(put, schema.parked, {"deadline_us": PAST}, row)
        recovery.run_once(store, world.settings, world, Suspicion(store, world.settings, world))
        parking.run_once(store, world.settings)
        Upkeep(store, world.settings).run_once()
        relay.run_once(store, world.settings, Quiet(world), world.ended)
        for message in world.queue:
            finish(world, message)
        world.queue.clear()
        work_left = [row for row in world.rows(schema.reservations) if row.ended_us is None]
        open_left = [row for row in world.rows(schema.attempts) if row.lease_until_us is not None]
        waits = world.rows(schema.parked) or world.rows(schema.untold)
        if not (work_left or open_left or waits):
            return


@dataclasses.dataclass
class Quiet:
    """A publisher that nobody schedules."""

    world: World

    def window(self, broker: str) -> int:
        return 10

    def publish_all(self, messages: Sequence[WireMessage]) -> list[None]:
        self.world.queue.extend(messages)
        return [None] * len(messages)

    def reset(self) -> None:
        raise AssertionError("this broker is never down")


def finish(world: World, message: WireMessage) -> None:
    """Run a message to its end."""
    reservation_id = uuid.UUID(message.envelope)
    request = world.requests[reservation_id]
    delivery = Delivery(
        world.root,
        reservation_id,
        request.task_id,
        request.nesting,
        len(message.body),
        "last",
        uuid.UUID(int=999),
        late_ack=True,
    )
    attempt = settlement.claim(world.store, world.settings, delivery, new_id())
    if isinstance(attempt, Attempt):
        if attempt.replay is None:
            attempt.end(Outcome("returned", payload='"done"'))
        attempt.close()
