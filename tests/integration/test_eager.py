"""Runs in place, by ``apply()`` and ``task_always_eager``: reserved and settled at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import Task, chain, chord, group, states
from celery.exceptions import Ignore, Reject, Retry

from celery_budget import (
    AttemptLost,
    BudgetExceeded,
    BudgetLine,
    PolicyError,
    RequestConflict,
    StoreError,
    UnknownBudget,
    budgeted,
    usage,
)
from celery_budget.errors import NotInstalled, RequestNotRun
from celery_budget.integration import eager
from celery_budget.integration.context import current_attempt
from celery_budget.store import schema
from tests.cluster import ROOT, SHORT_LEASES, WAIT, eventually
from tests.integration.support import Shop, make_app

TENANT = "tenant:{tenant}"


def plain(value: Any) -> Any:
    """The body of a task without a budget."""
    return value


class Works:
    """A shop's tasks, and what they did."""

    def __init__(self, shop: Shop, *, init: bool = True) -> None:
        self.shop = shop
        self.ran: list[Any] = []
        if init:
            shop.budget.set("tenant:a", limit=30, unit="tokens")

    def task(self, body: Callable[..., Any], **options: Any) -> Any:
        made = self.shop.app.task(name=f"eager.{body.__name__}", shared=False, **options)(body)
        return budgeted(budget=TENANT, estimate=6)(made)

    @property
    def work(self) -> Any:
        """Use 5 units, and give the value on."""

        def work(value: Any, tenant: str = "a", used: int = 5) -> Any:
            self.ran.append(value)
            usage.record(used)
            return value

        return self.shop.app.tasks.get("eager.work") or self.task(work)

    def spent(self, amount: int) -> None:
        """Nothing is held or open any more, ``amount`` was charged, and it adds up."""
        balance = self.shop.budget.balance("tenant:a")
        assert (balance.reserved, balance.spent) == (0, amount)
        assert self.shop.rows(schema.outbox) == []
        assert [
            row.lease_until_us for row in self.shop.rows(schema.attempts) if not row.outcome
        ] == []
        reconciled = self.shop.budget.reconcile()
        assert reconciled.ok
        assert not any(reconciled.open_work.values())

    def outcomes(self) -> list[str]:
        """Of all attempts, in the order in which they began."""
        rows = sorted(self.shop.rows(schema.attempts), key=lambda row: row.claim_id)
        assert {row.lease_until_us for row in rows} <= {None}
        return [row.outcome for row in rows]


@pytest.fixture
def works(on_both: Shop) -> Works:
    return Works(on_both)


@pytest.fixture
def always(works: Works) -> Works:
    """With ``task_always_eager``."""
    works.shop.app.conf.task_always_eager = True
    return works


# Runs.


@pytest.mark.parametrize("how", ["apply", "signature", "delay", "apply_async", "send"])
def test_a_run_is_reserved_and_settled(works: Works, how: str) -> None:
    work = works.work
    works.shop.app.conf.task_always_eager = how in ("delay", "apply_async", "send")
    result = {
        "apply": lambda: work.apply((7,)),
        "signature": lambda: work.s(7).apply(),
        "delay": lambda: work.delay(7),
        "apply_async": lambda: work.apply_async((7,), countdown=60, priority=3),
        "send": lambda: work.s(7).apply_async(),
    }[how]()
    assert (result.get(), result.state) == (7, states.SUCCESS)
    works.spent(5)
    [story] = works.shop.budget.explain(result.id)
    assert story.reservation["state"] == "settled"
    assert story.reservation["request_id"] == result.id
    assert [attempt["outcome"] for attempt in story.attempts] == ["returned"]
    assert works.shop.received() == []


