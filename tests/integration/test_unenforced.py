"""Tasks whose budgets are not enforced: whatever way a call takes, it is not refused, and told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, chain, chord, group
from sqlalchemy.orm import Session

from celery_budget import BudgetedTask, BudgetExceeded, UnknownBudget, budgeted, usage
from celery_budget.errors import EstimateError, PolicyError, QueueFull
from celery_budget.store import schema
from tests.apps import steps
from tests.cluster import WAIT, Cluster, embedded_in
from tests.integration.commands import Run, runner
from tests.integration.delivering import delivered
from tests.integration.support import Shop, current
from tests.integration.tenant import Tenant

OFF: dict[str, Any] = {"budget_enforce": False}


@pytest.fixture
def off(either: dict[str, str], make_shop: Callable[..., Shop]) -> Shop:
    """A shop on either store that enforces nothing; ``tenant:a`` has 10 tokens."""
    return make_shop(**either, **OFF)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def declare(shop: Shop, name: str = "draft", **options: Any) -> Any:
    """A task that reserves its size of tokens."""

    def draft(size: int = 6, *rest: object) -> int:
        return size

    given = {"budget": "tenant:a", "estimate": lambda size: size, **options}
    return budgeted(**given)(shop.app.task(name=f"shadow.{name}", shared=False)(draft))


def reserved(shop: Shop) -> int:
    return shop.amounts("tenant:a")[0]


def told(shop: Shop) -> dict[str, tuple[int, int]]:
    """How often, and how much, the report says would have been refused, by stage."""
    found: dict[str, tuple[int, int]] = {}
    for one in shop.budget.report().waived:
        count, amount = found.get(one.stage, (0, 0))
        found[one.stage] = count + one.count, amount + one.amount
    return found


def waived(shop: Shop) -> int:
    return sum(count for count, _ in told(shop).values())


def test_the_ways_of_a_single_call(off: Shop) -> None:
    task = declare(off)
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    task.delay()
    task.apply_async((6,), countdown=60)
    task.apply_async((6,), eta=later, expires=later + timedelta(hours=1))
    task.apply_async((6,), on_refused="park", park_for=5)
    task.apply_async((6,), request_id="one")
    task.apply_async((6,), request_id="one")
    off.app.send_task("shadow.draft", (6,))
    task.s(6).apply_async()
    assert reserved(off) == 7 * 6
    assert told(off) == {"shadow.draft": (6, 36)}
    assert off.budget.parked() == []
    assert off.budget.would_admit(task, (1000,))
    assert off.budget.report().counts["refused"] == 0
    # What is not due yet stays in the outbox, as ever.
    assert off.relay().published == 5


def canvases(task: Any) -> list[tuple[Any, int]]:
    """Canvases, and what each reserves at once."""
    return [
        (group(task.s(6), task.s(7)), 13),
        (chain(task.si(8), task.si(9)), 8),
        (chord([task.s(6), task.s(7)], task.si(8)), 13),
        (task.map([5, 6]), 11),
        (task.starmap([(5,), (6,)]), 11),
        (task.chunks([(5,), (6,)], 1), 11),
    ]


@pytest.mark.parametrize("number", range(6))
def test_the_ways_of_a_canvas(off: Shop, number: int) -> None:
    task = declare(off)
    task.delay(10)
    canvas, amount = canvases(task)[number]
    canvas.apply_async()
    assert reserved(off) == 10 + amount
    assert sum(asked for _, asked in told(off).values()) == amount


def test_a_chain_that_is_reserved_whole_and_a_batch(off: Shop) -> None:
    task = declare(off)
    task.delay(10)
    chain(task.si(8), task.si(9)).apply_async(reserve="chain")
    with off.budget.batch():
        task.delay(1)
        task.delay(2)
    assert (reserved(off), waived(off)) == (30, 4)


def test_in_a_callers_own_transaction(off: Shop) -> None:
    task = declare(off)
    task.delay(10)
    engine = sa.create_engine(off.app.conf.budget_database_url)
    for immediate in (False, True):
        with Session(engine) as session, session.begin():
            session.execute(sa.text("SELECT 1"))
            with off.budget.enlist(session, immediate=immediate):
                task.delay(6)
        with Session(engine) as session:
            with off.budget.enlist(session, immediate=immediate):
                task.delay(7)
            session.rollback()
    engine.dispose()
    assert (reserved(off), told(off)) == (22, {"shadow.draft": (2, 12)})


def test_what_runs_in_place(either: dict[str, str], make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(**either, **OFF, task_always_eager=True)
    left = [2]

    def again(self: Any, size: int) -> int:
        usage.extend(50)
        usage.record(size)
        if left[0]:
            left[0] -= 1
            raise self.retry(countdown=0)
        return size

    task = budgeted(budget="tenant:a", estimate=40, stop_at_hold=True)(
        shop.app.task(name="shadow.again", bind=True, shared=False, max_retries=5)(again)
    )
    with current(shop.app):
        assert task.delay(300).get() == 300
        assert task.apply((3,)).get() == 3
    assert shop.amounts("tenant:a")[:2] == (0, 903)
    assert waived(shop) >= 4


def test_lanes_hold_and_do_not_refuse(off: Shop) -> None:
    task = declare(off)
    off.budget.lanes.set("slow", queues=("slow",), max_waiting_jobs=1, max_running_units=50)
    for _ in range(3):
        task.apply_async((6,), queue="slow")
    assert reserved(off) == 18
    with pytest.raises(QueueFull):
        # No lane could ever let it go.
        task.apply_async((51,), queue="slow")


def test_the_first_lane_of_a_fallback_takes_it(off: Shop) -> None:
    off.app.conf.task_queues = None
    off.budget.set("free", limit=5, unit="tokens")
    off.budget.set("paid", limit=100, unit="tokens")
    for name in ("free", "paid"):
        off.budget.lanes.set(name, queues=(name,), budgets=(name,))
    task = declare(off, fallback=["free", "paid"])
    task.delay(6)
    with off.budget.batch():
        task.delay(7)
    assert [off.amounts(name)[0] for name in ("free", "paid")] == [13, 0]


def test_mistakes_are_errors_all_the_same(off: Shop) -> None:
    with pytest.raises(UnknownBudget):
        declare(off, "unknown", budget="tenant:nobody").delay(1)
    with pytest.raises(EstimateError):
        declare(off, "failing", estimate=lambda size: size / 0).delay(1)
    off.budget.close("tenant:a")
    with pytest.raises(BudgetExceeded, match="closed"):
        declare(off).delay(1)
    assert off.rows(schema.outbox) == []


def test_a_task_says_it_for_itself(make_shop: Callable[..., Shop]) -> None:
    on, off = make_shop(), make_shop(init=False, **OFF)
    declare(on, enforce=False).delay(11)
    with pytest.raises(BudgetExceeded):
        declare(off, enforce=True).delay(11)
    with pytest.raises(BudgetExceeded):
        declare(on, "plain").delay(11)

    class Shadow(BudgetedTask):
        budget = "tenant:a"
        estimate = 11
        enforce = False

    def based() -> None: ...

    on.app.task(name="shadow.based", base=Shadow, shared=False)(based).delay()
    assert reserved(on) == 22
    for wrong in (0, "no"):
        with pytest.raises(PolicyError, match="enforce="):
            declare(on, "wrong", enforce=wrong)


def test_turned_on_it_refuses_from_then_on(either: dict[str, str], make_shop: Any) -> None:
    off = make_shop(**either, **OFF)
    declare(off).delay(11)
    on = make_shop(init=False, **either)
    with pytest.raises(BudgetExceeded):
        declare(on).delay(1)
    assert reserved(on) == 11
    assert on.budget.reconcile().ok


@pytest.mark.parametrize("admitting", [False, True])
def test_what_was_admitted_before_is_not_stopped_at_its_hold(
    either: dict[str, str], make_shop: Any, admitting: bool
) -> None:
    """By a worker that enforces: it goes on as it was admitted."""
    caller = make_shop(**either, budget_enforce=admitting)
    worker = make_shop(init=False, **either)
    went_on = []

    def over(size: int = 4) -> None:
        usage.record(size + 1)
        usage.check()
        went_on.append(size)

    for shop in (caller, worker):
        budgeted(budget="tenant:a", estimate=4, stop_at_hold=True)(
            shop.app.task(name="shadow.over", shared=False)(over)
        )
    caller.task("shadow.over").delay()
    caller.relay()
    [message] = caller.received()
    delivered(worker, message)
    assert went_on == ([] if admitting else [4])
    assert worker.amounts("tenant:a") == (0, 5, 5)


def test_it_is_told(off: Shop, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    task = declare(off, stage="drafts")
    with caplog.at_level(logging.INFO, "celery_budget"):
        first, second = task.delay(4), task.delay(11)
    events = [one for one in caplog.records if "would be refused" in one.getMessage()]
    said = f"task shadow.draft[{second.id}] is admitted, and would be refused were it enforced"
    assert [one.getMessage() for one in events] == [f"{said}: exhausted"]
    report = run(off.app, "report")
    assert report.code == 0
    title = report.out.index("Would have been refused")
    words = report.out[title:].split("tenant:a")[1].split("\n")[0].split()
    assert words == ["drafts", "exhausted", "1", "11"]
    assert run(off.app, "report", "--json").json["waived"] == [
        {"budget": "tenant:a", "stage": "drafts", "reason": "exhausted", "count": 1, "amount": 11}
    ]
    csv = run(off.app, "report", "--format", "csv").out.splitlines()
    row = dict(zip(csv[0].split(","), csv[1].split(","), strict=True))
    assert (row["waived"], row["waived_amount"], row["refusals"]) == ("1", "11", "0")
    told = " ".join(run(off.app, "explain", second.id).out.split())
    assert "not enforced; it would have been refused (exhausted: 11 tokens of budget" in told
    assert "it would not be refused" in " ".join(run(off.app, "explain", first.id).out.split())
    assert run(off.app, "reconcile").code == 0


def test_a_real_worker_runs_what_is_over_its_budget(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Retries, a chord's body, and what came without a reservation: none waits or fails."""
    folder = tmp_path_factory.mktemp("unenforced")
    cluster = Cluster(
        folder,
        embedded_in(
            folder, budget_enforce=False, budget_unreserved="reject", imports=[steps.__name__]
        ),
    )
    try:
        tenant = Tenant(cluster)
        tenant.set(1)
        cluster.worker("--budget-relay", concurrency=1)
        retried = tenant.task("retried").delay(2, tenant.name)
        body = chord(
            [tenant.task("work").s(one, tenant.name) for one in (1, 2)],
            tenant.task("total").s(tenant.name),
        ).apply_async()
        elsewhere = Celery("elsewhere", set_as_current=False)
        elsewhere.conf.update(
            {name: value for name, value in cluster.app.conf.items() if name.startswith("broker_")}
        )
        elsewhere.conf.result_backend = cluster.app.conf.result_backend
        unreserved = elsewhere.send_task("steps.work", (7, tenant.name))
        assert [one.get(timeout=WAIT) for one in (retried, body, unreserved)] == [2, 3, 7]
        assert tenant.outcomes(retried.id) == ["retried", "retried", "returned"]
        assert tenant.story(unreserved.id).reservation["unreserved"]
        report = cluster.budget.report()
        assert (report.counts["refused"], report.counts["parked"]) == (0, 0)
        assert {one.stage for one in report.waived} >= {"steps.retried", "steps.work"}
        assert cluster.budget.reconcile().ok
    finally:
        cluster.stop()
