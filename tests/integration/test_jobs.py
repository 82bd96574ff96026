"""``budget.job`` and ``budget.result``: what comes of ledger and result backend together."""

from __future__ import annotations

from typing import Any

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_budget import BudgetedTask, RequestNotRun, ResultGone, ResultNotReady, UnknownRequest
from celery_budget.store import schema
from tests.integration.support import Shop
from tests.messages import Told

OWNER = "tenant:a"


@pytest.fixture
def result(shop: Shop) -> Any:
    """The result of a task that was admitted, and not published yet."""

    @shop.app.task(base=BudgetedTask, name="draft", budget=OWNER, estimate=1, lazy=False)
    def draft() -> None:
        pass

    return draft.delay()


def ended(shop: Shop, outcome: str, **values: Any) -> None:
    """Let the task have run to its end."""
    [row] = shop.rows(schema.reservations)
    now = row.created_us
    shop.sql(
        schema.reservations.update().values(
            **{"state": "settled", "attempts": 1, "ended_us": now, **values}
        )
    )
    shop.sql(
        schema.attempts.insert().values(
            root=row.root,
            reservation_id=row.reservation_id,
            attempt=1,
            claim_id=row.reservation_id,
            retries=0,
            worker="w",
            boot_id=row.reservation_id,
            late_ack=False,
            started_us=now,
            ended_us=now,
            outcome=outcome,
            replays=0,
        )
    )


def stored(shop: Shop, result: Any, state: str, value: Any = None) -> None:
    shop.app.backend.store_result(result.id, value, state)


def test_the_ledger_tells_though_the_result_backend_forgets(shop: Shop, result: Any) -> None:
    assert shop.budget.job(result.id, owner=OWNER).state == "queued"
    ended(shop, "returned")
    assert shop.budget.job(result.id, owner=OWNER).state == "succeeded"
    with pytest.raises(ResultGone):
        shop.budget.result(result.id, owner=OWNER)


def test_a_result_has_its_time(shop: Shop, result: Any) -> None:
    ended(shop, "returned")
    stored(shop, result, states.SUCCESS, 7)
    assert shop.budget.result(result.id, owner=OWNER) == 7
    day = shop.budget.settings.result_us
    shop.sql(schema.reservations.update().values(ended_us=schema.reservations.c.ended_us - day))
    with pytest.raises(ResultGone):
        shop.budget.result(result.id, owner=OWNER)
    assert shop.budget.job(result.id, owner=OWNER).state == "succeeded"


def test_what_is_being_stored_is_not_gone(shop: Shop, result: Any) -> None:
    ended(shop, "returned")
    shop.sql(schema.attempts.update().values(lease_until_us=2**60))
    with pytest.raises(ResultNotReady, match="succeeded"):
        shop.budget.result(result.id, owner=OWNER)


def test_what_did_not_run(shop: Shop, result: Any) -> None:
    shop.budget.cancel(result.id)
    job = shop.budget.job(result.id, owner=OWNER)
    assert (job.state, job.reason, job.started) == ("cancelled", "cancelled", None)
    with pytest.raises(TaskRevokedError, match="cancelled"):
        shop.budget.result(result.id, owner=OWNER)
    shop.sql(schema.reservations.update().values(reason="undelivered"))
    shop.app.backend.forget(result.id)
    with pytest.raises(RequestNotRun, match="undelivered"):
        shop.budget.result(result.id, owner=OWNER)


@pytest.mark.parametrize("reason", ["park_expired", "wait_expired"])
def test_what_waited_too_long_has_expired_and_tells_as_celery_does(
    shop: Shop, result: Any, reason: str
) -> None:
    shop.budget.cancel(result.id)
    shop.sql(schema.reservations.update().values(reason=reason))
    for meta in ((states.FAILURE, RequestNotRun(result.id, reason)), None):
        shop.app.backend.forget(result.id)
        if meta is not None:
            stored(shop, result, *meta)
        assert shop.budget.job(result.id, owner=OWNER).state == "expired"
        with pytest.raises(RequestNotRun, match=reason):
            shop.budget.result(result.id, owner=OWNER)


@pytest.mark.parametrize(
    ("state", "value", "expected"),
    [
        (states.PENDING, None, ("running", None)),
        ("PROGRESS", {"done": 1}, ("running", {"done": 1})),
        (states.SUCCESS, 5, ("succeeded", None)),
        (states.FAILURE, ValueError("no"), ("failed", None)),
        (states.REVOKED, TaskRevokedError("no"), ("cancelled", None)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_backend_tells_of_what_has_no_budget_and_took_its_place(
    shop: Shop, result: Any, state: str, value: Any, expected: tuple[str, Any]
) -> None:
    ended(shop, "replaced")
    if state != states.PENDING:
        stored(shop, result, state, value)
    job = shop.budget.job(result.id, owner=OWNER)
    assert (job.state, job.progress) == expected
    if state == states.SUCCESS:
        assert shop.budget.result(result.id, owner=OWNER) == 5
    elif isinstance(value, Exception):
        with pytest.raises(type(value)):
            shop.budget.result(result.id, owner=OWNER)
    else:
        with pytest.raises(ResultNotReady):
            shop.budget.result(result.id, owner=OWNER)


def test_a_backend_that_is_down_hides_only_progress(
    shop: Shop, result: Any, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    def down(*args: Any) -> None:
        raise OSError("down")

    shop.sql(schema.reservations.update().values(state="running"))
    stored(shop, result, "PROGRESS", {"done": 1})
    assert shop.budget.job(result.id, owner=OWNER).progress == {"done": 1}
    monkeypatch.setattr(shop.app.backend, "get_task_meta", down)
    job = shop.budget.job(result.id, owner=OWNER)
    assert (job.state, job.progress) == ("running", None)
    shop.sql(schema.reservations.update().values(state="lost"))
    with pytest.raises(OSError, match="down"):
        shop.budget.result(result.id, owner=OWNER)
    assert told("result.unreadable") == [{"task_id": result.id}]


def test_another_owner_finds_nothing(shop: Shop, result: Any) -> None:
    stored(shop, result, states.SUCCESS, "secret")
    ended(shop, "returned")
    for ask in (shop.budget.job, shop.budget.result):
        with pytest.raises(UnknownRequest):
            ask(result.id, owner="tenant:b")
