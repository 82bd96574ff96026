"""Requests that are tried in several lanes: in order, once, and through all of Celery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_budget import (
    BudgetedTask,
    BudgetExceeded,
    BudgetLine,
    PolicyError,
    QueueFull,
    StoreError,
    UnknownLane,
    admission,
    budgeted,
    usage,
)
from celery_budget.integration.fallbacks import LANE
from celery_budget.store import schema
from tests.apps import falling
from tests.cluster import Cluster, embedded_in, eventually
from tests.integration.support import Shop
from tests.integration.tenant import WAIT, Tenant


def lanes(shop: Shop, free: int = 10, paid: int = 100) -> None:
    """A free lane and a paid one, each with a budget of so much; the task's own is ample."""
    shop.budget.set("tenant:a", limit=1000)
    for name, limit in (("free", free), ("paid", paid)):
        shop.budget.set(name, limit=limit, unit="tokens")
        shop.budget.lanes.set(name, queues=[f"{name}-q"], budgets=[name], preflight=False)


def declare(shop: Shop, **options: Any) -> Any:
    def draft(size: int = 6) -> int:
        usage.record(1)
        return size

    given = {
        "budget": "tenant:a",
        "estimate": lambda size: size if isinstance(size, int) else 6,
        "fallback": ["free", "paid"],
        **options,
    }
    name = options.pop("name", "falling.here")
    given.pop("name", None)
    return budgeted(**given)(shop.app.task(name=name, shared=False)(draft))


def held(shop: Shop) -> tuple[int, int, int]:
    """What is reserved of the task's own budget, of the free one and of the paid one."""
    names = ("tenant:a", "free", "paid")
    a, free, paid = (shop.budget.balance(name).reserved for name in names)
    return a, free, paid


def chosen(shop: Shop) -> dict[str, str]:
    """The lane of each reservation, by its task's id."""
    return {row.task_id: row.lane for row in shop.rows(schema.reservations)}


def refusals(shop: Shop) -> dict[str, int]:
    return {row.budget: row.count for row in shop.rows(schema.refusals)}


def test_lanes_are_tried_in_order(on_both: Shop) -> None:
    lanes(on_both, free=10, paid=12)
    task = declare(on_both)
    first, second, third = task.delay(6), task.delay(6), task.delay(6)
    assert chosen(on_both) == {first.id: "free", second.id: "paid", third.id: "paid"}
    assert held(on_both) == (18, 6, 12)
    with pytest.raises(BudgetExceeded) as refused:
        task.delay(6)
    # Only the last lane's refusal is told, and counted.
    assert (refused.value.budget, refusals(on_both)) == ("paid", {"paid": 1})
    assert held(on_both) == (18, 6, 12)
    assert on_both.relay().published == 3
    [message] = on_both.received("free-q")
    assert (message.headers["id"], message.headers[LANE]) == (first.id, "free")
    there = {one.headers["id"]: one.headers[LANE] for one in on_both.received("paid-q")}
    assert there == {second.id: "paid", third.id: "paid"}


def test_a_full_lane_is_passed_by(on_both: Shop) -> None:
    lanes(on_both, free=100)
    on_both.budget.lanes.set("free", max_waiting_jobs=1)
    task = declare(on_both)
    first, second = task.delay(6), task.delay(6)
    assert chosen(on_both) == {first.id: "free", second.id: "paid"}
    on_both.budget.lanes.set("paid", max_waiting_jobs=1)
    with pytest.raises(QueueFull, match="'paid'"):
        task.delay(6)
    assert held(on_both) == (12, 6, 6)


def test_a_repeat_is_the_request_it_repeats_in_whichever_lane_that_is(on_both: Shop) -> None:
    lanes(on_both)
    task = declare(on_both)
    filler = task.delay(10)
    first = task.apply_async((6,), request_id="order")
    on_both.budget.cancel(filler.id)
    # It would fit the first lane by now.
    again = task.apply_async((6,), request_id="order")
    assert (again.id, chosen(on_both)[first.id]) == (first.id, "paid")
    assert held(on_both) == (6, 0, 6)


