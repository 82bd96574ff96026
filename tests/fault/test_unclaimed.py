"""Real workers that end a task before its call: its request ends at once, and never comes again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from celery import states

from celery_budget import RequestNotRun, budgeted, settlement
from celery_budget.core.reservations import Outcome
from celery_budget.settlement import Delivery
from celery_budget.store.schema import outbox
from tests.apps import early
from tests.cluster import WAIT, Cluster, Process, eventually
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

pytestmark = pytest.mark.fault

PRE = "early."


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
    ],
)
def early_cluster(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: PostgresServer,
    redis_server: RedisServer,
) -> Iterator[tuple[Cluster, Process]]:
    """A worker and a beat on each broker, whose ledger publishes nothing again by itself."""
    if request.param == "redis":
        broker = redis_server.database_url(9)
    else:
        broker = request.getfixturevalue("rabbitmq_server").create_vhost()
    cluster = Cluster(
        tmp_path_factory.mktemp(f"early-{request.param}"),
        {
            "broker_url": broker,
            "result_backend": redis_server.database_url(10),
            "budget_database_url": postgres_server.create_database(),
            "budget_republish_seconds": 600,
            "imports": [early.__name__],
        },
    )
    try:
        worker = cluster.worker()
        cluster.beat()
        yield cluster, worker
    finally:
        cluster.stop()


class Early:
    """One test's budget, and what becomes of its task."""

    def __init__(self, cluster: Cluster, worker: Process) -> None:
        self.cluster = cluster
        self.worker = worker
        self.tenant = uuid4().hex[:8]
        cluster.budget.set(f"tenant:{self.tenant}", limit=100, unit="tokens")

    def work(self, how: str, **options: Any) -> Any:
        """Publish the task that does this before its call."""
        task = self.cluster.app.tasks[PRE + "work"]
        return task.apply_async((how, self.tenant), **options)

    def here(self, name: str) -> Any:
        """A task with a budget that the worker does not know, or not as one."""
        task = self.cluster.app.task(name=PRE + name, shared=False)(_past)
        return budgeted(budget="tenant:{tenant}", estimate=6)(task)

    def ended(self, result: Any) -> tuple[str, str | None]:
        """Wait until the request has ended; return its state and why."""

        def look() -> Any:
            stories = self.cluster.budget.explain(result.id)
            return stories[-1].reservation if stories else {}

        row = eventually(look, lambda row: row.get("ended_us"), WAIT, f"the end of {result.id}")
        return row["state"], row["reason"]

    def spent(self, amount: int) -> None:
        balance = self.cluster.budget.balance(f"tenant:{self.tenant}")
        assert (balance.reserved, balance.spent) == (0, amount)
        assert self.cluster.budget.reconcile().mismatches == ()

    def change(self, result: Any, **values: Any) -> None:
        """Change a message in the outbox."""
        with self.cluster.budget.store.transaction() as connection:
            changed = connection.execute(
                outbox.update().where(outbox.c.task_id == result.id).values(**values)
            )
            assert changed.rowcount == 1

    def publishes(self, result: Any) -> int:
        with self.cluster.budget.store.transaction() as connection:
            found = connection.execute(
                sa.select(outbox.c.publishes).where(
                    outbox.c.task_id == result.id, outbox.c.state == "published"
                )
            ).scalar()
        return int(found or 0)


def _past(value: Any, tenant: str) -> Any:
    return value


@pytest.fixture
def case(early_cluster: tuple[Cluster, Process]) -> Early:
    return Early(*early_cluster)


@pytest.mark.parametrize("ignore_result", [False, True], ids=["stored", "ignored"])
@pytest.mark.parametrize(
    ("how", "reason", "error"),
    [
        ("raise", "failed", "ValueError"),
        ("policy", "failed", "PolicyError"),
        ("reject", "rejected", "Reject"),
        ("ignore", "ignored", None),
        ("retry without a message", "retried", None),
        ("retry for good", "failed", "ValueError"),
    ],
    ids=["raise", "policy", "reject", "ignore", "retry-without-message", "retry-for-good"],
)
def test_an_end_before_the_call(
    case: Early, how: str, reason: str, error: str | None, ignore_result: bool
) -> None:
    result = case.work(how, ignore_result=ignore_result)
    assert case.ended(result) == ("released", reason)
    case.spent(0)
    if ignore_result or error is None:
        expected = states.RETRY if reason == "retried" else states.PENDING
        assert ignore_result or result.state == expected
        return
    eventually(lambda: result.state, lambda state: state == states.FAILURE)
    assert type(result.result).__name__ == error


def test_a_task_that_the_worker_does_not_know(case: Early) -> None:
    result = case.here("unknown").delay(1, case.tenant)
    assert case.ended(result) == ("released", "not_registered")
    assert (result.state, type(result.result).__name__) == (states.FAILURE, "NotRegistered")
    case.spent(0)


