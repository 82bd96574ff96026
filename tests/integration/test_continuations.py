"""What follows from work in a real worker: chains, callbacks, retries, replacements, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import celery
import pytest
from celery import chain, chord, group, states
from packaging.version import Version

from celery_budget import BudgetExceeded, InvalidAmount, UnknownBudget
from tests.apps import steps
from tests.cluster import eventually
from tests.integration.tenant import WAIT, Tenant

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


# Canvas.


def test_a_chain_with_a_step_without_budget(tenant: Tenant) -> None:
    work, plain = tenant.task("work"), tenant.task("plain")
    result = chain(work.s(7, tenant.name), plain.s(), work.s(tenant.name)).apply_async()
    assert result.get(timeout=WAIT) == 7
    tenant.spent(10)
    assert tenant.outcomes(result.id) == ["returned"]
    first = tenant.story(result.parent.parent.id)
    assert first.reservation["state"] == "settled"


def test_a_group(tenant: Tenant) -> None:
    work = tenant.task("work")
    result = group(work.s(number, tenant.name) for number in range(4)).apply_async()
    assert result.get(timeout=WAIT) == [0, 1, 2, 3]
    tenant.spent(20)


def test_a_chord_with_a_budgeted_body(tenant: Tenant) -> None:
    work, total = tenant.task("work"), tenant.task("total")
    result = chord([work.s(number, tenant.name) for number in range(4)])(total.s(tenant.name))
    assert result.get(timeout=WAIT) == 6
    tenant.spent(21)


def test_a_chord_with_mixed_members_and_a_plain_body(tenant: Tenant) -> None:
    work, plain = tenant.task("work"), tenant.task("plain")
    result = chord([work.s(1, tenant.name), plain.s(2), work.s(3, tenant.name)])(plain.s())
    assert sorted(result.get(timeout=WAIT)) == [1, 2, 3]
    tenant.spent(10)


def test_a_group_within_a_chain(tenant: Tenant) -> None:
    work, total = tenant.task("work"), tenant.task("total")
    result = (
        work.s(5, tenant.name)
        | group(work.s(tenant.name), work.s(tenant.name))
        | total.s(tenant.name)
    ).apply_async()
    assert result.get(timeout=WAIT) == 10
    tenant.spent(16)


@pytest.mark.parametrize("first", ["work", "plain"])
def test_links(tenant: Tenant, first: str) -> None:
    work, plain = tenant.task("work"), tenant.task("plain")
    ids = [str(uuid4()) for _ in range(2)]
    links = [work.s(tenant.name).set(task_id=ids[0]), plain.s().set(task_id=ids[1])]
    if first == "work":
        work.apply_async((7, tenant.name), link=links)
    else:
        plain.apply_async((7,), link=links)
    for task_id in ids:
        assert tenant.cluster.app.AsyncResult(task_id).get(timeout=WAIT) == 7
    tenant.spent(10 if first == "work" else 5)


@pytest.mark.skipif(
    Version(celery.__version__) < Version("5.7"),
    reason="before 5.7 Celery counts what an errback was given as what it takes",
)
def test_error_links(tenant: Tenant) -> None:
    fail, after = tenant.task("fail"), tenant.task("after_failure")
    plain = tenant.task("plain")
    ids = [str(uuid4()) for _ in range(2)]
    result = fail.apply_async(
        (tenant.name, 2),
        link_error=[
            after.s(tenant=tenant.name).set(task_id=ids[0]),
            plain.s().set(task_id=ids[1]),
            tenant.task("inline_errback").s(tenant=tenant.name),
        ],
    )
    with pytest.raises(ValueError, match=result.id):
        result.get(timeout=WAIT)
    for task_id in ids:
        assert tenant.cluster.app.AsyncResult(task_id).get(timeout=WAIT) == result.id
    # One that Celery calls in the failed task's process is no request of its own.
    assert f"inline {result.id}" in tenant.cluster.journal()
    tenant.spent(3)


@pytest.mark.parametrize("first", ["work", "plain"])
def test_a_step_that_does_not_fit_waits_for_budget(tenant: Tenant, first: str) -> None:
    tenant.set(10 if first == "work" else 4)
    work, plain = tenant.task("work"), tenant.task("plain")
    head = work.s(7, tenant.name) if first == "work" else plain.s(7)
    result = chain(head, work.s(tenant.name)).apply_async()
    eventually(lambda: result.parent.state, states.SUCCESS.__eq__)
    assert result.parent.get(timeout=WAIT) == 7
    tenant.parked(result.id)
    # Parked work holds nothing.
    tenant.spent(5 if first == "work" else 0)
    assert result.state == states.PENDING
    tenant.set(20)
    assert result.get(timeout=WAIT) == 7
    tenant.spent(10 if first == "work" else 5)


@pytest.mark.parametrize("first", ["work", "plain"])
@pytest.mark.parametrize(
    ("step", "error"),
    [
        (lambda tenant: tenant.task("work").s("nobody"), UnknownBudget),
        (lambda tenant: tenant.task("priced").s(tenant.name), InvalidAmount),
    ],
    ids=["unknown budget", "bad estimate"],
)
def test_a_step_that_cannot_be_admitted_fails_and_not_the_one_before(
    tenant: Tenant, first: str, step: Callable[[Tenant], Any], error: type[Exception]
) -> None:
    work, plain = tenant.task("work"), tenant.task("plain")
    head = work.s("seven", tenant.name) if first == "work" else plain.s("seven")
    result = chain(head, step(tenant)).apply_async()
    with pytest.raises(error):
        result.get(timeout=WAIT)
    # Not get() at once: it may subscribe just after Celery has told of the result.
    eventually(lambda: result.parent.state, states.SUCCESS.__eq__)
    assert result.parent.get(timeout=WAIT) == "seven"
    tenant.spent(5 if first == "work" else 0)


# Retries.


def test_a_retry_that_does_not_fit_waits_for_budget(tenant: Tenant) -> None:
    tenant.set(7)
    result = tenant.task("retried").delay(1, tenant.name, used=3)
    tenant.parked(result.id)
    eventually(
        lambda: tenant.cluster.budget.balance(tenant.budget).reserved, lambda held: held == 3
    )
    tenant.set(10)
    assert result.get(timeout=WAIT) == 1
    tenant.spent(6)
    assert tenant.outcomes(result.id) == ["retried", "returned"]


# Other ends.


@pytest.mark.parametrize(
    ("by", "value", "spent"),
    [
        ("budgeted", "in its place", 7),
        ("plain", "in its place", 2),
        ("chain", "in its", 7),
        ("group", [1, 2], 12),
    ],
)
def test_a_replaced_task(tenant: Tenant, by: str, value: Any, spent: int) -> None:
    result = tenant.task("replaced").delay(tenant.name, by)
    assert result.get(timeout=WAIT) == value
    tenant.spent(spent)
    first = eventually(lambda: tenant.cluster.budget.explain(result.id), bool)[0]
    assert [attempt["outcome"] for attempt in first.attempts] == ["replaced"]


@pytest.mark.parametrize("by", ["budgeted", "chain"])
def test_a_replacement_that_does_not_fit_waits_for_budget(tenant: Tenant, by: str) -> None:
    tenant.set(6)
    result = tenant.task("replaced").delay(tenant.name, by)
    eventually(lambda: tenant.cluster.budget.report().counts["parked"], what="parked work")
    tenant.spent(2)
    tenant.set(8)
    assert result.get(timeout=WAIT).startswith("in its")
    tenant.spent(7)


def test_a_task_whose_result_is_ignored(tenant: Tenant) -> None:
    by_task = tenant.task("silent").delay(tenant.name)
    by_call = tenant.task("work").apply_async((1, tenant.name), ignore_result=True)
    tenant.spent(8)
    for result in (by_task, by_call):
        assert tenant.outcomes(result.id) == ["returned"]
        assert tenant.cluster.app.AsyncResult(result.id).state == states.PENDING


def test_a_refusal_inside_a_body_is_raised_there(tenant: Tenant) -> None:
    tenant.set(10)
    result = tenant.task("spawn").delay(tenant.name, 5)
    assert result.get(timeout=WAIT)[:10] == [
        "refused",
        tenant.budget,
        "tokens",
        5,
        4,
        10,
        6,
        0,
        "held",
        10,
    ]
    tenant.spent(1)


def test_a_refusal_that_a_body_lets_pass_is_its_failure(tenant: Tenant) -> None:
    tenant.set(10)
    result = tenant.task("propagate").delay(tenant.name, 5)
    with pytest.raises(BudgetExceeded) as caught:
        result.get(timeout=WAIT)
    assert caught.value.args[:9] == (tenant.budget, "tokens", 5, 4, 10, 6, 0, "held", 10)
    assert (caught.value.requested, caught.value.available) == (5, 4)
    tenant.spent(1)


def test_a_request_inside_a_body_is_admitted(tenant: Tenant) -> None:
    verdict, task_id = tenant.task("spawn").delay(tenant.name, 4).get(timeout=WAIT)
    assert verdict == "admitted"
    assert tenant.cluster.app.AsyncResult(task_id).get(timeout=WAIT) == 4
    # Nothing recorded: the estimate is charged.
    tenant.spent(5)


# Calls.


@pytest.mark.parametrize("name", ["loud", "polite"])
def test_a_class_with_a_call_of_its_own(tenant: Tenant, name: str) -> None:
    result = tenant.task(name).delay(tenant.name)
    assert result.get(timeout=WAIT) == [name, result.id]
    tenant.spent(3)
    assert tenant.outcomes(result.id) == ["returned"]


def test_direct_calls_pass_through(tenant: Tenant, caplog: pytest.LogCaptureFixture) -> None:
    work = tenant.task("work")
    for call in (work, work.run, steps.work.run):
        caplog.clear()
        assert call(7, tenant.name) == 7
        assert "outside a budgeted task" in caplog.text
    assert tenant.task("keys").run(tenant.name, [(1, None)]) == [False]
    tenant.spent(0)