def test_a_fault_is_no_refusal(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what came of the first lane: no other one is tried, and a repeat is safe."""
    lanes(shop)
    task = declare(shop)
    admit = admission.admit

    def admits_and_fails(*args: Any, **options: Any) -> Any:
        admit(*args, **options)
        raise StoreError("the answer was lost", retryable=True)

    with monkeypatch.context() as patch:
        patch.setattr(admission, "admit", admits_and_fails)
        with pytest.raises(StoreError):
            task.apply_async((6,), request_id="order")
    result = task.apply_async((6,), request_id="order")
    assert (chosen(shop), held(shop)) == ({result.id: "free"}, (6, 6, 0))
    assert shop.relay().published == 1


def test_the_tasks_own_budget_is_asked_in_each_lane(shop: Shop) -> None:
    lanes(shop)
    shop.budget.set("tenant:a", limit=5)
    with pytest.raises(BudgetExceeded) as refused:
        declare(shop).delay(6)
    assert (refused.value.budget, refusals(shop)) == ("tenant:a", {"tenant:a": 1})


def test_the_lanes_budgets_are_for_what_comes_by_a_fallback(shop: Shop) -> None:
    lanes(shop)
    declare(shop, fallback=None).apply_async((6,), queue="free-q")
    assert held(shop) == (6, 0, 0)
    assert set(chosen(shop).values()) == {"free"}


def test_what_all_refuse_is_parked_at_the_last(on_both: Shop) -> None:
    lanes(on_both, free=5, paid=5)
    task = declare(on_both, on_refused="park")
    result = task.apply_async((6,), request_id="order")
    assert task.apply_async((6,), request_id="order").id == result.id
    [waiting] = on_both.budget.parked()
    assert (waiting.task_id, waiting.budget, refusals(on_both)) == (result.id, "paid", {})
    on_both.budget.set("paid", limit=6)
    on_both.sweep()
    assert (chosen(on_both), held(on_both)) == ({result.id: "paid"}, (6, 0, 6))
    assert on_both.relay().published == 1
    assert [one.headers["id"] for one in on_both.received("paid-q")] == [result.id]


def test_declarations_that_cannot_work(shop: Shop) -> None:
    for wrong in ([], "free", ["free", "free"], [1]):
        with pytest.raises(Exception, match=r"fallback=") as told:
            declare(shop, fallback=wrong)
        assert told.type.__module__ == "celery_budget.errors"
    with pytest.raises(PolicyError, match="names no lanes"):
        declare(shop, fallback=None, on_refused="fallback")
    task = declare(shop)
    with pytest.raises(UnknownLane, match="'free'"):
        task.delay(1)
    lanes(shop, free=5, paid=5)
    with pytest.raises(BudgetExceeded):
        task.apply_async((6,), on_refused="fallback")
    shop.budget.lanes.set("free", budgets=["tenant:a"])
    with pytest.raises(PolicyError, match="'tenant:a' twice"):
        task.delay(1)
    assert shop.rows(schema.outbox) == []


def test_a_base_class_declares_it(shop: Shop) -> None:
    lanes(shop, free=5)

    class Falls(BudgetedTask):
        budget = "tenant:a"
        estimate = 6
        fallback = ("free", "paid")
        on_refused = "fallback"

    def draft() -> None: ...

    result = shop.app.task(name="falling.based", base=Falls, shared=False)(draft).delay()
    assert chosen(shop) == {result.id: "paid"}


def test_what_is_charged_at_each_start_is_held_with_the_rest(shop: Shop) -> None:
    lanes(shop)
    shop.budget.set("calls", limit=1, unit="requests")
    shop.budget.lanes.set("free", budgets=["free", "calls=1"])
    task = declare(shop, budget=[BudgetLine("tenant:a")])
    first, second = task.delay(1), task.delay(1)
    assert chosen(shop) == {first.id: "free", second.id: "paid"}
    assert shop.budget.balance("calls").reserved == 1


def test_what_is_admitted_together_is_spread_over_the_lanes(on_both: Shop) -> None:
    lanes(on_both, free=12, paid=12)
    task = declare(on_both)
    with on_both.budget.batch():
        made = [task.delay(6) for _ in range(4)]
    assert [chosen(on_both)[one.id] for one in made] == ["free", "free", "paid", "paid"]
    assert held(on_both) == (24, 12, 12)
    with pytest.raises(BudgetExceeded) as refused, on_both.budget.batch():
        task.delay(1)
    assert refused.value.budget == "paid"


def test_a_canvas_is_admitted_whole_in_its_lanes(shop: Shop) -> None:
    lanes(shop, free=12, paid=6)
    task = declare(shop)
    with pytest.raises(BudgetExceeded):
        group(task.s(6) for _ in range(4)).apply_async()
    assert shop.rows(schema.reservations) == []
    result = group(task.s(6) for _ in range(3)).apply_async()
    assert [chosen(shop)[one.id] for one in result.results] == ["free", "free", "paid"]


def test_in_a_callers_transaction_it_falls_back(on_both: Shop) -> None:
    lanes(on_both, free=6)
    task = declare(on_both)
    with on_both.budget.store.engine.connect() as connection:
        with on_both.budget.enlist(connection):
            task.delay(6)
            task.delay(6)
        connection.rollback()
    assert chosen(on_both) == {}
    with on_both.budget.store.engine.begin() as connection, on_both.budget.enlist(connection):
        made = [task.delay(6), task.delay(6)]
    assert [chosen(on_both)[one.id] for one in made] == ["free", "paid"]


def test_a_chain_that_is_reserved_whole_keeps_the_lanes_of_its_steps(shop: Shop) -> None:
    lanes(shop, free=6, paid=12)
    task = declare(shop)
    chain(task.si(6), task.si(6)).apply_async(reserve="chain")
    assert held(shop) == (12, 6, 6)
    [row] = [one for one in shop.rows(schema.reservations) if one.step == 1]
    lines = [one for one in shop.rows(schema.lines) if one.reservation_id == row.reservation_id]
    assert [one.budget for one in lines] == ["tenant:a", "paid"]


def test_would_admit_looks_at_all_lanes(on_both: Shop) -> None:
    lanes(on_both, free=5, paid=7)
    task = declare(on_both)
    assert on_both.budget.would_admit(task, (5,))
    assert on_both.budget.would_admit(task, (6,))
    outlook = on_both.budget.would_admit(task, (8,))
    assert isinstance(outlook.error, BudgetExceeded)
    assert (outlook.error.budget, outlook.error.requested) == ("paid", 8)
    on_both.budget.lanes.set("paid", max_waiting_units=5)
    assert isinstance(on_both.budget.would_admit(task, (6,)).error, QueueFull)
    assert on_both.rows(schema.refusals) == []


def test_in_place_the_first_lane_that_takes_it_pays(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(task_always_eager=True, task_eager_propagates=True)
    lanes(shop, free=5, paid=12)
    task = declare(shop)
    assert task.delay(6).get() == 6
    assert task.apply((5,)).get() == 5
    spent = [shop.budget.balance(name).spent for name in ("tenant:a", "free", "paid")]
    assert spent == [2, 1, 1]
    with pytest.raises(BudgetExceeded):
        task.delay(13)
    assert refusals(shop) == {"paid": 1}


def test_a_retry_in_place_stays_in_its_lane(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(task_always_eager=True)
    lanes(shop, free=5, paid=100)
    seen: list[tuple[int, int, int]] = []

    def draft(self: Any, size: int) -> int:
        usage.record(1)
        seen.append(held(shop))
        if self.request.retries == 0:
            # There is room in the first lane by now.
            shop.budget.set("free", limit=100)
            raise self.retry(args=(size + 1,), countdown=0)
        return size

    made = shop.app.task(name="falling.again", bind=True, shared=False)(draft)
    task = budgeted(budget="tenant:a", estimate=lambda size: size, fallback=["free", "paid"])(made)
    assert task.apply((6,)).get() == 7
    # What the retry asks of its own budget it asks of its lane's.
    assert seen == [(6, 0, 6), (8, 0, 8)]


def test_a_map_draws_on_its_lane_for_all_items(shop: Shop) -> None:
    lanes(shop, free=10)
    result = declare(shop).map([4, 7]).apply_async()
    assert (chosen(shop), held(shop)) == ({result.id: "paid"}, (11, 0, 11))


def test_a_lanes_queue_may_be_known_by_its_routing_key(make_shop: Callable[..., Shop]) -> None:
    from kombu import Exchange, Queue

    queue = Queue("named", Exchange("topics", type="topic"), routing_key="free-q")
    shop = make_shop(
        task_queues=[queue], task_default_queue="named", task_create_missing_queues=False
    )
    lanes(shop)
    with pytest.raises(PolicyError, match="'paid-q', which"):
        declare(shop, name="falling.unknown").delay(6)
    result = declare(shop, fallback=["free"]).delay(6)
    assert chosen(shop) == {result.id: "free"}
    shop.relay()
    assert [one.headers["id"] for one in shop.received("named")] == [result.id]


def test_an_explanation_and_the_report_tell_the_lane(shop: Shop) -> None:
    lanes(shop, free=6)
    task = declare(shop)
    first, second = task.delay(6), task.delay(6)
    [story] = shop.budget.explain(second.id)
    assert story.reservation["lane"] == "paid"
    assert shop.budget.report().lanes == {"free": 1, "paid": 1}
    assert first.id != second.id


# With a real worker.


@pytest.fixture(scope="module")
def embedded_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of three queues with a relay, on SQLite and the filesystem transport."""
    folder = tmp_path_factory.mktemp("falling")
    cluster = Cluster(folder, embedded_in(folder, imports=[falling.__name__]))
    try:
        cluster.worker("--budget-relay", "-Q", "celery,free-q,paid-q", concurrency=2)
        yield cluster
    finally:
        cluster.stop()


def test_lanes_through_a_real_worker(embedded_cluster: Cluster) -> None:
    tenant = Tenant(embedded_cluster)
    budget, tasks = embedded_cluster.budget, embedded_cluster.app.tasks
    for name, limit in (("free", 6), ("paid", 30)):
        budget.set(name, limit=limit, unit="tokens")
        budget.lanes.set(name, queues=[f"{name}-q"], budgets=[name], preflight=False)
    draft, turns = tasks["falling.draft"], tasks["falling.turns"]
    # One turns to the paid lane, and what is used after that is charged there as well.
    turned = turns.delay(tenant.name, 5)
    assert turned.get(timeout=WAIT) == "free-q"
    story = tenant.story(turned.id)
    assert story.reservation["lane"] == "free"
    found = {line["budget"]: line["settled"] for line in story.lines}
    assert found == {tenant.budget: 5, "free": 5, "paid": 3}
    # One that would be over the paid budget's limit goes without, and says so.
    budget.set("free", limit=11)
    assert turns.delay(tenant.name, 28).get(timeout=WAIT) == "refused by paid"
    # The free lane is used up. A retry stays in the lane it came by, where there is room meanwhile.
    retried = draft.apply_async((tenant.name,), {"retries": 1}, countdown=0)
    assert retried.get(timeout=WAIT) == ["paid-q", "paid"]
    assert tenant.outcomes(retried.id) == ["retried", "returned"]
    assert {line["budget"]: line["settled"] for line in tenant.story(retried.id).lines} == {
        tenant.budget: 4,
        "paid": 4,
    }
    # What follows is tried in all lanes.
    budget.set("free", limit=13)
    both = chain(draft.si(tenant.name), draft.si(tenant.name)).apply_async()
    assert both.get(timeout=WAIT) == ["paid-q", "paid"]
    budget.set("free", limit=17)
    whole = chord([draft.si(tenant.name)], draft.si(tenant.name)).apply_async()
    assert whole.get(timeout=WAIT) == ["free-q", "free"]
    eventually(
        lambda: budget.report().lanes,
        lambda seen: sum(seen.values()) == 7,
        WAIT,
        "all of them in the report",
    )
    # Where none takes what follows it waits for the last.
    embedded_cluster.settle()
    spent = {name: budget.balance(name).spent for name in ("free", "paid")}
    budget.set("free", limit=spent["free"] + 6)
    budget.set("paid", limit=spent["paid"] + 5)
    parked = chain(draft.si(tenant.name), draft.si(tenant.name)).apply_async()
    tenant.parked(parked.id)
    [waiting] = budget.parked()
    assert (waiting.task_id, waiting.budget) == (parked.id, "paid")
    budget.set("paid", limit=spent["paid"] + 6)
    assert parked.get(timeout=WAIT) == ["paid-q", "paid"]
    # What came without a reservation is asked the same, and runs where it is.
    elsewhere = Celery(
        "elsewhere", broker=embedded_cluster.app.conf.broker_url, set_as_current=False
    )
    elsewhere.conf.broker_transport_options = embedded_cluster.app.conf.broker_transport_options
    embedded_cluster.settle()
    budget.set("paid", limit=budget.balance("paid").spent + 6)
    sent = elsewhere.send_task("falling.turns", (tenant.name, 1), queue="celery")
    eventually(lambda: budget.explain(sent.id), bool, WAIT, "its reservation")
    story = tenant.story(sent.id)
    assert {line["budget"] for line in story.lines} == {tenant.budget, "paid"}
    assert story.reservation["unreserved"]
    assert budget.reconcile().mismatches == ()