def test_it_is_held_and_claimed_while_it_runs(works: Works) -> None:
    seen: list[Any] = []

    def look(tenant: str = "a") -> None:
        seen.append(works.shop.amounts("tenant:a"))
        seen.append([row.state for row in works.shop.rows(schema.reservations)])
        seen.append(len(works.shop.rows(schema.outbox)))

    works.task(look).apply()
    assert seen == [(6, 0, 24), ["running"], 0]
    # Nothing recorded: the estimate is charged.
    works.spent(6)
    [row] = works.shop.rows(schema.reservations)
    assert row.unmetered


@pytest.mark.parametrize("how", ["apply", "delay"])
def test_what_does_not_fit_runs_nothing(works: Works, how: str) -> None:
    works.shop.app.conf.task_always_eager = how == "delay"
    works.shop.budget.set("tenant:a", limit=5)
    run = works.work.delay if how == "delay" else lambda *args: works.work.apply(args)
    with pytest.raises(BudgetExceeded) as caught:
        run(7)
    assert (caught.value.requested, caught.value.available) == (6, 5)
    with pytest.raises(UnknownBudget, match="tenant:nobody"):
        run(7, "nobody")
    with pytest.raises(PolicyError, match="do not fit"):
        works.work.apply((1, 2, 3, 4))
    assert works.ran == []
    assert works.shop.counts()["refused"] == 1
    works.spent(0)


def test_a_store_that_cannot_be_reached_runs_nothing(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(init=False, budget_database_url="postgresql+psycopg://nobody@127.0.0.1:1/none")
    works = Works(shop, init=False)
    with pytest.raises(StoreError):
        works.work.apply((7,))
    assert works.ran == []


def test_without_a_ledger_nothing_runs() -> None:
    ran: list[Any] = []

    def never(value: Any) -> None:
        ran.append(value)

    app = make_app(budget=False, task_always_eager=True)
    task = budgeted(budget="b", estimate=1)(app.task(name="eager.never", shared=False)(never))
    for run in (lambda: task.apply((1,)), lambda: task.delay(1), lambda: task.map([1]).delay()):
        with pytest.raises(NotInstalled):
            run()
    assert ran == []
    app.close()


def test_several_budgets_are_all_drawn_on(works: Works) -> None:
    works.shop.budget.set("calls", limit=3, unit="requests")

    def both(tenant: str) -> None:
        usage.record(2)

    task = budgeted(budget=[TENANT, BudgetLine("calls", estimate=1, charge="start")], estimate=6)(
        works.shop.app.task(name="eager.both", shared=False)(both)
    )
    task.apply(("a",))
    works.spent(2)
    assert works.shop.amounts("calls") == (0, 1, 2)


def test_a_budget_and_its_window_are_made_first(works: Works) -> None:
    works.shop.budget.set("user:*", limit=10, unit="tokens", period="day")

    def own(user: str) -> None:
        usage.record(3)

    made = works.shop.app.task(name="eager.own", shared=False)(own)
    budgeted(budget="user:{user}", estimate=6)(made).apply(("u",))
    assert works.shop.amounts("user:u") == (0, 3, 7)


def test_usage_can_be_extended(works: Works) -> None:
    def more(tenant: str = "a") -> None:
        assert usage.extend(4)
        assert works.shop.amounts("tenant:a") == (10, 0, 20)
        with pytest.raises(BudgetExceeded):
            usage.extend(100)
        usage.record(9)

    works.task(more).apply().get()
    works.spent(9)


def test_finishing_may_use_what_is_above_the_soft_stop(works: Works) -> None:
    works.shop.budget.set("tenant:a", limit=10, soft_stop=0.5)
    with pytest.raises(BudgetExceeded):
        works.work.apply((1,))
    works.work.apply((1,), finishing=True)
    works.spent(5)
    with pytest.raises(PolicyError, match="finishing="):
        works.work.apply((1,), finishing="yes")


# Ends.


@pytest.mark.parametrize("propagates", [False, True])
def test_a_failure_is_charged_what_it_recorded(works: Works, propagates: bool) -> None:
    def fail(tenant: str = "a") -> None:
        usage.record(2)
        raise ValueError("no")

    task = works.task(fail)
    works.shop.app.conf.task_eager_propagates = propagates
    if propagates:
        with pytest.raises(ValueError, match="no"):
            task.apply()
    else:
        result = task.apply()
        assert (result.state, str(result.result)) == (states.FAILURE, "no")
    works.spent(2)
    assert works.outcomes() == ["raised"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Ignore(), "ignored"), (Reject("no"), "rejected"), (Reject("no", requeue=True), "rejected")],
    ids=["ignored", "rejected", "requeued"],
)
def test_what_is_ignored_or_rejected(works: Works, error: Exception, outcome: str) -> None:
    def end(tenant: str = "a") -> None:
        usage.record(2)
        raise error

    assert works.task(end).apply().state == outcome.upper()
    works.spent(2)
    assert works.outcomes() == [outcome]


