"""What the first release left in a database goes on under this one."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

from celery_budget import reconcile
from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Closed, Refused, Reserved, ReserveRequest
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import Store, migrate, reservations
from tests.contract.support import BOOT, RAISED, RETURNED, Ledger

OWNER = {"b": 10_000, "big": MAX_AMOUNT, "free": None, "usd": 50}
FUTURE = 4 * 10**15
PAST = 1_700_000_000_000_000


class First:
    """A database of the first release, filled with plain rows; balances follow from its lines."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ledger = Ledger(store, Settings("unused"))
        self.requests: dict[str, ReserveRequest] = {}
        self.claims: dict[str, uuid.UUID] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        for name, limit in OWNER.items():
            self.add(
                "budgets",
                name=name,
                unit="usd" if name == "usd" else "tokens",
                period="total",
                limit_amount=limit,
                created_us=PAST,
                updated_us=PAST,
            )

    def add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append({"root": "default", **values})

    def reserve(
        self,
        name: str,
        state: str,
        held: int,
        used: int = 0,
        settled: int = 0,
        *,
        budget: str = "b",
        retries: int = 0,
        attempts: int = 0,
        estimate: int = 10,
    ) -> None:
        """Add a reservation called ``name`` with its line."""
        request = self.ledger.request(estimate, budget=budget, task_id=f"task-{name}")
        self.requests[name] = request
        ended = state in ("settled", "released", "lost")
        self.add(
            "reservations",
            reservation_id=request.reservation_id,
            owner=budget,
            request_id=request.request_id,
            nesting=0,
            task_id=request.task_id,
            task_name=request.task_name,
            stage=request.stage,
            fingerprint=request.fingerprint,
            opaque=False,
            estimator="constant",
            estimator_version="1",
            state=state,
            reason="cancelled" if state == "released" else None,
            retries=retries,
            attempts=attempts,
            deliveries=min(attempts, 1),
            unreserved=False,
            unmetered=False,
            over=False,
            created_us=PAST,
            ended_us=PAST if ended else None,
        )
        self.add(
            "lines",
            reservation_id=request.reservation_id,
            line=0,
            budget=budget,
            window_us=0,
            stripe=0,
            charge="used",
            estimate=estimate,
            reserved=held,
            used=used,
            settled=settled,
        )

    def attempt(self, name: str, number: int = 1, **values: Any) -> None:
        """Add an attempt; it runs unless ``values`` tell."""
        claim_id = new_id()
        self.claims[name] = claim_id
        row: dict[str, Any] = {
            "reservation_id": self.requests[name].reservation_id,
            "attempt": number,
            "claim_id": claim_id,
            "retries": 0,
            "worker": "worker@host",
            "boot_id": BOOT,
            "late_ack": True,
            "started_us": PAST,
            "ended_us": None,
            "outcome": None,
            "payload": None,
            "lease_until_us": FUTURE,
            "replays": 0,
            "repeated": None,
        }
        self.add("attempts", **{**row, **values})

    def use(self, name: str, amount: int, key: str = "key:one", attempt: int = 1) -> None:
        self.add(
            "usage",
            reservation_id=self.requests[name].reservation_id,
            key=key,
            attempt=attempt,
            amount=amount,
            late=False,
            recorded_us=PAST,
        )

    def message(self, name: str | None, state: str = "published", **values: Any) -> None:
        request = None if name is None else self.requests[name]
        row: dict[str, Any] = {
            "outbox_id": new_id(),
            "reservation_id": request and request.reservation_id,
            "parent_id": None,
            "task_id": "plain" if request is None else request.task_id,
            "task_name": "shop.draft",
            "retries": 0,
            "state": state,
            "after_attempt": None,
            "due_us": FUTURE if state == "published" else PAST,
            "expires_us": None,
            "publishes": int(state == "published"),
            "failures": 0,
            "last_error": None,
            "created_us": PAST,
            "published_us": PAST if state == "published" else None,
            "queue": "celery",
            "body": b"\x00body",
            "envelope": "{}",
        }
        self.add("outbox", **{**row, **values})

    def park(self, request: ReserveRequest, reservation_id: uuid.UUID | None, retries: int) -> None:
        written = {
            "reservation_id": str(request.reservation_id),
            "root": "default",
            "owner": request.owner,
            "request_id": request.request_id,
            "task_id": request.task_id,
            "task_name": request.task_name,
            "stage": request.stage,
            "fingerprint": request.fingerprint,
            "estimator": "constant",
            "estimator_version": "1",
            "lines": [
                {"budget": one.budget, "amount": one.amount, "charge": "used"}
                for one in request.lines
            ],
            "opaque": False,
            "nesting": 0,
            "parent": None,
            "retries": retries,
            "unreserved": False,
        }
        self.add(
            "parked",
            parked_id=new_id(),
            reservation_id=reservation_id,
            after_attempt=None if reservation_id is None else 1,
            owner=request.owner,
            task_id=request.task_id,
            request_id=request.request_id,
            nesting=0,
            retries=retries,
            request=json.dumps(written),
            created_us=PAST,
            deadline_us=FUTURE,
            checked_us=0,
            task_name="shop.draft",
            queue="celery",
            due_us=0,
            expires_us=None,
            body=b"body",
            envelope="{}",
        )

    def refuse(self, budget: str, times: int) -> None:
        for one in range(times):
            self.add(
                "refusals",
                refusal_id=new_id(),
                budget=budget,
                stage="draft",
                task_name="shop.draft",
                requested=100 + one,
                refused_us=PAST + one,
            )

    def fill(self) -> None:
        """Write it all, as the first release would have."""
        for name in OWNER:
            mine = [line for line in self.rows["lines"] if line["budget"] == name]
            self.add(
                "balances",
                budget=name,
                window_us=0,
                stripe=0,
                reserved=sum(line["reserved"] for line in mine),
                spent=sum(line["settled"] for line in mine),
            )
        with self.store.transaction() as connection:
            _to(connection, "0001")
        with self.store.transaction() as connection:
            for table, rows in self.rows.items():
                name = f"budget_{table}"
                # What SQLite tells of types is not what Python is to bind them by.
                found = sa.inspect(connection).get_columns(name)
                of = sa.table(name, *(sa.column(one["name"], _type(rows, one)) for one in found))
                connection.execute(of.insert(), rows)

    def held(self, name: str, number: int = 1) -> Attempt:
        """The attempt that a worker of the first release had claimed."""
        request = self.requests[name]
        return Attempt(
            self.store,
            Settings(database_url="sqlite://"),
            "default",
            request.reservation_id,
            number,
            self.claims[name],
        )


