"""Requests that wait for budget by their own wish: what callers see, and a real worker runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import chain, chord, group, states

from celery_budget import (
    BudgetedTask,
    BudgetExceeded,
    GivenUp,
    NotParked,
    ParkingFull,
    RequestConflict,
    RequestNotRun,
    budgeted,
    park_expired,
)
from celery_budget.errors import InvalidAmount, PolicyError
from celery_budget.integration.service import look_at_parked
from celery_budget.store import schema
from tests.apps import waiting
from tests.cluster import Cluster, embedded_in, eventually
from tests.integration.commands import Run, runner
from tests.integration.support import Shop
from tests.integration.tenant import WAIT, Tenant


@pytest.fixture(scope="module")
def embedded_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker with a relay on SQLite, the filesystem transport and results in files."""
    folder = tmp_path_factory.mktemp("waiting")
    cluster = Cluster(folder, embedded_in(folder, imports=[waiting.__name__]))
    try:
        cluster.worker("--budget-relay", concurrency=2)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def tenant(embedded_cluster: Cluster) -> Tenant:
    return Tenant(embedded_cluster)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_what_waits_runs_when_a_settlement_gives_budget_back(tenant: Tenant) -> None:
    tenant.set(10)
    cluster, until = tenant.cluster, f"go-{tenant.name}"
    hold, draft = cluster.app.tasks["waiting.hold"], cluster.app.tasks["waiting.draft"]
    holder = hold.delay(tenant.name, until)
    eventually(cluster.journal, lambda said: f"holds {until}" in said)
    first = draft.apply_async((7, tenant.name), request_id="once")
    again = draft.apply_async((7, tenant.name), request_id="once")
    assert (first.id, first.state) == (again.id, states.PENDING)
    tenant.parked(first.id)
    cluster.release(until)
    assert first.get(timeout=WAIT) == 7
    assert holder.get(timeout=WAIT) is None
    assert tenant.outcomes(first.id) == ["returned"]
    tenant.spent(4)


def test_past_its_deadline_the_result_says_so(tenant: Tenant) -> None:
    tenant.set(5)
    draft = tenant.cluster.app.tasks["waiting.draft"]
    result = draft.apply_async((7, tenant.name), park_for=0.2)
    with pytest.raises(RequestNotRun, match="park_expired"):
        result.get(timeout=WAIT)
    assert tenant.story(result.id).reservation["reason"] == "park_expired"
    tenant.spent(0)


def declare(shop: Shop, **options: Any) -> Any:
    """A task of ten tokens at most, that waits unless told otherwise."""

    def draft(size: int = 6) -> int:
        return size

    given = {"budget": "tenant:a", "estimate": lambda size: size, "on_refused": "park", **options}
    return budgeted(**given)(shop.app.task(name="parking.draft", shared=False)(draft))


def waits(shop: Shop) -> list[str]:
    return [one.task_id for one in shop.budget.parked()]


def test_a_call_says_whether_it_waits(on_both: Shop) -> None:
    task = declare(on_both)
    task.delay()
    waiting_one = task.delay()
    assert (waits(on_both), waiting_one.state) == ([waiting_one.id], states.PENDING)
    with pytest.raises(BudgetExceeded):
        task.apply_async(on_refused="raise")
    assert len(on_both.received()) == 0
    on_both.budget.set("tenant:a", limit=20)
    on_both.sweep()
    assert on_both.relay().published == 2
    assert waiting_one.id in {message.headers["id"] for message in on_both.received()}


def test_a_task_that_does_not_wait_may_for_one_call(shop: Shop) -> None:
    task = declare(shop, on_refused=None)
    with pytest.raises(BudgetExceeded):
        task.delay(11)
    result = task.apply_async((11,), on_refused="park", park_for=60)
    assert waits(shop) == [result.id]
    [row] = shop.rows(schema.parked)
    assert 0 < row.deadline_us - row.created_us <= 60_000_000
    assert b"park" not in row.body
    assert "on_refused" not in row.envelope