def test_what_leaves_the_call_by_force_is_settled(works: Works) -> None:
    def interrupted(tenant: str = "a") -> None:
        usage.record(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        works.task(interrupted).apply()
    works.spent(2)
    assert works.outcomes() == ["raised"]


def test_a_call_that_is_not_reached_gives_its_hold_back(works: Works) -> None:
    class Unready(Task):
        def before_start(self, *args: Any) -> None:
            raise ValueError("not yet")

    def never(tenant: str = "a") -> None:
        works.ran.append(1)

    result = works.task(never, base=Unready).apply()
    assert (result.state, works.ran) == (states.FAILURE, [])
    works.spent(0)
    assert works.outcomes() == ["raised"]


def test_an_apply_that_passes_ours_by_runs_nothing(works: Works) -> None:
    work = works.work
    result = Task.apply(work, (7,))
    assert isinstance(result.result, PolicyError)
    assert works.ran == []
    works.spent(0)


def test_an_attempt_that_was_given_up_says_so(works: Works) -> None:
    def slow(tenant: str = "a") -> str:
        works.shop.sql(schema.attempts.update().values(lease_until_us=0, suspected_us=1))
        works.shop.sweep()
        return "too late"

    result = works.task(slow).apply()
    assert isinstance(result.result, AttemptLost)
    [row] = works.shop.rows(schema.reservations)
    assert row.state == "lost"
    works.spent(6)


# Retries and replacements.


def retried(self: Any, failures: int, tenant: str = "a", used: int = 2) -> int:
    usage.record(used)
    if self.request.retries < failures:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@pytest.mark.parametrize("run", ["apply", "delay"])
def test_a_retry_is_the_next_attempt(works: Works, run: str) -> None:
    task = works.task(retried, bind=True)
    works.shop.app.conf.task_always_eager = run == "delay"
    result = task.apply((2,)) if run == "apply" else task.delay(2)
    assert result.get() == 2
    works.spent(6)
    assert works.outcomes() == ["retried", "retried", "returned"]
    [row] = works.shop.rows(schema.reservations)
    assert (row.attempts, row.retries, row.task_id) == (3, 2, result.id)


def test_a_retry_that_is_not_raised(works: Works) -> None:
    def returned(self: Any, tenant: str = "a") -> Any:
        usage.record(2)
        return self.request.retries or self.retry(countdown=0, throw=False)

    assert works.task(returned, bind=True).apply().get() == 1
    works.spent(4)
    assert works.outcomes() == ["retried", "returned"]


def test_a_retry_holds_its_estimate_on_top_of_what_was_used(works: Works) -> None:
    held: list[int] = []

    def watched(self: Any, tenant: str = "a") -> None:
        held.append(works.shop.amounts("tenant:a")[0])
        usage.record(4)
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    works.task(watched, bind=True).apply()
    assert held == [6, 10, 14]
    works.spent(12)


def test_a_retry_that_does_not_fit_is_settled_and_raised(works: Works) -> None:
    works.shop.budget.set("tenant:a", limit=9)
    with pytest.raises(BudgetExceeded) as caught:
        works.task(retried, bind=True).apply((2, "a", 4))
    assert caught.value.budget == "tenant:a"
    works.spent(4)
    assert works.outcomes() == ["retried"]
    assert works.shop.counts()["refused"] == 1


def test_retries_that_are_used_up(works: Works) -> None:
    result = works.task(retried, bind=True, max_retries=1).apply((5,))
    assert result.state == states.FAILURE
    works.spent(4)
    assert works.outcomes() == ["retried", "raised"]


def test_a_retry_where_errors_propagate_is_raised(works: Works) -> None:
    with pytest.raises(Retry):
        works.task(retried, bind=True).apply((2,), throw=True)
    works.spent(2)
    assert works.outcomes() == ["retried"]


@pytest.mark.parametrize(
    ("by", "value", "spent", "outcomes"),
    [
        ("budgeted", "new", 6, ["replaced", "returned"]),
        ("plain", "new", 1, ["replaced"]),
        ("chain", "new", 11, ["replaced", "returned", "returned"]),
        ("group", ["new", "too"], 11, ["replaced", "returned", "returned"]),
        ("itself", "new", 7, ["replaced", "replaced", "returned"]),
    ],
)
def test_what_takes_a_tasks_place_is_admitted_when_that_is_settled(
    works: Works, by: str, value: Any, spent: int, outcomes: list[str]
) -> None:
    other = works.shop.app.task(name="eager.plain", shared=False)(plain)
    work = works.work

    def replacing(self: Any, by: str, tenant: str = "a") -> Any:
        usage.record(1)
        return self.replace(
            {
                "budgeted": lambda: work.s("new"),
                "plain": lambda: other.s("new"),
                "chain": lambda: work.s("new") | work.s(),
                "group": lambda: group(work.s("new"), work.s("too")),
                "itself": lambda: task.s("budgeted"),
            }[by]()
        )

    task = works.task(replacing, bind=True)
    # No room for two holds at once.
    works.shop.budget.set("tenant:a", limit=max(6, spent + 1))
    result = task.apply((by,))
    assert result.get() == value
    works.spent(spent)
    assert works.outcomes() == outcomes


# Identity.


@pytest.mark.parametrize("run", ["apply", "apply_async"])
def test_a_request_id_fixes_the_task_id_and_runs_once(works: Works, run: str) -> None:
    work = works.work
    works.shop.app.conf.task_always_eager = run == "apply_async"
    first = getattr(work, run)((7,), request_id="r")
    again = getattr(work, run)((7,), request_id="r")
    assert first.id == again.id
    assert (first.get(), again.get()) == (7, None)
    assert (again.state, works.ran) == (states.SUCCESS, [7])
    works.spent(5)
    with pytest.raises(RequestConflict):
        getattr(work, run)((8,), request_id="r")
    assert getattr(work, run)((7,), request_id="other").id != first.id
    # The same request by a message is that one as well.
    works.shop.app.conf.task_always_eager = False
    assert work.apply_async((7,), request_id="r").id == first.id
    works.spent(10)


def test_a_task_id_is_a_request_id(works: Works) -> None:
    task_id = str(uuid4())
    for _ in range(2):
        assert works.work.apply((7,), task_id=task_id).id == task_id
    assert works.ran == [7]
    with pytest.raises(PolicyError, match="stands for task"):
        works.work.apply((7,), task_id=task_id, request_id="r")
    with pytest.raises(PolicyError, match="request_id"):
        works.work.apply((7,), request_id="a\nb")


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (ValueError, states.FAILURE),
        (Ignore, states.IGNORED),
        (Reject, states.REJECTED),
    ],
)
def test_a_repeat_tells_how_the_first_one_ended(works: Works, ending: Any, state: str) -> None:
    def end(tenant: str = "a") -> None:
        works.ran.append(1)
        raise ending

    task = works.task(end)
    for _ in range(2):
        result = task.apply(request_id="r")
        assert result.state == state
    assert works.ran == [1]
    if state == states.FAILURE:
        with pytest.raises(RequestNotRun, match="has run before"):
            result.get()


