"""``deadline=`` of calls, tasks and canvases: what the ledger keeps, and what the message says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group

from celery_budget import (
    AttemptsSpent,
    BudgetedTask,
    PolicyError,
    RequestNotRun,
    budgeted,
    usage,
)
from celery_budget.core.deadlines import moment
from celery_budget.integration.deadlines import UNTIL
from celery_budget.store import schema
from tests.integration.support import Shop

YEAR_3000 = datetime(3000, 1, 1, tzinfo=timezone.utc)
NAIVE = YEAR_3000.replace(tzinfo=None)
PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
SECOND = 1_000_000


def task(shop: Shop, name: str = "draft", **declared: Any) -> Any:
    def body(*args: Any) -> None:
        pass

    return shop.app.task(
        body, base=BudgetedTask, name=name, budget="tenant:a", estimate=1, lazy=False, **declared
    )


def kept(shop: Shop) -> list[int | None]:
    """The deadlines of all requests, in seconds from their admission."""
    rows = shop.rows(schema.reservations)
    return [
        None if row.deadline_us is None else round((row.deadline_us - row.created_us) / SECOND)
        for row in rows
    ]


@pytest.mark.parametrize(
    "wrong", [0, -1, math.inf, math.nan, True, "60", NAIVE, timedelta(1), 10**10],
    ids=repr,
)  # fmt: skip
def test_what_is_no_deadline_changes_nothing(shop: Shop, wrong: Any) -> None:
    before, draft = shop.ledger(), task(shop)
    with pytest.raises(PolicyError, match="deadline= of draft is"):
        draft.apply_async(deadline=wrong)
    with pytest.raises(PolicyError, match="deadline= of draft is"):
        draft.apply(deadline=wrong)
    with pytest.raises(PolicyError, match="deadline= of"):
        task(shop, "declared", deadline=wrong)
    with pytest.raises(PolicyError, match="deadline= of a task is"):
        budgeted(budget="b", estimate=1, deadline=wrong)
    with pytest.raises(PolicyError, match="deadline= of a chord is"):
        chord([draft.s()], draft.s()).apply_async(deadline=wrong)
    assert shop.ledger() == before


def test_the_calls_own_counts_before_the_tasks(on_both: Shop) -> None:
    declared = task(on_both, deadline=60)
    declared.delay()
    declared.apply_async(deadline=30)
    on_both.app.send_task("draft", deadline=90)
    task(on_both, "free").delay()
    assert sorted(kept(on_both), key=str) == [30, 60, 90, None]


def test_the_message_expires_by_it(on_both: Shop) -> None:
    draft = task(on_both)
    soon = datetime(2999, 1, 1, tzinfo=timezone.utc)
    results = [
        draft.apply_async(deadline=YEAR_3000),
        draft.apply_async(deadline=YEAR_3000, expires=soon),
        draft.apply_async(deadline=soon, expires=YEAR_3000),
        draft.apply_async(),
    ]
    on_both.relay()
    said = {one.headers["id"]: one.headers["expires"] for one in on_both.received()}
    assert [said[one.id] for one in results] == [
        YEAR_3000.isoformat(),
        soon.isoformat(),
        soon.isoformat(),
        None,
    ]
    told = on_both.budget.explain(results[0].id)[0].reservation
    assert moment(told["deadline_us"]) == YEAR_3000


def test_a_canvas_has_one(on_both: Shop) -> None:
    draft = task(on_both)
    group(draft.s(), draft.s()).apply_async(deadline=60)
    assert kept(on_both) == [60, 60]
    assert len({row.deadline_us for row in on_both.rows(schema.reservations)}) == 1


def test_a_chain_that_is_reserved_whole_has_one(on_both: Shop) -> None:
    draft, later = task(on_both), task(on_both, "later", deadline=5)
    chain(draft.s(), draft.si(), later.si()).apply_async(reserve="chain", deadline=60)
    by_step = sorted(on_both.rows(schema.reservations), key=lambda row: row.step)
    first = by_step[0].deadline_us
    assert [one.deadline_us - first for one in by_step] == [0, 0, -55 * SECOND]


def test_what_follows_is_told_of_it(on_both: Shop) -> None:
    """A step behind one that has no budget finds no attempt in the ledger; errbacks are free."""
    draft, told = task(on_both), task(on_both, "told")
    step = draft.s().on_error(told.s())
    step.link(draft.s())
    chord(
        [chain(step, draft.s())],
        draft.s(),
    ).apply_async(deadline=YEAR_3000)
    on_both.relay()
    [message] = on_both.received()
    embed = message.payload[2]
    until = int(YEAR_3000.timestamp()) * SECOND
    assert [one["options"][UNTIL] for one in embed["chain"]] == [until]
    assert [one["options"][UNTIL] for one in embed["callbacks"]] == [until]
    assert UNTIL not in embed["errbacks"][0]["options"]


def test_a_chords_body_is_told_of_it(make_shop: Callable[..., Shop], tmp_path: Path) -> None:
    """A task without a budget publishes it, by this result backend: it follows no attempt."""
    (tmp_path / "results").mkdir()
    shop = make_shop(result_backend=f"file://{tmp_path / 'results'}")
    draft = task(shop)
    before = time.time_ns() // 1000
    chord([draft.s()], draft.s()).apply_async(deadline=60)
    after = time.time_ns() // 1000
    shop.make_due()
    shop.relay()
    [unlock] = [one for one in shop.received() if one.headers["task"] == "celery.chord_unlock"]
    _, body = unlock.payload[0]
    assert before + 60 * SECOND <= body["options"][UNTIL] <= after + 60 * SECOND


def test_a_call_in_place_past_it_is_not_run(shop: Shop) -> None:
    ran = []

    @shop.app.task(base=BudgetedTask, name="here", budget="tenant:a", estimate=1, lazy=False)
    def here() -> None:
        ran.append(usage.deadline())

    with pytest.raises(RequestNotRun, match="deadline"):
        here.apply(deadline=PAST)
    assert ran == []
    assert shop.amounts("tenant:a") == (0, 0, 10)
    here.apply(deadline=YEAR_3000)
    here.apply()
    assert ran == [YEAR_3000, None]


def test_a_retry_in_place_ends_by_it(shop: Shop) -> None:
    @shop.app.task(
        base=BudgetedTask, name="here", budget="tenant:a", estimate=1, lazy=False, bind=True
    )
    def here(self: Any, countdown: float) -> None:
        usage.record(1)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            if countdown == 0:
                # It passes between the retry's request and its own claim.
                shop.sql(schema.reservations.update().values(deadline_us=1))
            self.retry(countdown=countdown)

    with pytest.raises(ZeroDivisionError):
        here.apply((3600,), deadline=60, throw=True)
    assert shop.amounts("tenant:a") == (0, 1, 9)
    with pytest.raises(AttemptsSpent, match="deadline has passed"):
        here.apply((0,), deadline=60)
    assert shop.amounts("tenant:a") == (0, 2, 8)
