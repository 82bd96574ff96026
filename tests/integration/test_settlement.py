"""What a real worker charges: usage, failures, time limits, revocations, unreserved deliveries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery, states

from celery_budget import UnknownBudget
from tests.cluster import Cluster, eventually
from tests.integration.tenant import WAIT, Tenant

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


def flags(tenant: Tenant, task_id: str) -> tuple[str, list[str]]:
    """The state a request has ended in, and its flags."""
    row = tenant.story(task_id).reservation
    return row["state"], [flag for flag in ("over", "unmetered", "unreserved") if row[flag]]


@pytest.mark.parametrize(
    ("records", "added", "spent", "flagged"),
    [
        ([(5, "a")], [True], 5, []),
        ([(6, "a")], [True], 6, []),
        ([(2, "a"), (2, "a"), (2, "b")], [True, False, True], 4, []),
        ([(5, "a"), (1, "a")], [True, False], 5, []),
        ([(2, None), (2, None), (1, None)], [True, True, True], 5, []),
        ([(0, "a")], [True], 0, []),
        ([(0, None)], [True], 0, []),
        ([(9, "a")], [True], 9, ["over"]),
        ([(4, "a"), (4, "b")], [True, True], 8, ["over"]),
        ([(200, "a")], [True], 200, ["over"]),
        ([], [], 6, ["unmetered"]),
    ],
    ids=[
        "less than estimated",
        "as estimated",
        "a key again",
        "a key again with another amount",
        "without keys",
        "nothing used",
        "nothing used, no key",
        "more than estimated",
        "more in two parts",
        "more than the limit",
        "nothing recorded",
    ],
)
def test_what_was_recorded_is_charged(
    tenant: Tenant,
    records: list[tuple[int, str | None]],
    added: list[bool],
    spent: int,
    flagged: list[str],
) -> None:
    result = tenant.task("keys").delay(tenant.name, records)
    assert result.get(timeout=WAIT) == added
    tenant.spent(spent)
    assert flags(tenant, result.id) == ("settled", flagged)


@pytest.mark.parametrize(
    ("amount", "key"),
    [(-1, None), (True, None), (1.5, "a"), ("6", "a"), (2**63, None), (1, ""), (1, "x" * 300)],
    ids=repr,
)
def test_what_is_no_usage_is_the_bodys_error(tenant: Tenant, amount: Any, key: Any) -> None:
    result = tenant.task("keys").delay(tenant.name, [(2, "fine"), (amount, key)])
    with pytest.raises(ValueError, match=r"amount|key"):
        result.get(timeout=WAIT)
    # It is a failure: what was recorded before is charged.
    tenant.spent(2)


@pytest.mark.parametrize("used", [0, 2, 9])
def test_a_failure_is_charged_what_it_recorded(tenant: Tenant, used: int) -> None:
    result = tenant.task("fail").delay(tenant.name, used)
    with pytest.raises(ValueError, match=result.id):
        result.get(timeout=WAIT)
    tenant.spent(used)
    assert flags(tenant, result.id) == ("settled", ["over"] if used > 6 else [])
    assert tenant.outcomes(result.id) == ["raised"]


def test_a_success_that_recorded_nothing_is_charged_its_estimate(tenant: Tenant) -> None:
    result = tenant.task("unmetered").delay(tenant.name)
    result.get(timeout=WAIT)
    tenant.spent(6)
    assert flags(tenant, result.id) == ("settled", ["unmetered"])


def test_usage_of_a_task_that_is_called_by_another_is_the_callers(tenant: Tenant) -> None:
    result = tenant.task("calls").delay(tenant.name)
    assert result.get(timeout=WAIT) == [1, 2]
    tenant.spent(3)
    assert flags(tenant, result.id) == ("settled", [])
    # What it runs in place has a reservation of its own.
    assert [line["settled"] for line in tenant.story(result.id).lines] == [1]


def test_a_task_that_calls_itself_is_part_of_its_run(tenant: Tenant) -> None:
    result = tenant.task("nested").delay(tenant.name, 2)
    assert result.get(timeout=WAIT) == 3
    tenant.spent(3)
    assert tenant.outcomes(result.id) == ["returned"]


def test_an_error_that_cannot_be_pickled_is_stored_at_once(tenant: Tenant) -> None:
    result = tenant.task("odd").delay(tenant.name)
    with pytest.raises(Exception, match="this and that"):
        result.get(timeout=WAIT)
    tenant.spent(2)
    [attempt] = tenant.story(result.id).attempts
    assert (attempt["outcome"], attempt["replays"]) == ("raised", 0)


def test_usage_after_the_call_is_charged_on_top(tenant: Tenant) -> None:
    result = tenant.task("late").delay(tenant.name)
    result.get(timeout=WAIT)
    tenant.spent(5)
    assert [row["late"] for row in tenant.story(result.id).usage] == [False, True]


def test_a_value_that_cannot_be_stored_is_a_failure(tenant: Tenant) -> None:
    result = tenant.task("unwritable").delay(tenant.name)
    with pytest.raises(Exception, match="serializable"):
        result.get(timeout=WAIT)
    tenant.spent(2)
    assert tenant.outcomes(result.id) == ["raised"]


# Ends without a return.


# Deliveries without a reservation.


@pytest.fixture
def elsewhere(cluster: Cluster) -> Celery:
    """An application of the same broker that knows nothing of budgets."""
    return Celery(
        "elsewhere",
        broker=cluster.app.conf.broker_url,
        backend=cluster.app.conf.result_backend,
        set_as_current=False,
    )


def test_a_delivery_without_a_reservation_is_admitted_when_it_is_claimed(
    tenant: Tenant, elsewhere: Celery
) -> None:
    result = elsewhere.send_task("steps.work", (7, tenant.name), link=tenant.task("plain").s())
    assert result.get(timeout=WAIT) == 7
    tenant.spent(5)
    assert flags(tenant, result.id) == ("settled", ["unreserved"])


def test_one_that_does_not_fit_waits_for_budget(tenant: Tenant, elsewhere: Celery) -> None:
    tenant.set(5)
    result = elsewhere.send_task("steps.work", (7, tenant.name))
    tenant.parked(result.id)
    tenant.spent(0)
    tenant.set(6)
    assert result.get(timeout=WAIT) == 7
    tenant.spent(5)
    assert flags(tenant, result.id) == ("settled", ["unreserved"])


def test_one_that_retries_is_admitted_once(tenant: Tenant, elsewhere: Celery) -> None:
    result = elsewhere.send_task("steps.retried", (2, tenant.name))
    assert result.get(timeout=WAIT) == 2
    tenant.spent(3)
    assert tenant.outcomes(result.id) == ["retried", "retried", "returned"]


@pytest.mark.parametrize("header", ["", "x", "default/none", f"default/{UUID(int=7)}", 7, None])
def test_one_with_a_header_that_means_nothing(
    tenant: Tenant, elsewhere: Celery, header: Any
) -> None:
    result = elsewhere.send_task(
        "steps.work", (7, tenant.name), headers={"budget_reservation": header}
    )
    assert result.get(timeout=WAIT) == 7
    tenant.spent(5)
    assert flags(tenant, result.id) == ("settled", ["unreserved"])


def test_one_with_the_header_of_another_request(tenant: Tenant, elsewhere: Celery) -> None:
    first = tenant.task("work").delay(1, tenant.name)
    first.get(timeout=WAIT)
    row = tenant.story(first.id).reservation
    stolen = f"default/{row['reservation_id']}"
    result = elsewhere.send_task(
        "steps.work", (7, tenant.name), headers={"budget_reservation": stolen}
    )
    assert result.get(timeout=WAIT) == 7
    tenant.spent(10)


def test_a_second_copy_runs_nothing(tenant: Tenant, elsewhere: Celery) -> None:
    task_id = str(uuid4())
    for _ in range(3):
        elsewhere.send_task("steps.slow", (tenant.name, 0.2), task_id=task_id)
    tenant.spent(2)
    # The other copies have been through the worker when a later message is.
    tenant.task("work").delay(1, tenant.name).get(timeout=WAIT)
    tenant.spent(7)
    assert tenant.cluster.journal().count(f"slow {tenant.name}") == 1


def test_one_of_an_unknown_budget_fails(tenant: Tenant, elsewhere: Celery) -> None:
    result = elsewhere.send_task("steps.work", (7, "nobody"))
    with pytest.raises(UnknownBudget, match="tenant:nobody"):
        result.get(timeout=WAIT)


@pytest.mark.slow
def test_deliveries_without_a_reservation_can_be_rejected(
    make_cluster: Callable[..., Cluster], embedded: dict[str, Any]
) -> None:
    cluster = make_cluster(**embedded, budget_unreserved="reject", imports=["tests.apps.steps"])
    cluster.budget.set("tenant:a", limit=10, unit="tokens")
    elsewhere = Celery("elsewhere", set_as_current=False)
    elsewhere.conf.update(
        {name: value for name, value in cluster.app.conf.items() if name.startswith("broker_")}
    )
    elsewhere.conf.result_backend = cluster.app.conf.result_backend
    elsewhere.send_task("steps.work", (7, "a"))
    reserved = cluster.app.tasks["steps.work"].delay(1, "a")
    cluster.worker(pool="solo")
    cluster.relay()
    assert reserved.get(timeout=WAIT) == 1
    eventually(lambda: cluster.counts()["refused"], lambda refused: refused == 1)
    cluster.settle()
    assert cluster.budget.balance("tenant:a").spent == 5
    assert cluster.counts()["unreserved"] == 0
    assert reserved.state == states.SUCCESS