def test_a_repeat_gives_the_value_where_results_are_stored(always: Works) -> None:
    always.shop.app.conf.task_store_eager_result = True
    work = always.work
    for _ in range(2):
        assert work.apply_async((7,), request_id="r").get(timeout=WAIT) == 7
    assert always.ran == [7]
    always.spent(5)


def test_a_repeat_of_what_a_message_runs_waits_for_that(works: Works) -> None:
    request_id = uuid4().hex
    published = works.work.apply_async((7,), request_id=request_id)
    again = works.work.apply((7,), request_id=request_id)
    assert (again.id, again.state, works.ran) == (published.id, states.PENDING, [])


def test_of_two_at_once_with_one_request_id_one_runs(works: Works) -> None:
    go_on, started = threading.Event(), threading.Event()
    barrier = threading.Barrier(2)
    results: list[Any] = []

    def slow(tenant: str = "a") -> str:
        works.ran.append(threading.get_ident())
        started.set()
        assert go_on.wait(WAIT)
        return "done"

    task = works.task(slow)

    def run() -> None:
        barrier.wait(WAIT)
        results.append(task.apply(request_id="r"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(WAIT)
    # The other one is back before the first one has ended.
    eventually(lambda: len(results), lambda count: count == 1)
    assert results[0].state == states.STARTED
    go_on.set()
    for thread in threads:
        thread.join(WAIT)
    assert [result.state for result in results] == [states.STARTED, states.SUCCESS]
    assert len(works.ran) == 1
    works.spent(6)


# Canvases.


@pytest.mark.parametrize("how", ["apply", "apply_async"])
@pytest.mark.parametrize(
    ("kind", "value", "spent"),
    [
        ("chain", 1, 10),
        ("group", [1, 2], 10),
        ("chord", [1, 2], 15),
        ("nested", [[1, 2], 3], 25),
        ("map", [1, 2], 10),
        ("starmap", [1, 2], 7),
        ("chunks", [[1, 2], [3]], 15),
        ("mapped chain", [1, 2], 15),
    ],
)
def test_each_member_of_a_canvas_runs_in_place(
    works: Works, how: str, kind: str, value: Any, spent: int
) -> None:
    work = works.work
    works.shop.app.conf.task_always_eager = how == "apply_async"
    canvas = {
        "chain": lambda: chain(work.s(1), work.s()),
        "group": lambda: group(work.s(1), work.s(2)),
        "chord": lambda: chord([work.s(1), work.s(2)], work.s()),
        "nested": lambda: chord([chord([work.s(1), work.s(2)], work.s()), work.s(3)], work.s()),
        "map": lambda: work.map([1, 2]),
        "starmap": lambda: work.starmap([(1,), (2, "a", 2)]),
        "chunks": lambda: work.chunks([(1,), (2,), (3,)], 2).group(),
        "mapped chain": lambda: chain(work.map([1, 2]), work.s()),
    }[kind]()
    result = canvas.apply() if how == "apply" else canvas.apply_async()
    assert result.get() == value
    works.spent(spent)


@pytest.mark.parametrize("how", ["apply", "apply_async"])
@pytest.mark.parametrize("kind", ["chain", "group", "chord"])
def test_a_request_id_names_a_canvas(works: Works, how: str, kind: str) -> None:
    works.shop.app.conf.task_store_eager_result = True
    works.shop.app.conf.task_always_eager = how == "apply_async"
    work = works.work

    def run() -> Any:
        canvas = {
            "chain": chain(work.s(1), work.s()),
            "group": group(work.s(1), work.s(2)),
            "chord": chord([work.s(1), work.s(2)], work.s()),
        }[kind]
        return getattr(canvas, how)(request_id="r")

    first = run()
    spent = works.shop.amounts("tenant:a")[1]
    assert spent == {"chain": 10, "group": 10, "chord": 15}[kind]
    again = run()
    assert again.id == first.id
    assert again.get() == first.get()
    works.spent(spent)


def test_a_chain_stops_where_a_step_does_not_fit(always: Works) -> None:
    always.shop.budget.set("tenant:a", limit=10)
    with pytest.raises(BudgetExceeded):
        chain(always.work.s(1), always.work.s()).apply_async()
    assert always.ran == [1]
    always.spent(5)


def test_a_callback_runs_in_place_and_finishes(always: Works) -> None:
    always.shop.budget.set("tenant:a", limit=15, soft_stop=0.6)
    always.work.apply_async((1,), link=always.work.s())
    assert always.ran == [1, 1]
    always.spent(10)


def test_a_callback_that_does_not_fit_is_raised(always: Works) -> None:
    always.shop.budget.set("tenant:a", limit=10)
    with pytest.raises(BudgetExceeded):
        always.work.apply_async((1,), link=always.work.s())
    assert always.ran == [1]
    always.spent(5)


def test_an_errback_runs_in_place(always: Works) -> None:
    failed: list[str] = []

    def fail(tenant: str = "a") -> None:
        usage.record(2)
        raise ValueError("no")

    def after(task_id: str) -> None:
        usage.record(1)
        failed.append(task_id)

    after_task = budgeted(budget="tenant:a", estimate=6)(
        always.shop.app.task(name="eager.after", shared=False)(after)
    )
    result = always.task(fail).apply_async(link_error=after_task.s())
    assert failed == [result.id]
    always.spent(3)


def test_callbacks_of_apply_are_published(works: Works) -> None:
    """Without ``task_always_eager`` Celery sends what follows."""
    works.work.apply((1,), link=works.work.s())
    assert works.ran == [1]
    assert works.shop.amounts("tenant:a") == (6, 5, 19)
    assert works.shop.relay().published == 1
    assert len(works.shop.received()) == 1


# Beside other work.


def test_a_task_run_inside_another_has_an_attempt_of_its_own(works: Works) -> None:
    work = works.work
    attempts: list[Any] = []

    def outer(tenant: str = "a") -> None:
        attempts.append(current_attempt())
        usage.record(1)
        work.apply((7,))
        attempts.append(current_attempt())
        usage.record(1)

    works.task(outer).apply()
    assert attempts[0] is attempts[1]
    assert attempts[0] is not None
    works.spent(7)
    assert works.outcomes() == ["returned", "returned"]


def test_a_task_that_calls_itself_directly_is_part_of_its_run(works: Works) -> None:
    def calls(self: Any, deep: int, tenant: str = "a") -> None:
        usage.record(1)
        if deep:
            self(deep - 1)

    works.task(calls, bind=True).apply((2,))
    works.spent(3)


def test_direct_calls_have_no_reservation(works: Works) -> None:
    assert works.work(7) == 7
    assert works.work.run(8) == 8
    works.spent(0)
    assert works.shop.rows(schema.reservations) == []


def test_a_message_that_a_run_publishes(works: Works) -> None:
    work = works.work

    def publishes(tenant: str = "a") -> None:
        usage.record(1)
        work.delay(1)

    works.task(publishes).apply()
    assert works.shop.amounts("tenant:a") == (6, 1, 23)
    [row] = works.shop.rows(schema.outbox)
    assert row.state == "due"


def test_a_run_inside_a_batch_is_in_place_at_once(works: Works) -> None:
    def block() -> None:
        with works.shop.budget.batch():
            works.work.apply((1,))
            assert works.shop.amounts("tenant:a") == (0, 5, 25)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    works.spent(5)


def test_tasks_without_a_budget_are_left_alone(make_shop: Callable[..., Shop]) -> None:
    """A store that cannot be reached shows that none is asked."""
    shop = make_shop(
        init=False,
        task_always_eager=True,
        budget_database_url="postgresql+psycopg://nobody@127.0.0.1:1/none",
    )
    task = shop.app.task(name="eager.plain", shared=False)(plain)
    assert task.delay(1).get() == 1
    assert task.map([1, 2]).apply_async().get() == [1, 2]
    assert chain(task.s(1), task.s()).apply_async(task_id="x").id == "x"


# Leases.


def test_a_run_longer_than_its_lease_keeps_it(make_shop: Callable[..., Shop]) -> None:
    works = Works(make_shop(**SHORT_LEASES))
    went_on = threading.Event()

    def lease() -> int:
        """Until when the attempt that runs has its lease."""
        rows = works.shop.rows(schema.attempts)
        [until] = [row.lease_until_us for row in rows if row.outcome is None]
        return int(until)

    def slow(tenant: str = "a") -> str:
        first = lease()
        # Two renewals on, and the sweep has found nothing to bring to an end.
        second = eventually(lease, lambda until: until > first)
        eventually(lease, lambda until: until > second)
        works.shop.sweep()
        went_on.set()
        return "done"

    assert works.task(slow).apply().get() == "done"
    assert went_on.is_set()
    works.spent(6)
    # The thread that renews is gone when nothing runs, and comes back for the next run.
    eventually(_renewing, lambda names: names == [])
    works.task(slow).apply()
    works.spent(12)


def _renewing() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "budget-leases-in-place"]


def test_a_forked_child_renews_nothing_of_its_parents(make_shop: Callable[..., Shop]) -> None:
    works = Works(make_shop(**SHORT_LEASES))
    work = works.work

    def forks(tenant: str = "a") -> int:
        usage.record(1)
        child = os.fork()
        if child == 0:
            ok = works.work.apply((7,)).get(disable_sync_subtasks=False) == 7 and _renewing() != []
            os._exit(0 if ok else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert work is works.work
    assert works.task(forks).apply().get() == 0
    works.spent(6)


KILLED = """
import os, signal, sys
from celery import Celery
from celery_budget import CeleryBudget, budgeted, usage

app = Celery("killed", set_as_current=True)
app.conf.update(
    budget_database_url=sys.argv[1],
    budget_lease_seconds=1,
    budget_publish_seconds=1,
    budget_lock_seconds=1,
)
CeleryBudget(app)

@budgeted(budget="tenant:a", estimate=6)
@app.task(name="killed.work", bind=True)
def work(self, used, retries):
    usage.record(used)
    if self.request.retries < retries:
        raise self.retry(countdown=0)
    os.kill(os.getpid(), signal.SIGKILL)

work.apply((int(sys.argv[2]), int(sys.argv[3])), task_id="killed")
"""


@pytest.mark.parametrize(("used", "retries", "spent"), [(0, 0, 6), (2, 0, 6), (9, 0, 9), (2, 1, 8)])
def test_a_process_that_dies_leaves_a_lost_attempt(
    either: dict[str, str], make_shop: Callable[..., Shop], used: int, retries: int, spent: int
) -> None:
    shop = make_shop(
        **either, budget_lease_seconds=1, budget_publish_seconds=1, budget_lock_seconds=1
    )
    works = Works(shop)
    url = shop.app.conf.budget_database_url
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, url, str(used), str(retries)], cwd=ROOT, timeout=WAIT
    )
    assert ended.returncode == -signal.SIGKILL
    assert shop.rows(schema.outbox) == []

    def swept() -> str:
        shop.sweep()
        return str(shop.budget.explain("killed")[0].reservation["state"])

    eventually(swept, lambda state: state == "lost")
    works.spent(spent)
    assert shop.relay().published == 0
    shop.sweep()
    works.spent(spent)
    assert isinstance(shop.app.AsyncResult("killed").result, AttemptLost)
    assert eager.APPLY[:3] == ("link", "link_error", "task_id")
    assert eager.APPLY_ASYNC[0] == "task_id"
