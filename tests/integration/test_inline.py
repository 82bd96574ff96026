"""map, starmap and chunks: reserved for all their items, and settled on the one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, chain, chord, group
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from celery_budget import (
    BudgetExceeded,
    BudgetLine,
    InvalidAmount,
    InvalidName,
    PolicyError,
    RequestConflict,
    budgeted,
)
from celery_budget.integration.worker import _is_gated
from celery_budget.store import schema
from tests.cluster import WAIT, Cluster, eventually
from tests.integration.support import Shop, reservation_of
from tests.integration.tenant import Tenant
from tests.integration.test_settlement import flags


def sized(size: int, tenant: str = "a") -> int:
    return size


def both(tokens: int, tenant: str) -> int:
    return tokens


def plain(value: Any) -> Any:
    return value


@pytest.fixture
def task(on_both: Shop) -> Any:
    """One whose estimate is its first argument, and which may be run for another tenant."""
    on_both.budget.set("tenant:b", limit=5, unit="tokens")
    return budgeted(budget="tenant:{tenant}", estimate=lambda size: size)(
        on_both.app.task(name="inline.sized", shared=False)(sized)
    )


# Admission.


@pytest.mark.parametrize("kind", ["map", "starmap"])
def test_the_items_are_reserved_together(on_both: Shop, task: Any, kind: str) -> None:
    result = (task.map([1, 2, 3]) if kind == "map" else task.starmap([(1, "a"), (5, "a")])).delay()
    assert on_both.amounts("tenant:a") == (6, 0, 4)
    [row] = on_both.rows(schema.reservations)
    assert (row.task_id, row.task_name, row.owner) == (result.id, f"celery.{kind}", "tenant:a")
    assert (row.stage, row.estimator_version) == ("inline.sized", "1")
    on_both.relay()
    [message] = on_both.received()
    assert reservation_of(message) == row.reservation_id
    args, kwargs, _ = message.decode()
    assert (args, kwargs["task"]["task"]) == ([], "inline.sized")


def test_what_does_not_fit_is_not_published(on_both: Shop, task: Any) -> None:
    before = on_both.ledger("budget_refusals", "budget_backlog")
    with pytest.raises(BudgetExceeded) as caught:
        task.map([5, 6]).delay()
    assert caught.value.requested == 11
    # Each would fit by itself: all items or none.
    with pytest.raises(BudgetExceeded) as caught:
        task.starmap([(5, "a"), (6, "b")]).delay()
    assert caught.value.budget == "tenant:b"
    assert on_both.ledger("budget_refusals", "budget_backlog") == before
    on_both.relay()
    assert on_both.received() == []


def test_items_of_several_budgets_draw_on_all_of_them(on_both: Shop, task: Any) -> None:
    task.starmap([(2, "b"), (3, "a"), (1, "b")]).delay()
    assert on_both.amounts("tenant:a") == (3, 0, 7)
    assert on_both.amounts("tenant:b") == (3, 0, 2)
    [row] = on_both.rows(schema.reservations)
    assert row.owner == "tenant:b"


def test_lines_of_several_units_are_summed_each(on_both: Shop) -> None:
    on_both.budget.set("calls", limit=9, unit="requests")
    task = budgeted(
        budget=["tenant:{tenant}", BudgetLine("calls", estimate=1, charge="start")],
        estimate=lambda tokens: tokens,
    )(on_both.app.task(name="inline.both", shared=False)(both))
    task.starmap([(2, "a"), (3, "a"), (4, "a")]).delay()
    lines = sorted(on_both.rows(schema.lines), key=lambda line: line.line)
    assert [(line.budget, line.estimate, line.charge) for line in lines] == [
        ("tenant:a", 9, "used"),
        ("calls", 3, "start"),
    ]


@pytest.mark.parametrize(
    ("publish", "error", "match"),
    [
        (lambda task: task.map([2**62, 2**62]), InvalidAmount, "summed estimate"),
        (lambda task: task.map([1, "2"]), InvalidAmount, "'2'"),
        (lambda task: task.starmap([(1, "a", 3)]), PolicyError, "do not fit"),
        (lambda task: task.starmap([1]), PolicyError, "all the arguments"),
        (lambda task: task.starmap([(1, "a"), (1, "\n")]), InvalidName, "cannot be worked out"),
    ],
    ids=["too large", "no amount", "too many arguments", "no arguments", "no name"],
)
def test_items_that_cannot_be_reserved(
    on_both: Shop, task: Any, publish: Callable[..., Any], error: type[Exception], match: str
) -> None:
    before = on_both.ledger("budget_backlog")
    with pytest.raises(error, match=match):
        publish(task).delay()
    assert on_both.ledger("budget_backlog") == before
    assert on_both.received() == []


def test_a_budget_is_charged_by_one_rule(on_both: Shop) -> None:
    task = budgeted(
        budget=[
            BudgetLine("tenant:{tenant}", estimate=1),
            BudgetLine(lambda tokens: f"tenant:{'ab'[tokens]}", estimate=1, charge="start"),
        ]
    )(on_both.app.task(name="inline.mixed", shared=False)(both))
    on_both.budget.set("tenant:b", limit=5, unit="tokens")
    for items in ([(1, "a"), (0, "b")], [(0, "a")]):
        with pytest.raises(PolicyError, match="twice"):
            task.starmap(items).delay()
    assert on_both.rows(schema.reservations) == []


def test_no_items_ask_for_nothing(on_both: Shop, task: Any) -> None:
    before = on_both.ledger()
    task.map([]).delay()
    task.starmap([]).delay()
    assert on_both.ledger() == before
    assert [reservation_of(message) for message in on_both.received()] == [None, None]


def test_the_signature_counts_for_its_task_alone(on_both: Shop, task: Any) -> None:
    """As Celery runs it: by its items only."""
    on_both.app.send_task("celery.map", kwargs={"task": task.s(9, "b"), "it": [1, 2]})
    on_both.app.send_task("celery.map", (dict(task.s()), [3]))
    assert on_both.amounts("tenant:a") == (6, 0, 4)
    assert on_both.amounts("tenant:b") == (0, 0, 5)


def test_a_starmap_of_a_map_is_reserved_by_the_items_of_that(on_both: Shop, task: Any) -> None:
    mapped = on_both.app.tasks["celery.map"]
    mapped.starmap([(dict(task.s()), [1, 2]), (dict(task.s()), [3])]).delay()
    assert on_both.amounts("tenant:a") == (6, 0, 4)


def test_a_request_id_stands_for_the_items(on_both: Shop, task: Any) -> None:
    first = task.map([1, 2]).apply_async(request_id="r")
    assert task.map([1, 2]).apply_async(request_id="r").id == first.id
    assert on_both.amounts("tenant:a") == (3, 0, 7)
    for other in (task.map([2, 1]), task.starmap([(1, "a"), (2, "a")]), task.map([1, 2, 3])):
        with pytest.raises(RequestConflict):
            other.apply_async(request_id="r")


def test_generators_are_gone_through_once(on_both: Shop, task: Any) -> None:
    task.map(size for size in (1, 2)).delay()
    assert on_both.amounts("tenant:a") == (3, 0, 7)
    applied = on_both.app.tasks["celery.map"].apply((task.s(), (size for size in (1, 2))))
    assert applied.get() == [1, 2]
    assert on_both.amounts("tenant:a") == (3, 3, 4)


def test_chunks_are_a_group_of_starmaps(on_both: Shop, task: Any) -> None:
    task.chunks([(1, "a"), (2, "a"), (3, "a")], 2).apply_async()
    assert on_both.amounts("tenant:a") == (6, 0, 4)
    on_both.relay()
    assert [message.headers["task"] for message in on_both.received()] == ["celery.starmap"] * 2
    # As a group all of them are admitted, or none.
    with pytest.raises(BudgetExceeded):
        task.chunks([(3, "a"), (2, "a")], 1).apply_async()
    assert on_both.amounts("tenant:a") == (6, 0, 4)


def test_in_a_canvas(on_both: Shop, task: Any) -> None:
    chain(task.map([1, 2]), task.si(4)).delay()
    assert on_both.amounts("tenant:a") == (3, 0, 7)
    group(task.map([1]), task.starmap([(1, "a")])).delay()
    chord([task.map([1]), task.map([1])], task.si(1)).delay()
    assert on_both.amounts("tenant:a") == (7, 0, 3)


def test_as_the_step_of_a_chain_that_is_reserved_whole(on_both: Shop, task: Any) -> None:
    chain(task.si(1), task.map([2, 3]), task.starmap([(1, "a")])).apply_async(reserve="chain")
    assert on_both.amounts("tenant:a") == (7, 0, 3)


def test_what_calls_tasks_without_a_budget_is_left_alone(make_shop: Callable[..., Shop]) -> None:
    """A store that cannot be reached shows that none is asked."""
    shop = make_shop(init=False, budget_database_url="postgresql+psycopg://nobody@127.0.0.1:1/none")
    task = shop.app.task(name="inline.plain", shared=False)(plain)
    task.map([1, 2]).delay()
    task.chunks([(1,), (2,)], 1).apply_async()
    assert [message.headers["task"] for message in shop.received()] == [
        "celery.map",
        "celery.starmap",
        "celery.starmap",
    ]
    assert task.map([1, 2]).apply().get() == [1, 2]
    mapped = shop.app.tasks["celery.map"]
    assert mapped(task.s(), [1, 2]) == [1, 2]
    for kwargs in ({"task": dict(task.s()), "it": [1]}, {"task": dict(task.s())}, {}):
        assert not _is_gated(mapped, SimpleNamespace(args=(), kwargs=kwargs))


# Execution.


@pytest.mark.redis
@pytest.mark.postgres
class TestRun:
    """By a real worker."""

    def test_usage_in_an_item_counts_for_the_message(self, tenant: Tenant) -> None:
        items = [(1, tenant.name), (2, tenant.name, 3), (3, tenant.name, 2)]
        result = tenant.task("work").starmap(items).delay()
        assert result.get(timeout=WAIT) == [1, 2, 3]
        tenant.spent(10)
        story = tenant.story(result.id)
        assert story.reservation["task_name"] == "celery.starmap"
        assert [(line["estimate"], line["settled"]) for line in story.lines] == [(18, 10)]
        assert tenant.outcomes(result.id) == ["returned"]

    def test_a_success_that_recorded_nothing_is_charged_the_sum(self, tenant: Tenant) -> None:
        result = tenant.task("unmetered").map([tenant.name] * 3).delay()
        assert result.get(timeout=WAIT) == [None] * 3
        tenant.spent(18)
        assert flags(tenant, result.id) == ("settled", ["unmetered"])

    def test_an_item_that_fails_is_charged_what_was_recorded(self, tenant: Tenant) -> None:
        result = tenant.task("fail").starmap([(tenant.name, 2), (tenant.name, 3)]).delay()
        with pytest.raises(ValueError, match="None"):
            result.get(timeout=WAIT)
        tenant.spent(2)
        assert tenant.outcomes(result.id) == ["raised"]

    def test_an_item_that_asks_for_a_retry_has_none(self, tenant: Tenant) -> None:
        """As Celery has it; the message has run, and nothing is held for it."""
        result = tenant.task("retried").starmap([(1, tenant.name)]).delay()
        eventually(lambda: result.state, lambda state: state == "RETRY", WAIT)
        tenant.spent(1)
        assert tenant.outcomes(result.id) == ["retried"]

    @pytest.mark.parametrize("kind", ["chain", "group", "chord", "chunks"])
    def test_in_a_canvas(self, tenant: Tenant, kind: str) -> None:
        work, name = tenant.task("work"), tenant.name
        mapped = work.starmap([(1, name), (2, name)])
        canvas, value, spent = {
            "chain": lambda: (chain(mapped, tenant.task("total").s(name)), 3, 11),
            "group": lambda: (group(mapped, work.s(3, name)), [[1, 2], 3], 15),
            "chord": lambda: (
                chord([mapped, mapped.clone()], tenant.task("plain").s()),
                [[1, 2]] * 2,
                20,
            ),
            "chunks": lambda: (
                work.chunks([(number, name) for number in (1, 2, 3)], 2),
                [[1, 2], [3]],
                15,
            ),
        }[kind]()
        assert canvas.apply_async().get(timeout=WAIT) == value
        tenant.spent(spent)

    def test_a_delivery_without_a_reservation(self, tenant: Tenant, cluster: Cluster) -> None:
        elsewhere = Celery(
            "elsewhere",
            broker=cluster.app.conf.broker_url,
            backend=cluster.app.conf.result_backend,
            set_as_current=False,
        )
        kwargs = {"task": {"task": "steps.work"}, "it": [(1, tenant.name), (2, tenant.name)]}
        result = elsewhere.send_task("celery.starmap", kwargs=kwargs)
        assert result.get(timeout=WAIT) == [1, 2]
        tenant.spent(10)
        assert flags(tenant, result.id) == ("settled", ["unreserved"])
        elsewhere.close()

    def test_tasks_without_a_budget(self, tenant: Tenant) -> None:
        result = tenant.task("plain").map([1, 2]).delay()
        assert result.get(timeout=WAIT) == [1, 2]
        assert tenant.cluster.budget.explain(result.id) == []

    def test_a_revocation_gives_the_hold_back(self, tenant: Tenant) -> None:
        result = tenant.task("work").starmap([(1, tenant.name)]).apply_async(countdown=3600)
        tenant.cluster.app.control.revoke(result.id, reply=True, timeout=WAIT, limit=1)
        make_due(tenant, result.id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=WAIT)
        tenant.spent(0)
        assert flags(tenant, result.id)[0] == "released"

    def test_a_hard_time_limit_charges_the_sum(self, tenant: Tenant) -> None:
        items = [(tenant.name, 60), (tenant.name, 60)]
        result = tenant.task("slow").starmap(items).apply_async(time_limit=3)
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=WAIT)
        tenant.spent(12)
        assert flags(tenant, result.id)[0] == "lost"

    def test_a_termination_charges_the_sum(self, tenant: Tenant) -> None:
        result = tenant.task("slow").starmap([(tenant.name, 60), (tenant.name, 60)]).delay()
        eventually(lambda: f"slow {tenant.name}" in tenant.cluster.journal(), what="its start")
        result.revoke(terminate=True)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=WAIT)
        tenant.spent(12)
        assert flags(tenant, result.id)[0] == "lost"


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False], ids=["late ack", "early ack"])
def test_a_child_that_dies(
    make_cluster: Callable[..., Cluster], embedded: dict[str, Any], late: bool
) -> None:
    cluster = make_cluster(**embedded, task_acks_late=late)
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    result = cluster.task("held").starmap([("one", "a"), ("two", "a")]).delay()
    worker = cluster.worker(concurrency=1)
    cluster.relay()
    cluster.release("one")
    eventually(lambda: "start two" in cluster.journal(), what="the second item")
    [child] = worker.children()
    child.kill()
    if late:
        cluster.release("two")
        assert result.get(timeout=WAIT) == ["one", "two"]
        assert cluster.journal().count("start one") == 2
    else:
        with pytest.raises(Exception, match="exited prematurely"):
            result.get(timeout=WAIT)
    cluster.settle()
    row = cluster.budget.explain(result.id)[0].reservation
    assert row["state"] == ("settled" if late else "lost")


@pytest.mark.slow
def test_a_lease_lives_as_long_as_the_items_run(
    make_cluster: Callable[..., Cluster], embedded: dict[str, Any]
) -> None:
    cluster = make_cluster(**embedded)
    cluster.budget.set("tenant:a", limit=100, unit="tokens")
    result = cluster.task("held").starmap([("one", "a")]).delay()
    cluster.worker(concurrency=1)
    cluster.relay()

    def lease() -> int:
        attempts = cluster.budget.explain(result.id)[0].attempts
        return attempts[0]["lease_until_us"] if attempts else 0

    first = eventually(lease, what="its claim")
    second = eventually(lease, lambda until: until > first, what="a renewal")
    eventually(lease, lambda until: until > second, what="another one")
    cluster.release("one")
    assert result.get(timeout=WAIT) == ["one"]
    cluster.settle()
    assert cluster.journal().count("start one") == 1


def make_due(tenant: Tenant, task_id: str, **headers: str) -> None:
    """Let a waiting message's time come, with other headers than it was given."""
    outbox = schema.outbox
    with tenant.cluster.budget.store.transaction() as connection:
        mine = outbox.c.task_id == task_id
        envelope = json.loads(
            connection.execute(sa.select(outbox.c.envelope).where(mine)).scalar_one()
        )
        envelope["headers"].update(headers, eta=None)
        connection.execute(
            outbox.update().where(mine).values(due_us=0, envelope=json.dumps(envelope))
        )