def _type(rows: list[dict[str, Any]], column: Any) -> sa.types.TypeEngine[Any]:
    kinds = {type(row.get(column["name"])) for row in rows} - {type(None)}
    of: dict[type, sa.types.TypeEngine[Any]] = {
        uuid.UUID: sa.Uuid(),
        bool: sa.Boolean(),
        int: sa.BigInteger(),
        bytes: sa.LargeBinary(),
    }
    return of.get(kinds.pop(), sa.Text()) if kinds else column["type"]


def _to(connection: sa.Connection, version: str) -> None:
    config = migrate._config()
    config.attributes["connection"] = connection
    step = command.upgrade if version != "down" else command.downgrade
    step(config, "0001" if version == "down" else version)


@pytest.fixture
def first(empty: Store) -> First:
    first = First(empty)
    done = {"ended_us": PAST, "lease_until_us": None}

    first.reserve("reserved", "reserved", 10)
    first.message("reserved", "due")
    first.reserve("published", "published", 10)
    first.message("published")
    first.reserve("cancelled", "published", 10)
    first.message("cancelled")
    first.reserve("silent", "published", 10)
    first.message("silent", due_us=PAST)

    first.reserve("running", "running", 10, 4, attempts=1)
    first.message("running")
    first.attempt("running")
    first.use("running", 3)
    first.use("running", 1, key="attempt:1:1")
    first.reserve("over", "running", 15, 15, attempts=1)
    first.message("over")
    first.attempt("over")
    first.use("over", 15)
    first.reserve("retrying", "running", 14, 4, attempts=1)
    first.message("retrying")
    first.message("retrying", "blocked", retries=1, after_attempt=1)
    first.attempt("retrying")
    first.use("retrying", 4)
    # A second attempt that was given the first one's reply: it is metered.
    first.reserve("repeating", "running", 15, 5, attempts=2)
    first.message("repeating")
    first.attempt("repeating", 1, outcome="uncertain", **done)
    first.attempt("repeating", 2, repeated=5)
    first.use("repeating", 5)
    # On two lines: what was used counted on each of them, whatever its budget counts.
    first.reserve("two", "running", 10, 4, attempts=1)
    first.add("lines", **{**first.rows["lines"][-1], "line": 1, "budget": "usd"})
    first.message("two")
    first.attempt("two")
    first.use("two", 4)
    first.reserve("lapsed", "running", 10, attempts=1)
    first.message("lapsed")
    first.attempt("lapsed", lease_until_us=PAST)
    first.reserve("early", "running", 10, attempts=1)
    first.message("early")
    first.attempt("early", lease_until_us=PAST, late_ack=False)

    first.reserve("waiting", "waiting", 13, 3, attempts=1, retries=1)
    first.message("waiting", "due", retries=1)
    first.attempt("waiting", outcome="retried", **done)
    first.use("waiting", 3)
    first.reserve("parked", "waiting", 5, 5, attempts=1, retries=1)
    first.attempt("parked", outcome="retried", **done)
    first.use("parked", 5)
    first.park(first.requests["parked"], first.requests["parked"].reservation_id, 1)

    first.reserve("settled", "settled", 0, 7, 7, attempts=1)
    first.attempt("settled", outcome="returned", **done)
    first.use("settled", 7)
    first.reserve("unclosed", "settled", 0, 0, 10, attempts=1)
    first.message("unclosed")
    first.attempt(
        "unclosed", outcome="returned", payload='"done"', ended_us=PAST, lease_until_us=PAST
    )
    first.reserve("released", "released", 0)
    first.reserve("lost", "lost", 0, 2, 10, attempts=1)
    first.attempt("lost", outcome="uncertain", **done)
    first.use("lost", 2)

    half = 2**62
    first.reserve("large", "running", half, half, budget="big", attempts=1, estimate=half)
    first.message("large")
    first.attempt("large")
    first.use("large", half)
    first.reserve("larger", "settled", 0, half - 1, half - 1, budget="big", attempts=1)
    first.attempt("larger", outcome="returned", **done)
    first.use("larger", half - 1)

    first.park(first.ledger.request(20, task_id="task-never"), None, 0)
    first.message(None, "due")
    first.message(
        None, "published", parent_id=first.requests["running"].reservation_id, task_id="child"
    )
    first.refuse("b", 20)
    first.refuse("big", 3)
    first.fill()
    return first


