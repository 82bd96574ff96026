"""Chains that were reserved whole, in a real worker; and canvases that follow from running work."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, group, states

from celery_budget import RequestNotRun
from tests.cluster import eventually
from tests.integration.tenant import WAIT, Tenant

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


def plan(tenant: Tenant, *steps: Any) -> tuple[Any, list[str]]:
    """Publish a chain, reserved whole; return its result and the ids of its steps."""
    result = chain(*steps).apply_async(reserve="chain")
    ids, node = [], result
    while node is not None:
        ids.insert(0, node.id)
        node = node.parent
    return result, ids


def of_plan(tenant: Tenant, task_id: str) -> Any:
    """The last reservation of a task."""
    return tenant.cluster.budget.explain(task_id)[-1].reservation


def test_it_runs_to_its_end_under_what_was_planned(tenant: Tenant) -> None:
    tenant.set(18)
    work = tenant.task("work")
    steps = [work.s(7, tenant.name), work.s(tenant.name), work.si(8, tenant.name)]
    result, ids = plan(tenant, *steps)
    planned = [of_plan(tenant, task_id)["reservation_id"] for task_id in ids]
    assert result.get(timeout=WAIT) == 8
    tenant.spent(15)
    assert [of_plan(tenant, task_id)["reservation_id"] for task_id in ids] == planned
    assert [tenant.outcomes(task_id) for task_id in ids] == [["returned"]] * 3


def test_nobody_else_gets_what_is_planned(tenant: Tenant) -> None:
    """A limit lowered and a budget full: the chain goes on all the same."""
    tenant.set(18)
    work, retried = tenant.task("work"), tenant.task("retried")
    result, _ = plan(
        tenant, retried.si(0, tenant.name), work.si(1, tenant.name), work.si(2, tenant.name)
    )
    tenant.set(1)
    assert result.get(timeout=WAIT) == 2
    tenant.spent(11)


def test_a_failure_gives_back_what_was_planned_after_it(tenant: Tenant) -> None:
    work, fail = tenant.task("work"), tenant.task("fail")
    result, ids = plan(
        tenant,
        work.si(1, tenant.name),
        fail.si(tenant.name, 2),
        work.si(2, tenant.name),
        work.si(3, tenant.name),
    )
    with pytest.raises(ValueError, match=ids[1]):
        result.get(timeout=WAIT)
    tenant.spent(7)
    for task_id in ids[2:]:
        reservation = of_plan(tenant, task_id)
        assert (reservation["state"], reservation["reason"]) == ("released", "predecessor")


@pytest.mark.parametrize("how", ["ignored", "rejected"])
def test_so_does_a_step_that_ends_otherwise(tenant: Tenant, how: str) -> None:
    step = {
        "ignored": tenant.task("ignored").si(tenant.name),
        "rejected": tenant.task("rejected").si(tenant.name),
    }[how]
    _, ids = plan(tenant, step, tenant.task("work").si(1, tenant.name))
    tenant.spent(2)
    assert of_plan(tenant, ids[1])["state"] == "released"


def test_a_step_that_retries_keeps_what_is_planned_after_it(tenant: Tenant) -> None:
    retried, work = tenant.task("retried"), tenant.task("work")
    result, ids = plan(tenant, retried.si(2, tenant.name), work.si(1, tenant.name))
    assert result.get(timeout=WAIT) == 1
    tenant.spent(8)
    assert tenant.outcomes(ids[0]) == ["retried", "retried", "returned"]


@pytest.mark.parametrize(
    ("by", "spent"), [("budgeted", 12), ("plain", 7), ("chain", 12), ("group", 17)]
)
def test_a_step_that_is_replaced(tenant: Tenant, by: str, spent: int) -> None:
    """The plan goes over to one budgeted task; otherwise the chain goes on step by step.

    Unless what takes the step's place is faster than the end of the one that it replaces.
    """
    replaced, work = tenant.task("replaced"), tenant.task("work")
    result, ids = plan(tenant, replaced.si(tenant.name, by), work.si(1, tenant.name))
    planned = of_plan(tenant, ids[1])["reservation_id"]
    assert result.get(timeout=WAIT) == 1
    tenant.spent(spent)
    stories = tenant.cluster.budget.explain(ids[1])
    ran = [one.reservation["reservation_id"] for one in stories if one.attempts]
    assert len(ran) == 1
    assert by != "budgeted" or ran == [planned]


def test_cancelling_the_first_step_gives_all_back(tenant: Tenant) -> None:
    work = tenant.task("work")
    result = chain(work.si(1, tenant.name), work.si(2, tenant.name)).apply_async(
        reserve="chain", countdown=600
    )
    tenant.cluster.budget.cancel(result.parent.id)
    tenant.spent(0)
    assert of_plan(tenant, result.id)["state"] == "released"


def test_a_step_that_was_cancelled_before_its_turn_does_not_run(tenant: Tenant) -> None:
    work = tenant.task("work")
    result = chain(
        work.si(1, tenant.name), work.si(2, tenant.name), work.si(3, tenant.name)
    ).apply_async(reserve="chain", countdown=1)
    middle = result.parent.id
    tenant.cluster.budget.cancel(middle)
    tenant.spent(5)
    assert tenant.cluster.app.AsyncResult(middle).state == states.REVOKED
    assert of_plan(tenant, result.id)["state"] == "released"


def test_a_first_step_that_expires_gives_all_back(tenant: Tenant) -> None:
    work = tenant.task("work")
    result = chain(work.si(1, tenant.name), work.si(2, tenant.name)).apply_async(
        reserve="chain", countdown=0.6, expires=0.3
    )
    eventually(lambda: result.parent.state, states.REVOKED.__eq__)
    tenant.spent(0)


def test_a_group_that_follows_is_parked_where_it_does_not_fit(tenant: Tenant) -> None:
    tenant.set(12)
    work = tenant.task("work")
    head = work.si(1, tenant.name)
    result = (head | group(work.si(number, tenant.name) for number in range(3))).apply_async()
    eventually(lambda: [one.state for one in result.results].count(states.SUCCESS), (1).__eq__)
    tenant.spent(10)
    tenant.set(100)
    assert result.get(timeout=WAIT) == [0, 1, 2]
    tenant.spent(20)


def test_a_member_that_cannot_be_admitted_fails_by_itself(tenant: Tenant) -> None:
    work = tenant.task("work")
    members = group(work.si(0, tenant.name), work.si(1, "nobody"))
    result = (work.si(1, tenant.name) | members).apply_async()
    good, bad = result.results
    assert good.get(timeout=WAIT) == 0
    eventually(lambda: bad.state, states.FAILURE.__eq__)
    assert not isinstance(bad.result, RequestNotRun)
    tenant.spent(10)
