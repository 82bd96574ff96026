"""What each operation says to the database: how many statements, in how many transactions.

Counted where the driver sends them, so that a hidden round trip (a ping, a rollback, a session's
setting) shows as well. The numbers are those of today, not a goal: whoever changes one changes it
here, for the better or with a reason. How long any of it takes is for ``benchmarks/``.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from celery_budget import admission, budgeted, settlement
from celery_budget.closings import Closings
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    AlreadyReserved,
    Extended,
    Outcome,
    Parked,
    Refused,
    Reserved,
)
from celery_budget.core.usage import Used
from celery_budget.errors import QueueFull, UnknownBudget
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import (
    Store,
    budgets,
    claims,
    dispatching,
    lanes,
    migrate,
    quarantine,
    schema,
)
from celery_budget.telling import tell_task
from tests.contract.support import BOOT, RAISED, RETRIED, RETURNED, Ledger, message_of
from tests.integration.support import Shop


class Cost(NamedTuple):
    """What one operation costs.

    :ivar statements: without those that begin and end transactions.
    :ivar transactions: begun explicitly; a statement outside of them is its own.
    """

    statements: int
    transactions: int


#: One statement, committed by itself: what admission on PostgreSQL promises.
ONE_ROUND_TRIP = Cost(1, 0)

#: On PostgreSQL each transaction that writes has one statement more, its lock time-out.
BASELINE = {
    "postgresql": {
        "reserve": ONE_ROUND_TRIP,
        "reserve from two budgets": ONE_ROUND_TRIP,
        "refuse": ONE_ROUND_TRIP,
        "repeat": ONE_ROUND_TRIP,
        # A budget that is not there is looked for among the templates.
        "unknown budget": Cost(3, 0),
        "continue": Cost(2, 1),
        # With its turn among what waits for that budget.
        "park": Cost(4, 1),
        # With a look whether a relay sleeps.
        "enqueue": Cost(3, 1),
        # Looks whether a lane holds anything.
        # The lanes of a fallback are read before; each is tried by one admission.
        "read lanes": Cost(1, 1),
        "turn": Cost(14, 1),
        "relay nothing": Cost(3, 1),
        # A look at lanes, one statement that takes, one that marks.
        "relay": Cost(5, 2),
        # Which of them may go is decided here, and what follows by its key is let go.
        "relay in order": Cost(7, 2),
        "reserve in a lane": ONE_ROUND_TRIP,
        "refuse in a lane": ONE_ROUND_TRIP,
        # Shares are given back, read with the budgets above, written, and forgotten.
        "dispatch": Cost(13, 1),
        "pass by": Cost(4, 1),
        "give back": Cost(3, 1),
        "reschedule": Cost(2, 1),
        "isolate": Cost(12, 1),
        "expire": Cost(10, 1),
        "tell": Cost(7, 4),
        "requeue": Cost(7, 1),
        "discard": Cost(4, 1),
        "claim": ONE_ROUND_TRIP,
        # With what was to be closed.
        "claim and close": ONE_ROUND_TRIP,
        "claim a running one": ONE_ROUND_TRIP,
        "renew three": Cost(2, 1),
        "record": ONE_ROUND_TRIP,
        "record over the hold": ONE_ROUND_TRIP,
        "record twice": ONE_ROUND_TRIP,
        "record two units": ONE_ROUND_TRIP,
        # With the flag, and the part of the estimate that is missing.
        "record what is not told": Cost(8, 1),
        "what remains": Cost(1, 1),
        "write a retry": Cost(8, 1),
        "end in a retry": Cost(8, 1),
        "end": ONE_ROUND_TRIP,
        "run": Cost(2, 0),
        "start in place": ONE_ROUND_TRIP,
        "refuse in place": ONE_ROUND_TRIP,
        "end in place": ONE_ROUND_TRIP,
        "close": Cost(4, 1),
        "release": Cost(7, 1),
        # With its beat, a look for parked work that is over, one for budgets that anything waits
        # for, one for messages, one for kept results, and one for effects, that are kept no longer.
        "sweep": Cost(16, 10),
        "balance": Cost(1, 1),
    },
    "sqlite": {
        # With a look for what was parked before.
        "reserve": Cost(9, 1),
        "reserve from two budgets": Cost(11, 1),
        "refuse": Cost(7, 1),
        "repeat": Cost(2, 1),
        "unknown budget": Cost(6, 1),
        "continue": Cost(7, 1),
        "park": Cost(5, 1),
        "enqueue": Cost(1, 1),
        "read lanes": Cost(1, 1),
        "turn": Cost(14, 1),
        "relay nothing": Cost(2, 2),
        "relay": Cost(6, 3),
        "relay in order": Cost(7, 3),
        "reserve in a lane": Cost(11, 1),
        "refuse in a lane": Cost(7, 1),
        "dispatch": Cost(12, 1),
        "pass by": Cost(3, 1),
        "give back": Cost(2, 1),
        "reschedule": Cost(1, 1),
        "isolate": Cost(13, 1),
        "expire": Cost(11, 1),
        "tell": Cost(4, 4),
        "requeue": Cost(13, 1),
        "discard": Cost(3, 1),
        "claim": Cost(5, 1),
        "claim a running one": Cost(2, 1),
        "renew three": Cost(1, 1),
        "record": Cost(4, 1),
        "record over the hold": Cost(9, 1),
        "record twice": Cost(4, 1),
        "record two units": Cost(4, 1),
        "record what is not told": Cost(7, 1),
        "what remains": Cost(1, 1),
        "write a retry": Cost(7, 1),
        "end in a retry": Cost(7, 1),
        "end": Cost(12, 1),
        "start in place": Cost(11, 1),
        "refuse in place": Cost(5, 1),
        "end in place": Cost(15, 1),
        "close": Cost(3, 1),
        "release": Cost(8, 1),
        "sweep": Cost(12, 10),
        "balance": Cost(1, 1),
    },
}

Expect = Callable[[str], AbstractContextManager[None]]


class Wire:
    """Notes what the database driver sends."""

    def __init__(self, store: Store) -> None:
        self.said: list[str] = []
        self.round_trips = 0
        self._store = store
        self._connections: list[Any] = []

    @contextmanager
    def listen(self) -> Iterator[None]:
        # What each process asks its server once is not an operation's.
        with self._store.statement():
            pass
        with tempfile.TemporaryFile("w+") as self._log:
            event.listen(Pool, "checkout", self._checkout)
            try:
                # From here on even what comes before a connection is handed out is heard.
                with self._store.statement():
                    pass
                self.said.clear()
                yield
            finally:
                event.remove(Pool, "checkout", self._checkout)
                for connection in self._connections:
                    self._leave(connection)
            self._log.seek(0)
            text = self._log.read()
        if self._store.dialect == "postgresql":
            # libpq's own record: F are the client's messages, B the server's.
            self.said = re.findall(r'\tF\t\d+\t(?:Query\t "|Parse\t "[^"]*" ")(.*)', text)
            self.round_trips = text.count("\tReadyForQuery\t")

    @property
    def cost(self) -> Cost:
        begun = [one for one in self.said if one.startswith("BEGIN")]
        ended = [one for one in self.said if one.startswith(("COMMIT", "ROLLBACK"))]
        assert len(begun) == len(ended), self.said
        return Cost(len(self.said) - len(begun) - len(ended), len(begun))

    def _checkout(self, connection: Any, record: Any, proxy: Any) -> None:
        if connection in self._connections:
            return
        self._connections.append(connection)
        if self._store.dialect == "sqlite":
            connection.set_trace_callback(self.said.append)
        else:
            # Preparing what was executed often takes a round trip of its own, once.
            connection.prepare_threshold = None
            connection.pgconn.trace(self._log.fileno())

    def _leave(self, connection: Any) -> None:
        if self._store.dialect == "sqlite":
            connection.set_trace_callback(None)
        else:
            connection.pgconn.untrace()


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param(
            "postgresql",
            marks=[
                pytest.mark.postgres,
                pytest.mark.skipif(sys.platform != "linux", reason="psycopg traces on Linux only"),
            ],
        ),
    ],
)
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated database of each dialect; each test takes a root of its own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('statements') / 'budget.db'}"
    else:
        url = request.getfixturevalue("postgres_server").create_database()
    store = Store(url)
    store.run(migrate.upgrade)
    store.dispose()
    return url


def never_counted(store: Store, root: str) -> None:
    """Keep admissions from counting the outbox, which one in two seconds does."""
    fresh = schema.backlog.insert().values(root=root, messages=0, counted_us=2**62)
    store.run(lambda connection: connection.execute(fresh))


@pytest.fixture
def ledger(store_url: str) -> Iterator[Ledger]:
    """A ledger whose budget ``b`` has 100 tokens."""
    store = Store(store_url)
    ledger = Ledger(store, Settings(store_url, root=f"root-{uuid4().hex[:12]}"))
    ledger.set("b", 100)
    never_counted(store, ledger.root)
    yield ledger
    store.dispose()


@pytest.fixture
def costs(ledger: Ledger) -> Expect:
    """Check that what is done inside costs what the baseline says of its name."""

    dialect = ledger.store.dialect

    @contextmanager
    def expect(name: str) -> Iterator[None]:
        wire = Wire(ledger.store)
        with wire.listen():
            yield
        assert {name: wire.cost} == {name: BASELINE[dialect].get(name)}, "\n".join(wire.said)
        if dialect == "postgresql":
            assert wire.round_trips == len(wire.said)

    return expect


def test_a_request_is_reserved(ledger: Ledger, costs: Expect) -> None:
    request = ledger.request()
    with costs("reserve"):
        admitted = ledger.admit(request)
    assert admitted == Reserved(request.reservation_id)


def test_a_request_of_two_budgets_is_reserved(ledger: Ledger, costs: Expect) -> None:
    ledger.set("c", 100)
    request = ledger.request(10, ("c", 10))
    with costs("reserve from two budgets"):
        admitted = ledger.admit(request)
    assert admitted == Reserved(request.reservation_id)


def test_a_request_is_refused(ledger: Ledger, costs: Expect) -> None:
    request = ledger.request(101)
    with costs("refuse"):
        admitted = ledger.admit(request)
    assert isinstance(admitted, Refused)


def test_a_request_is_repeated(ledger: Ledger, costs: Expect) -> None:
    first = ledger.reserve()
    request = ledger.request(task_id=first.task_id)
    with costs("repeat"):
        admitted = ledger.admit(request)
    assert admitted == AlreadyReserved(first.reservation_id, first.task_id)


def test_a_budget_is_unknown(ledger: Ledger, costs: Expect) -> None:
    request = ledger.request(budget="unknown")
    with costs("unknown budget"), pytest.raises(UnknownBudget):
        ledger.admit(request)


def test_a_continuation_is_reserved(ledger: Ledger, costs: Expect) -> None:
    request = ledger.request()
    with costs("continue"):
        admitted = ledger.admit(request, continuation=True)
    assert admitted == Reserved(request.reservation_id)


def test_a_continuation_is_parked(ledger: Ledger, costs: Expect) -> None:
    request = ledger.request(101)
    with costs("park"):
        admitted = ledger.admit(request, continuation=True)
    assert isinstance(admitted, Parked)


def test_lanes_of_a_fallback_are_read(ledger: Ledger, costs: Expect) -> None:
    lane(ledger, budgets=("b",))
    with costs("read lanes"):
        assert len(ledger.store.read(lanes.named, ledger.root, ["llm"])) == 1


def test_an_attempt_turns_to_a_lane(ledger: Ledger, costs: Expect) -> None:
    ledger.set("paid", 100)
    lane(ledger, budgets=("paid",))
    _, attempt = ledger.start()
    with costs("turn"):
        assert isinstance(attempt.turn_to("llm"), Extended)


def test_an_attempt_is_claimed(ledger: Ledger, costs: Expect) -> None:
    request = ledger.reserve()
    with costs("claim"):
        ledger.run(request)


def test_a_duplicate_is_turned_away(ledger: Ledger, costs: Expect) -> None:
    request, _ = ledger.start()
    with costs("claim a running one"):
        ledger.deliver(request)


def test_leases_are_renewed(ledger: Ledger, costs: Expect) -> None:
    requests = [ledger.start()[0] for _ in range(3)]
    with costs("renew three"):
        renewed = settlement.renew(
            ledger.store, ledger.settings, [request.task_id for request in requests], BOOT, []
        )
    assert renewed == 3


def test_usage_is_recorded(ledger: Ledger, costs: Expect) -> None:
    _, attempt = ledger.start()
    with costs("record"):
        assert attempt.record(3)


def test_usage_is_recorded_over_the_hold(ledger: Ledger, costs: Expect) -> None:
    _, attempt = ledger.start()
    with costs("record over the hold"):
        assert attempt.record(11)


def test_usage_is_recorded_twice(ledger: Ledger, costs: Expect) -> None:
    _, attempt = ledger.start()
    attempt.record(3, key="reply")
    with costs("record twice"):
        assert not attempt.record(3, key="reply")


def test_usage_of_two_units_is_recorded(ledger: Ledger, costs: Expect) -> None:
    ledger.set("usd", 100, "micro-usd")
    attempt = ledger.run(ledger.reserve(10, ("usd", 10)))
    with costs("record two units"):
        assert attempt.write(Used({"tokens": 3, "micro-usd": 4}))[0]


def test_usage_is_not_told(ledger: Ledger, costs: Expect) -> None:
    _, attempt = ledger.start()
    with costs("record what is not told"):
        assert attempt.write(Used({"tokens": 0}, True, {"tokens"}))[0]


def test_what_remains_is_looked_up(ledger: Ledger, costs: Expect) -> None:
    _, attempt = ledger.start()
    with costs("what remains"):
        assert attempt.remaining() == 10


@pytest.mark.parametrize("outcome", [RETURNED, RAISED], ids=lambda outcome: str(outcome.kind))
def test_an_attempt_ends(ledger: Ledger, costs: Expect, outcome: Any) -> None:
    _, attempt = ledger.start()
    attempt.record(3)
    with costs("end"):
        assert attempt.end(outcome)


def test_an_attempt_that_nobody_waits_for_runs(ledger: Ledger, costs: Expect) -> None:
    if ledger.store.dialect == "sqlite":
        pytest.skip("each is closed by itself")
    request = ledger.reserve()
    with costs("run"):
        attempt = ledger.run(request)
        assert attempt.end(Outcome("returned"), closes=True)
    assert attempt.closed


def test_a_run_in_place(ledger: Ledger, costs: Expect) -> None:
    request = ledger.request()
    with costs("start in place"):
        attempt = ledger.start_in_place(request)
    assert isinstance(attempt, Attempt)
    with costs("end in place"):
        assert attempt.end(Outcome("returned"))
    assert [row.lease_until_us for row in ledger.rows("attempts")] == [None]


def test_a_run_in_place_is_refused(ledger: Ledger, costs: Expect) -> None:
    request = ledger.request(10**9)
    with costs("refuse in place"):
        assert isinstance(ledger.start_in_place(request), Refused)


def test_attempts_are_closed_with_the_next_claim(ledger: Ledger, costs: Expect) -> None:
    if ledger.store.dialect == "sqlite":
        pytest.skip("each is closed by itself")
    closings = Closings(ledger.store, ledger.root, idle_seconds=3600)
    for _ in range(3):
        attempt = ledger.start()[1]
        attempt.end(RETURNED)
        attempt.closings = closings
        assert attempt.close()
    request = ledger.reserve()
    with costs("claim and close"):
        ledger.run(request, closings=closings)
    assert [row.lease_until_us is None for row in ledger.rows("attempts")] == [True] * 3 + [False]


def test_a_retry_is_written(ledger: Ledger, costs: Expect) -> None:
    request, attempt = ledger.start()
    with costs("write a retry"):
        _, written = ledger.retry(request, attempt)
    assert written == Reserved(request.reservation_id)


def test_an_attempt_ends_in_a_retry(ledger: Ledger, costs: Expect) -> None:
    request, attempt = ledger.start()
    ledger.retry(request, attempt)
    with costs("end in a retry"):
        assert attempt.end(RETRIED)


def test_an_attempt_is_closed(ledger: Ledger, costs: Expect) -> None:
    _, attempt = ledger.start()
    attempt.end(RETURNED)
    with costs("close"):
        assert attempt.close()


def test_a_hold_is_released(ledger: Ledger, costs: Expect) -> None:
    request = ledger.reserve()
    with costs("release"):
        assert settlement.revoke(ledger.store, ledger.root, request.reservation_id, "revoked")


@pytest.mark.parametrize(("count", "name"), [(0, "relay nothing"), (1, "relay"), (20, "relay")])
def test_messages_are_relayed(ledger: Ledger, costs: Expect, count: int, name: str) -> None:
    for _ in range(count):
        ledger.reserve(1)
    with costs(name):
        assert ledger.relay().published == count


def lane(ledger: Ledger, **terms: Any) -> None:
    given = {"queues": ("celery",), "preflight": False, **terms}
    ledger.store.run(lanes.declare, ledger.root, "llm", given)


def test_a_request_is_reserved_in_a_lane(ledger: Ledger, costs: Expect) -> None:
    lane(ledger, max_waiting_jobs=10, max_waiting_units=100)
    request = ledger.request()
    with costs("reserve in a lane"):
        admitted = ledger.admit(request)
    assert admitted == Reserved(request.reservation_id)


def test_a_request_is_refused_by_a_lane(ledger: Ledger, costs: Expect) -> None:
    lane(ledger, max_waiting_jobs=0)
    request = ledger.request()
    with costs("refuse in a lane"), pytest.raises(QueueFull):
        ledger.admit(request)


@pytest.mark.parametrize("count", [1, 20])
def test_a_lane_is_dispatched(ledger: Ledger, costs: Expect, count: int) -> None:
    lane(ledger, max_running_units=100)
    for _ in range(count):
        ledger.reserve(1)
    with costs("dispatch"):
        assert ledger.store.run(dispatching.dispatch, ledger.root, "llm") == count


def taken(ledger: Ledger) -> claims.Batch:
    key = (ledger.root, "", 100, 60_000_000, new_id())
    return ledger.store.run(claims.claim_due, *key)


@pytest.mark.parametrize("count", [1, 20])
def test_messages_are_relayed_in_order(ledger: Ledger, costs: Expect, count: int) -> None:
    for number in range(count):
        ledger.reserve(1, order_key=str(number % 2))
    with costs("relay in order"):
        assert ledger.relay().published == count


@pytest.mark.parametrize("count", [1, 20])
def test_messages_are_passed_by(ledger: Ledger, costs: Expect, count: int) -> None:
    ledger.reserve(1, order_key="k")
    assert len(taken(ledger).messages) == 1
    for _ in range(count):
        ledger.reserve(1, order_key="k")
    with costs("pass by"):
        assert taken(ledger).behind == count


@pytest.mark.parametrize("count", [1, 20])
def test_messages_are_given_back(ledger: Ledger, costs: Expect, count: int) -> None:
    for _ in range(count):
        ledger.reserve(1)
    batch = taken(ledger)
    with costs("give back"):
        ledger.store.run(claims.give_back, ledger.root, batch.fence, batch.messages, "down")


def test_a_message_is_rescheduled(ledger: Ledger, costs: Expect) -> None:
    ledger.reserve(1)
    batch = taken(ledger)
    [due] = batch.messages
    key = (ledger.root, batch.fence, {due.outbox_id: 1}, "full")
    with costs("reschedule"):
        ledger.store.run(claims.reschedule, *key, failed=True)


def test_a_message_is_isolated_published_again_and_discarded(ledger: Ledger, costs: Expect) -> None:
    request = ledger.reserve(1)
    for name in ("requeue", "discard"):
        batch = taken(ledger)
        key = (ledger.root, batch.fence, batch.messages[0], "oversize", "no")
        with costs("isolate") if name == "requeue" else nullcontext():
            assert ledger.store.run(quarantine.isolate, *key)
        with costs(name):
            if name == "discard":
                assert ledger.store.run(quarantine.discard, ledger.root, request.task_id)
            else:
                again = (quarantine.requeue, ledger.root, request.task_id, lambda wire, _: wire)
                ledger.store.run(*again, lock_ms=5000, bound=1000)


def test_a_message_is_expired_and_its_result_told(ledger: Ledger, costs: Expect) -> None:
    request = ledger.reserve(1)
    batch = taken(ledger)
    with costs("expire"):
        assert ledger.store.run(claims.expire, ledger.root, batch.fence, batch.messages[0])
    with costs("tell"):
        assert tell_task(ledger.store, ledger.root, ledger.results.ended, request.task_id)
    assert ledger.results.told == [(request.task_id, "expired")]


def test_a_message_without_a_budget_is_enqueued(ledger: Ledger, costs: Expect) -> None:
    message = message_of(ledger.request())
    with costs("enqueue"):
        assert admission.enqueue(ledger.store, ledger.settings, message)


def test_a_sweep_finds_nothing(ledger: Ledger, costs: Expect) -> None:
    ledger.start()
    ledger.recover()
    with costs("sweep"):
        ledger.sweep()
        ledger.recover()


def test_a_balance_is_read(ledger: Ledger, costs: Expect) -> None:
    with costs("balance"):
        ledger.store.read(budgets.balance, ledger.root, "b")


def test_delay_is_its_admission_and_nothing_else(
    ledger: Ledger, store_url: str, make_shop: Callable[..., Shop], costs: Expect
) -> None:
    shop = make_shop(budget_database_url=store_url, budget_root=ledger.root)

    @budgeted(budget="b", estimate=7)
    @shop.app.task(name="shop.draft", shared=False)
    def draft() -> None: ...

    with shop.budget.store.statement():
        pass
    with costs("reserve"):
        draft.delay()
    assert ledger.balance() == (7, 0)