HELD = 10 * 8 + 15 + 14 + 15 + 13 + 5
SPENT = 7 + 10 + 10


def test_it_migrates_with_its_holds_and_adds_up(first: First) -> None:
    ledger = first.ledger
    assert ledger.store.run(migrate.upgrade) == migrate._head()
    assert reconcile.reconcile(ledger.store, ledger.settings).mismatches == ()
    assert ledger.balance("b") == (HELD, SPENT)
    assert ledger.balance("big") == (2**62, 2**62 - 1)
    assert ledger.balances("free", "usd") == [(0, 0), (10, 0)]
    counts = reconcile.report(ledger.store, ledger.settings).counts
    assert counts["refused"] == 23
    assert counts["parked"] == 2
    told = [(row.budget, row.what, row.entry, row.who) for row in ledger.rows("journal")]
    assert told == [(name, "checkpoint", 1, "migration 0002") for name in ("b", "big", "usd")]
    by_budget = {row.budget: row for row in ledger.rows("refusals")}
    assert (by_budget["b"].count, by_budget["b"].requested) == (20, 119)
    assert len(by_budget) == 2


@pytest.mark.parametrize("table", ["reservations", "lines", "attempts", "outbox", "parked"])
def test_every_row_is_as_it_was(first: First, table: str) -> None:
    first.store.run(migrate.upgrade)
    found = [dict(row._mapping) for row in first.ledger.rows(table)]
    assert len(found) == len(first.rows[table])
    key = {"parked": "parked_id", "outbox": "outbox_id"}.get(table, "reservation_id")

    def order(row: dict[str, Any]) -> Any:
        return row[key], row.get("attempt")

    for now, then in zip(
        sorted(found, key=order), sorted(first.rows[table], key=order), strict=True
    ):
        assert {name: now[name] for name in then if name != "repeated"} == {
            name: value for name, value in then.items() if name != "repeated"
        }