def test_a_task_that_has_no_budget_in_the_worker_runs_once(case: Early) -> None:
    result = case.here("past").delay(1, case.tenant)
    assert result.get(timeout=WAIT) == 1
    assert case.ended(result) == ("released", "not_claimed")
    case.spent(0)


@pytest.mark.parametrize("how", ["no json", "not accepted", "no compression"])
def test_a_message_that_cannot_be_read(case: Early, how: str) -> None:
    """Celery stores nothing of it; whoever waits for it is told all the same."""
    result = case.work("never", countdown=3600)
    envelope = json.loads(
        str(
            next(
                row.envelope
                for row in case.cluster.budget.store.read(_rows)
                if row.task_id == result.id
            )
        )
    )
    envelope["headers"]["eta"] = None
    values: dict[str, Any] = {"due_us": 1}
    if how == "no json":
        values["body"] = b"{"
    elif how == "not accepted":
        envelope["content_type"] = "application/x-python-serialize"
    else:
        envelope["headers"]["compression"] = "application/x-gzip"
    case.change(result, envelope=json.dumps(envelope), **values)
    assert case.ended(result) == ("released", "unreadable")
    case.spent(0)
    with pytest.raises(RequestNotRun, match="unreadable"):
        result.get(timeout=WAIT)


def _rows(connection: sa.Connection) -> list[Any]:
    return list(connection.execute(sa.select(outbox)))


def test_a_hard_time_limit_before_the_call(case: Early) -> None:
    result = case.work("wait", time_limit=1)
    assert case.ended(result) == ("released", "worker_lost")
    assert (result.state, type(result.result).__name__) == (states.FAILURE, "TimeLimitExceeded")
    case.spent(0)


def test_a_retry_before_the_call_goes_on(case: Early) -> None:
    result = case.work("retry")
    assert result.get(timeout=WAIT) == "retry"
    assert case.ended(result) == ("settled", None)
    case.spent(2)


def test_an_error_before_the_call_of_a_retry(case: Early) -> None:
    """What the first attempt used is charged."""
    result = case.work("raise in a retry")
    with pytest.raises(ValueError, match="raise in a retry"):
        result.get(timeout=WAIT)
    assert case.ended(result) == ("settled", "failed")
    case.spent(2)


def test_a_copy_that_fails_before_its_call_changes_nothing(case: Early) -> None:
    result = case.work("raise in a copy")
    started = f"run {'raise in a copy'} 0"
    eventually(case.cluster.journal, lambda journal: started in journal)
    eventually(lambda: case.publishes(result), lambda count: count == 1)
    case.change(result, state="due", due_us=1)
    case.worker.says(f"[{result.id}] is not this delivery's to end")
    assert case.cluster.journal().count("before raise in a copy 0") == 2
    case.cluster.release("go on")
    assert result.get(timeout=WAIT) == "raise in a copy", "no failure was stored"
    assert case.ended(result) == ("settled", None)
    case.spent(2)
    for name in ("started", "go on"):
        (case.cluster.folder / name).unlink()


def test_a_copy_whose_task_is_not_known_changes_nothing(case: Early) -> None:
    """As where another worker, with newer code, runs it."""
    result = case.here("newer").apply_async((1, case.tenant), countdown=3600)
    [story] = case.cluster.budget.explain(result.id)
    delivery = Delivery(
        case.cluster.budget.settings.root,
        UUID(story.reservation["reservation_id"]),
        result.id,
        0,
        0,
        "newer@host",
        uuid4(),
        late_ack=True,
    )
    store, settings = case.cluster.budget.store, case.cluster.budget.settings
    attempt = settlement.claim(store, settings, delivery, uuid4())
    assert isinstance(attempt, settlement.Attempt)
    case.change(result, due_us=1)
    case.worker.says(f"[{result.id}] is not this delivery's to end")
    assert result.state == states.PENDING
    assert attempt.end(Outcome("returned"))
    assert attempt.close()
    assert case.ended(result) == ("settled", None)


def test_what_the_ledger_was_not_told_recovery_ends(
    make_cluster: Callable[..., Cluster], redis_url: str, postgres_url: str
) -> None:
    """Without a result too: it is published again once its queue is empty, and fails again."""
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=postgres_url,
        budget_republish_seconds=1,
        imports=[early.__name__],
        shop_deaf="unclaimed",
    )
    case = Early(cluster, cluster.worker())
    cluster.beat()
    result = case.work("raise", ignore_result=True)
    assert case.ended(result) == ("released", "failed")
    assert cluster.journal().count("before raise 0") >= 2
    case.spent(0)