def test_a_base_class_declares_it(shop: Shop) -> None:
    class Waits(BudgetedTask):
        budget = "tenant:a"
        estimate = 11
        on_refused = "park"
        park_for = 60

    def draft() -> None: ...

    task = shop.app.task(name="parking.based", base=Waits, shared=False)(draft)
    result = task.delay()
    assert waits(shop) == [result.id]


def test_a_request_id_is_one_request_while_it_waits(shop: Shop) -> None:
    task = declare(shop)
    first = task.apply_async((11,), request_id="order-1")
    assert task.apply_async((11,), request_id="order-1").id == first.id
    sent = shop.app.send_task("parking.draft", (11,), request_id="order-1", on_refused="raise")
    assert (sent.id, waits(shop)) == (first.id, [first.id])
    with pytest.raises(RequestConflict):
        task.apply_async((12,), request_id="order-1")


def test_as_much_waits_as_may(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(budget_max_parked=1)
    task = declare(shop)
    task.delay(11)
    with pytest.raises(ParkingFull, match="budget_max_parked"):
        task.delay(11)
    assert len(waits(shop)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"on_refused": "fallback"},
        {"on_refused": "wait"},
        {"park_for": 0},
        {"on_refused": "park", "reserve": "chain"},
    ],
)
def test_what_means_nothing_changes_nothing(shop: Shop, options: dict[str, Any]) -> None:
    task = declare(shop, on_refused=None)
    with pytest.raises(PolicyError, match=r"on_refused=|park_for="):
        task.apply_async((1,), **options)
    with pytest.raises(PolicyError, match="on_refused="):
        declare(shop, on_refused="fallback")
    assert shop.rows(schema.outbox) == []