def test_everything_open_goes_on(first: First) -> None:
    ledger, requests = first.ledger, first.requests
    ledger.store.run(migrate.upgrade)

    # What was due is published, and a worker gets it.
    ledger.relay()
    assert {"task-reserved", "task-waiting", "plain"} <= set(ledger.broker.published)
    assert ledger.state(requests["reserved"]) == "published"
    for name in ("reserved", "published"):
        attempt = ledger.run(requests[name])
        assert attempt.record(6)
        assert attempt.end(RETURNED)
        assert attempt.close()
    assert ledger.run(requests["waiting"], retries=1).end(RAISED)
    assert ledger.line(requests["waiting"]) == (0, 3, 3)

    # Workers of before end what they run.
    running = first.held("running")
    assert not running.record(3, key="one")
    assert running.record(2, key="two")
    assert running.end(RETURNED)
    assert ledger.line(requests["running"]) == (0, 6, 6)
    over = first.held("over")
    assert over.record(5)
    assert over.end(RETURNED)
    assert ledger.line(requests["over"]) == (0, 20, 20)
    assert first.held("retrying").end(RAISED)
    assert ledger.state(requests["retrying"]) == "waiting"
    assert ledger.run(requests["retrying"], retries=1).end(RETURNED)
    assert ledger.line(requests["retrying"]) == (0, 4, 14)
    two = first.held("two")
    assert two.record(1, key="more", unit="usd")
    assert two.end(RETURNED)
    assert ledger.line(requests["two"]) == (0, 4, 4)
    assert ledger.balance("usd") == (0, 5)
    # One whose reply was repeated is charged once.
    assert first.held("repeating", 2).end(RETURNED)
    assert ledger.line(requests["repeating"]) == (0, 5, 5)
    assert not ledger.row(requests["repeating"]).unmetered

    assert ledger.store.run(_release, requests["cancelled"]) is not None
    for name in ("lapsed", "early", "unclosed"):
        ledger.lapse(requests[name])
    recovered = ledger.recover()
    assert (recovered.rerun, recovered.lost) == (1, 1)
    assert (recovered.replayed, recovered.republished) == (1, 1)
    assert ledger.line(requests["early"]) == (0, 0, 10)
    assert ledger.run(requests["lapsed"]).number == 2
    replay = ledger.deliver(requests["unclosed"])
    assert replay.replay.payload == '"done"'
    assert isinstance(ledger.deliver(requests["settled"]), Closed)

    # What was parked is admitted, one with and one without a reservation.
    assert ledger.sweep().admitted == 2
    assert ledger.line(requests["parked"]) == (15, 5, 0)
    assert ledger.run(requests["parked"], retries=1).end(RETURNED)
    assert [row.state for row in ledger.rows("reservations", task_id="task-never")] == ["reserved"]

    # Late usage of what had ended, and the largest numbers there are.
    settled = first.held("settled")
    assert settled.record(4, key="late")
    assert ledger.line(requests["settled"]) == (0, 11, 11)
    assert isinstance(ledger.admit(ledger.request(1, budget="big")), Refused)
    large = first.held("large")
    assert large.end(RETURNED)
    assert ledger.balance("big") == (0, MAX_AMOUNT)

    # And new requests are held to what is left.
    held, spent = ledger.balance("b")
    request = ledger.request(10_000 - held - spent)
    assert ledger.admit(request) == Reserved(request.reservation_id)
    assert isinstance(ledger.admit(ledger.request(1)), Refused)
    assert reconcile.reconcile(ledger.store, ledger.settings).mismatches == ()


def _release(connection: sa.Connection, request: ReserveRequest) -> Any:
    return reservations.release(connection, "default", request.reservation_id, "cancelled")


def test_a_migrated_budget_takes_new_terms(first: First) -> None:
    ledger = first.ledger
    ledger.store.run(migrate.upgrade)
    held, spent = ledger.balance("b")
    ledger.set("org", 20_000)
    ledger.set("b", 10_000, parent="org", period="day")
    request = ledger.reserve(100)
    assert ledger.balances("b", "org") == [(held + 100, spent), (100, 0)]
    assert first.held("running").end(RETURNED)
    assert ledger.line(first.requests["running"]) == (0, 4, 4)
    assert ledger.run(request).end(RETURNED)
    assert reconcile.reconcile(ledger.store, ledger.settings).mismatches == ()


def test_it_goes_back_and_forth(first: First) -> None:
    ledger = first.ledger
    ledger.store.run(migrate.upgrade)
    before = ledger.dump()
    with ledger.store.transaction() as connection:
        _to(connection, "down")
    ledger.store.run(migrate.upgrade)
    after = ledger.dump()
    for table in ("budgets", "reservations", "lines", "attempts", "outbox", "parked", "balances"):
        assert after[table] == before[table]
    assert reconcile.reconcile(ledger.store, ledger.settings).mismatches == ()


@pytest.mark.parametrize(
    "terms", [{"period": "day"}, {"parent": "org"}, {"soft_stop": 500_000}, {"state": "closed"}]
)
def test_what_the_first_release_would_take_for_something_else_stays(
    empty: Store, terms: dict[str, Any]
) -> None:
    ledger = Ledger(empty, Settings("unused"))
    empty.run(migrate.upgrade)
    for name in ("org", "b"):
        ledger.set(name, 100)
    ledger.put("budgets", terms, name="b")
    before = ledger.dump()
    with pytest.raises(ValueError, match="nothing was changed"):
        empty.run(_to, "down")
    assert ledger.dump() == before