def test_in_place_nothing_waits(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(task_always_eager=True, task_eager_propagates=True)
    task = declare(shop)
    assert task.apply_async((6,), on_refused="park", park_for=5).get() == 6
    for call in (task.apply_async, task.apply):
        with pytest.raises(BudgetExceeded):
            call((11,), on_refused="park")
        with pytest.raises(PolicyError, match="on_refused="):
            call((1,), on_refused="wait")
    assert waits(shop) == []


def test_a_group_is_admitted_whole_or_refused(shop: Shop) -> None:
    task = declare(shop)
    for canvas in (group(task.s(6), task.s(6)), chord([task.s(6), task.s(6)], task.si(1))):
        with pytest.raises(BudgetExceeded):
            canvas.apply_async()
        with pytest.raises(PolicyError, match="on_refused='park' is not for a group"):
            canvas.apply_async(on_refused="park")
    assert (waits(shop), shop.rows(schema.reservations)) == ([], [])


def test_of_a_partial_group_each_that_does_not_fit_waits(shop: Shop) -> None:
    task = declare(shop, on_refused=None)
    canvas = group(task.s(6), task.s(6), task.s(4))
    result = canvas.apply_async(partial=True, on_refused="park")
    assert (result.refused, waits(shop)) == ((), [result.results[1].id])
    assert len(result.results) == 3


def test_a_chains_first_step_waits_and_the_rest_follows(shop: Shop) -> None:
    task = declare(shop)
    result = chain(task.s(11), task.si(1)).apply_async()
    assert waits(shop) == [result.parent.id]
    with pytest.raises(BudgetExceeded):
        chain(task.s(11), task.si(1)).apply_async(reserve="chain")
    shop.budget.set("tenant:a", limit=20)
    shop.sweep()
    shop.relay()
    [message] = shop.received()
    assert message.headers["id"] == result.parent.id


def test_in_a_batch_and_in_a_callers_transaction_it_waits(on_both: Shop) -> None:
    task = declare(on_both)
    with on_both.budget.batch():
        large, small = task.delay(11), task.delay(1)
    assert waits(on_both) == [large.id]
    with on_both.budget.store.engine.connect() as connection:
        with on_both.budget.enlist(connection):
            task.delay(12)
        assert connection.execute(sa.select(sa.func.count()).select_from(schema.parked)).scalar()
        connection.rollback()
    assert waits(on_both) == [large.id], "it went with the transaction"
    with on_both.budget.store.engine.begin() as connection, on_both.budget.enlist(connection):
        enlisted = task.delay(12)
    assert set(waits(on_both)) == {large.id, enlisted.id}
    assert [row.task_id for row in on_both.rows(schema.reservations)] == [small.id]


def test_a_countdown_and_an_expiry_go_with_it(shop: Shop) -> None:
    task = declare(shop)
    late = task.apply_async((11,), countdown=3600)
    over = task.apply_async((12,), expires=30)
    rows = {row.task_id: row for row in shop.rows(schema.parked)}
    assert rows[over.id].deadline_us <= rows[over.id].created_us + 30_000_000
    shop.sql(schema.parked.update().where(schema.parked.c.task_id == over.id).values(deadline_us=1))
    shop.budget.set("tenant:a", limit=20)
    shop.sweep()
    assert shop.relay().published == 0
    assert {row.task_id: row.state for row in shop.rows(schema.reservations)} == {
        late.id: "reserved",
        over.id: "released",
    }
    with pytest.raises(RequestNotRun, match="park_expired"):
        over.get(timeout=5)


def test_a_signal_tells_what_was_given_up(shop: Shop) -> None:
    heard: list[tuple[Any, GivenUp]] = []

    def hear(sender: Any, given_up: GivenUp, **_: Any) -> None:
        heard.append((sender, given_up))
        raise RuntimeError("a receiver that fails")

    park_expired.connect(hear)
    try:
        result = declare(shop).delay(11)
        shop.sql(schema.parked.update().values(deadline_us=1))
        assert look_at_parked(shop.budget).given_up == 1
        look_at_parked(shop.budget)
    finally:
        park_expired.disconnect(hear)
    [(sender, given_up)] = heard
    assert sender is shop.app
    assert (given_up.task_id, given_up.budget, given_up.amount) == (result.id, "tenant:a", 11)


def test_what_waits_is_listed_and_discarded(on_both: Shop, run: Run) -> None:
    app, task = on_both.app, declare(on_both)
    assert run(app, "parked", "list").out == "Nothing waits for budget.\n"
    assert run(app, "parked", "list", "--json").json == {"parked": []}
    assert run(app, "list", "--json").json["parked"] == []
    first, second = task.delay(11), task.delay(12)
    header, _, *rows = run(app, "parked", "list").rows
    assert header[:3] == ["budget", "reason", "needs"]
    assert [row[:4] for row in rows] == [
        ["tenant:a", "exhausted", "11", f"parking.draft[{first.id}]"],
        ["tenant:a", "exhausted", "12", f"parking.draft[{second.id}]"],
    ]
    found = run(app, "parked", "list", "--limit", "1", "--json").json["parked"]
    assert [one["task_id"] for one in found] == [first.id]
    for command in ("list", "report"):
        [queued] = run(app, command, "--json").json["parked"]
        assert (queued["budget"], queued["requests"]) == ("tenant:a", 2)
        assert "parked" in run(app, command).out.split()
    assert "for 11 of budget tenant:a" in " ".join(run(app, "explain", first.id).out.split())
    assert run(app, "parked", "discard", found[0]["parked_id"]).code == 0
    assert run(app, "parked", "discard", second.id, "--json").json == {"discarded": second.id}
    assert (waits(on_both), first.state) == ([], states.REVOKED)
    gone = run(app, "parked", "discard", second.id)
    assert (gone.code, second.id in gone.err) == (1, True)
    with pytest.raises(NotParked):
        on_both.budget.discard_parked(first.id)
    with pytest.raises(InvalidAmount):
        on_both.budget.parked(0)
